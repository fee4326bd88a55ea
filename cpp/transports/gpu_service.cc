#include "transports/gpu_service.h"

#include <algorithm>
#include <map>

namespace tensorwire {
namespace {

constexpr size_t kSlots = 8;

}  // namespace

// ---- writes

std::byte* GpuService::begin_write(const std::shared_ptr<Region>& region, const Header& header,
                                   Status& status) {
  Gpu& gpu = *region->mapping->gpu();
  try {
    queue_->start();
    if (!lane_ || &lane_->gpu() != &gpu) {
      for (const auto& slot : slots_) {
        if (slot->copied) wait(*slot);
      }
      lane_ = std::make_shared<GpuLane>(gpu);
    }
    if (!slots_.empty() && slots_.front()->copied) {
      bool passed = slots_.front()->copied->query() != cuda::kNotReady;
      if (!passed && slots_.size() == kSlots) wait(*slots_.front());
      if (passed || slots_.size() == kSlots) free(*slots_.front());
    }
    if (slots_.empty() || slots_.front()->copied) {
      auto slot = std::make_shared<Slot>();
      slot->chunk = std::make_unique<GpuChunk>(gpu);
      slots_.push_front(std::move(slot));
    }
    slots_.front()->view = std::make_unique<MappingView>(region->mapping);
  } catch (const Error& error) {
    status = error.status();
    return nullptr;
  }
  slots_.push_back(std::move(slots_.front()));
  slots_.pop_front();
  region_ = region;
  offset_ = header.offset;
  length_ = header.length;
  return slots_.back()->chunk->data();
}

// Copies on the lane wait for nothing else, so this takes no longer than they do.
void GpuService::wait(Slot& slot) {
  Gpu& gpu = lane_->gpu();
  GpuScope scope(gpu);
  if (slot.copied->query() == cuda::kNotReady) {
    gpu.driver().cuStreamSynchronize(lane_->stream());
  }
}

void GpuService::free(Slot& slot) {
  slot.copied.reset();
  slot.view.reset();
}

GpuEventPtr GpuService::end_write(Status& status) {
  std::shared_ptr<Region> region = std::move(region_);
  if (!region) return nullptr;
  Gpu& gpu = lane_->gpu();
  Slot& slot = *slots_.back();
  cuda::Result result =
      gpu_copy(gpu, region->data() + offset_, slot.chunk->data(), length_, lane_->stream());
  if (result != cuda::kSuccess) status = gpu.driver().status("a copy on " + gpu.label(), result);
  try {
    slot.copied = GpuEvent::record(gpu, lane_->stream());
  } catch (const Error& error) {
    if (status.ok()) status = error.status();
  }
  return slot.copied;
}

bool GpuService::revoke(const Region& region) {
  if (region_.get() != &region) return false;
  const std::byte* chunk = slots_.back()->chunk->data();
  bool receiving = stream_ && stream_->discard_payload_in(chunk, chunk + GpuChunk::kBytes);
  region_.reset();
  return receiving;
}

void GpuService::when(const GpuEventPtr& moment, GpuThen then) {
  queue_->when(lane_, moment,
               [self = weak_from_this(), then = std::move(then)](const GpuOutcome& outcome) {
                 auto here = self.lock();
                 if (here && here->stream_) then(outcome);
               });
}

// ---- reads

// Sends one chunk, and tells when the kernel has it.
class GpuService::Source : public FrameSource {
 public:
  Source(const Header& header, const std::byte* chunk, std::shared_ptr<Progress> progress,
         GpuThen sent)
      : header_(header), chunk_(chunk), progress_(std::move(progress)), sent_(std::move(sent)) {}
  ~Source() override {
    progress_->post([sent = std::move(sent_)] {
      sent({});
      return false;
    });
  }
  bool next(Header& header, std::span<const std::byte>& payload) override {
    header = header_;
    payload = {chunk_, static_cast<size_t>(header.length)};
    return false;
  }

 private:
  const Header header_;
  const std::byte* chunk_;
  const std::shared_ptr<Progress> progress_;
  GpuThen sent_;
};

struct GpuService::Answer {
  std::shared_ptr<Region> region;
  MappingView view;
  Header request;
  std::shared_ptr<void> keep;
  uint64_t sent = 0;
  struct Ready {
    GpuStaging::Segment segment;
    GpuThen then;
  };
  std::map<uint64_t, Ready> ready;  // by where it starts: chunks may be copied in any order
};

void GpuService::read(const std::shared_ptr<Region>& region, const Header& request,
                      std::shared_ptr<void> keep) {
  std::shared_ptr<Answer> answer;
  try {
    queue_->start();
    answer = std::make_shared<Answer>(
        Answer{region, MappingView(region->mapping), request, std::move(keep), 0, {}});
  } catch (const Error& error) {
    failed_(request, error.status());
    return;
  }
  std::vector<GpuStaging::Item> items{
      {region->mapping->gpu(), region->data() + request.offset, request.length}};
  auto self = shared_from_this();
  auto other_side = [self, answer](std::span<const GpuStaging::Segment> segments, GpuThen then) {
    // One item has one segment in a chunk.
    const GpuStaging::Segment& segment = segments.front();
    answer->ready.emplace(segment.from, Answer::Ready{segment, std::move(then)});
    self->send_next(answer);
  };
  answers_->move(std::move(items), false, other_side, [self, answer](const GpuOutcome& outcome) {
    if (!outcome.ok() && self->stream_) self->failed_(answer->request, outcome.status);
  });
}

void GpuService::send_next(const std::shared_ptr<Answer>& answer) {
  while (!answer->ready.empty() && answer->ready.begin()->first == answer->sent) {
    auto [segment, then] = std::move(answer->ready.begin()->second);
    answer->ready.erase(answer->ready.begin());
    if (!stream_) {
      then({{Code::kPeerLost, "the peer is gone"}});
    } else if (answer->region->freed.load(std::memory_order_relaxed)) {
      then({{Code::kStaleHandle, kStale}});
    } else {
      bool more = segment.from + segment.length < answer->request.length;
      Header header{.type = FrameType::kData,
                    .flags = more ? uint8_t{0} : kLast,
                    .offset = answer->request.total + segment.from,
                    .length = segment.length,
                    .transfer = answer->request.transfer};
      stream_->send(std::make_shared<Source>(header, segment.chunk, progress_, std::move(then)));
    }
    answer->sent = segment.from + segment.length;
  }
}

void GpuService::close() {
  region_.reset();
  stream_.reset();
  // What is still being copied keeps its memory until it is through.
  for (auto& slot : slots_) {
    if (slot->copied) queue_->when(lane_, slot->copied, [slot](const GpuOutcome&) {});
  }
  slots_.clear();
}

}  // namespace tensorwire
