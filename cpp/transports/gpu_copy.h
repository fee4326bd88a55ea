// One transfer between memory of this process and memory that is mapped here, in which a GPU has a
// part: its memory, or a stream behind which the transfer starts.
//
// Per pair of memory: between memory of GPUs, and between that and pinned memory of the host, the
// GPU copies by itself, once. Memory of the host that is in a region is pinned when it is needed.
// Other memory of the host goes through pinned chunks (GpuStaging), one more copy by a CPU.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "loop/gpu_queue.h"
#include "transports/gpu_staging.h"
#include "transports/transport.h"

namespace tensorwire {

// Counters of the bytes that GPUs moved for one Node.
struct GpuTraffic {
  std::atomic<uint64_t> bytes_direct{0};  // by one copy
  std::atomic<uint64_t> bytes_staged{0};  // through pinned chunks
};

class GpuCopy : public KeptCall, public std::enable_shared_from_this<GpuCopy> {
 public:
  // Copies pieces between memory of the host, all at once or in turns, in the driving thread.
  using ByCpu = std::function<void(std::vector<Piece>, GpuThen)>;

  // finish is called once: when nothing of the memory is used any more, or it was left.
  GpuCopy(std::span<const Piece> pieces, const SignalTo& signal, bool is_read, const How& how,
          std::shared_ptr<Progress> progress, std::shared_ptr<GpuQueue> queue,
          std::shared_ptr<GpuStaging> staging, std::shared_ptr<GpuTraffic> traffic, ByCpu by_cpu,
          GpuThen finish);

  // What the GPU can copy by itself is on its way when this returns. Any thread. Throws what
  // happened before anything was: kUnavailable, kNoMemory, kClosed, kBusy.
  void start();
  // Has passed when all is copied; null if a CPU takes part.
  const GpuEventPtr& landing() const { return landing_; }

 private:
  struct Lane {
    std::shared_ptr<GpuLane> lane;
    std::vector<size_t> pieces;
  };
  struct Staged {
    Gpu* gpu;
    bool to_gpu;
    std::vector<size_t> pieces;
  };
  void sort();
  GpuEventPtr run(const std::shared_ptr<Lane>& lane);
  void stage(const Staged& staged);
  void behind(std::function<void()> then);
  void part_done(const GpuOutcome& outcome);

  const bool is_read_;
  const How how_;
  const std::shared_ptr<Progress> progress_;
  const std::shared_ptr<GpuQueue> queue_;
  const std::shared_ptr<GpuStaging> staging_;
  const std::shared_ptr<GpuTraffic> traffic_;
  const ByCpu by_cpu_;
  const GpuThen finish_;
  std::vector<MappingView> views_;
  std::vector<std::shared_ptr<Lane>> lanes_;
  std::vector<Staged> staged_;
  std::vector<Piece> cpu_;
  GpuEventPtr landing_;

  std::atomic<size_t> parts_left_{0};
  std::mutex mutex_;
  GpuOutcome outcome_;
};

}  // namespace tensorwire
