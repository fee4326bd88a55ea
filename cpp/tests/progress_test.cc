// The progress loop: whoever waits is woken, by threads, doorbells, jobs, timers and descriptors,
// however the lead changes hands.
#include "loop/progress.h"

#include <doctest/doctest.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "base/event.h"
#include "base/word.h"
#include "threads.h"

namespace tensorwire {
namespace {

// Far longer than anything here takes: a wait that ends by it has lost its wake-up.
Deadline in_time() { return Deadline::after(30.0); }

struct Loop {
  ~Loop() { progress->stop(); }
  Progress* operator->() const { return progress.get(); }
  std::shared_ptr<Progress> progress = std::make_shared<Progress>();
  std::shared_ptr<Doorbell> bell = Doorbell::hang(*progress);
  std::shared_ptr<EventRaiser> raiser = EventRaiser::shared();
};

// What a peer on the same host does after it stored a word.
void ring_like_a_peer(Loop& loop) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (loop->page()->armed.load(std::memory_order_relaxed) == 0) return;
  loop.raiser->raise(loop.bell->descriptor());
}

// A thread that waits as long as this lives; none without a loop.
class Waiter {
 public:
  explicit Waiter(std::shared_ptr<Progress> progress) : progress_(std::move(progress)) {
    if (!progress_) return;
    thread_ = std::thread([this] { progress_->wait([&] { return end_.load(); }, Deadline()); });
  }
  ~Waiter() {
    if (!progress_) return;
    end_ = true;
    progress_->notify();
    thread_.join();
  }

 private:
  std::shared_ptr<Progress> progress_;
  std::atomic<bool> end_{false};
  std::thread thread_;
};

bool readable(int fd, int timeout_ms) {
  pollfd entry{fd, POLLIN, 0};
  return ::poll(&entry, 1, timeout_ms) == 1;
}

TEST_CASE("progress: notify wakes whoever waits, whoever leads") {
  Loop loop;
  constexpr uint64_t kRounds = 5000;
  std::array<std::atomic<uint64_t>, 4> turn{};
  std::atomic<int> lost{0};
  // A ring of threads, each of which waits for the one before it.
  run_threads(turn.size(), [&](size_t me) {
    size_t before = (me + turn.size() - 1) % turn.size();
    for (uint64_t round = 1; round <= kRounds && lost == 0; ++round) {
      uint64_t wanted = me == 0 ? round - 1 : round;
      if (!loop->wait([&] { return turn[before].load() >= wanted; }, in_time())) ++lost;
      turn[me] = round;
      loop->notify();
    }
  });
  CHECK(lost == 0);
}

TEST_CASE("progress: a word and a doorbell wake a waiter of another Node") {
  Loop here, there;
  constexpr uint64_t kRounds = 10000;
  alignas(64) uint64_t ping = 0, pong = 0;
  auto* ping_word = reinterpret_cast<std::byte*>(&ping);
  auto* pong_word = reinterpret_cast<std::byte*>(&pong);
  std::atomic<int> lost{0};
  std::thread other([&] {
    for (uint64_t round = 1; round <= kRounds; ++round) {
      auto reached = [&] { return word_at(ping_word).load(std::memory_order_acquire) >= round; };
      if (!there->wait(reached, in_time())) return void(++lost);
      store_max(pong_word, round);
      ring_like_a_peer(here);
    }
  });
  for (uint64_t round = 1; round <= kRounds && lost == 0; ++round) {
    store_max(ping_word, round);
    ring_like_a_peer(there);
    auto reached = [&] { return word_at(pong_word).load(std::memory_order_acquire) >= round; };
    if (!here->wait(reached, in_time())) ++lost;
  }
  other.join();
  CHECK(lost == 0);
}

TEST_CASE("pace: who usually waits for long does not poll longer; who does not polls for a while") {
  Pace pace;
  CHECK(pace.bound_ns() == 0);  // nothing is known yet
  for (int i = 0; i < 100; ++i) pace.took(2'000);
  int64_t longest = pace.bound_ns();
  if (longest != 0) {  // there are two cores, and nobody else wants them
    CHECK(longest >= 2 * 2'000);
    CHECK(longest < 1'000'000);
  }
  for (int i = 0; i < 100; ++i) pace.took(INT64_MAX);
  CHECK(pace.bound_ns() == 0);
}

TEST_CASE("progress: waits with a pace wake each other, however long they poll") {
  Loop here, there;
  constexpr uint64_t kRounds = 20'000;
  alignas(64) uint64_t ping = 0, pong = 0;
  auto* ping_word = reinterpret_cast<std::byte*>(&ping);
  auto* pong_word = reinterpret_cast<std::byte*>(&pong);
  Pace mine, other_pace;
  std::atomic<int> lost{0};
  std::thread other([&] {
    for (uint64_t round = 1; round <= kRounds; ++round) {
      auto reached = [&] { return word_at(ping_word).load(std::memory_order_acquire) >= round; };
      if (!there->wait(reached, in_time(), &other_pace)) return void(++lost);
      store_max(pong_word, round);
      ring_like_a_peer(here);
    }
  });
  for (uint64_t round = 1; round <= kRounds && lost == 0; ++round) {
    if (round % 2'000 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
    store_max(ping_word, round);
    ring_like_a_peer(there);
    auto reached = [&] { return word_at(pong_word).load(std::memory_order_acquire) >= round; };
    if (!here->wait(reached, in_time(), &mine)) ++lost;
  }
  other.join();
  CHECK(lost == 0);
}

TEST_CASE("progress: a deadline ends a wait that polls because of its pace") {
  Loop loop;
  Pace pace;
  for (int i = 0; i < 100; ++i) pace.took(2'000);
  auto began = Clock::now();
  CHECK_FALSE(loop->wait([] { return false; }, Deadline::after(1e-6), &pace));
  CHECK(Clock::now() - began < std::chrono::seconds(1));
}

TEST_CASE("progress: several waiters of one doorbell all wake") {
  Loop loop;
  constexpr uint64_t kRounds = 2000;
  alignas(64) uint64_t memory = 0;
  auto* word = reinterpret_cast<std::byte*>(&memory);
  std::atomic<uint64_t> arrived{0};
  std::atomic<int> lost{0};
  std::vector<std::thread> threads;
  constexpr uint64_t kWaiters = 3;
  for (uint64_t i = 0; i < kWaiters; ++i) {
    threads.emplace_back([&] {
      for (uint64_t round = 1; round <= kRounds; ++round) {
        auto reached = [&] { return word_at(word).load(std::memory_order_acquire) >= round; };
        if (!loop->wait(reached, in_time())) return void(++lost);
        arrived.fetch_add(1);
        arrived.notify_all();
      }
    });
  }
  for (uint64_t round = 1; round <= kRounds && lost == 0; ++round) {
    store_max(word, round);
    ring_like_a_peer(loop);
    for (uint64_t seen; (seen = arrived) < kWaiters * round && lost == 0;) arrived.wait(seen);
  }
  for (auto& thread : threads) thread.join();
  CHECK(lost == 0);
}

TEST_CASE("progress: jobs run once each, or again while they ask for it") {
  std::atomic<int> once{0}, thrice{0};
  Loop loop;
  loop->post([&] {
    ++once;
    return false;
  });
  loop->post([&] { return ++thrice < 3; });
  CHECK(loop->wait([&] { return once == 1 && thrice == 3; }, in_time()));
  loop->run([] {});
  CHECK(once == 1);
  CHECK(thrice == 3);
}

TEST_CASE("progress: run is done when it returns, and never runs beside another job") {
  Loop loop;
  int plain = 0;  // TSan would see two at a time
  run_threads(4, [&](int) {
    for (int i = 0; i < 500; ++i) {
      bool ran = false;
      loop->run([&] {
        ++plain;
        ran = true;
      });
      if (!ran) std::abort();
    }
  });
  loop->run([&] { CHECK(plain == 2000); });
}

TEST_CASE("progress: a job is done though nobody waits, and though somebody waits for ever") {
  std::atomic<int> done{0};
  Loop loop;
  for (bool waiter : {false, true}) {
    Waiter beside(waiter ? loop.progress : nullptr);
    for (int i = 0; i < 200; ++i) {
      int before = done;
      loop->post([&] {
        ++done;
        done.notify_all();
        return false;
      });
      done.wait(before);  // outside the loop: this thread never leads
    }
  }
  CHECK(done == 400);
}

TEST_CASE("progress: timers fire in time, also those that timers set") {
  std::atomic<int> fired{0}, early{0};
  Loop loop;
  auto start = Clock::now();
  for (int ms : {30, 10, 20}) {
    loop->after(ms / 1000.0, [&, ms] {
      if (Clock::now() - start < std::chrono::milliseconds(ms)) ++early;
      ++fired;
      loop->after(0.005, [&] { ++fired; });
    });
  }
  CHECK(loop->wait([&] { return fired == 6; }, in_time()));
  CHECK(early == 0);
}

TEST_CASE("progress: an earlier timer shortens a sleep that has begun") {
  std::atomic<bool> late{false};
  std::atomic<int> fired{0};
  Loop loop;
  loop->after(1000.0, [&] { late = true; });
  for (bool waiter : {false, true}) {
    Waiter beside(waiter ? loop.progress : nullptr);
    int before = fired;
    loop->after(0.01, [&] {
      ++fired;
      fired.notify_all();
    });
    fired.wait(before);
  }
  CHECK(fired == 2);
  CHECK_FALSE(late);
}

TEST_CASE("progress: stop runs what is queued, and a second stop is fine") {
  std::atomic<int> jobs{0}, timers{0};
  auto progress = std::make_shared<Progress>();
  for (int i = 0; i < 10; ++i) {
    progress->post([&jobs] { return ++jobs % 3 != 0; });
    progress->after(1000.0, [&] { ++timers; });
  }
  progress->stop();
  progress->stop();
  CHECK(jobs >= 10);
  CHECK(timers == 10);
}

TEST_CASE("progress: what is waited for while the loop stops is still seen") {
  for (int i = 0; i < 30; ++i) {
    auto progress = std::make_shared<Progress>();
    std::atomic<bool> over{false};
    std::atomic<int> lost{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&] {
        if (!progress->wait([&] { return over.load(); }, in_time())) ++lost;
      });
    }
    if (i % 2 == 1) progress->run([] {});
    over = true;
    progress->stop();
    for (auto& thread : threads) thread.join();
    CHECK(lost == 0);
  }
}

TEST_CASE("progress: stop and a waiter that leads do not run jobs beside each other") {
  for (int i = 0; i < 100; ++i) {
    auto progress = std::make_shared<Progress>();
    int plain = 0;  // TSan would see two at a time
    std::atomic<int> left{300};
    std::thread waiter([&] { progress->wait([&] { return left == 0; }, in_time()); });
    std::thread poster([&] {
      for (int job = 0; job < 100; ++job) {
        bool taken = progress->post([&, times = 3]() mutable {
          ++plain;
          --left;
          return --times > 0;
        });
        if (taken) continue;
        left -= 3;  // refused after the end: never run
        progress->notify();
      }
    });
    if (i % 2 == 0) poster.join();
    progress->stop();
    if (i % 2 == 1) poster.join();
    progress->stop();
    waiter.join();
    CHECK(left == 0);
  }
}

TEST_CASE("progress: a notifier is rung while it is armed, and only then") {
  Loop loop;
  auto notifier = std::make_shared<Notifier>();
  loop->add(notifier);
  loop->notify();
  CHECK_FALSE(readable(notifier->descriptor(), 0));
  CHECK(loop->page()->armed == 0);

  loop->arm(*notifier);
  loop->arm(*notifier);
  CHECK(loop->page()->armed == 1);
  loop->notify();
  CHECK(readable(notifier->descriptor(), 10'000));
  notifier->drain();
  CHECK_FALSE(readable(notifier->descriptor(), 0));
  // A doorbell reaches it through whoever drives.
  ring_like_a_peer(loop);
  CHECK(readable(notifier->descriptor(), 10'000));
  notifier->drain();

  loop->disarm(*notifier);
  loop->disarm(*notifier);
  CHECK(loop->page()->armed == 0);
  loop->notify();
  CHECK_FALSE(readable(notifier->descriptor(), 0));
  loop->arm(*notifier);
  loop->remove(notifier);
  CHECK(loop->page()->armed == 0);
}

// Reads one byte per call and leaves when told to.
class Pipe : public Handler {
 public:
  explicit Pipe(Progress& progress) : progress_(progress) {
    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    read_ = Descriptor(ends[0]);
    write_ = Descriptor(ends[1]);
  }
  void on_ready(uint32_t events) override {
    char byte;
    if ((events & EPOLLIN) == 0 || ::read(read_.get(), &byte, 1) != 1) return;
    if (byte == 'q') progress_.unwatch(read_.get());
    seen += 1;
    progress_.changed();
  }
  void send(char byte) { CHECK(::write(write_.get(), &byte, 1) == 1); }
  int descriptor() const { return read_.get(); }
  std::atomic<int> seen{0};

 private:
  Progress& progress_;
  Descriptor read_, write_;
};

TEST_CASE("progress: handlers are called until they leave") {
  Loop loop;
  auto pipe = std::make_shared<Pipe>(*loop.progress);
  loop->watch(pipe->descriptor(), EPOLLIN, pipe);
  for (int i = 1; i <= 200; ++i) {
    pipe->send('.');
    CHECK(loop->wait([&] { return pipe->seen == i; }, in_time()));
  }
  pipe->send('q');
  CHECK(loop->wait([&] { return pipe->seen == 201; }, in_time()));
  pipe->send('.');
  loop->run([] {});
  CHECK_FALSE(loop->wait([&] { return pipe->seen > 201; }, Deadline::after(0.01)));
}

// Counts how often it is called, and says when it was last.
struct Counter : Handler {
  explicit Counter(int fd) : fd(fd) {}
  void on_ready(uint32_t) override {
    eventfd_t count;
    ::eventfd_read(fd, &count);
    at = Clock::now();
    ++calls;
  }
  int fd;
  std::atomic<int> calls{0};
  std::atomic<Clock::time_point> at{};
};

TEST_CASE("progress: the thread parks for longer where only waiters need the loop") {
  using std::chrono::microseconds;
  using std::chrono::milliseconds;
  Loop loop;
  // A wait that is over in vain takes the lead from the thread, and leaves it.
  auto wait = [&] { loop->wait([] { return false; }, Deadline::after(0.0003)); };
  auto taken_back = [&] {
    uint64_t before = loop->counters().handovers;
    for (int i = 0; i < 40; ++i) {
      std::this_thread::sleep_for(microseconds(2500));
      wait();
    }
    return loop->counters().handovers - before;
  };
  uint64_t least = taken_back();
  for (int tries = 0; tries < 4 && least >= 20; ++tries) least = taken_back();  // a busy machine
  CHECK(least < 20);

  // With bytes from a peer it leaves them alone no longer than before, also while waiters go on to
  // come and go too often for it ever to drive.
  Descriptor event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  auto counter = std::make_shared<Counter>(event.get());
  loop->watch(event.get(), EPOLLIN, counter);
  auto soonest = milliseconds(1000);
  for (int i = 1; i <= 30; ++i) {
    wait();
    auto began = Clock::now();
    ::eventfd_write(event.get(), 1);
    std::this_thread::sleep_for(milliseconds(6));
    while (counter->calls < i) wait();
    soonest = std::min(soonest, std::chrono::ceil<milliseconds>(counter->at.load() - began));
  }
  CHECK(soonest < milliseconds(5));
}

TEST_CASE("progress: everything at once, and nothing is lost") {
  constexpr int kRounds = 1500;
  std::atomic<int> lost{0}, fired{0}, ran{0}, posted{0};
  Loop loop;
  auto pipe = std::make_shared<Pipe>(*loop.progress);
  loop->watch(pipe->descriptor(), EPOLLIN, pipe);
  alignas(64) uint64_t memory = 0;
  auto* word = reinterpret_cast<std::byte*>(&memory);
  std::vector<std::thread> threads;
  threads.emplace_back([&] {  // timers, waited for
    for (int i = 1; i <= kRounds; ++i) {
      loop->after(i % 3 * 1e-4, [&] { ++fired; });
      if (!loop->wait([&] { return fired == i; }, in_time())) return void(++lost);
    }
  });
  threads.emplace_back([&] {  // jobs, run to their end
    for (int i = 0; i < kRounds; ++i) loop->run([&] { ++ran; });
  });
  threads.emplace_back([&] {  // waits that time out and give the lead away
    for (int i = 0; i < kRounds; ++i) loop->wait([] { return false; }, Deadline::after(5e-5));
  });
  threads.emplace_back([&] {  // a descriptor
    for (int i = 1; i <= kRounds; ++i) {
      pipe->send('.');
      if (!loop->wait([&] { return pipe->seen == i; }, in_time())) return void(++lost);
    }
  });
  threads.emplace_back([&] {  // words
    for (uint64_t i = 1; i <= kRounds; ++i) {
      auto reached = [&] { return word_at(word).load(std::memory_order_acquire) >= i; };
      if (!loop->wait(reached, in_time())) return void(++lost);
    }
  });
  threads.emplace_back([&] {  // a peer, and jobs that nobody waits for
    for (uint64_t i = 1; i <= kRounds; ++i) {
      store_max(word, i);
      ring_like_a_peer(loop);
      loop->post([&] {
        ++posted;
        return false;
      });
    }
  });
  for (auto& thread : threads) thread.join();
  CHECK(loop->wait([&] { return posted == kRounds; }, in_time()));
  CHECK(lost == 0);
  CHECK(ran == kRounds);
  CHECK(loop->page()->armed == 0);
}

// Runs a function at each event.
struct Caller : Handler {
  Caller(int fd, std::function<void()> call) : fd(fd), call(std::move(call)) {}
  void on_ready(uint32_t) override {
    eventfd_t count;
    ::eventfd_read(fd, &count);
    call();
  }
  const int fd;
  const std::function<void()> call;
};

TEST_CASE("progress: a job posted as the thread gives the loop away does not wait for it to park") {
  using std::chrono::milliseconds;
  auto progress = std::make_shared<Progress>();
  Descriptor event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  std::atomic<bool> asks{false}, over{false}, done{false};
  std::atomic<Clock::time_point> posted{}, ran{};
  // In the thread's last round a waiter asks for the loop, and has what it wants before it gets it,
  // so that nobody takes it.
  auto caller = std::make_shared<Caller>(event.get(), [&] {
    asks = true;
    asks.notify_all();
    std::this_thread::sleep_for(milliseconds(3));
    over = true;
    posted = Clock::now();
    progress->post([&] {
      ran = Clock::now();
      done = true;
      done.notify_all();
      return false;
    });
  });
  progress->watch(event.get(), EPOLLIN, caller);
  std::array<Clock::duration, 15> took;
  for (auto& each : took) {
    asks = over = done = false;
    std::this_thread::sleep_for(milliseconds(5));  // the thread drives again
    std::thread waiter([&] {
      asks.wait(false);
      progress->wait([&] { return over.load(); }, in_time());
    });
    ::eventfd_write(event.get(), 1);
    done.wait(false);
    waiter.join();
    each = ran.load() - posted.load();
  }
  progress->stop();
  std::sort(took.begin(), took.end());
  // Parking took a millisecond. A loaded machine is late too, but seldom more often than not.
  CHECK(took[took.size() / 2] < std::chrono::microseconds(800));
}

}  // namespace
}  // namespace tensorwire
