// What Python waits for: transfers, and the notifiers of event loops.
#include "bindings/bindings.h"

#include <cmath>

namespace tensorwire {

void run_signal_handlers() {
  if (::gettid() != ::getpid()) return;
  nb::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

Seconds::Seconds(nb::handle given) noexcept {
  if (given.is_none()) return;
  double found = PyFloat_AsDouble(given.ptr());
  is_number_ = !PyErr_Occurred();
  if (is_number_ && !std::isnan(found)) {
    seconds_ = found;
    return;
  }
  PyErr_Clear();
  wrong_ = is_number_ ? "nan" : Py_TYPE(given.ptr())->tp_name;
}

void Seconds::refuse() const {
  throw Error(is_number_ ? Code::kInvalid : Code::kType,
              "a timeout is a number of seconds or None, not " + wrong_);
}

[[noreturn]] void time_out(const std::string& what, double timeout_s) {
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%g", timeout_s);
  throw Error(Code::kTimeout, what + " within " + seconds + " s");
}

namespace {

void wait_transfer(const TransferPtr& transfer, std::optional<double> timeout_s, uint32_t epoch,
                   bool may_lead = true) {
  if (!transfer->done()) {
    if (epoch != fork::epoch()) {
      throw Error(Code::kClosed,
                  "the transfer belongs to the process that this one was forked from");
    }
    if (!wait_patiently([&](Deadline d) { return transfer->wait(d, may_lead); }, timeout_s)) {
      time_out("the transfer did not complete (it goes on; only the waiting stopped)", *timeout_s);
    }
  }
  bury_the_dead();
  if (!transfer->status().ok()) throw Error(transfer->status());
}

// What is put on the stream later waits until the transfer is complete, well or not.
void block_stream(const PyTransfer& t, uint64_t handle, int ordinal) {
  if (t.transfer->done()) return;
  if (t.epoch != fork::epoch()) {
    throw Error(Code::kClosed, "the transfer belongs to the process that this one was forked from");
  }
  Gpu& gpu = Gpu::at(ordinal);
  cuda::Stream stream = stream_of(handle);
  GpuEvent::check_stream(gpu, stream);
  if (t.transfer->landing()) {
    t.transfer->landing()->hold(gpu, stream);
    return;
  }
  auto gate = std::make_shared<GpuGate>(gpu, stream);
  t.transfer->then([gate] { gate->open(); });
}

// Tells an event loop of completions and doorbells of one Node.
struct PyNotifier {
  explicit PyNotifier(const Node& node) : PyNotifier(node.progress()) {}
  explicit PyNotifier(const PyTransfer& transfer) : PyNotifier(transfer.transfer->progress()) {}
  explicit PyNotifier(std::shared_ptr<Progress> of)
      : progress(std::move(of)), notifier(std::make_shared<Notifier>()) {
    progress->add(notifier);
  }
  PyNotifier(const PyNotifier&) = delete;
  ~PyNotifier() { progress->remove(notifier); }

  std::shared_ptr<Progress> progress;
  std::shared_ptr<Notifier> notifier;
};

}  // namespace

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
          [](const PyTransfer& t, const Seconds& timeout_s, bool lead) {
            wait_transfer(t.transfer, timeout_s, t.epoch, lead);
          },
          "timeout_s"_a = nb::none(), nb::kw_only(), "lead"_a = true,
          "Waits until it is complete; may be called again, with the same outcome.\n\n"
          "Args:\n"
          "    timeout_s: None waits for ever, 0 only looks.\n"
          "    lead: the waiting thread may do the work of the Node's own meanwhile, which is\n"
          "        fastest for one that waits again and again. It leaves what peers send over TCP\n"
          "        to the next such waiter for up to a millisecond. False: for a thread that\n"
          "        waits now and then, and does other things in between.\n\n"
          "Raises:\n"
          "    TimeoutError: it is not complete yet. Only the waiting has ended: the transfer "
          "goes\n"
          "        on, and its memory must stay as it is.\n"
          "    PeerLostError: the peer or the link was lost; any part of the bytes may be placed.\n"
          "    ClosedError: the Peer or Node was closed on this side, or this is a forked child.\n"
          "    StaleHandleError: the region was freed; nothing was placed in other memory.\n"
          "    PermissionError, ValueError: the owner of the memory refused.")
      .def(
          "block_stream",
          [](const PyTransfer& t, nb::handle stream) {
            const GpuEventPtr& landing = t.transfer->landing();
            auto given = nb::module_::import_("tensorwire.memory.gpu")
                             .attr("on_stream")(stream, landing ? landing->gpu().ordinal() : -1);
            auto [handle, gpu] = nb::cast<std::pair<uint64_t, int>>(given);
            block_stream(t, handle, gpu);
          },
          "stream"_a, nb::sig("def block_stream(self, stream: typing.Any) -> None"),
          "Lets what is put on a stream of a GPU from now on wait until the transfer is "
          "complete.\n\n"
          "The calling thread does not wait. The stream goes on whether the transfer ends well or "
          "not;\n"
          "`wait` tells.\n\n"
          "Args:\n"
          "    stream: a torch.cuda.Stream, an object with `__cuda_stream__`, or a handle as an "
          "int.\n\n"
          "Raises:\n"
          "    TypeError: none of these.\n"
          "    ValueError: it is being captured into a CUDA graph, or a handle alone does not tell "
          "the\n"
          "        GPU.\n"
          "    UnavailableError: the driver refused.")
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

  nb::class_<PyNotifier>(m, "Notifier")
      .def(nb::init<const Node&>(), "node"_a)
      .def(nb::init<const PyTransfer&>(), "transfer"_a)
      .def("fileno", [](const PyNotifier& n) { return n.notifier->descriptor(); })
      .def("arm",
           [](PyNotifier& n) {
             check_not_forked(*n.progress->page_mapping());
             n.progress->arm(*n.notifier);
           })
      .def("disarm", [](PyNotifier& n) { n.progress->disarm(*n.notifier); })
      .def("drain", [](PyNotifier& n) { n.notifier->drain(); });
}

}  // namespace tensorwire
