#include "transports/tcp.h"

#include <algorithm>
#include <array>

#include "base/text.h"

namespace tensorwire {
namespace {

// Frames that wait for an answer; more are held back here, so that the peer's queue of answers is
// bounded by a constant that it can enforce.
constexpr size_t kWindow = 512;
constexpr size_t kSmallWindow = 64;  // of the window, left to small transfers by large ones
// Writes up to this size are copied into their frames, which overtake larger transfers.
constexpr uint64_t kSmallBytes = 16 << 10;
constexpr size_t kSmallParts = 4;

// What an answer says, for people; an answer to a read whose region is freed meanwhile has no text.
std::string reason_of(Code code, std::string_view message) {
  if (code == Code::kOk || !message.empty()) return presented(message);
  return code == Code::kStaleHandle ? "the region was freed" : "its owner gave no reason";
}

}  // namespace

// A transfer on its way. As a FrameSource it yields the chunks of a write.
struct TcpChannel::Request : FrameSource {
  struct Part {
    std::byte* local;
    uint32_t region;
    uint64_t generation;
    uint64_t offset;  // in the region
    uint64_t length;
    uint64_t start;         // in the byte stream of the transfer
    uint64_t received = 0;  // bytes of a read, which come in order and once
    bool answered = false;
  };

  TransferPtr transfer;
  uint64_t id = 0;
  bool is_read = false;
  bool is_small = false;  // its frames overtake others; a write is copied
  std::vector<Part> parts;
  bool has_signal = false;
  Header signal;    // kSignal or kFetchAdd
  size_t part = 0;  // cursor: next part to send or ask for
  uint64_t part_sent = 0;
  size_t asked = 0;  // frames that left and will be answered
  size_t answers = 0;
  // Reads; the channel's lock, then the driving thread.
  size_t answers_left = 0;
  Status status;

  // The part of a read that was asked for and has room for these bytes at this position of the
  // byte stream, where its last bytes ended; null if there is none.
  Part* receiving(uint64_t position, uint64_t length) {
    auto asked_end = parts.begin() + static_cast<ptrdiff_t>(asked);
    auto after = std::upper_bound(parts.begin(), asked_end, position,
                                  [](uint64_t at, const Part& p) { return at < p.start; });
    if (after == parts.begin()) return nullptr;
    Part& found = *(after - 1);
    bool fits = position - found.start == found.received && length <= found.length - found.received;
    return fits && !found.answered ? &found : nullptr;
  }

  bool next(Header& header, std::span<const std::byte>& payload) override {
    if (part == parts.size()) {
      header = signal;
      return false;
    }
    const Part& p = parts[part];
    uint64_t length = std::min(p.length - part_sent, kMaxChunkBytes);
    header = {.type = FrameType::kWrite,
              .region = p.region,
              .generation = p.generation,
              .offset = p.offset + part_sent,
              .length = length,
              .transfer = id,
              .total = transfer->bytes};
    payload = {p.local + part_sent, static_cast<size_t>(length)};
    part_sent += length;
    if (part_sent == p.length) {
      ++part;
      part_sent = 0;
    }
    bool more = part < parts.size() || has_signal;
    header.flags = more ? 0 : kLast;
    return more;
  }
};

TcpChannel::TcpChannel(std::shared_ptr<Progress> progress, std::shared_ptr<Traffic> traffic,
                       std::shared_ptr<Stream> stream, std::atomic<uint64_t>& next_id)
    : progress_(std::move(progress)),
      traffic_(std::move(traffic)),
      stream_(std::move(stream)),
      next_id_(next_id) {}

TcpChannel::RequestPtr TcpChannel::make(std::span<const Piece> pieces, const SignalTo& signal,
                                        bool is_read) {
  auto request = std::make_shared<Request>();
  request->id = next_id_.fetch_add(1, std::memory_order_relaxed);
  request->is_read = is_read;
  uint64_t total = 0;
  request->parts.reserve(pieces.size());
  for (const Piece& piece : pieces) {
    if (piece.length == 0) continue;
    request->parts.push_back({piece.local, piece.remote->id, piece.remote->generation, piece.offset,
                              piece.length, total});
    total += piece.length;
  }
  request->is_small = !is_read && total <= kSmallBytes && request->parts.size() <= kSmallParts;
  request->answers_left = request->parts.size();
  request->transfer = std::make_shared<Transfer>(progress_, total);
  if (signal.region != nullptr) {
    request->signal = {.type = FrameType::kSignal,
                       .flags = kLast,
                       .region = signal.region->id,
                       .generation = signal.region->generation,
                       .offset = signal.offset,
                       .transfer = request->id,
                       .total = total,
                       .value = signal.value};
    request->has_signal = true;
  }
  return request;
}

TransferPtr TcpChannel::start(RequestPtr request) {
  TransferPtr transfer = request->transfer;
  if (request->parts.empty() && !request->has_signal) {
    transfer->complete();
    return transfer;
  }
  std::unique_lock lock(mutex_);
  if (down_) {
    Status status = down_status_;
    lock.unlock();
    transfer->complete(status);
    return transfer;
  }
  pending_.emplace(request->id, request);
  auto& queue = request->is_small ? small_ : waiting_;
  queue.push_back(std::move(request));
  issue(lock);
  return transfer;
}

std::deque<TcpChannel::RequestPtr>* TcpChannel::next() {
  if (down_ || open_ >= kWindow) return nullptr;
  if (!small_.empty()) return &small_;
  return waiting_.empty() || open_ >= kWindow - kSmallWindow ? nullptr : &waiting_;
}

// Only one thread issues at a time, outside the lock, so that requests leave in order.
void TcpChannel::issue(std::unique_lock<std::mutex>& lock) {
  if (issuing_) return;
  issuing_ = true;
  while (auto* queue = next()) {
    RequestPtr request = queue->front();
    ++open_;
    ++request->asked;
    Header header;
    bool last = true;
    if (request->is_read) {
      const auto& part = request->parts[request->part++];
      header = {.type = FrameType::kRead,
                .region = part.region,
                .generation = part.generation,
                .offset = part.offset,
                .length = part.length,
                .transfer = request->id,
                .total = part.start};
      last = request->part == request->parts.size();
    }
    if (last) queue->pop_front();
    lock.unlock();
    if (request->is_read) {
      stream_->send(header);
    } else if (request->parts.empty()) {
      stream_->send(request->signal);
    } else if (request->is_small) {
      std::array<Stream::Frame, kSmallParts + 1> frames;
      size_t count = 0;
      for (bool more = true; more && count < frames.size(); ++count) {
        std::span<const std::byte> payload;
        more = request->next(frames[count].header, payload);
        frames[count].body = {reinterpret_cast<const char*>(payload.data()), payload.size()};
      }
      stream_->send({frames.data(), count});
    } else {
      stream_->send(std::move(request));
    }
    lock.lock();
  }
  issuing_ = false;
}

void TcpChannel::answered(std::unique_lock<std::mutex>& lock) {
  --open_;
  if (next() != nullptr) issue(lock);
}

TransferPtr TcpChannel::write(std::span<const Piece> pieces, const SignalTo& signal, const How&) {
  auto request = make(pieces, signal, false);
  traffic_->writes.fetch_add(1, std::memory_order_relaxed);
  traffic_->bytes_written.fetch_add(request->transfer->bytes, std::memory_order_relaxed);
  if (request->has_signal) traffic_->signals.fetch_add(1, std::memory_order_relaxed);
  return start(std::move(request));
}

TransferPtr TcpChannel::read(std::span<const Piece> pieces, const How&) {
  auto request = make(pieces, {}, true);
  traffic_->reads.fetch_add(1, std::memory_order_relaxed);
  traffic_->bytes_read.fetch_add(request->transfer->bytes, std::memory_order_relaxed);
  return start(std::move(request));
}

TransferPtr TcpChannel::signal(const SignalTo& signal) {
  traffic_->signals.fetch_add(1, std::memory_order_relaxed);
  return start(make({}, signal, false));
}

TransferPtr TcpChannel::fetch_add(const RemoteRegion& region, uint64_t offset, uint64_t value) {
  auto request = make({}, {&region, offset, value}, false);
  request->signal.type = FrameType::kFetchAdd;
  request->signal.flags = 0;
  return start(std::move(request));
}

void TcpChannel::shutdown(const Status& status) {
  std::unordered_map<uint64_t, RequestPtr> pending;
  {
    std::lock_guard lock(mutex_);
    down_ = true;
    down_status_ = status;
    pending.swap(pending_);
    waiting_.clear();
    small_.clear();
  }
  for (auto& [id, request] : pending) request->transfer->complete(status);
}

TcpChannel::RequestPtr TcpChannel::find(uint64_t id) {
  std::lock_guard lock(mutex_);
  auto found = pending_.find(id);
  return found == pending_.end() ? nullptr : found->second;
}

bool TcpChannel::begin_data(const Header& header, std::byte** target) {
  RequestPtr request = find(header.transfer);
  if (!request || !request->is_read || header.length == 0) return false;
  std::lock_guard lock(mutex_);
  const auto* part = request->receiving(header.offset, header.length);
  if (part == nullptr) return false;
  *target = part->local + part->received;
  return true;
}

bool TcpChannel::end_data(const Header& header) {
  RequestPtr request = find(header.transfer);
  if (!request) return false;
  std::unique_lock lock(mutex_);
  auto* part = request->receiving(header.offset, header.length);
  if (part == nullptr) return false;
  part->received += header.length;
  if (!(header.flags & kLast)) return true;
  // All of what was asked for, each byte once: a count of bytes would take the same ones twice.
  if (part->received != part->length) return false;
  part->answered = true;
  if (++request->answers > request->asked) return false;
  if (request->answers_left-- > 1) {
    answered(lock);
    return true;
  }
  pending_.erase(header.transfer);
  answered(lock);
  lock.unlock();
  request->transfer->complete(request->status);
  progress_->changed();
  return true;
}

bool TcpChannel::done(const Header& header, std::string_view message) {
  RequestPtr request = find(header.transfer);
  if (!request) return false;
  // Nobody can have placed what is not sent yet; the caller would take its memory back too soon.
  bool sends = !request->is_read && !request->is_small && !request->parts.empty();
  if (sends && !stream_->has_sent(*request)) return false;
  std::unique_lock lock(mutex_);
  if (++request->answers > request->asked) return false;
  auto code = static_cast<Code>(header.status);
  if (request->is_read) {
    if (code == Code::kOk) return false;  // a read is answered by data
    if (request->status.ok()) request->status = {code, reason_of(code, message)};
    if (request->answers_left-- > 1) {
      answered(lock);
      return true;
    }
    code = request->status.code;
  } else {
    request->status.message = reason_of(code, message);
  }
  pending_.erase(header.transfer);
  answered(lock);
  lock.unlock();
  request->transfer->complete({code, request->status.message}, header.value);
  progress_->changed();
  return true;
}

}  // namespace tensorwire
