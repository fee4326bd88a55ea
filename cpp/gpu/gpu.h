// GPUs of this process: their memory, what is recorded on their streams, and host memory that they
// reach by themselves. Knows no Nodes.
//
// Each GPU's primary context is used, which torch and other libraries of the process share. All
// that is made here may be used and destroyed by any thread; in a forked child it is dead, and its
// destructors do nothing.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/fork.h"
#include "gpu/cuda_driver.h"

namespace tensorwire {

class GpuEvent;
using GpuEventPtr = std::shared_ptr<GpuEvent>;

// One GPU. Never destroyed.
class Gpu {
 public:
  // By its number in this process (CUDA_VISIBLE_DEVICES). The first call for a GPU makes or takes
  // up its primary context, which takes some tenths of a second. Throws kInvalid if there is no
  // such GPU, kUnavailable, kNoMemory.
  static Gpu& at(int ordinal);
  static int count();  // throws kUnavailable
  // Their names, without using any of them. Throws kUnavailable.
  static std::vector<std::string> names();
  // Whose memory is at this address. Throws kInvalid if it is no GPU's, and as at().
  static Gpu& holding(const void* address);

  int ordinal() const { return ordinal_; }
  const std::string& name() const { return name_; }
  std::string label() const;  // "cuda:0 (NVIDIA H100 80GB HBM3)"
  const cuda::Library& driver() const { return driver_; }
  size_t whole(size_t size) const;  // rounded up to what can be allocated
  bool registers_read_only() const { return registers_read_only_; }

  // A stream of our own on which nothing else is under way, to be given back. Null if too many are
  // taken: shared_stream() is left then. Throws kUnavailable, kNoMemory.
  cuda::Stream take_stream();
  void give_back(cuda::Stream stream);
  // A stream for all; nothing on it ever waits for anything but copies.
  cuda::Stream shared_stream();

  // The kind of memory of an address range: memory of a GPU, pinned memory of the host, or neither.
  enum class Kind { kOther, kPinned, kGpu };
  Kind kind_of(const void* address, size_t size) const;

 private:
  friend class GpuScope;
  friend class GpuEvent;
  friend class GpuGate;
  Gpu(const cuda::Library& driver, int ordinal);
  cuda::Event take_event();

  const cuda::Library& driver_;
  const int ordinal_;
  cuda::Context context_ = nullptr;
  std::string name_;
  size_t granularity_ = 0;
  bool registers_read_only_ = false;

  std::mutex mutex_;
  std::vector<cuda::Stream> idle_;
  size_t streams_ = 0;
  cuda::Stream shared_ = nullptr;
  std::vector<cuda::Event> events_;  // to be recorded again
  struct Gate {
    uint32_t* word = nullptr;  // pinned
    uint32_t value = 0;        // that the last one who had it waited for
  };
  std::vector<Gate> gates_;  // open ones
};

// Makes the GPU's context current in the calling thread while it lives; a nested one costs nothing.
// Does not disturb a graph that the thread's owner captures meanwhile.
class GpuScope {
 public:
  explicit GpuScope(const Gpu& gpu);
  ~GpuScope();
  GpuScope(const GpuScope&) = delete;
  GpuScope& operator=(const GpuScope&) = delete;

 private:
  const Gpu& gpu_;
  const Gpu* const before_;
  int mode_ = cuda::kCaptureRelaxed;
};

// A moment on a stream.
class GpuEvent {
 public:
  // Throws kInvalid if the stream is being captured into a graph, kUnavailable if it is none.
  static void check_stream(Gpu& gpu, cuda::Stream stream);
  // All that is on the stream now, which is none that is being captured. Throws kUnavailable,
  // kNoMemory.
  static GpuEventPtr record(Gpu& gpu, cuda::Stream stream);
  // Records an event like record(); null if it is the legacy default stream, torch's own, and
  // nothing is on it, so that no wait is needed.
  static GpuEventPtr record_unless_idle(Gpu& gpu, cuda::Stream stream);
  ~GpuEvent();
  GpuEvent(const GpuEvent&) = delete;
  GpuEvent& operator=(const GpuEvent&) = delete;

  Gpu& gpu() const { return gpu_; }
  // kSuccess: the moment has passed; kNotReady: not yet; else the GPU failed.
  cuda::Result query() const;
  // Makes later work on the stream wait for the event. Throws kUnavailable.
  void hold(Gpu& gpu, cuda::Stream stream) const;

 private:
  explicit GpuEvent(Gpu& gpu) : gpu_(gpu), epoch_(fork::epoch()) {}
  Gpu& gpu_;
  const uint32_t epoch_;
  cuda::Event event_ = nullptr;
};

// Holds up a stream until it is opened, also by its destructor.
class GpuGate {
 public:
  // Throws kInvalid as GpuEvent::record does, kUnavailable, kNoMemory.
  GpuGate(Gpu& gpu, cuda::Stream stream);
  ~GpuGate() { open(); }
  GpuGate(const GpuGate&) = delete;
  GpuGate& operator=(const GpuGate&) = delete;
  void open();

 private:
  Gpu& gpu_;
  const uint32_t epoch_;
  Gpu::Gate gate_;
  std::atomic<bool> open_{false};
};

// An allocation of physical memory of a GPU, mapped for that GPU. It lives as long as any process
// has it mapped, or has a descriptor of it.
class GpuMemory {
 public:
  // Zeroed. shareable: with a descriptor. Throws kNoMemory, kUnavailable, kBusy.
  static std::unique_ptr<GpuMemory> create(Gpu& gpu, size_t size, bool shareable);
  // Maps what a peer's create() gave; the descriptor stays the caller's. Looked at first in ways
  // that block for no kind of file, then by the driver, which takes none but its own. Throws
  // kInvalid (no such memory, or smaller), kUnavailable (not for this process), kNoMemory.
  static std::unique_ptr<GpuMemory> import(int descriptor, size_t size, bool writable);
  // Unmaps it. No thread and no stream may use it any more.
  ~GpuMemory();
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;

  Gpu& gpu() const { return *gpu_; }
  std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }
  Descriptor take_descriptor() { return std::move(descriptor_); }
  // Waits for all that is on the GPU's streams of this process. False if the GPU failed.
  bool settle() const;

 private:
  GpuMemory() = default;
  void map(cuda::Memory memory, size_t size, bool writable);
  Gpu* gpu_ = nullptr;
  cuda::Address address_ = 0;
  size_t reserved_ = 0;
  bool mapped_ = false;
  uint32_t epoch_ = 0;
  Descriptor descriptor_;
};

// Host memory that was made fit for copies by a GPU: its pages stay where they are.
class GpuPin {
 public:
  // Pins memory; null if the system does not allow it. Memory that was pinned before stays pinned
  // when this ends.
  static std::unique_ptr<GpuPin> pin(Gpu& gpu, void* address, size_t size, bool writable);
  ~GpuPin();
  GpuPin(const GpuPin&) = delete;
  GpuPin& operator=(const GpuPin&) = delete;

 private:
  GpuPin(Gpu& gpu, void* address) : gpu_(gpu), address_(address), epoch_(fork::epoch()) {}
  Gpu& gpu_;
  void* address_;  // null: somebody else pinned it
  const uint32_t epoch_;
};

// Pinned memory of the host, allocated by the driver.
class GpuChunk {
 public:
  static constexpr size_t kBytes = 1 << 20;
  explicit GpuChunk(Gpu& gpu);  // throws kNoMemory, kUnavailable
  ~GpuChunk();
  GpuChunk(const GpuChunk&) = delete;
  GpuChunk& operator=(const GpuChunk&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  Gpu& gpu_;
  const uint32_t epoch_;
  void* data_ = nullptr;
};

// Copies between memory of GPUs and pinned memory, after all earlier work on the stream. Throws
// nothing.
cuda::Result gpu_copy(const Gpu& gpu, void* target, const void* source, size_t size,
                      cuda::Stream stream);

}  // namespace tensorwire
