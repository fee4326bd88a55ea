#include "transports/gpu_staging.h"

#include <algorithm>

namespace tensorwire {
namespace {

constexpr size_t kStagingSlots = 8;
constexpr size_t kMostSegments = 256;  // in one chunk

}  // namespace

struct GpuStaging::Slot {
  std::unique_ptr<GpuChunk> chunk;
  std::vector<Segment> segments;
};

struct GpuStaging::Job {
  std::vector<Item> items;
  bool to_gpu;
  OtherSide other_side;
  GpuThen then;
  std::shared_ptr<GpuLane> lane;
  size_t item = 0;       // next to be moved
  uint64_t from = 0;     // of that item
  size_t under_way = 0;  // slots
  GpuOutcome outcome;

  bool all_started() const { return !outcome.ok() || item == items.size(); }
};

void GpuStaging::move(std::vector<Item> items, bool to_gpu, OtherSide other_side, GpuThen then) {
  auto job = std::make_shared<Job>();
  job->items = std::move(items);
  job->to_gpu = to_gpu;
  job->other_side = std::move(other_side);
  job->then = std::move(then);
  jobs_.push_back(std::move(job));
  pump();
}

// Only the first job is under way, so that a channel needs no more chunks than one.
void GpuStaging::pump() {
  if (pumping_) return;
  pumping_ = true;
  auto self = shared_from_this();
  while (!jobs_.empty()) {
    std::shared_ptr<Job> job = jobs_.front();
    try {
      if (!job->all_started() && !job->lane) {
        job->lane = std::make_shared<GpuLane>(*job->items.front().gpu);
      }
      while (!job->all_started() && (!free_.empty() || slots_ < kStagingSlots)) {
        if (free_.empty()) {
          auto slot = std::make_shared<Slot>();
          slot->chunk = std::make_unique<GpuChunk>(*job->items.front().gpu);
          free_.push_back(std::move(slot));
          ++slots_;
        }
        auto slot = std::move(free_.back());
        free_.pop_back();
        fill(job, slot);
        ++job->under_way;
        step(job, slot);
      }
    } catch (const Error& error) {
      if (job->outcome.ok()) job->outcome.status = error.status();
    }
    if (!job->all_started() || job->under_way > 0) break;
    jobs_.pop_front();
    job->lane.reset();
    job->then(job->outcome);
  }
  pumping_ = false;
}

// As many segments as the chunk has room for.
void GpuStaging::fill(const std::shared_ptr<Job>& job, const std::shared_ptr<Slot>& slot) {
  slot->segments.clear();
  size_t used = 0;
  while (job->item < job->items.size() && used < GpuChunk::kBytes &&
         slot->segments.size() < kMostSegments) {
    const Item& item = job->items[job->item];
    uint64_t length = std::min<uint64_t>(item.length - job->from, GpuChunk::kBytes - used);
    if (length > 0) {
      slot->segments.push_back({job->item, job->from, length, slot->chunk->data() + used});
    }
    used += length;
    job->from += length;
    if (job->from < item.length) continue;
    ++job->item;
    job->from = 0;
  }
}

void GpuStaging::step(const std::shared_ptr<Job>& job, const std::shared_ptr<Slot>& slot) {
  auto self = shared_from_this();
  auto last = [self, job, slot](const GpuOutcome& outcome) { self->over(job, slot, outcome); };
  if (job->to_gpu) {
    job->other_side(slot->segments, [self, job, slot, last](const GpuOutcome& outcome) {
      outcome.ok() ? self->on_gpu(job, slot, last) : last(outcome);
    });
  } else {
    on_gpu(job, slot, [job, slot, last](const GpuOutcome& outcome) {
      outcome.ok() ? job->other_side(slot->segments, last) : last(outcome);
    });
  }
}

void GpuStaging::on_gpu(const std::shared_ptr<Job>& job, const std::shared_ptr<Slot>& slot,
                        GpuThen then) {
  Gpu& gpu = job->lane->gpu();
  cuda::Result result = cuda::kSuccess;
  for (const Segment& segment : slot->segments) {
    std::byte* there = job->items[segment.item].on_gpu + segment.from;
    result = job->to_gpu ? gpu_copy(gpu, there, segment.chunk, segment.length, job->lane->stream())
                         : gpu_copy(gpu, segment.chunk, there, segment.length, job->lane->stream());
    if (result != cuda::kSuccess) break;
  }
  Status failure;
  if (result != cuda::kSuccess) failure = gpu.driver().status("a copy on " + gpu.label(), result);
  GpuEventPtr event;
  try {
    event = GpuEvent::record(gpu, job->lane->stream());
  } catch (const Error& error) {
    then({failure.ok() ? error.status() : failure});
    return;
  }
  queue_->when(job->lane, event, [failure, then = std::move(then)](const GpuOutcome& outcome) {
    then(failure.ok() || !outcome.ok() ? outcome : GpuOutcome{failure});
  });
}

void GpuStaging::over(const std::shared_ptr<Job>& job, const std::shared_ptr<Slot>& slot,
                      const GpuOutcome& outcome) {
  if (outcome.left || job->outcome.ok()) job->outcome = outcome;
  if (outcome.left) {
    --slots_;  // whoever left it keeps the chunk
  } else {
    free_.push_back(slot);
  }
  --job->under_way;
  pump();
}

}  // namespace tensorwire
