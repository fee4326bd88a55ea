#include "spin.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <thread>
#include <vector>

#include "clock.h"
#include "fork.h"

namespace tensorwire {
namespace {

int cores() {
  cpu_set_t set;
  return ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

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

// Half of the median round trip between two threads that sleep on eventfds.
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
  std::thread other([&] {
    for (int i = 0; i < kRounds; ++i) receive(there.get()), ::eventfd_write(back.get(), 1);
  });
  std::vector<int64_t> times;
  for (int i = 0; i < kRounds; ++i) {
    auto start = Clock::now();
    ::eventfd_write(there.get(), 1);
    receive(back.get());
    times.push_back(std::chrono::nanoseconds(Clock::now() - start).count());
  }
  other.join();
  std::nth_element(times.begin(), times.begin() + kRounds / 2, times.end());
  return std::clamp<int64_t>(times[kRounds / 2] / 2, 1'000, 100'000);
}

}  // namespace

int64_t spin_bound_ns(Polls polls) {
  static const int64_t cost = measure_wake_ns();
  // Looking at the load costs some microseconds, so it is done now and then.
  static std::atomic<int64_t> bound{cost}, calm{1}, looked_at{0};
  int64_t now = Clock::now().time_since_epoch().count();
  int64_t last = looked_at.load(std::memory_order_relaxed);
  if (now - last > 50'000'000 && looked_at.compare_exchange_strong(last, now)) {
    int here = cores();
    bool crowded = runnable() > here;
    bound = here < 2 || crowded ? 0 : cost;
    calm = crowded ? 0 : 1;
  }
  if (polls == Polls::kWords) return bound.load(std::memory_order_relaxed);
  return calm.load(std::memory_order_relaxed) * cost *
         (polls == Polls::kGpu ? kGpuSpins : kPolledSpins);
}

}  // namespace tensorwire
