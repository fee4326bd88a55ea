#include "wire/stream.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace tensorwire {
namespace {

constexpr size_t kMaxSegments = 32;           // in one system call
constexpr uint64_t kInlineBudget = 4u << 20;  // bytes that a caller pushes itself
constexpr uint64_t kRoundBudget = 8u << 20;   // bytes per direction and round of the driver
constexpr uint64_t kFillBytes = 4u << 20;     // generated ahead of the socket
constexpr uint64_t kTurnBytes = 2u << 20;  // sent of a large transfer before it is another's turn
constexpr uint64_t kReadCostBytes = 512 << 10;  // what a read counts at least: many small frames
// While so much payload is missing, the kernel wakes us for batches only: of kWakeBytes, or for
// half of a full chunk, so that it is copied while the other half arrives. More wake-ups than that
// cost a large transfer more than they save; one for all of it copies only when nothing arrives any
// more.
constexpr uint64_t kBatchAboveBytes = 16 << 10;
constexpr uint64_t kWakeBytes = 256 << 10;
constexpr uint64_t kHalfChunkBytes = kMaxChunkBytes / 2;
constexpr uint64_t kFullChunkBytes = 768 << 10;

}  // namespace

Stream::Stream(std::shared_ptr<Progress> progress, Link link, FrameSink& sink,
               std::function<void(Status)> on_lost, std::shared_ptr<void> owner)
    : progress_(std::move(progress)),
      link_(std::move(link)),
      on_lost_(std::move(on_lost)),
      owner_(std::move(owner)),
      parser_(sink) {}

void Stream::start() {
  progress_->watch(link_.get(), EPOLLIN, shared_from_this());
  silence_.emplace(link_.get());
  if (silence_->pause_s() > 0) look_for_silence();
  if (link_.more()) go_on_receiving();
}

void Stream::look_for_silence() {
  if (silence_->lost()) {
    // A reset, since what is left to send would keep the end of the stream from a peer that still
    // hears us.
    linger abort{1, 0};
    ::setsockopt(link_.get(), SOL_SOCKET, SO_LINGER, &abort, sizeof abort);
    auto keep = owner_;
    lose({Code::kPeerLost, "the link has been silent for too long (peer_timeout_s)"});
    return;
  }
  progress_->after(silence_->pause_s(), [weak = weak_from_this()] {
    auto self = weak.lock();
    if (self && !self->closed_) self->look_for_silence();
  });
}

// ---- sending

void Stream::send(const Header& header, std::string_view body, bool now) {
  std::lock_guard lock(mutex_);
  if (failed_ || closed_) return;
  queue(header, body);
  if (waiting_for_room_) return;
  if (now) {
    push(kInlineBudget);
  } else if (!flush_asked_) {
    flush_asked_ = true;
    progress_->flush_later(shared_from_this());
  }
}

void Stream::send(std::span<const Frame> frames) {
  std::lock_guard lock(mutex_);
  if (failed_ || closed_) return;
  for (const Frame& frame : frames) queue(frame.header, frame.body);
  if (!waiting_for_room_) push(kInlineBudget);
}

// Behind other small frames and before chunks of which nothing is on its way.
void Stream::queue(const Header& header, std::string_view body) {
  auto after = std::find_if(wire_.begin(), wire_.end(), [](const Segment& segment) {
    return segment.source != nullptr && segment.sent == 0;
  });
  Segment& segment = *wire_.emplace(after);
  segment.header = header;
  segment.body = body;
  queued_.fetch_add(1, std::memory_order_relaxed);
}

void Stream::send(std::shared_ptr<FrameSource> source) {
  std::lock_guard lock(mutex_);
  if (failed_ || closed_) return;
  sources_.push_back(std::move(source));
  if (!waiting_for_room_) push(kInlineBudget);
}

bool Stream::has_sent(const FrameSource& source) {
  if (source.sent_.load(std::memory_order_acquire)) return true;
  // The thread that sends the end of it may not have noted it yet; it holds the lock until then.
  std::lock_guard lock(mutex_);
  return source.sent_.load(std::memory_order_relaxed);
}

void Stream::on_flush() {
  std::lock_guard lock(mutex_);
  flush_asked_ = false;
  if (!failed_ && !closed_ && !waiting_for_room_) push(kInlineBudget);
}

void Stream::fill() {
  uint64_t bytes = 0;
  for (const auto& segment : wire_) {
    bytes += segment.size();
    if (bytes >= kFillBytes) return;
  }
  while (!sources_.empty() && wire_.size() < kMaxSegments && bytes < kFillBytes) {
    auto source = std::move(sources_.front());
    sources_.pop_front();
    Segment& segment = wire_.emplace_back();
    segment.source = source;
    bool more = source->next(segment.header, segment.payload);
    segment.last = !more;
    bytes += segment.size();
    turn_bytes_ += segment.size();
    bool goes_on = more && turn_bytes_ < kTurnBytes;
    if (goes_on) {
      sources_.push_front(std::move(source));
      continue;
    }
    turn_bytes_ = 0;
    if (more) sources_.push_back(std::move(source));
  }
}

ssize_t Stream::send_some() {
  std::array<iovec, 3 * kMaxSegments> parts;
  size_t count = 0;
  size_t segments = 0;
  for (auto& segment : wire_) {
    if (segments == kMaxSegments) break;
    uint64_t skip = segment.sent;
    auto add = [&](const void* data, uint64_t size) {
      if (skip >= size) {
        skip -= size;
        return;
      }
      parts[count++] = {const_cast<char*>(static_cast<const char*>(data)) + skip,
                        static_cast<size_t>(size - skip)};
      skip = 0;
    };
    add(&segment.header, sizeof(Header));
    add(segment.body.data(), segment.body.size());
    add(segment.payload.data(), segment.payload.size());
    ++segments;
  }
  return link_.send({parts.data(), count});
}

bool Stream::push(uint64_t budget) {
  for (;;) {
    fill();
    if (wire_.empty() && !link_.unsent()) {
      want_output(false);
      return true;
    }
    if (budget == 0) {
      want_output(true);
      return true;
    }
    ssize_t sent = send_some();
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        want_output(true);
        return true;
      }
      // The driver finds out too, from the socket itself, and reports it.
      failed_ = true;
      failure_ = link_.failure("send", errno);
      want_output(true);
      return false;
    }
    uint64_t left = static_cast<uint64_t>(sent);
    budget -= std::min(budget, left);
    while (left > 0) {
      Segment& segment = wire_.front();
      uint64_t step = std::min(left, segment.size() - segment.sent);
      segment.sent += step;
      left -= step;
      if (segment.sent < segment.size()) break;
      if (!segment.source) queued_.fetch_sub(1, std::memory_order_relaxed);
      if (segment.last) segment.source->sent_.store(true, std::memory_order_release);
      wire_.pop_front();
    }
  }
}

void Stream::want_output(bool want) {
  if (want == waiting_for_room_) return;
  waiting_for_room_ = want;
  progress_->change(link_.get(), want ? EPOLLIN | EPOLLOUT : EPOLLIN);
  progress_->backlog(want ? 1 : -1);
}

// ---- receiving

void Stream::on_ready(uint32_t events) {
  auto keep = owner_;  // it may drop its last reference below
  if (events & EPOLLOUT) {
    std::unique_lock lock(mutex_);
    if (closed_) return;
    if (failed_ || !push(kRoundBudget)) {
      std::string failure = failure_;
      lock.unlock();
      receive();  // what came before tells more than that nothing can be sent: a goodbye, say
      lose({Code::kPeerLost, failure});
      return;
    }
  }
  if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
    if (receive()) batch_wakeups();
  }
}

void Stream::batch_wakeups() {
  if (closed_) return;
  uint64_t left = parser_.payload_left();
  left -= std::min<uint64_t>(left, link_.held_bytes());
  uint64_t batch = parser_.payload_bytes() >= kFullChunkBytes ? kHalfChunkBytes : kWakeBytes;
  int want = left >= kBatchAboveBytes ? static_cast<int>(std::min(left, batch)) : 1;
  if (want == wake_bytes_) return;
  wake_bytes_ = want;
  ::setsockopt(link_.get(), SOL_SOCKET, SO_RCVLOWAT, &want, sizeof want);
}

ssize_t Stream::receive_some(std::span<std::span<std::byte>> spans) {
  std::array<iovec, 2> parts;
  for (size_t i = 0; i < spans.size(); ++i) parts[i] = {spans[i].data(), spans[i].size()};
  return link_.receive({parts.data(), spans.size()});
}

bool Stream::receive() {
  uint64_t budget = kRoundBudget;
  while (!closed_ && budget > 0) {
    std::array<std::span<std::byte>, 2> spans;
    size_t count = parser_.spans(spans);
    ssize_t size = receive_some({spans.data(), count});
    if (size < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return true;
      lose({Code::kPeerLost, link_.failure("receive", errno)});
      return false;
    }
    if (size == 0) {
      lose({Code::kPeerLost, "the connection was closed by the other side"});
      return false;
    }
    if (!parser_.commit(static_cast<size_t>(size))) {
      if (!closed_) {
        lose({Code::kPeerLost, std::string("the peer broke the protocol: ") + parser_.breach()});
      }
      return false;
    }
    budget -= std::min(budget, std::max(static_cast<uint64_t>(size), kReadCostBytes));
    // A short read emptied the socket: the next one would only say so.
    size_t room = 0;
    for (size_t i = 0; i < count; ++i) room += spans[i].size();
    if (static_cast<size_t>(size) < room && !link_.more()) return true;
  }
  if (!closed_ && link_.more()) go_on_receiving();
  return true;
}

// The socket does not become readable for what the link has taken from it.
void Stream::go_on_receiving() {
  progress_->post([weak = weak_from_this()] {
    if (auto self = weak.lock()) self->on_ready(EPOLLIN);
    return false;
  });
}

bool Stream::discard_payload_in(const std::byte* begin, const std::byte* end) {
  const std::byte* target = parser_.target();
  if (target == nullptr || target < begin || target >= end) return false;
  if (parser_.type() != FrameType::kWrite) return false;
  parser_.discard_target();
  return true;
}

void Stream::lose(Status status) {
  if (closed_) return;
  on_lost_(std::move(status));
}

void Stream::close() {
  auto self = shared_from_this();
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    if (!failed_ && !waiting_for_room_) push(kInlineBudget);
    want_output(false);
    closed_ = true;
  }
  progress_->unwatch(link_.get());
  link_.shut_down();
  std::lock_guard lock(mutex_);
  wire_.clear();
  sources_.clear();
  queued_ = 0;
  link_.reset();
  owner_.reset();
}

}  // namespace tensorwire
