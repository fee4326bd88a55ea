// How long it pays to poll for something before sleeping until it comes.
#pragma once

#include <atomic>
#include <cstdint>

namespace tensorwire {

// The things that a waiter polls for, which differ in the cost of being woken.
enum class Polls { kWords, kDevice, kGpu };

// How long a waiter polls before it sleeps: the cost of being woken by another core, measured once
// per process; 0 on one core or when more threads want to run than there are cores. What devices do
// needs no core of ours, so there it is longer, also on one core: eight times with a patient
// Poller, fifty times while a GPU copies, since its driver's call comes later than most copies
// take. Any thread.
int64_t spin_bound_ns(Polls polls = Polls::kWords);

// Returns whether there is one core, or more threads than cores wanted to run lately: then a thread
// that wakes another before its own work is done may lose its core to it. Checks only sometimes.
// Any thread.
bool crowded();

// The recent times of waits for one thing, such as the next message of a peer. A waiter that
// expects a short wait polls longer than being woken takes: sleeping costs both ends that time, and
// the time until caches and the core are warm again. Any thread.
class Pace {
 public:
  // How long to poll: somewhat longer than is usual, where that is usually as long as a few
  // wake-ups at both ends; else, and where cores are wanted by others, 0. Call leave_core()
  // meanwhile, until it says false.
  int64_t bound_ns() const;
  // One wait is over.
  void took(int64_t ns);

 private:
  std::atomic<int64_t> usual_ns_{kLongestNs};
  static constexpr int64_t kLongestNs = 1'000'000;
};

// Yields this core to another thread; perhaps that is the awaited peer. given: how often that
// happened in this wait; 0 at its beginning. Returns false if the caller must stop polling: it was
// the second time, or the core was away for so long that no thread here should poll for a while:
// first for 50 ms, and twice as long each time that it happens again soon.
bool leave_core(int& given);

}  // namespace tensorwire
