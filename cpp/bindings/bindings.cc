// The module itself: errors, the end of the interpreter, and functions of no class.
#include "bindings/bindings.h"

#include <atomic>

#include "base/control_groups.h"
#include "wire/resolve.h"

namespace tensorwire {

namespace {

nb::str to_text(std::string_view text) {
  return nb::steal<nb::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

}  // namespace

void set_error(Code code, std::string_view what) {
  try {
    nb::object made = nb::module_::import_("tensorwire.errors")
                          .attr("from_code")(static_cast<int>(code), to_text(what));
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
  } catch (nb::python_error& raised) {
    raised.restore();
  }
}

namespace {

// The thread that ends the interpreter, once it does. Only daemon threads run beside it.
std::atomic<unsigned long> ending_thread{0};
PyObject* before_end = nullptr;  // called in a thread that is to end; never given back

// To a daemon thread the Nodes that are closed at exit are no error that it could act on: it ends,
// by the exception that ends a thread without a message.
bool ends_this_thread(const Error& error) {
  unsigned long ending = ending_thread.load(std::memory_order_acquire);
  if (ending == 0 || ending == PyThread_get_thread_ident()) return false;
  return error.code() == Code::kClosed || error.code() == Code::kPeerLost;
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    if (ends_this_thread(error)) {
      if (!nb::steal(PyObject_CallNoArgs(before_end)).is_valid()) PyErr_WriteUnraisable(before_end);
      PyErr_SetNone(PyExc_SystemExit);
      return;
    }
    set_error(error.code(), error.what());
  }
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "The native core of tensorwire. Use tensorwire.memory; this module may change.";
  nb::register_exception_translator(translate);
  bind_buffers(m);
  bind_transfer(m);
  bind_regions(m);
  bind_peer(m);
  bind_node(m);
  bind_bench_loops(m);
  bind_fuse(m);
  bind_rpc(m);
  m.def(
      "expect_leaks", [] { nb::set_leak_warnings(false); },
      "Says nothing at the end about objects that outlive the interpreter, as tensors of torch's "
      "own globals do.");
  m.def(
      "begin_exit",
      [](nb::typed<nb::callable, void()> before) {
        before_end = nb::object(before).release().ptr();
        ending_thread.store(PyThread_get_thread_ident(), std::memory_order_release);
      },
      "before"_a,
      "The calling thread ends the interpreter: what it closes ends other threads by SystemExit, "
      "each of which calls before() first.");
  m.def(
      "exiting", [] { return ending_thread.load(std::memory_order_acquire) != 0; },
      "True after `begin_exit`.");
  m.def(
      "resolve",
      [](const std::string& host, const Seconds& timeout_s) {
        Resolved found;
        {
          WithoutGil release;
          found = resolve(host, 0, Deadline::after(timeout_s), run_signal_handlers);
        }
        if (found.addresses.empty()) {
          throw Error(Code::kInvalid, "cannot resolve '" + host + "': " + found.failure);
        }
        std::vector<std::string> numeric;
        for (const auto& address : found.addresses) numeric.push_back(address.text());
        return numeric;
      },
      "host"_a, "timeout_s"_a.none(), "The addresses of a host, as text, the best first.");
  m.def(
      "memory_limit",
      [](const std::string& root) {
        MemoryLimit most = memory_limit(root);
        return std::make_pair(most.bytes, to_text(most.of));
      },
      "root"_a = "", "How many bytes of memory this process may have, and what sets that limit.");
  m.def(
      "control_groups",
      [](const std::string& controller, const std::string& root) {
        std::vector<std::tuple<nb::bytes, nb::str, bool>> found;
        for (const ControlGroup& group : control_groups(controller, root)) {
          nb::bytes folder(group.folder.data(), group.folder.size());
          found.emplace_back(folder, to_text(group.name), group.version_2);
        }
        return found;
      },
      "controller"_a, "root"_a = "",
      "The control groups that bound this process, its own first, where they can have limits of a "
      "controller such as memory: folder, name for people, and whether it is of version 2.");
  m.def("cpu_quota", &cpu_quota, "root"_a = "",
        "How many cores the control groups of this process grant at present, such as 0.5; None "
        "without a limit.");
  m.def("cores", &cores,
        "How many cores this process can keep busy: those that it may run on, or fewer, such as "
        "0.5, where its control groups granted fewer when it began.");
}

}  // namespace tensorwire
