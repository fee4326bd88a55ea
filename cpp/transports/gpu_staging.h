// Copies between memory of a GPU and memory that no GPU reaches: through chunks of pinned memory,
// in a pipeline. Knows no transports: how bytes get from a chunk to the other side, or from there
// into a chunk, is its user's.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "loop/gpu_queue.h"

namespace tensorwire {

// The chunks of one channel. Driving thread only.
class GpuStaging : public std::enable_shared_from_this<GpuStaging> {
 public:
  // A contiguous part of memory of a GPU.
  struct Item {
    Gpu* gpu;
    std::byte* on_gpu;
    uint64_t length;
  };
  // Bytes [from, from + length) of an item, and where in a chunk they are, or shall be.
  struct Segment {
    size_t item;
    uint64_t from;
    uint64_t length;
    std::byte* chunk;
  };
  // Takes the segments out of the chunk, or fills it, and then calls the function: at once, or
  // later in the driving thread.
  using OtherSide = std::function<void(std::span<const Segment>, GpuThen)>;

  explicit GpuStaging(std::shared_ptr<GpuQueue> queue) : queue_(std::move(queue)) {}

  // Moves all items, behind those of earlier calls, and then calls `then` with the first failure;
  // nothing touches any memory of the call after that, unless it was left.
  void move(std::vector<Item> items, bool to_gpu, OtherSide other_side, GpuThen then);

 private:
  struct Job;
  struct Slot;
  void pump();
  void fill(const std::shared_ptr<Job>& job, const std::shared_ptr<Slot>& slot);
  void step(const std::shared_ptr<Job>& job, const std::shared_ptr<Slot>& slot);
  void on_gpu(const std::shared_ptr<Job>& job, const std::shared_ptr<Slot>& slot, GpuThen then);
  void over(const std::shared_ptr<Job>& job, const std::shared_ptr<Slot>& slot,
            const GpuOutcome& outcome);

  const std::shared_ptr<GpuQueue> queue_;
  std::deque<std::shared_ptr<Job>> jobs_;
  std::vector<std::shared_ptr<Slot>> free_;
  size_t slots_ = 0;
  bool pumping_ = false;
};

}  // namespace tensorwire
