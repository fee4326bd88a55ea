// How long it pays to poll for something before sleeping until it comes.
#pragma once

#include <atomic>
#include <cstdint>

namespace tensorwire {

// What a waiter polls for, by what being woken costs there.
enum class Polls { kWords, kDevice, kGpu };

// How long a waiter polls before it sleeps: the cost of being woken by another core, measured once
// per process; 0 on one core or when more threads want to run than there are cores. What devices do
// needs no core of ours, so there it is longer, also on one core: eight times with a patient
// Poller, fifty times while a GPU copies, since its driver's call comes later than most copies
// take. Any thread.
int64_t spin_bound_ns(Polls polls = Polls::kWords);

// Lately more threads wanted to run than there are cores, or there is one: who wakes another thread
// before its own work is done may lose its core to it. Looks now and then. Any thread.
bool crowded();

// How long waits for one thing have taken lately, such as for the next message of a peer. Who
// expects a short one polls longer than being woken costs: sleeping costs both ends that, and the
// time until caches and the core itself are awake again. Any thread.
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

// Lets whoever wants this core have it; perhaps that is the peer that is waited for. given: how
// often it went to another thread in this wait; 0 when that begins. False: stop polling. Either
// that was the second time, or the core was gone for so long that nobody here should poll for a
// while: first for 50 ms, and twice as long each time that it happens again soon.
bool leave_core(int& given);

}  // namespace tensorwire
