#include "transports/gpu_copy.h"

#include <algorithm>
#include <cstring>
#include <optional>

namespace tensorwire {
namespace {

std::byte* remote_of(const Piece& piece) { return piece.remote->mapping->data() + piece.offset; }

Gpu* gpu_of(const Piece& piece) {
  return piece.gpu != nullptr ? piece.gpu : piece.remote->mapping->gpu();
}

// Whether the GPU gets at both ends by itself.
bool is_direct(const Piece& piece, Gpu& gpu) {
  bool local = piece.gpu != nullptr || (piece.mapping && piece.mapping->reach(gpu, piece.length)) ||
               gpu.kind_of(piece.local, piece.length) == Gpu::Kind::kPinned;
  return local && piece.remote->mapping->reach(gpu, piece.length);
}

}  // namespace

GpuCopy::GpuCopy(std::span<const Piece> pieces, const SignalTo& signal, bool is_read,
                 const How& how, std::shared_ptr<Progress> progress,
                 std::shared_ptr<GpuQueue> queue, std::shared_ptr<GpuStaging> staging,
                 std::shared_ptr<GpuTraffic> traffic, ByCpu by_cpu, GpuThen finish)
    : KeptCall(pieces, signal),
      is_read_(is_read),
      how_(how),
      progress_(std::move(progress)),
      queue_(std::move(queue)),
      staging_(std::move(staging)),
      traffic_(std::move(traffic)),
      by_cpu_(std::move(by_cpu)),
      finish_(std::move(finish)) {}

// Which piece goes which way. Keeps all memory that is mapped from now on.
void GpuCopy::sort() {
  std::optional<GpuScope> scope;
  const Mapping* last = nullptr;
  auto keep = [&](const std::shared_ptr<Mapping>& mapping) {
    if (!mapping || mapping.get() == last) return;
    last = mapping.get();
    views_.emplace_back(mapping);
  };
  for (const Piece& piece : pieces) keep(piece.remote->mapping);
  for (const Piece& piece : pieces) keep(piece.mapping);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    if (piece.length == 0) continue;
    Gpu* gpu = gpu_of(piece);
    if (gpu != nullptr && !scope) scope.emplace(*gpu);
    if (gpu == nullptr) {
      cpu_.push_back(piece);
    } else if (!is_direct(piece, *gpu)) {
      bool to_gpu = (piece.gpu != nullptr) == is_read_;
      auto staged = std::find_if(staged_.begin(), staged_.end(), [&](const Staged& each) {
        return each.gpu == gpu && each.to_gpu == to_gpu;
      });
      if (staged == staged_.end()) staged = staged_.insert(staged, {gpu, to_gpu, {}});
      staged->pieces.push_back(i);
    } else {
      auto lane = std::find_if(lanes_.begin(), lanes_.end(),
                               [&](const auto& each) { return &each->lane->gpu() == gpu; });
      if (lane == lanes_.end()) {
        lanes_.push_back(std::make_shared<Lane>(Lane{std::make_shared<GpuLane>(*gpu), {}}));
        lane = lanes_.end() - 1;
      }
      (*lane)->pieces.push_back(i);
    }
  }
}

void GpuCopy::start() {
  queue_->start();
  sort();
  bool held_up = how_.after && how_.after->query() == cuda::kNotReady;
  bool by_cpu = !cpu_.empty() || (lanes_.empty() && staged_.empty() && held_up);
  parts_left_ = lanes_.size() + staged_.size() + (by_cpu ? 1 : 0) + 1;
  auto self = shared_from_this();
  for (const auto& lane : lanes_) {
    if (held_up && lane->lane->shared()) {
      behind([self, lane] { self->run(lane); });
      continue;
    }
    try {
      if (held_up) how_.after->hold(lane->lane->gpu(), lane->lane->stream());
    } catch (const Error& error) {
      part_done({error.status()});
      continue;
    }
    GpuEventPtr event = run(lane);
    if (lanes_.size() == 1 && !by_cpu && staged_.empty()) landing_ = event;
  }
  for (const Staged& staged : staged_) {
    behind([self, &staged] { self->stage(staged); });
  }
  if (by_cpu) {
    behind([self] {
      self->by_cpu_(self->cpu_, [self](const GpuOutcome& outcome) { self->part_done(outcome); });
    });
  }
  part_done({});
}

void GpuCopy::stage(const Staged& staged) {
  std::vector<GpuStaging::Item> items;
  uint64_t bytes = 0;
  for (size_t i : staged.pieces) {
    const Piece& piece = pieces[i];
    items.push_back(
        {staged.gpu, piece.gpu != nullptr ? piece.local : remote_of(piece), piece.length});
    bytes += piece.length;
  }
  traffic_->bytes_staged.fetch_add(bytes, std::memory_order_relaxed);
  auto self = shared_from_this();
  auto other_side = [self, &staged](std::span<const GpuStaging::Segment> segments,
                                    const GpuThen& then) {
    for (const auto& segment : segments) {
      const Piece& piece = self->pieces[staged.pieces[segment.item]];
      std::byte* host = (piece.gpu != nullptr ? remote_of(piece) : piece.local) + segment.from;
      staged.to_gpu ? std::memcpy(segment.chunk, host, segment.length)
                    : std::memcpy(host, segment.chunk, segment.length);
    }
    then({});
  };
  staging_->move(std::move(items), staged.to_gpu, other_side,
                 [self](const GpuOutcome& outcome) { self->part_done(outcome); });
}

// Puts all copies of one GPU on its lane.
GpuEventPtr GpuCopy::run(const std::shared_ptr<Lane>& lane) {
  Gpu& gpu = lane->lane->gpu();
  GpuScope scope(gpu);
  cuda::Stream stream = lane->lane->stream();
  cuda::Result result = cuda::kSuccess;
  uint64_t bytes = 0;
  for (size_t i : lane->pieces) {
    const Piece& piece = pieces[i];
    result = is_read_ ? gpu_copy(gpu, piece.local, remote_of(piece), piece.length, stream)
                      : gpu_copy(gpu, remote_of(piece), piece.local, piece.length, stream);
    if (result != cuda::kSuccess) break;
    bytes += piece.length;
  }
  traffic_->bytes_direct.fetch_add(bytes, std::memory_order_relaxed);
  Status failure;
  if (result != cuda::kSuccess) failure = gpu.driver().status("a copy on " + gpu.label(), result);
  GpuEventPtr event;
  try {
    event = GpuEvent::record(gpu, stream);
  } catch (const Error& error) {
    part_done({failure.ok() ? error.status() : failure});
    return nullptr;
  }
  queue_->when(std::move(lane->lane), event,
               [self = shared_from_this(), failure](const GpuOutcome& outcome) {
                 self->part_done(failure.ok() || !outcome.ok() ? outcome : GpuOutcome{failure});
               });
  return event;
}

// Calls it in the driving thread, when what the transfer starts behind has passed.
void GpuCopy::behind(std::function<void()> then) {
  auto self = shared_from_this();
  if (how_.after) {
    queue_->when(how_.after, [self, then = std::move(then)](const GpuOutcome& outcome) {
      outcome.ok() ? then() : self->part_done(outcome);
    });
    return;
  }
  bool taken = progress_->post([then = std::move(then)] {
    then();
    return false;
  });
  if (!taken) part_done({{Code::kClosed, "the Node is closed"}});
}

void GpuCopy::part_done(const GpuOutcome& outcome) {
  {
    std::lock_guard lock(mutex_);
    if (outcome.left || outcome_.ok()) outcome_ = outcome;
  }
  if (parts_left_.fetch_sub(1) != 1) return;
  if (outcome_.left) {
    new std::shared_ptr<GpuCopy>(shared_from_this());  // its memory stays for ever
  } else {
    views_.clear();
  }
  finish_(outcome_);
}

}  // namespace tensorwire
