// The events of GPUs for which one Node waits. The driving thread checks whether they have passed
// while waiters poll; before the loop sleeps, the GPU gets a request to wake it.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/error.h"
#include "gpu/gpu.h"
#include "loop/progress.h"

namespace tensorwire {

// A stream of our own for one transfer, given back at the end.
class GpuLane {
 public:
  // Throws kUnavailable, kNoMemory.
  explicit GpuLane(Gpu& gpu);
  ~GpuLane();
  GpuLane(const GpuLane&) = delete;
  GpuLane& operator=(const GpuLane&) = delete;

  Gpu& gpu() const { return gpu_; }
  cuda::Stream stream() const { return stream_; }
  // Whether all share this lane: then nothing on it may wait for streams of the user.
  bool shared() const { return shared_; }

 private:
  Gpu& gpu_;
  cuda::Stream stream_;
  bool shared_;
};

// How something that a GPU does ended.
struct GpuOutcome {
  Status status;
  bool left = false;  // nobody waits any more, and the GPU may still use the memory of the copy
  bool ok() const { return status.ok(); }
};
using GpuThen = std::function<void(const GpuOutcome&)>;

class GpuQueue : public Poller, public std::enable_shared_from_this<GpuQueue> {
 public:
  explicit GpuQueue(std::shared_ptr<Progress> progress);

  // To be called before the first when(), and then as often as one likes. Throws kBusy, kClosed.
  void start();

  // Calls `then` in the driving thread when all has passed that is on the lane now, or the GPU has
  // failed. It keeps the lane until then. Any thread.
  void when(std::shared_ptr<GpuLane> lane, GpuEventPtr event, GpuThen then);
  // The same for an event of a stream of the user, on which nothing of ours is put.
  void when(GpuEventPtr event, GpuThen then);
  // Driving thread, at the end of the Node: waits for what GPUs still do with memory of transfers.
  // Not for ever: a copy that a stream of the user delays for too long is given up (GpuOutcome),
  // and its memory must stay until the process ends. What comes later is waited for at once.
  void stop();

  bool poll() override;
  bool arm() override;
  int descriptor() const override { return wake_->event.get(); }

 private:
  struct Waiting {
    std::shared_ptr<GpuLane> lane;
    GpuEventPtr event;
    GpuThen then;
    bool armed = false;
  };
  void take();
  bool look();
  void look_again();
  static void leave(Waiting one);

  const std::shared_ptr<Progress> progress_;
  // The bell that functions on streams ring, which may be called after the Node is closed.
  struct Wake {
    std::mutex mutex;
    Descriptor event;
    void ring();
  };
  std::shared_ptr<Wake> wake_;
  bool looking_again_ = false;    // driving thread only
  std::vector<Waiting> waiting_;  // driving thread only
  size_t next_ = 0;               // driving thread only

  std::mutex mutex_;
  std::vector<Waiting> arrived_;
  std::atomic<bool> any_arrived_{false}, started_{false}, stopped_{false};
};

}  // namespace tensorwire
