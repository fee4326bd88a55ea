// Monotonic time and deadlines. A deadline that is absent means "for ever".
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>

namespace tensorwire {

using Clock = std::chrono::steady_clock;

// How long a wait that signals may end goes on before it looks for one that came just before it.
inline constexpr double kLookForSignalsS = 0.5;

class Deadline {
 public:
  Deadline() = default;  // never
  static Deadline after(double seconds) {
    Deadline deadline;
    // A hundred years stands for anything longer, so that no sum overflows.
    seconds = std::clamp(seconds, 0.0, 3.2e9);
    deadline.at_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                      std::chrono::duration<double>(seconds));
    return deadline;
  }
  static Deadline after(std::optional<double> seconds) {
    return seconds ? after(*seconds) : Deadline();
  }
  // This one, or that many seconds from now if that is earlier.
  Deadline at_most(double seconds) const {
    Deadline limit = after(seconds);
    return at_ && *at_ < *limit.at_ ? *this : limit;
  }
  bool never() const { return !at_; }
  bool passed() const { return at_ && Clock::now() >= *at_; }
  // Nanoseconds left, at least 0; meaningless when never().
  int64_t left_ns() const {
    auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(*at_ - Clock::now()).count();
    return left > 0 ? left : 0;
  }
  // For poll and epoll_wait: -1 for ever, else rounded up to a millisecond.
  int left_ms() const {
    if (never()) return -1;
    int64_t ms = (left_ns() + 999'999) / 1'000'000;
    return static_cast<int>(std::min<int64_t>(ms, 1'000'000'000));
  }

 private:
  std::optional<Clock::time_point> at_;
};

}  // namespace tensorwire
