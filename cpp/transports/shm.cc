#include "transports/shm.h"

#include <algorithm>
#include <cstring>

#include "base/copy.h"
#include "base/word.h"

namespace tensorwire {
namespace {

constexpr uint64_t kJobChunkBytes = 1 << 20;  // copied per round of the driver

Status stale() { return {Code::kStaleHandle, kStale}; }

inline void copy_piece(const Piece& piece, uint64_t from, uint64_t length, bool is_read) {
  std::byte* remote = piece.remote->mapping->data() + piece.offset + from;
  std::byte* local = piece.local + from;
  if (is_read) {
    std::memmove(local, remote, length);  // a Node may be its own peer: they may overlap
  } else {
    copy_out(remote, local, length);
  }
}

}  // namespace

void ShmChannel::attach(std::shared_ptr<Mapping> page, Descriptor doorbell, uint64_t incarnation) {
  page_mapping_ = std::move(page);
  page_ = reinterpret_cast<const NodePage*>(page_mapping_->data());
  if (page_->magic != kPageMagic || page_->incarnation != incarnation) {
    throw Error(Code::kInvalid, "a peer offered a page that is not its own");
  }
  doorbell_ = std::move(doorbell);
  raiser_ = EventRaiser::shared();
}

bool ShmChannel::live(const RemoteRegion& region) const {
  return region.mapping != nullptr && region.id < kMaxRegions &&
         page_->generations[region.id].load(std::memory_order_acquire) == region.generation;
}

Status ShmChannel::down() const {
  std::lock_guard lock(mutex_);
  return down_status_;
}

Status ShmChannel::check(std::span<const Piece> pieces, const SignalTo& signal) const {
  if (down_.load(std::memory_order_acquire)) return down();
  for (const Piece& piece : pieces) {
    if (!live(*piece.remote)) return down_ ? down() : stale();
  }
  if (signal.region != nullptr && !live(*signal.region)) return down_ ? down() : stale();
  return {};
}

// To be asked when the bytes are moved: if this Node was closed meanwhile, the peer's memory may
// have been given back before them. If the peer was lost they are there all the same: it may have
// left because it had all that it waited for.
Status ShmChannel::ended() const {
  if (!down_.load(std::memory_order_acquire)) return {};
  Status status = down();
  return status.code == Code::kClosed ? status : Status{};
}

void ShmChannel::ring() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (page_->armed.load(std::memory_order_relaxed) == 0) return;
  std::lock_guard lock(mutex_);
  if (doorbell_) raiser_->raise(doorbell_.get());
}

void ShmChannel::raise(const SignalTo& signal) {
  store_max(signal.region->mapping->data() + signal.offset, signal.value);
  ring();
}

// Copies by the driver, a chunk a round, for callers that must not be held up.
struct ShmChannel::CopyJob : KeptCall {
  bool is_read;
  std::function<void(Status)> then;
  size_t piece = 0;
  uint64_t from = 0;
};

bool ShmChannel::copy_later(std::shared_ptr<CopyJob> job) {
  // Jobs may outlive the peer but not the Node, which runs or fails them all before it stops.
  return progress_->post([this, self = shared_from_this(), job] {
    if (Status broken = check(job->pieces, job->signal); !broken.ok()) {
      job->then(std::move(broken));
      return false;
    }
    uint64_t budget = kJobChunkBytes;
    while (budget > 0 && job->piece < job->pieces.size()) {
      const Piece& piece = job->pieces[job->piece];
      uint64_t length = std::min(budget, piece.length - job->from);
      copy_piece(piece, job->from, length, job->is_read);
      budget -= length;
      job->from += length;
      if (job->from == piece.length) {
        ++job->piece;
        job->from = 0;
      }
    }
    if (job->piece < job->pieces.size()) return true;
    job->then({});
    return false;
  });
}

TransferPtr ShmChannel::copy(std::span<const Piece> pieces, const SignalTo& signal, const How& how,
                             bool is_read) {
  uint64_t total = total_bytes(pieces);
  auto transfer = std::make_shared<Transfer>(progress_, total);
  Status status = check(pieces, signal);
  if (!status.ok()) {
    transfer->complete(std::move(status));
    return transfer;
  }
  if (!pieces.empty()) {
    (is_read ? traffic_->reads : traffic_->writes).fetch_add(1, std::memory_order_relaxed);
    (is_read ? traffic_->bytes_read : traffic_->bytes_written)
        .fetch_add(total, std::memory_order_relaxed);
  }
  if (signal.region != nullptr) traffic_->signals.fetch_add(1, std::memory_order_relaxed);
  if (needs_gpu(pieces, how)) {
    copy_by_gpu(pieces, signal, how, is_read, transfer);
    return transfer;
  }
  if (how.inline_limit == 0 || total <= how.inline_limit) {
    for (const Piece& piece : pieces) copy_piece(piece, 0, piece.length, is_read);
    if (signal.region != nullptr) raise(signal);
    transfer->complete(ended());
    return transfer;
  }
  auto job = std::make_shared<CopyJob>(CopyJob{KeptCall(pieces, signal), is_read, {}});
  job->then = [this, kept = job.get(), transfer](Status failure) {
    if (failure.ok() && kept->signal.region != nullptr) raise(kept->signal);
    transfer->complete(failure.ok() ? ended() : std::move(failure));
  };
  if (!copy_later(job)) transfer->complete({Code::kClosed, "the Node is closed"});
  return transfer;
}

void ShmChannel::copy_by_gpu(std::span<const Piece> pieces, const SignalTo& signal, const How& how,
                             bool is_read, const TransferPtr& transfer) {
  auto self = shared_from_this();
  auto by_cpu = [self, is_read](std::vector<Piece> rest, const GpuThen& then) {
    auto job = std::make_shared<CopyJob>(CopyJob{KeptCall(rest, {}), is_read, {}});
    job->then = [then](const Status& status) { then({status}); };
    if (!self->copy_later(job)) then({{Code::kClosed, "the Node is closed"}});
  };
  SignalTo word = signal;
  RemoteRegionPtr of_word = signal.region ? signal.region->shared_from_this() : nullptr;
  auto finish = [self, word, of_word, transfer](const GpuOutcome& outcome) {
    if (outcome.left) return transfer->abandon(outcome.status);
    if (outcome.ok() && word.region != nullptr) self->raise(word);
    transfer->complete(outcome.ok() ? self->ended() : outcome.status);
  };
  auto copy = std::make_shared<GpuCopy>(pieces, signal, is_read, how, progress_, gpu_queue_,
                                        gpu_staging_, gpu_traffic_, by_cpu, finish);
  try {
    copy->start();
  } catch (const Error& error) {
    transfer->complete(error.status());
    return;
  }
  transfer->set_landing(copy->landing());
}

TransferPtr ShmChannel::write(std::span<const Piece> pieces, const SignalTo& signal,
                              const How& how) {
  return copy(pieces, signal, how, false);
}

TransferPtr ShmChannel::read(std::span<const Piece> pieces, const How& how) {
  return copy(pieces, {}, how, true);
}

TransferPtr ShmChannel::signal(const SignalTo& signal) { return copy({}, signal, 0, false); }

TransferPtr ShmChannel::fetch_add(const RemoteRegion& region, uint64_t offset, uint64_t value) {
  auto transfer = std::make_shared<Transfer>(progress_, 0);
  if (Status status = check({}, {&region, offset, value}); !status.ok()) {
    transfer->complete(std::move(status));
    return transfer;
  }
  uint64_t before = word_at(region.mapping->data() + offset).fetch_add(value);
  ring();
  transfer->complete(ended(), before);
  return transfer;
}

void ShmChannel::refuse(const Status& status) {
  std::lock_guard lock(mutex_);
  down_status_ = status;
  down_.store(true, std::memory_order_release);
}

void ShmChannel::shutdown(const Status&) {
  std::lock_guard lock(mutex_);
  doorbell_.reset();
  raiser_.reset();
  if (page_mapping_) page_mapping_->retire();
}

}  // namespace tensorwire
