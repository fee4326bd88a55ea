#include "base/spin.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <system_error>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/control_groups.h"
#include "base/fork.h"

namespace tensorwire {
namespace {

// Threads that want to run now, on the whole host; 0 if unknown.
int runnable() {
  int fd = ::open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  char text[64] = {};
  ssize_t size = ::read(fd, text, sizeof text - 1);
  ::close(fd);
  if (size <= 0) return 0;
  const char* p = text;
  for (int spaces = 0; *p && spaces < 3; ++p) spaces += *p == ' ';
  return std::atoi(p);
}

// A NIC needs no core of ours to answer, and sleeping until it does costs several wake-ups: its
// event, the descriptor, the thread.
constexpr int kPolledSpins = 8;
constexpr int kGpuSpins = 50;

// A wait that usually takes so many wake-ups is polled for to its end, and somewhat longer. Where
// both ends sleep, a quick answer takes a wait of some ten wake-ups: each end's, whose caches and
// core are cold then. Who did not poll for as long would never find out how quick it can be.
constexpr int kSoonSpins = 16, kLongerSpins = 4;
constexpr int kPaceWeight = 4;  // of all waits before one, by it

// Keeps this thread on the n-th of the cores that it may use. One that is woken on the core of who
// wakes it costs much less.
void keep_to_core(int n) {
  cpu_set_t all, one;
  if (::sched_getaffinity(0, sizeof all, &all) != 0 || CPU_COUNT(&all) <= n) return;
  int core = 0;
  for (int seen = 0; !CPU_ISSET(core, &all) || seen++ < n;) ++core;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  ::sched_setaffinity(0, sizeof one, &one);
}

// Half of the median round trip between two threads, of two cores, that sleep on eventfds.
int64_t measure_wake_ns() {
  Descriptor there(::eventfd(0, EFD_CLOEXEC)), back(::eventfd(0, EFD_CLOEXEC));
  if (!there || !back) return 0;
  constexpr int kRounds = 31;
  auto receive = [](int fd) {
    pollfd p{fd, POLLIN, 0};
    ::poll(&p, 1, 100);
    eventfd_t count;
    while (::eventfd_read(fd, &count) < 0 && errno == EINTR) {
    }
  };
  std::vector<int64_t> times;
  auto ask = [&] {
    for (int i = 0; i < kRounds; ++i) {
      auto start = Clock::now();
      ::eventfd_write(there.get(), 1);
      receive(back.get());
      times.push_back(std::chrono::nanoseconds(Clock::now() - start).count());
    }
  };
  std::thread other([&] {
    keep_to_core(1);
    for (int i = 0; i < kRounds; ++i) receive(there.get()), ::eventfd_write(back.get(), 1);
  });
  try {
    std::thread([&] { keep_to_core(0), ask(); }).join();
  } catch (const std::system_error&) {
    ask();  // there are no more threads; the other one waits for as many questions
  }
  other.join();
  std::nth_element(times.begin(), times.begin() + kRounds / 2, times.end());
  return std::clamp<int64_t>(times[kRounds / 2] / 2, 1'000, 100'000);
}

// Two threads may measure at a time. Not a static of its own, which others wait for: a child that
// is forked meanwhile would wait for ever for a thread that it does not have.
int64_t wake_ns() {
  static std::atomic<int64_t> cost{-1};
  int64_t known = cost.load(std::memory_order_relaxed);
  if (known >= 0) return known;
  int64_t measured = measure_wake_ns();
  return cost.compare_exchange_strong(known, measured) ? measured : known;
}

int64_t now_ns() { return Clock::now().time_since_epoch().count(); }

constexpr int64_t kLookNs = 50'000'000;
constexpr int64_t kCrowdedNs = 3 * kLookNs;  // a look may miss it
std::atomic<int64_t> crowded_until{0};

// A core that comes back later than this has probably run another thread. Who gives it away so
// often in one wait had better sleep: to switch to and fro costs both more than to be woken once.
constexpr int64_t kGivenNs = 2'000;
constexpr int kMostGiven = 2;

// Others want the cores: until when nobody polls whose Pace would have him, and for how long that
// was said.
constexpr int64_t kGoneNs = 1'000'000, kLongestWantedNs = 32 * kLookNs;
std::atomic<int64_t> wanted_until{0}, wanted_for{kLookNs};
std::atomic<bool> several{false};  // cores; see spin_bound_ns, which every waiter asks first

}  // namespace

int64_t spin_bound_ns(Polls polls) {
  int64_t cost = wake_ns();
  // Looking at the load costs some microseconds, so it is done now and then.
  static std::atomic<int64_t> bound{0}, calm{1}, looked_at{0};
  int64_t now = now_ns();
  int64_t last = looked_at.load(std::memory_order_relaxed);
  if (now - last > kLookNs && looked_at.compare_exchange_strong(last, now)) {
    double here = cores();
    // With less than one core, who polls uses up what the group grants to all of it.
    bool too_many = here < 1 || runnable() > here;
    several = here >= 2;
    bound = here < 2 || too_many ? 0 : cost;
    calm = too_many ? 0 : 1;
    if (too_many) crowded_until.store(now + kCrowdedNs, std::memory_order_relaxed);
  }
  if (polls == Polls::kWords) return bound.load(std::memory_order_relaxed);
  return calm.load(std::memory_order_relaxed) * cost *
         (polls == Polls::kGpu ? kGpuSpins : kPolledSpins);
}

bool crowded() {
  spin_bound_ns();
  return !several.load(std::memory_order_relaxed) ||
         now_ns() < crowded_until.load(std::memory_order_relaxed);
}

int64_t Pace::bound_ns() const {
  int64_t cost = wake_ns(), usual = usual_ns_.load(std::memory_order_relaxed);
  // Half of the longest: where a wake-up is slow, a wait that is none of these must not count
  // either.
  if (usual > std::min(kSoonSpins * cost, kLongestNs / 2) ||
      now_ns() < wanted_until.load(std::memory_order_relaxed))
    return 0;
  if (!several.load(std::memory_order_relaxed)) return 0;
  return usual + std::min(usual, kLongerSpins * cost) + cost;
}

void Pace::took(int64_t ns) {
  int64_t usual = usual_ns_.load(std::memory_order_relaxed);
  usual += (std::min(ns, kLongestNs) - usual) / kPaceWeight;
  usual_ns_.store(usual, std::memory_order_relaxed);
}

bool leave_core(int& given) {
  int64_t began = now_ns();
  ::sched_yield();
  int64_t now = now_ns(), gone = now - began;
  if (gone < kGoneNs) return gone <= kGivenNs || ++given < kMostGiven;
  int64_t last = wanted_until.load(std::memory_order_relaxed);
  int64_t before = wanted_for.load(std::memory_order_relaxed);
  int64_t next = now - last < kLongestWantedNs ? std::min(2 * before, kLongestWantedNs) : kLookNs;
  wanted_for.store(next, std::memory_order_relaxed);
  wanted_until.store(now + next, std::memory_order_relaxed);
  return false;
}

}  // namespace tensorwire
