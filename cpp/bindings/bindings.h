// The common declarations of the bindings, which convert between Python and the core, release the
// GIL where a call would block, and decide nothing. No other folder includes nanobind.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cxxabi.h>
#include <unistd.h>

#include "node/node.h"
#include "node/prepared.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tensorwire {

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

// Memory named by its address, for objects without the buffer protocol (torch tensors).
struct Buffer {
  uint64_t address;
  uint64_t size;
  bool writable;
  nb::object owner;
  Gpu* gpu = nullptr;                // whose memory it is; null: the host's
  std::shared_ptr<Mapping> mapping;  // of the region that it is in, if it is in one
};

// Numbers of pieces, of int64.
using Indices = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The local side of a transfer while the call runs; handed to the transfer if that goes on.
class Local {
 public:
  Local(nb::handle object, bool writable);
  ~Local() {
    if (has_view_) PyBuffer_Release(&view_);
  }
  Local(Local&& other) noexcept
      : view_(other.view_),
        has_view_(std::exchange(other.has_view_, false)),
        data_(other.data_),
        size_(other.size_),
        gpu_(other.gpu_),
        mapping_(std::move(other.mapping_)),
        owner_(std::move(other.owner_)) {}
  Local(const Local&) = delete;
  Local& operator=(Local&&) = delete;

  std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }
  Gpu* gpu() const { return gpu_; }
  Piece piece(const RemoteRegion& remote, uint64_t offset) const {
    return {data_, &remote, offset, size_, gpu_, mapping_};
  }
  void keep_until_done(Transfer& transfer);

 private:
  Py_buffer view_{};
  bool has_view_ = false;
  std::byte* data_ = nullptr;
  uint64_t size_ = 0;
  Gpu* gpu_ = nullptr;
  std::shared_ptr<Mapping> mapping_;
  nb::object owner_;
};

// A stream of a GPU, as Python gives it: its handle and the number of the GPU.
using OnStream = std::optional<std::pair<uint64_t, int>>;

inline cuda::Stream stream_of(uint64_t handle) {
  return reinterpret_cast<cuda::Stream>(static_cast<uintptr_t>(handle));
}

// Python objects whose transfers ended on a thread without the GIL wait for a call that has it.
void release_object(void* object);
void bury_the_dead();

// Up to these sizes a transfer does not hold up other threads long enough to be worth letting go of
// the GIL and taking it back: one memcpy on shm, a system call on the others.
inline constexpr uint64_t kKeepGilShmBytes = 1 << 20;
inline constexpr uint64_t kKeepGilBytes = 64 << 10;

template <class Start>
TransferPtr start_transfer(const Peer& peer, uint64_t bytes, bool by_gpu, const Start& start) {
  bury_the_dead();
  if (!by_gpu && bytes <= (peer.transport() == "shm" ? kKeepGilShmBytes : kKeepGilBytes))
    return start();
  WithoutGil release;
  return start();
}

// A time limit from Python: a number of seconds, or None for ever. Any other object is an error
// where it is used, with our message instead of nanobind's list of signatures.
class Seconds {
 public:
  Seconds() = default;
  explicit Seconds(nb::handle given) noexcept;
  operator std::optional<double>() const {
    if (!wrong_.empty()) refuse();
    return seconds_;
  }
  double operator*() const { return *seconds_; }

 private:
  [[noreturn]] void refuse() const;

  std::optional<double> seconds_;
  std::string wrong_;
  bool is_number_ = false;
};

// Calls wait(deadline) without the GIL until it says true or the time is over; runs Python's signal
// handlers in between.
template <class Wait>
bool wait_patiently(const Wait& wait, std::optional<double> timeout_s) {
  Deadline deadline = Deadline::after(timeout_s);
  for (;;) {
    bool ready;
    {
      WithoutGil release;
      Progress::set_interruptible(true);
      try {
        ready = wait(deadline.at_most(kLookForSignalsS));
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
void run_signal_handlers();

[[noreturn]] void time_out(const std::string& what, double timeout_s);

// Python's Transfer: remembers which process made it.
struct PyTransfer {
  TransferPtr transfer;
  uint32_t epoch = fork::epoch();
};

// A prepared list keeps its local objects.
struct PyPrepared {
  PyPrepared(std::shared_ptr<Prepared> prepared, std::vector<Local> locals)
      : prepared(std::move(prepared)), locals(std::move(locals)) {}
  PyPrepared(PyPrepared&&) = default;
  PyPrepared(const PyPrepared&) = delete;

  std::shared_ptr<Prepared> prepared;
  std::vector<Local> locals;
};

// Equal for a Node and its transfers, and for nothing else while a notifier of it lives.
inline uint64_t progress_id(const std::shared_ptr<Progress>& progress) {
  return reinterpret_cast<uint64_t>(progress.get());
}

inline constexpr const char* kForked =
    "the memory belongs to the process that this one was forked from; create a Node of its own "
    "here";

inline void check_not_forked(const Mapping& mapping) {
  if (!mapping.usable()) throw Error(Code::kClosed, kForked);
}

// Sets Python's error. Making it runs Python code, and so perhaps a signal's handler: what that
// raises (KeyboardInterrupt) is then the error.
void set_error(Code code, std::string_view what);

// Each adds the classes and functions of its file to the module.
void bind_transfer(nb::module_& m);
void bind_buffers(nb::module_& m);
void bind_regions(nb::module_& m);
void bind_peer(nb::module_& m);
void bind_node(nb::module_& m);
void bind_bench_loops(nb::module_& m);
void bind_fuse(nb::module_& m);
void bind_rpc(nb::module_& m);

}  // namespace tensorwire

namespace nanobind::detail {
template <>
struct type_caster<tensorwire::Seconds> {
  NB_TYPE_CASTER(tensorwire::Seconds, const_name("float"))
  bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
    value = tensorwire::Seconds(source);
    return true;
  }
};
}  // namespace nanobind::detail
