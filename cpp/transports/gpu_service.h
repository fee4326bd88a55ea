// What one peer may do by frames to regions of this Node that are on a GPU: payload is received
// into pinned chunks and copied from there, and what it reads is sent from such chunks. Whether it
// may is asked before. Driving thread only.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "memory/region.h"
#include "transports/gpu_staging.h"
#include "wire/frame.h"
#include "wire/stream.h"

namespace tensorwire {

class GpuService : public std::enable_shared_from_this<GpuService> {
 public:
  // Tells the peer how a read failed.
  using Failed = std::function<void(const Header& request, const Status&)>;

  GpuService(std::shared_ptr<Progress> progress, std::shared_ptr<GpuQueue> queue,
             std::shared_ptr<Stream> stream, Failed failed)
      : progress_(std::move(progress)),
        queue_(std::move(queue)),
        stream_(std::move(stream)),
        failed_(std::move(failed)),
        answers_(std::make_shared<GpuStaging>(queue_)) {}

  // Where the payload goes that is about to come; null and a status if it cannot be had. May wait
  // for copies that were begun.
  std::byte* begin_write(const std::shared_ptr<Region>& region, const Header& header,
                         Status& status);
  // The payload came: copies it. A moment that has passed when it is in its place; null and a
  // status if that failed, or without a begin_write.
  GpuEventPtr end_write(Status& status);
  // The region was freed. True if payload for it was being received, which goes nowhere now.
  bool revoke(const Region& region);
  // Calls it when a moment of end_write has passed; not if the peer is gone by then.
  void when(const GpuEventPtr& moment, GpuThen then);

  // Answers a read. `keep` lives as long as that goes on.
  void read(const std::shared_ptr<Region>& region, const Header& request,
            std::shared_ptr<void> keep);
  // The peer is gone.
  void close();

 private:
  class Source;
  struct Answer;
  struct Slot {
    std::unique_ptr<GpuChunk> chunk;
    GpuEventPtr copied;                 // null: free
    std::unique_ptr<MappingView> view;  // of what it is copied to
  };
  void wait(Slot& slot);
  static void free(Slot& slot);
  void send_next(const std::shared_ptr<Answer>& answer);

  const std::shared_ptr<Progress> progress_;
  const std::shared_ptr<GpuQueue> queue_;
  std::shared_ptr<Stream> stream_;
  Failed failed_;
  const std::shared_ptr<GpuStaging> answers_;
  std::shared_ptr<GpuLane> lane_;
  std::deque<std::shared_ptr<Slot>> slots_;  // the oldest first
  std::shared_ptr<Region> region_;  // of the payload that is being received, which goes to the last
  uint64_t offset_ = 0, length_ = 0;
};

}  // namespace tensorwire
