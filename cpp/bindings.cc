// The Python face of the core: converts, releases the GIL where a call would block, and decides
// nothing. The only file that sees nanobind.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cxxabi.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <mutex>

#include "drivers.h"
#include "memory_limit.h"
#include "node.h"
#include "prepared.h"
#include "resolve.h"
#include "text.h"
#include "word.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tensorwire {
namespace {

// Up to these sizes a transfer does not hold up other threads long enough to be worth letting go of
// the GIL and taking it back: one memcpy on shm, a system call on the others.
constexpr uint64_t kKeepGilShmBytes = 1 << 20;
constexpr uint64_t kKeepGilBytes = 64 << 10;

// Lets go of the GIL. At exit Python ends threads that want it back by unwinding them, which no
// destructor may do: such a thread sleeps until the process is gone.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (abi::__forced_unwind&) {
      for (;;) ::pause();
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// ---- what Python objects a transfer holds

// Objects whose transfers ended on a thread without the GIL; dropped by the next call that has it.
struct Graveyard {
  std::mutex mutex;
  std::vector<Py_buffer*> views;
  std::vector<PyObject*> objects;
  std::atomic<bool> occupied{false};
  std::atomic<bool> asked{false};
};

Graveyard& graveyard() {
  static auto* instance = new Graveyard;  // outlives the interpreter
  return *instance;
}

void bury_the_dead() {
  Graveyard& g = graveyard();
  if (!g.occupied.load(std::memory_order_acquire)) return;
  std::vector<Py_buffer*> views;
  std::vector<PyObject*> objects;
  {
    std::lock_guard lock(g.mutex);
    views.swap(g.views);
    objects.swap(g.objects);
    g.occupied = false;
  }
  for (auto* view : views) {
    PyBuffer_Release(view);
    delete view;
  }
  for (auto* object : objects) Py_DECREF(object);
}

template <class T>
void inter(std::vector<T*> Graveyard::* list, T* dead) {
  Graveyard& g = graveyard();
  {
    std::lock_guard lock(g.mutex);
    (g.*list).push_back(dead);
    g.occupied = true;
  }
  // Nobody may call for a long time: let the main thread do it when it gets round to it.
  if (!g.asked.exchange(true)) {
    auto bury = [](void*) {
      graveyard().asked = false;
      bury_the_dead();
      return 0;
    };
    if (Py_AddPendingCall(bury, nullptr) != 0) g.asked = false;
  }
}

void release_view(void* view) { inter(&Graveyard::views, static_cast<Py_buffer*>(view)); }
void release_object(void* object) { inter(&Graveyard::objects, static_cast<PyObject*>(object)); }

// Memory named by its address, for objects without the buffer protocol (torch tensors).
struct Buffer {
  uint64_t address;
  uint64_t size;
  bool writable;
  nb::object owner;
};

// The local side of a transfer while the call runs; handed to the transfer if that goes on.
class Local {
 public:
  Local(nb::handle object, bool writable) {
    Buffer* buffer = nullptr;
    if (nb::try_cast(object, buffer, false) && buffer != nullptr) {
      if (writable && !buffer->writable) throw read_only();
      data_ = reinterpret_cast<std::byte*>(buffer->address);
      size_ = buffer->size;
      owner_ = nb::borrow(object);
      return;
    }
    int flags = PyBUF_FORMAT | PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
      // An object's own __buffer__ may be Python code: what interrupts it is no matter of buffers.
      if (!PyErr_ExceptionMatches(PyExc_Exception)) throw nb::python_error();
      PyErr_Clear();
      owner_ = as_plain_items(object);
      if (!owner_.is_valid() || PyObject_GetBuffer(owner_.ptr(), &view_, flags) != 0) {
        PyErr_Clear();
        explain(owner_.is_valid() ? owner_ : object, writable);
      }
    }
    if (holds_objects(view_.format)) {
      PyBuffer_Release(&view_);
      throw Error(Code::kType,
                  "arrays of Python objects cannot be transferred; use a numeric dtype");
    }
    has_view_ = true;
    data_ = static_cast<std::byte*>(view_.buf);
    size_ = static_cast<uint64_t>(view_.len);
  }
  ~Local() {
    if (has_view_) PyBuffer_Release(&view_);
  }
  Local(Local&& other) noexcept
      : view_(other.view_),
        has_view_(std::exchange(other.has_view_, false)),
        data_(other.data_),
        size_(other.size_),
        owner_(std::move(other.owner_)) {}
  Local(const Local&) = delete;
  Local& operator=(Local&&) = delete;

  std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }

  void keep_until_done(Transfer& transfer) {
    if (has_view_) {
      auto* view = new Py_buffer(view_);
      if (transfer.hold({view, release_view})) {
        has_view_ = false;
      } else {
        delete view;
      }
    } else if (owner_.is_valid()) {
      Py_INCREF(owner_.ptr());
      if (!transfer.hold({owner_.ptr(), release_object})) Py_DECREF(owner_.ptr());
    }
  }

 private:
  // An 'O' in the format (PEP 3118) outside the names of fields, which stand between colons.
  static bool holds_objects(const char* format) {
    bool in_name = false;
    for (; format != nullptr && *format != 0; ++format) {
      if (*format == ':') in_name = !in_name;
      if (*format == 'O' && !in_name) return true;
    }
    return false;
  }
  // numpy exports no dtype that struct has no letter for (datetime64, also in a structure), though
  // its items are bytes like others: the same array as items without a meaning. Else nothing.
  static nb::object as_plain_items(nb::handle object) {
    nb::object dtype = nb::getattr(object, "dtype", nb::none());
    nb::object has_object = nb::getattr(dtype, "hasobject", nb::none());
    if (!has_object.is(nb::bool_(false))) return {};
    nb::object items = nb::str("V{}").attr("format")(dtype.attr("itemsize"));
    return object.attr("view")(items);
  }
  static Error read_only() {
    return Error(Code::kInvalid, "the destination is read-only; pass a writable array");
  }
  [[noreturn]] static void explain(nb::handle object, bool writable) {
    if (!PyObject_CheckBuffer(object.ptr())) {
      throw Error(Code::kType,
                  std::string("expected an array, tensor, bytes-like object or Region, "
                              "not ") +
                      Py_TYPE(object.ptr())->tp_name);
    }
    Py_buffer any;
    if (PyObject_GetBuffer(object.ptr(), &any, PyBUF_STRIDED_RO | PyBUF_FORMAT) == 0) {
      bool contiguous = PyBuffer_IsContiguous(&any, 'C') != 0, read_only_view = any.readonly != 0;
      PyBuffer_Release(&any);
      if (!contiguous) {
        throw Error(Code::kInvalid,
                    "the array is not contiguous in memory; pass numpy.ascontiguousarray(array) or "
                    "tensor.contiguous()");
      }
      if (writable && read_only_view) throw read_only();
    }
    PyErr_Clear();
    throw Error(Code::kType, std::string("cannot get at the memory of a ") +
                                 Py_TYPE(object.ptr())->tp_name +
                                 "; if it is an array, use a numeric dtype");
  }

  Py_buffer view_{};
  bool has_view_ = false;
  std::byte* data_ = nullptr;
  uint64_t size_ = 0;
  nb::object owner_;
};

// ---- waiting

// Calls wait(deadline) without the GIL until it says true or the time is over; runs Python's signal
// handlers in between.
template <class Wait>
bool wait_patiently(const Wait& wait, std::optional<double> timeout_s) {
  Deadline deadline = Deadline::after(timeout_s);
  for (;;) {
    Deadline slice =
        deadline.never() || deadline.left_ns() > 500'000'000 ? Deadline::after(0.5) : deadline;
    bool ready;
    {
      WithoutGil release;
      Progress::set_interruptible(true);
      try {
        ready = wait(slice);
      } catch (...) {
        Progress::set_interruptible(false);
        throw;
      }
      Progress::set_interruptible(false);
    }
    if (ready) return true;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (deadline.passed()) return false;
  }
}

// For the core's Interrupted, in a thread that has let go of the GIL. Python runs them in its main
// thread alone. Another one does not ask for the GIL here: when Python ends, that ends the thread,
// through frames of the core that nothing may unwind.
void run_signal_handlers() {
  if (::gettid() != ::getpid()) return;
  nb::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

[[noreturn]] void time_out(const std::string& what, double timeout_s) {
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%g", timeout_s);
  throw Error(Code::kTimeout, what + " within " + seconds + " s");
}

void wait_transfer(const TransferPtr& transfer, std::optional<double> timeout_s, uint32_t epoch) {
  if (!transfer->done()) {
    if (epoch != fork::epoch()) {
      throw Error(Code::kClosed,
                  "the transfer belongs to the process that this one was forked from");
    }
    if (!wait_patiently([&](Deadline d) { return transfer->wait(d); }, timeout_s)) {
      time_out("the transfer did not complete (it goes on; only the waiting stopped)", *timeout_s);
    }
  }
  bury_the_dead();
  if (!transfer->status().ok()) throw Error(transfer->status());
}

// Python's Transfer: remembers which process made it.
struct PyTransfer {
  TransferPtr transfer;
  uint32_t epoch = fork::epoch();
};

RemoteRegionPtr answer(const PeerPtr& peer, const AskedPtr& asked, const char* what,
                       std::optional<double> timeout_s) {
  try {
    if (!wait_patiently([&](Deadline d) { return asked->transfer->wait(d); }, timeout_s)) {
      time_out(std::string(what) + ": no answer from peer '" + peer->name() + "'", *timeout_s);
    }
  } catch (...) {
    peer->abandon(asked);
    throw;
  }
  return peer->finish(asked);
}

std::shared_ptr<RemoteRegion> mutable_(RemoteRegionPtr region) {
  return std::const_pointer_cast<RemoteRegion>(std::move(region));
}

// ---- transfers

using MaybeWord = std::optional<std::shared_ptr<RemoteRegion>>;

SignalTo signal_to(const MaybeWord& word, uint64_t offset, uint64_t value) {
  return {word ? word->get() : nullptr, offset, value};
}

PyTransfer hand_over(TransferPtr transfer, std::span<Local> locals) {
  if (!transfer->done()) {
    for (Local& local : locals) local.keep_until_done(*transfer);
  }
  return {std::move(transfer)};
}

template <class Start>
TransferPtr start_transfer(const Peer& peer, uint64_t bytes, const Start& start) {
  bury_the_dead();
  if (bytes <= (peer.transport() == "shm" ? kKeepGilShmBytes : kKeepGilBytes)) return start();
  WithoutGil release;
  return start();
}

PyTransfer transfer_one(Peer& peer, nb::handle object, const RemoteRegion& remote, uint64_t offset,
                        uint64_t limit, const SignalTo& signal, uint64_t inline_limit,
                        bool is_write) {
  Local local(object, !is_write);
  if (local.size() > limit) {
    throw Error(Code::kInvalid, "the local memory has " + std::to_string(local.size()) +
                                    " bytes, the target only " + std::to_string(limit) +
                                    "; slice one of them");
  }
  Piece piece{local.data(), &remote, offset, local.size()};
  auto transfer = start_transfer(peer, local.size(), [&] {
    return is_write ? peer.write({&piece, 1}, signal, inline_limit)
                    : peer.read({&piece, 1}, inline_limit);
  });
  return hand_over(std::move(transfer), {&local, 1});
}

using Objects = nb::typed<nb::sequence, nb::object>;

struct PieceList {
  std::vector<Local> locals;
  std::vector<Piece> pieces;
  uint64_t bytes = 0;
};

PieceList piece_list(const Objects& objects,
                     const std::vector<std::shared_ptr<RemoteRegion>>& remotes,
                     const std::vector<uint64_t>& offsets, bool writable) {
  PieceList list;
  size_t count = nb::len(objects);
  if (count != remotes.size() || count != offsets.size()) {
    throw Error(Code::kInvalid, "there are " + std::to_string(count) + " local and " +
                                    std::to_string(remotes.size()) + " remote pieces");
  }
  list.locals.reserve(count);
  for (nb::handle object : objects) {
    Local& local = list.locals.emplace_back(object, writable);
    size_t i = list.pieces.size();
    if (!remotes[i]) throw Error(Code::kType, "a remote piece is a RemoteRegion, not None");
    list.pieces.push_back({local.data(), remotes[i].get(), offsets[i], local.size()});
    list.bytes += local.size();
  }
  return list;
}

PyTransfer transfer_many(Peer& peer, const Objects& objects,
                         const std::vector<std::shared_ptr<RemoteRegion>>& remotes,
                         const std::vector<uint64_t>& offsets, const SignalTo& signal,
                         uint64_t inline_limit, bool is_write) {
  PieceList list = piece_list(objects, remotes, offsets, !is_write);
  auto transfer = start_transfer(peer, list.bytes, [&] {
    return is_write ? peer.write(list.pieces, signal, inline_limit)
                    : peer.read(list.pieces, inline_limit);
  });
  return hand_over(std::move(transfer), list.locals);
}

// A prepared list keeps its local objects.
struct PyPrepared {
  PyPrepared(std::shared_ptr<Prepared> prepared, std::vector<Local> locals)
      : prepared(std::move(prepared)), locals(std::move(locals)) {}
  PyPrepared(PyPrepared&&) = default;
  PyPrepared(const PyPrepared&) = delete;

  std::shared_ptr<Prepared> prepared;
  std::vector<Local> locals;
};

using Indices = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Tells an event loop of completions and doorbells of one Node.
struct PyNotifier {
  explicit PyNotifier(std::shared_ptr<Progress> of)
      : progress(std::move(of)), notifier(std::make_shared<Notifier>()) {
    progress->add(notifier);
  }
  PyNotifier(const PyNotifier&) = delete;
  ~PyNotifier() {
    if (progress->page_mapping()->usable()) progress->remove(notifier);
  }

  std::shared_ptr<Progress> progress;
  std::shared_ptr<Notifier> notifier;
};

// Equal for a Node and its transfers, and for nothing else while a notifier of it lives.
uint64_t progress_id(const std::shared_ptr<Progress>& progress) {
  return reinterpret_cast<uint64_t>(progress.get());
}

// ---- classes

constexpr const char* kForked =
    "the memory belongs to the process that this one was forked from; create a Node of its own "
    "here";

constexpr const char* kGone =
    "the Node is closed and its memory given back; only arrays and views from before stay";

void check_not_forked(const Mapping& mapping) {
  if (!mapping.usable()) throw Error(Code::kClosed, kForked);
}

// Memory of this process alone that can be mapped twice; no Node is needed for it.
struct LocalMemory {
  std::shared_ptr<Mapping> mapping;
};

std::shared_ptr<PrivateMapping> map_private(const std::shared_ptr<Mapping>& mapping) {
  check_not_forked(*mapping);
  if (mapping->descriptor() < 0) {
    throw Error(Code::kUnavailable,
                "the region's memory cannot be mapped again: this Node shares none");
  }
  return std::make_shared<PrivateMapping>(mapping, mapping->descriptor());
}

// Sets Python's error. Making it runs Python code, and so perhaps a signal's handler: what that
// raises (KeyboardInterrupt) is then the error.
void set_error(Code code, std::string_view what) {
  try {
    nb::object text = nb::steal(
        PyUnicode_DecodeUTF8(what.data(), static_cast<Py_ssize_t>(what.size()), "replace"));
    nb::object made =
        nb::module_::import_("tensorwire.errors").attr("from_code")(static_cast<int>(code), text);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
  } catch (nb::python_error& raised) {
    raised.restore();
  }
}

// Whatever shows memory of a region refers to one of these: it keeps the memory, also when the Node
// is closed. (numpy refers to the exporter of a memoryview and not to its buffer, so that counting
// exports would not do.)
struct View {
  View(std::shared_ptr<Mapping> of, uint64_t size, bool writable)
      : mapping(std::move(of)), size(size), writable(writable) {
    if (!mapping) throw Error(Code::kUnavailable, "the region has no memory in this process");
    check_not_forked(*mapping);
    if (!mapping->add_view()) throw Error(Code::kClosed, kGone);
  }
  ~View() { mapping->drop_view(); }
  View(const View&) = delete;

  const std::shared_ptr<Mapping> mapping;
  const uint64_t size;
  const bool writable;
};

int view_buffer(PyObject* object, Py_buffer* buffer, int flags) {
  auto* view = nb::inst_ptr<View>(nb::handle(object));
  buffer->obj = nullptr;
  if (!view->mapping->usable()) {
    set_error(Code::kClosed, kForked);
    return -1;
  }
  return PyBuffer_FillInfo(buffer, object, view->mapping->data(),
                           static_cast<Py_ssize_t>(view->size), !view->writable, flags);
}

int private_buffer(PyObject* object, Py_buffer* view, int flags) {
  auto* mapping = nb::inst_ptr<PrivateMapping>(nb::handle(object));
  view->obj = nullptr;
  if (!mapping->usable()) {
    set_error(Code::kClosed, kForked);
    return -1;
  }
  return PyBuffer_FillInfo(view, object, mapping->data(), static_cast<Py_ssize_t>(mapping->size()),
                           0, flags);
}

int memory_buffer(PyObject* object, Py_buffer* view, int flags) {
  auto& mapping = *nb::inst_ptr<LocalMemory>(nb::handle(object))->mapping;
  view->obj = nullptr;
  if (!mapping.usable()) {
    set_error(Code::kClosed, kForked);
    return -1;
  }
  return PyBuffer_FillInfo(view, object, mapping.data(), static_cast<Py_ssize_t>(mapping.size()), 0,
                           flags);
}

PyType_Slot kPrivateSlots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void*>(private_buffer)},
    {0, nullptr},
};

PyType_Slot kMemorySlots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void*>(memory_buffer)},
    {0, nullptr},
};

PyType_Slot kViewSlots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void*>(view_buffer)},
    {0, nullptr},
};

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

void bind_transfer(nb::module_& m) {
  nb::class_<PyTransfer>(
      m, "Transfer",
      "One operation or one batch in flight; `await` it or `wait`.\n\n"
      "It completes exactly once: placed in the target's memory, or failed. That tells nothing "
      "about whether the target is awake or has looked. Until then it keeps the local memory "
      "alive, which must not be changed (a source) or used (a destination). Dropping the object "
      "does not stop the transfer. Any thread may use it.")
      .def(
          "done", [](const PyTransfer& t) { return t.transfer->done(); },
          "True when it is complete, well or not. Never blocks.")
      .def(
          "wait",
          [](const PyTransfer& t, std::optional<double> timeout_s) {
            wait_transfer(t.transfer, timeout_s, t.epoch);
          },
          "timeout_s"_a = nb::none(),
          "Waits until it is complete; may be called again, with the same outcome.\n\n"
          "Args:\n"
          "    timeout_s: None waits for ever, 0 only looks.\n\n"
          "Raises:\n"
          "    TimeoutError: it is not complete yet. Only the waiting has ended: the transfer "
          "goes\n"
          "        on, and its memory must stay as it is.\n"
          "    PeerLostError: the peer or the link was lost; any part of the bytes may be placed.\n"
          "    ClosedError: the Peer or Node was closed on this side, or this is a forked child.\n"
          "    StaleHandleError: the region was freed; nothing was placed in other memory.\n"
          "    PermissionError, ValueError: the owner of the memory refused.")
      .def_prop_ro(
          "progress_id", [](const PyTransfer& t) { return progress_id(t.transfer->progress()); },
          "Equals that of its Node.")
      .def_prop_ro(
          "bytes", [](const PyTransfer& t) { return t.transfer->bytes; }, "Payload bytes.")
      .def_prop_ro(
          "value",
          [](const PyTransfer& t) {
            if (!t.transfer->done())
              throw Error(Code::kBusy, "the transfer is not done yet; wait() for it first");
            return t.transfer->value();
          },
          "What the word held before a fetch_add, when that is complete (else BusyError).")
      .def_prop_ro(
          "code",
          [](const PyTransfer& t) {
            return t.transfer->done() ? static_cast<int>(t.transfer->status().code) : 0;
          },
          "The error code of a failed transfer, 0 while pending or done well.")
      .def(
          "__await__",
          [](nb::handle self) {
            return nb::module_::import_("tensorwire.memory.aio")
                .attr("wait_transfer")(self)
                .attr("__await__")();
          },
          nb::sig("def __await__(self) -> collections.abc.Generator[typing.Any, None, None]"));
}

void bind_private(nb::module_& m) {
  nb::class_<PrivateMapping>(m, "PrivateMapping", nb::type_slots(kPrivateSlots))
      .def_prop_ro("size_bytes", &PrivateMapping::size)
      .def_prop_ro_static("told_by_kernel",
                          [](nb::handle) { return PrivateMapping::told_by_kernel(); })
      .def(
          "written",
          [](PrivateMapping& p, bool compare) {
            check_not_forked(p.shared());
            return p.written(compare);
          },
          "compare"_a)
      .def("revert", [](PrivateMapping& p) {
        check_not_forked(p.shared());
        p.revert();
      });
  nb::class_<LocalMemory>(m, "LocalMemory", nb::type_slots(kMemorySlots))
      .def(
          "__init__",
          [](LocalMemory* self, uint64_t size_bytes) {
            new (self) LocalMemory{Mapping::create(size_bytes, true, true)};
          },
          "size_bytes"_a)
      .def("map_private", [](const LocalMemory& l) { return map_private(l.mapping); });
  m.def(
      "same_bytes",
      [](nb::handle one, nb::handle other) {
        Local first(one, false), second(other, false);
        WithoutGil release;
        return first.size() == second.size() &&
               std::memcmp(first.data(), second.data(), first.size()) == 0;
      },
      "one"_a, "other"_a);
  m.def(
      "checksum",
      [](nb::handle local) {
        Local bytes(local, false);
        WithoutGil release;
        return checksum({bytes.data(), bytes.size()});
      },
      "local"_a);
}

void bind_regions(nb::module_& m) {
  nb::class_<View>(m, "View", nb::type_slots(kViewSlots));
  nb::class_<Region>(m, "Region")
      .def("view", [](const Region& r) { return new View(r.mapping, r.size, true); })
      .def_prop_ro("size_bytes", [](const Region& r) { return r.size; })
      .def_prop_ro("name", [](const Region& r) { return r.name; })
      .def_prop_ro("id", [](const Region& r) { return r.id; })
      .def_prop_ro("generation", [](const Region& r) { return r.generation; })
      .def_prop_ro("writable", [](const Region& r) { return r.access.write; })
      .def_prop_ro("readable", [](const Region& r) { return r.access.read; })
      .def_prop_ro("freed", [](const Region& r) { return r.freed.load(); })
      .def_prop_ro("address", [](const Region& r) { return reinterpret_cast<uint64_t>(r.data()); })
      .def("discard",
           [](const Region& r) {
             check_not_forked(*r.mapping);
             r.mapping->discard();
           })
      .def("map_private", [](const Region& r) { return map_private(r.mapping); })
      .def(
          "load_word",
          [](const Region& r, uint64_t offset) {
            if (offset % 8 != 0 || !r.contains(offset, 8)) {
              throw Error(Code::kInvalid, "a word is 8 bytes at a multiple of 8 inside the region");
            }
            check_not_forked(*r.mapping);
            uint64_t value = word_at(r.data() + offset).load(std::memory_order_acquire);
            if (r.mapping->gone()) throw Error(Code::kClosed, kGone);
            return value;
          },
          "offset"_a)
      .def(
          "reaches",  // for event loops: throws nothing but in a forked child
          [](const Region& r, uint64_t offset, uint64_t value) {
            check_not_forked(*r.mapping);
            bool high = r.contains(offset, 8) &&
                        word_at(r.data() + offset).load(std::memory_order_acquire) >= value;
            return high || r.mapping->gone();
          },
          "offset"_a, "value"_a);
  nb::class_<RemoteRegion>(m, "RemoteRegion")
      .def("view",
           [](const RemoteRegion& r) { return new View(r.mapping, r.size, r.access.write); })
      .def_prop_ro("mapped", [](const RemoteRegion& r) { return r.mapping != nullptr; })
      .def_prop_ro("copied", [](const RemoteRegion& r) { return r.copied; })
      .def_prop_ro("size_bytes", [](const RemoteRegion& r) { return r.size; })
      .def_prop_ro("name", [](const RemoteRegion& r) { return r.name; })
      .def_prop_ro("id", [](const RemoteRegion& r) { return r.id; })
      .def_prop_ro("generation", [](const RemoteRegion& r) { return r.generation; })
      .def_prop_ro("incarnation", [](const RemoteRegion& r) { return r.incarnation; })
      .def_prop_ro("writable", [](const RemoteRegion& r) { return r.access.write; })
      .def_prop_ro("readable", [](const RemoteRegion& r) { return r.access.read; });
  nb::class_<Buffer>(m, "Buffer")
      .def(
          "__init__",
          [](Buffer* self, uint64_t address, uint64_t size_bytes, bool writable, nb::object owner) {
            new (self) Buffer{address, size_bytes, writable, std::move(owner)};
          },
          "address"_a, "size_bytes"_a, "writable"_a, "owner"_a)
      .def_ro("size_bytes", &Buffer::size);
}

void bind_peer(nb::module_& m) {
  nb::class_<PyPrepared>(m, "Prepared")
      .def_prop_ro("size", [](const PyPrepared& p) { return p.prepared->size(); })
      .def_prop_ro("bytes", [](const PyPrepared& p) { return p.prepared->bytes(); })
      .def_prop_ro("runs", [](const PyPrepared& p) { return p.prepared->runs(); })
      .def(
          "start",
          [](nb::handle self, const std::optional<Indices>& indices, const MaybeWord& word,
             uint64_t word_offset, uint64_t value, uint64_t inline_limit) {
            auto& prepared = *nb::cast<PyPrepared&>(self).prepared;
            SignalTo signal = signal_to(word, word_offset, value);
            auto transfer = start_transfer(*prepared.peer(), prepared.bytes(), [&] {
              return indices
                         ? prepared.start({indices->data(), indices->size()}, signal, inline_limit)
                         : prepared.start(signal, inline_limit);
            });
            if (!transfer->done()) {
              Py_INCREF(self.ptr());
              if (!transfer->hold({self.ptr(), release_object})) Py_DECREF(self.ptr());
            }
            return PyTransfer{std::move(transfer)};
          },
          "indices"_a.none() = nb::none(), "word"_a.none() = nb::none(), "word_offset"_a = 0,
          "value"_a = 0, "inline_limit"_a = 0);

  nb::class_<FaultPlan>(m, "FaultPlan")
      .def(nb::init<uint64_t, const std::string&, double>(), "nth"_a, "action"_a, "delay_s"_a = 0.0)
      .def_prop_ro("count", &FaultPlan::count)
      .def_prop_ro("hit", &FaultPlan::hit);

  nb::class_<Peer>(m, "Peer")
      .def_prop_ro("name", &Peer::name)
      .def_prop_ro("address", &Peer::address)
      .def_prop_ro("incarnation", &Peer::incarnation)
      .def_prop_ro("pid", &Peer::pid)
      .def_prop_ro("transport", &Peer::transport)
      .def_prop_ro("reason", &Peer::reason)
      .def_prop_ro("wire", &Peer::wire)
      .def_prop_ro("lost", &Peer::lost)
      .def_prop_ro("lost_reason", [](const Peer& p) { return p.lost_status().message; })
      .def(
          "allocate",
          [](const PeerPtr& p, uint64_t size_bytes, const std::string& name,
             std::optional<double> timeout_s) {
            return mutable_(
                answer(p, p->ask_allocate(size_bytes, name, {true, true}), "allocate", timeout_s));
          },
          "size_bytes"_a, "name"_a, "timeout_s"_a.none())
      .def(
          "lookup",
          [](const PeerPtr& p, const std::string& name, std::optional<double> timeout_s) {
            return mutable_(answer(p, p->ask_lookup(name), "region", timeout_s));
          },
          "name"_a, "timeout_s"_a.none())
      .def(
          "attach",
          [](const PeerPtr& p, uint32_t id, uint64_t generation, std::optional<double> timeout_s,
             bool copied) {
            return mutable_(answer(p, p->ask_attach(id, generation, copied), "region", timeout_s));
          },
          "id"_a, "generation"_a, "timeout_s"_a.none(), "copied"_a = false)
      .def(
          "free",
          [](const PeerPtr& p, const RemoteRegion& remote, std::optional<double> timeout_s) {
            answer(p, p->ask_free(remote), "free", timeout_s);
          },
          "remote"_a, "timeout_s"_a.none())
      .def(
          "write",
          [](Peer& p, const Objects& locals,
             const std::vector<std::shared_ptr<RemoteRegion>>& remotes,
             const std::vector<uint64_t>& offsets, const MaybeWord& word, uint64_t word_offset,
             uint64_t value, uint64_t inline_limit) {
            return transfer_many(p, locals, remotes, offsets, signal_to(word, word_offset, value),
                                 inline_limit, true);
          },
          "locals"_a, "remotes"_a, "offsets"_a, "word"_a.none() = nb::none(), "word_offset"_a = 0,
          "value"_a = 0, "inline_limit"_a = 0)
      .def(
          "read",
          [](Peer& p, const Objects& locals,
             const std::vector<std::shared_ptr<RemoteRegion>>& remotes,
             const std::vector<uint64_t>& offsets, uint64_t inline_limit) {
            return transfer_many(p, locals, remotes, offsets, {}, inline_limit, false);
          },
          "locals"_a, "remotes"_a, "offsets"_a, "inline_limit"_a = 0)
      .def(
          "write_one",
          [](Peer& p, nb::handle local, const RemoteRegion& remote, uint64_t offset, uint64_t limit,
             const MaybeWord& word, uint64_t word_offset, uint64_t value, uint64_t inline_limit) {
            return transfer_one(p, local, remote, offset, limit,
                                signal_to(word, word_offset, value), inline_limit, true);
          },
          "local"_a, "remote"_a, "offset"_a, "limit"_a, "word"_a.none() = nb::none(),
          "word_offset"_a = 0, "value"_a = 0, "inline_limit"_a = 0)
      .def(
          "read_one",
          [](Peer& p, nb::handle local, const RemoteRegion& remote, uint64_t offset, uint64_t limit,
             uint64_t inline_limit) {
            return transfer_one(p, local, remote, offset, limit, {}, inline_limit, false);
          },
          "local"_a, "remote"_a, "offset"_a, "limit"_a, "inline_limit"_a = 0)
      .def(
          "signal",
          [](Peer& p, const RemoteRegion& word, uint64_t word_offset, uint64_t value,
             const std::vector<PyTransfer*>& after) {
            bury_the_dead();
            std::vector<TransferPtr> transfers;
            for (auto* t : after) {
              if (t == nullptr) throw Error(Code::kType, "after= takes transfers, not None");
              transfers.push_back(t->transfer);
            }
            return PyTransfer{p.signal({&word, word_offset, value}, transfers)};
          },
          "word"_a, "word_offset"_a, "value"_a, "after"_a)
      .def(
          "fetch_add",
          [](Peer& p, const RemoteRegion& remote, uint64_t offset, int64_t value) {
            bury_the_dead();
            return PyTransfer{p.fetch_add(remote, offset, static_cast<uint64_t>(value))};
          },
          "remote"_a, "offset"_a, "value"_a)
      .def(
          "prepare",
          [](const PeerPtr& p, bool write, const Objects& locals,
             const std::vector<std::shared_ptr<RemoteRegion>>& remotes,
             const std::vector<uint64_t>& offsets) {
            PieceList list = piece_list(locals, remotes, offsets, !write);
            std::vector<Prepared::Item> items;
            for (size_t i = 0; i < list.pieces.size(); ++i) {
              items.push_back(
                  {list.pieces[i].local, remotes[i], offsets[i], list.pieces[i].length});
            }
            return new PyPrepared(std::make_shared<Prepared>(p, write, std::move(items)),
                                  std::move(list.locals));
          },
          "write"_a, "locals"_a, "remotes"_a, "offsets"_a)
      .def(
          "inject",
          [](Peer& p, std::optional<std::shared_ptr<FaultPlan>> plan) {
            p.inject(plan ? *plan : nullptr);
          },
          "plan"_a.none());
}

void bind_node(nb::module_& m) {
  nb::class_<PyNotifier>(m, "Notifier")
      .def(
          "__init__",
          [](PyNotifier* self, const Node& node) { new (self) PyNotifier(node.progress()); },
          "node"_a)
      .def(
          "__init__",
          [](PyNotifier* self, const PyTransfer& t) {
            new (self) PyNotifier(t.transfer->progress());
          },
          "transfer"_a)
      .def("fileno", [](const PyNotifier& n) { return n.notifier->descriptor(); })
      .def("arm",
           [](PyNotifier& n) {
             check_not_forked(*n.progress->page_mapping());
             n.progress->arm(*n.notifier);
           })
      .def("disarm",
           [](PyNotifier& n) {
             if (n.progress->page_mapping()->usable()) n.progress->disarm(*n.notifier);
           })
      .def("drain", [](PyNotifier& n) { n.notifier->drain(); });

  nb::class_<Node>(m, "Node")
      .def(nb::new_([](const std::string& name, const std::string& host, uint16_t port,
                       nb::bytes secret, const std::vector<std::string>& transports, bool try_rdma,
                       const std::string& rdma_device, uint64_t quota_bytes, uint64_t max_peers,
                       double handshake_timeout_s, double peer_timeout_s) {
             NodeOptions options;
             options.name = name;
             options.host = host;
             options.port = port;
             auto* bytes = reinterpret_cast<const uint8_t*>(secret.c_str());
             options.secret.assign(bytes, bytes + secret.size());
             options.transports = transport_bits(transports);
             options.try_rdma = try_rdma;
             options.rdma_device = rdma_device;
             options.quota_bytes = quota_bytes;
             options.max_peers = max_peers;
             options.handshake_timeout_s = handshake_timeout_s;
             options.peer_timeout_s = peer_timeout_s;
             WithoutGil release;
             return Node::create(std::move(options));
           }),
           "name"_a, "host"_a, "port"_a, "secret"_a, "transports"_a, "try_rdma"_a, "rdma_device"_a,
           "quota_bytes"_a, "max_peers"_a, "handshake_timeout_s"_a, "peer_timeout_s"_a)
      .def_prop_ro("no_rdma", &Node::no_rdma)
      .def_prop_ro("name", &Node::name)
      .def_prop_ro("host", &Node::host)
      .def_prop_ro("port", &Node::port)
      .def_prop_ro("incarnation", &Node::incarnation)
      .def_prop_ro("closed", &Node::closed)
      .def_prop_ro("progress_id", [](const Node& n) { return progress_id(n.progress()); })
      .def("check_open", &Node::check_open)
      .def(
          "allocate",
          [](Node& n, uint64_t size_bytes, const std::string& name, bool writable, bool readable,
             bool mappable) {
            return n.allocate(size_bytes, name, {readable, writable}, mappable);
          },
          "size_bytes"_a, "name"_a, "writable"_a, "readable"_a, "mappable"_a = false)
      .def("region", &Node::region, "name"_a)
      .def(
          "free",
          [](Node& n, std::shared_ptr<Region> region) {
            WithoutGil release;
            n.free(region);
          },
          "region"_a)
      .def(
          "connect",
          [](Node& n, const std::string& host, uint16_t port, std::optional<double> timeout_s,
             const std::string& require) {
            WithoutGil release;
            return n.connect(host, port, Deadline::after(timeout_s), require, run_signal_handlers);
          },
          "host"_a, "port"_a, "timeout_s"_a.none(), "require"_a)
      .def(
          "accept",
          [](Node& n, std::optional<double> timeout_s) {
            PeerPtr peer;
            auto accept = [&](Deadline d) { return (peer = n.accept(d)) != nullptr; };
            if (!wait_patiently(accept, timeout_s)) time_out("no peer connected", *timeout_s);
            return peer;
          },
          "timeout_s"_a.none())
      .def("peers", &Node::peers)
      .def(
          "wait_word",
          [](Node& n, std::shared_ptr<Region> region, uint64_t offset, uint64_t value,
             std::optional<double> timeout_s, std::optional<PeerPtr> peer) {
            n.check_open();
            auto wait = [&](Deadline d) {
              return n.wait_word(*region, offset, value, d, peer ? *peer : nullptr);
            };
            if (!wait_patiently(wait, timeout_s)) {
              time_out("the word did not reach " + std::to_string(value), *timeout_s);
            }
          },
          "region"_a, "offset"_a, "value"_a, "timeout_s"_a.none(), "peer"_a.none() = nb::none())
      .def("raise_word", &Node::raise_word, "region"_a, "offset"_a, "value"_a)
      .def(
          "close_peer",
          [](Node& n, PeerPtr peer, std::string reason) {
            if (reason.size() > kMaxBodyBytes || !presentable(reason)) {
              throw Error(Code::kInvalid,
                          "a reason is text without control characters, of at most " +
                              std::to_string(kMaxBodyBytes) + " bytes");
            }
            if (reason.empty()) reason = kClosedByUser;
            WithoutGil release;
            if (n.closed() || peer->lost()) return;
            n.progress()->run([&] { peer->lose({Code::kClosed, "you closed this peer"}, reason); });
          },
          "peer"_a, "reason"_a)
      .def("stats",
           [](const Node& n) {
             nb::typed<nb::dict, nb::str, nb::int_> result;
             auto put = [&](const char* name, uint64_t value) { result[name] = value; };
             put("bytes_written", n.traffic().bytes_written);
             put("bytes_read", n.traffic().bytes_read);
             put("bytes_received", n.traffic().bytes_received);
             put("bytes_served", n.traffic().bytes_served);
             put("writes", n.traffic().writes);
             put("reads", n.traffic().reads);
             put("signals", n.traffic().signals);
             put("transfers_started", n.transfers().started);
             put("transfers_completed", n.transfers().completed);
             put("doorbell_rings", n.progress()->counters().rings);
             put("sleeps", n.progress()->counters().sleeps);
             put("rounds", n.progress()->counters().rounds);
             put("handovers", n.progress()->counters().handovers);
             put("spin_bound_ns", static_cast<uint64_t>(Progress::spin_bound_ns()));
             return result;
           })
      .def("close", [](Node& n) {
        WithoutGil release;
        n.close();
      });
}

void bind_drivers(nb::module_& m) {
  using Release = nb::call_guard<WithoutGil>;
  nb::module_ d = m.def_submodule("drivers", "Measuring loops in C++, for tensorwire bench.");
  d.def("copy_memory", &drivers::copy_memory, "target"_a, "source"_a, "size_bytes"_a, "repeats"_a,
        "batch"_a, Release());
  d.def("copy_pieces", &drivers::copy_pieces, "target"_a, "source"_a, "piece_bytes"_a,
        "stride_bytes"_a, "pieces"_a, "repeats"_a, "batch"_a, Release());
  d.def("mapped_address", &drivers::mapped_address, "remote"_a);
  d.def("socket_ping_pong", &drivers::socket_ping_pong, "descriptor"_a, "buffer"_a, "size_bytes"_a,
        "repeats"_a, "batch"_a, Release());
  d.def("socket_send", &drivers::socket_send, "descriptor"_a, "buffer"_a, "size_bytes"_a,
        "repeats"_a, "batch"_a, Release());
  d.def("socket_fetch", &drivers::socket_fetch, "descriptor"_a, "buffer"_a, "size_bytes"_a,
        "repeats"_a, "batch"_a, Release());
  d.def("serve_echo", &drivers::serve_echo, "descriptor"_a, "buffer"_a, "size_bytes"_a, Release());
  d.def("serve_sink", &drivers::serve_sink, "descriptor"_a, "buffer"_a, "size_bytes"_a, Release());
  d.def("serve_source", &drivers::serve_source, "descriptor"_a, "buffer"_a, "size_bytes"_a,
        Release());
  d.def("exchange_limit", &drivers::exchange_limit, "parameters"_a, "states"_a, "gradients"_a,
        "elements"_a, "threads"_a, "repeats"_a, Release());
  d.def("exchange_limit_constants", &drivers::exchange_limit_constants);
  d.def("write_complete", &drivers::write_complete, "peer"_a, "local"_a, "size_bytes"_a, "remote"_a,
        "offset"_a, "repeats"_a, "batch"_a, Release());
  d.def("write_pipelined", &drivers::write_pipelined, "peer"_a, "local"_a, "size_bytes"_a,
        "remote"_a, "offset"_a, "count"_a, "depth"_a, Release());
  d.def("read_complete", &drivers::read_complete, "peer"_a, "local"_a, "size_bytes"_a, "remote"_a,
        "offset"_a, "repeats"_a, "batch"_a, Release());
  d.def(
      "start_complete",
      [](const PyPrepared& p, const std::vector<int64_t>& indices, size_t repeats, size_t batch) {
        WithoutGil release;
        return drivers::start_complete(*p.prepared, indices, repeats, batch);
      },
      "prepared"_a, "indices"_a, "repeats"_a, "batch"_a);
  d.def("fetch_add_complete", &drivers::fetch_add_complete, "peer"_a, "remote"_a, "offset"_a,
        "repeats"_a, "batch"_a, Release());
  d.def("signal_ping", &drivers::signal_ping, "node"_a, "mine"_a, "my_offset"_a, "peer"_a,
        "theirs"_a, "their_offset"_a, "first"_a, "rounds"_a, "pause_s"_a, "timeout_s"_a, Release());
  d.def("signal_pong", &drivers::signal_pong, "node"_a, "mine"_a, "my_offset"_a, "peer"_a,
        "theirs"_a, "their_offset"_a, "first"_a, "rounds"_a, "timeout_s"_a, Release());
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "The native core of tensorwire. Use tensorwire.memory; this module may change.";
  nb::register_exception_translator(translate);
  bind_transfer(m);
  bind_private(m);
  bind_regions(m);
  bind_peer(m);
  bind_node(m);
  bind_drivers(m);
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
      [](const std::string& host, std::optional<double> timeout_s) {
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
        return std::make_pair(most.bytes, most.of);
      },
      "root"_a = "", "How many bytes of memory this process may have, and what sets that limit.");
  m.def("fork_epoch", &fork::epoch, "Grows by one in each forked child.");
  m.def(
      "hmac_sha256",
      [](nb::bytes key, nb::bytes text) {
        auto digest = hmac({reinterpret_cast<const uint8_t*>(key.c_str()), key.size()}, "",
                           {reinterpret_cast<const uint8_t*>(text.c_str()), text.size()});
        return nb::bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
      },
      "key"_a, "text"_a, "The handshake's HMAC, for tests against a known good one.");
}

}  // namespace tensorwire
