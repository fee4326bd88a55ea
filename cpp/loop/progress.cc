#include "loop/progress.h"

#include <linux/futex.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include "base/blocking.h"
#include "base/error.h"

namespace tensorwire {
namespace {

constexpr int kMaxEvents = 64;
constexpr int kQuickLooks = 3;

enum ParkState : int { kAwake, kParked, kParkedForEver };

enum class Woken { kYes, kTimeout, kSignal };

Woken futex_wait(std::atomic<uint32_t>& word, uint32_t seen, const int64_t* timeout_ns) {
  timespec limit{};
  if (timeout_ns != nullptr) {
    limit.tv_sec = *timeout_ns / 1'000'000'000;
    limit.tv_nsec = *timeout_ns % 1'000'000'000;
  }
  long result = ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen,
                          timeout_ns ? &limit : nullptr, nullptr, 0);
  if (result == 0 || errno == EAGAIN) return Woken::kYes;
  return errno == EINTR ? Woken::kSignal : Woken::kTimeout;
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr,
            nullptr, 0);
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Doorbell::Doorbell(Progress& progress)
    : progress_(progress), event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!event_) throw Error(Code::kBusy, system_message("eventfd", errno));
}

std::shared_ptr<Doorbell> Doorbell::hang(Progress& progress) {
  std::shared_ptr<Doorbell> made(new Doorbell(progress));
  progress.watch(made->descriptor(), EPOLLIN | EPOLLET, made);
  return made;
}

void Doorbell::take_down() { progress_.unwatch(event_.get()); }

void Doorbell::on_ready(uint32_t) { progress_.rang(); }

thread_local bool Progress::interruptible_ = false;
thread_local bool Progress::interrupted_ = false;

Notifier::Notifier() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!event_) throw Error(Code::kBusy, system_message("eventfd", errno));
}

void Notifier::drain() {
  eventfd_t count;
  ::eventfd_read(event_.get(), &count);
}

Progress::Progress(bool shareable)
    : page_mapping_(Mapping::create(sizeof(NodePage), shareable, false)),
      page_(new (page_mapping_->data()) NodePage),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      kick_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      epoch_(fork::epoch()) {
  if (!epoll_ || !kick_)
    throw Error(Code::kBusy, system_message("cannot create a Node's descriptors", errno));
  epoll_event event{.events = EPOLLIN, .data = {.fd = kick_.get()}};
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, kick_.get(), &event);
  try {
    spin_bound_ns();
    thread_ = start_thread([this] { thread_main(); });
  } catch (const std::system_error& error) {
    throw Error(Code::kBusy, std::string("cannot start a Node's thread: ") + error.what());
  }
}

Progress::~Progress() {
  if (epoch_ != fork::epoch()) {
    // The thread lives in the parent only; forget it without joining.
    new (&thread_) std::thread;
    return;
  }
  stop();
}

void Progress::stop() {
  if (stopping_.exchange(true)) return;
  urgent_ = true;
  unpark();
  kick();
  notify();
  if (thread_.joinable()) thread_.join();
  // What is still queued must end too; its owners were told that all is over. A waiter that leads
  // leaves, because what it waits for was ended before.
  while (!try_drive(kWaiter)) {
    kick();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  for (bool left = true; left;) {
    run_timers();
    run_jobs();
    std::lock_guard lock(jobs_mutex_);
    left = !jobs_.empty() || !timers_.empty();
    drained_ = !left;
  }
  // The lead stays taken: whoever waits now waits for a time limit, without descriptors.
  {
    std::lock_guard lock(handlers_mutex_);
    epoll_.reset();
  }
  {
    std::lock_guard lock(kick_mutex_);
    kick_.reset();
  }
  page_mapping_->retire();
  notify();
}

// ---- handlers

void Progress::watch(int fd, uint32_t events, std::shared_ptr<Handler> handler) {
  std::shared_ptr<Handler> refused;  // destroyed without the lock
  std::lock_guard lock(handlers_mutex_);
  if (!epoll_) throw Error(Code::kClosed, "the Node is closed");
  handlers_[fd] = std::move(handler);
  epoll_event event{.events = events, .data = {.fd = fd}};
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    int error_number = errno;
    refused = std::move(handlers_[fd]);
    handlers_.erase(fd);
    throw Error(Code::kBusy, system_message("epoll_ctl", error_number));
  }
}

void Progress::change(int fd, uint32_t events) {
  epoll_event event{.events = events, .data = {.fd = fd}};
  std::lock_guard lock(handlers_mutex_);
  if (epoll_) ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void Progress::unwatch(int fd) {
  std::shared_ptr<Handler> gone;  // destroyed without the lock
  std::lock_guard lock(handlers_mutex_);
  if (epoll_) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  auto found = handlers_.find(fd);
  if (found != handlers_.end()) {
    gone = std::move(found->second);
    handlers_.erase(found);
  }
}

void Progress::flush_later(std::shared_ptr<Handler> handler) {
  to_flush_.push_back(std::move(handler));
}

void Progress::drive(std::shared_ptr<Poller> poller, bool patient) {
  class Nothing : public Handler {  // a ready descriptor ends the sleep; polling does the work
    void on_ready(uint32_t) override {}
  };
  watch(poller->descriptor(), EPOLLIN, std::make_shared<Nothing>());
  pollers_.push_back(std::move(poller));
  if (patient) polled_ = true;
  park_ns_ = kParkNs;
}

void Progress::undrive(const Poller& poller) {
  auto found = std::find_if(pollers_.begin(), pollers_.end(),
                            [&](const auto& each) { return each.get() == &poller; });
  if (found == pollers_.end()) return;
  unwatch(poller.descriptor());
  pollers_.erase(found);
  if (pollers_.empty()) polled_ = false;
}

// What one of them does may take one away, or add one.
bool Progress::poll() {
  bool any = false;
  for (size_t i = 0; i < pollers_.size(); ++i) {
    auto poller = pollers_[i];
    any = poller->poll() || any;
  }
  return any;
}

bool Progress::arm() {
  for (size_t i = 0; i < pollers_.size(); ++i) {
    auto poller = pollers_[i];
    if (!poller->arm()) return false;
  }
  return true;
}

void Progress::flush() {
  while (!to_flush_.empty()) {
    auto handlers = std::move(to_flush_);
    to_flush_.clear();
    for (auto& handler : handlers) handler->on_flush();
  }
}

// ---- jobs and timers

bool Progress::post(std::function<bool()> job) {
  {
    std::lock_guard lock(jobs_mutex_);
    if (drained_) return false;
    jobs_.push_back(std::move(job));
    have_jobs_ = true;
  }
  attention();
  return true;
}

bool Progress::after(double seconds, std::function<void()> job) {
  seconds = std::clamp(seconds, 0.0, 3.2e9);
  {
    std::lock_guard lock(jobs_mutex_);
    if (drained_) return false;
    timers_.emplace(Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                       std::chrono::duration<double>(seconds)),
                    std::move(job));
    have_timers_ = true;
  }
  attention();
  return true;
}

void Progress::run(const std::function<void()>& job) {
  auto done = std::make_shared<std::atomic<bool>>(false);
  // The caller waits without limit, so the job may refer to its frame.
  bool taken = post([&job, done] {
    job();
    done->store(true, std::memory_order_release);
    return false;
  });
  if (taken) wait([&] { return done->load(std::memory_order_acquire); }, Deadline());
}

bool Progress::run_jobs() {
  if (!have_jobs_) return false;
  std::deque<std::function<bool()>> jobs;
  {
    std::lock_guard lock(jobs_mutex_);
    jobs.swap(jobs_);
    have_jobs_ = false;
  }
  std::deque<std::function<bool()>> again;
  for (auto& job : jobs) {
    if (job()) again.push_back(std::move(job));
  }
  changed_ = true;
  std::lock_guard lock(jobs_mutex_);
  for (auto& job : jobs_) again.push_back(std::move(job));
  jobs_ = std::move(again);
  have_jobs_ = !jobs_.empty();
  return have_jobs_;
}

void Progress::run_timers() {
  if (!have_timers_) return;
  std::vector<std::function<void()>> due;
  {
    std::lock_guard lock(jobs_mutex_);
    // At the end nothing is worth waiting for.
    auto end = stopping_ ? timers_.end() : timers_.upper_bound(Clock::now());
    for (auto timer = timers_.begin(); timer != end; ++timer) {
      due.push_back(std::move(timer->second));
    }
    timers_.erase(timers_.begin(), end);
    have_timers_ = !timers_.empty();
  }
  for (auto& job : due) job();
  changed_ = changed_ || !due.empty();
}

int Progress::bounded(int timeout_ms) {
  if (have_jobs_) return 0;
  if (!have_timers_) return timeout_ms;
  std::lock_guard lock(jobs_mutex_);
  if (timers_.empty()) return timeout_ms;
  auto left =
      std::chrono::ceil<std::chrono::milliseconds>(timers_.begin()->first - Clock::now()).count();
  int limit = static_cast<int>(std::clamp<int64_t>(left, 0, 1'000'000));
  return timeout_ms < 0 ? limit : std::min(timeout_ms, limit);
}

// ---- waking

void Progress::kick() {
  std::lock_guard lock(kick_mutex_);
  if (kick_) ::eventfd_write(kick_.get(), 1);
}

void Progress::notify() {
  wake();
  // A waiter that leads sleeps on its descriptors, not on event_seq_. (The thread has no
  // condition.)
  if (driver_.load() == kWaiter) kick();
}

void Progress::wake() {
  event_seq_.fetch_add(1);
  if (sleepers_.load() > 0) futex_wake_all(event_seq_);
  if (armed_notifiers_.load() > 0) {
    std::lock_guard lock(notifiers_mutex_);
    for (auto& notifier : notifiers_) {
      if (notifier->armed_) ::eventfd_write(notifier->event_.get(), 1);
    }
  }
}

void Progress::rang() {
  counters_.rings.fetch_add(1, std::memory_order_relaxed);
  changed_ = true;
}

void Progress::attention() {
  urgent_ = true;
  if (driver_.load() == kNobody) {
    unpark();
  } else {
    kick();
  }
}

void Progress::expect_gpu(int change) {
  expected_.fetch_add(change);
  if (change > 0 && driver_.load() != kNobody) kick();
}

void Progress::backlog(int change) {
  if (backlog_.fetch_add(change) == 0 && driver_.load() == kNobody) {
    urgent_ = true;
    unpark();
  }
}

void Progress::add(std::shared_ptr<Notifier> notifier) {
  if (epoch_ != fork::epoch()) return;
  std::lock_guard lock(notifiers_mutex_);
  notifiers_.push_back(std::move(notifier));
}

void Progress::remove(const std::shared_ptr<Notifier>& notifier) {
  if (epoch_ != fork::epoch()) return;  // the page is out of reach, and the lock may be held
  disarm(*notifier);
  std::lock_guard lock(notifiers_mutex_);
  std::erase(notifiers_, notifier);
}

void Progress::arm(Notifier& notifier) {
  if (epoch_ != fork::epoch()) return;
  if (notifier.armed_.exchange(true)) return;
  armed_notifiers_.fetch_add(1);
  page_->armed.fetch_add(1);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  // Who waits so does not drive, and the thread may have parked for longer.
  if (park_ns_.load() > kParkNs) driver_.load() == kNobody ? attention() : unpark();
}

void Progress::disarm(Notifier& notifier) {
  if (epoch_ != fork::epoch()) return;
  if (!notifier.armed_.exchange(false)) return;
  page_->armed.fetch_sub(1);
  armed_notifiers_.fetch_sub(1);
}

// ---- driving

bool Progress::try_drive(Driver who) {
  int expected = kNobody;
  return driver_.load(std::memory_order_relaxed) == kNobody &&
         driver_.compare_exchange_strong(expected, who);
}

void Progress::release_drive(Driver who) {
  driver_.store(kNobody);
  if (sleepers_.load() > 0) {
    event_seq_.fetch_add(1);
    futex_wake_all(event_seq_);
  }
  if (who == kThread) return;  // whoever asked for the loop takes it now, with what is left to do
  bool work = have_jobs_.load() || urgent_.load() || backlog_.load() > 0;
  if (work) urgent_ = true;
  if (work || park_state_.load() == kParkedForEver) unpark();
}

bool Progress::look_quickly() {
  for (int i = 0; i < kQuickLooks; ++i) {
    if (!poll()) continue;
    flush();
    wake();
    return true;
  }
  return false;
}

void Progress::drive_once(int timeout_ms) {
  counters_.rounds.fetch_add(1, std::memory_order_relaxed);
  urgent_.store(false);
  if (poll()) changed_ = true;
  bool more = run_jobs();
  run_timers();
  flush();
  if (changed_) {
    changed_ = false;
    wake();
    timeout_ms = 0;  // the driver's own condition may hold now
  }
  timeout_ms = more ? 0 : bounded(timeout_ms);
  if (timeout_ms != 0 && !pollers_.empty()) {
    if (!arm()) timeout_ms = 0;
    timeout_ms = bounded(timeout_ms);
  }
  epoll_event events[kMaxEvents];
  int count = ::epoll_wait(epoll_.get(), events, kMaxEvents, timeout_ms);
  if (count < 0 && errno == EINTR) interrupted_ = true;
  for (int i = 0; i < count; ++i) {
    int fd = events[i].data.fd;
    if (fd == kick_.get()) {
      eventfd_t count;
      ::eventfd_read(fd, &count);
      changed_ = true;
      continue;
    }
    std::shared_ptr<Handler> handler;
    {
      std::lock_guard lock(handlers_mutex_);
      auto found = handlers_.find(fd);
      if (found != handlers_.end()) handler = found->second;
    }
    if (!handler) continue;
    if (handler->serves()) served_.fetch_add(1);
    handler->on_ready(events[i].events);
  }
  if (changed_) {
    changed_ = false;
    wake();
  }
}

bool Progress::wait_slow(ReadyFunction ready, const void* argument, Deadline deadline, Pace* pace,
                         bool may_lead) {
  if (deadline.passed()) return false;
  auto began = Clock::now();
  interrupted_ = false;
  bool leading = false;
  auto lead = [&] {
    if (!leading && may_lead && try_drive(kWaiter)) {
      leading = true;
      leads_.fetch_add(1, std::memory_order_relaxed);
    }
    return leading;
  };
  auto leave = [&](bool result) {
    if (leading) release_drive(kWaiter);
    if (pace != nullptr) pace->took(std::chrono::nanoseconds(Clock::now() - began).count());
    return result;
  };

  Polls polls = expected_ > 0 ? Polls::kGpu : polled_ ? Polls::kDevice : Polls::kWords;
  // The thread would sleep until the GPU's driver wakes it, which takes longer than most copies.
  if (may_lead && polls == Polls::kGpu && driver_.load() == kThread && !yield_.exchange(true)) {
    kick();
  }
  int64_t bound = spin_bound_ns(polls), longer = pace == nullptr ? 0 : pace->bound_ns();
  bool paced = longer > bound;
  if (paced) bound = longer;
  if (bound > 0) {
    if (!deadline.never()) bound = std::min(bound, deadline.left_ns());
    auto end = began + std::chrono::nanoseconds(bound);
    int given = 0;
    do {
      for (int i = 0; i < (polls == Polls::kGpu ? 1 : 16); ++i) {
        if (ready(argument)) return leave(true);
        relax();
      }
      // Words that peers on other hosts raise arrive through the loop. A round calls the system,
      // and to look whether a GPU is done does not.
      if (lead() && !(polls == Polls::kGpu && look_quickly())) drive_once(0);
      if (paced && !leave_core(given)) break;
    } while (Clock::now() < end);
  }

  page_->armed.fetch_add(1);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  bool result = false;
  for (;;) {
    uint32_t seq = event_seq_.load();
    if (ready(argument)) {
      result = true;
      break;
    }
    if (deadline.passed() || (interruptible_ && interrupted_)) break;
    counters_.sleeps.fetch_add(1, std::memory_order_relaxed);
    // Who has just taken the lead looks once more: the one before may have taken our event out of
    // the loop after we looked and before we could sleep on event_seq_.
    bool led = leading;
    if (lead()) {
      if (led) drive_once(deadline.left_ms());
      continue;
    }
    sleepers_.fetch_add(1);
    int driver = driver_.load();
    if (!may_lead) {
      if (driver == kNobody) attention();
    } else if (driver == kThread && !yield_.exchange(true)) {
      kick();
    }
    if (driver != kNobody || !may_lead) {
      int64_t left = deadline.never() ? 0 : deadline.left_ns();
      if (futex_wait(event_seq_, seq, deadline.never() ? nullptr : &left) == Woken::kSignal) {
        interrupted_ = true;
      }
    }
    sleepers_.fetch_sub(1);
  }
  page_->armed.fetch_sub(1);
  return leave(result);
}

void Progress::unpark() {
  park_word_.fetch_add(1);
  futex_wake_all(park_word_);
}

// Only a round takes urgent_ back. While a waiter drives it is his: he begins a round, or sees it
// when he leaves.
bool Progress::called() const { return urgent_.load() && driver_.load() == kNobody; }

void Progress::park() {
  for (bool first = true;; first = false) {
    uint32_t word = park_word_.load();
    uint64_t leads = leads_.load(), rounds = counters_.rounds.load();
    park_state_ = kParked;
    if (stopping_ || called()) break;
    // Whoever wanted the thread as it gave the loop away had no way to say so.
    bool wanted = first || armed_notifiers_.load() > 0 || served_.load() != served_before_;
    int64_t period = wanted ? kParkNs : park_ns_.load();
    Woken woken = futex_wait(park_word_, word, &period);
    if (stopping_ || called()) break;
    if (woken != Woken::kTimeout)
      continue;  // somebody stopped driving: leave waiters one more period
    if (driver_.load() == kNobody) {
      // Waiters that come and go have looked at everything within the period.
      if (counters_.rounds.load() != rounds) continue;
      break;
    }
    if (leads_.load() != leads) continue;
    // One waiter drove all that time. It wakes us when it stops.
    word = park_word_.load();
    park_state_ = kParkedForEver;
    if (driver_.load() != kNobody && !urgent_ && !stopping_) {
      futex_wait(park_word_, word, nullptr);
    }
  }
  park_state_ = kAwake;
}

void Progress::thread_main() {
  while (!stopping_) {
    if (try_drive(kThread)) {
      while (!stopping_ && !yield_) drive_once(-1);
      if (urgent_) drive_once(0);  // so that only what becomes urgent later ends the park
      yield_ = false;
      uint64_t before = std::exchange(served_before_, served_.load());
      park_ns_ = served_before_ == before && pollers_.empty() ? kQuietParkNs : kParkNs;
      counters_.handovers.fetch_add(1, std::memory_order_relaxed);
      release_drive(kThread);
      if (stopping_) return;
    }
    park();
  }
}

}  // namespace tensorwire
