// Progress: one epoll loop per Node, which waiting threads drive, and a thread that drives it when
// no other does. It knows descriptors, doorbells and conditions; no frames, no regions.
//
// Invariants (docs/internals/threads.md explains them, models/wake.pml checks them):
//  - At most one thread drives, and driver_ names it. Only it dispatches handlers, jobs and timers.
//  - A waiter raises page.armed before its last look at its condition. A writer in another process
//    stores its word, fences, and rings the doorbell if armed is not 0. So either the waiter sees
//    the word or the doorbell rings.
//  - Waiters that do not drive sleep on event_seq_. The driver raises it after every change that a
//    condition may depend on, and when it stops driving while others sleep.
//  - The thread parks while others drive: with a time limit while they change quickly, of kParkNs,
//    or longer where it drove in vain; for ever once one stays, which wakes it when it stops.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/fork.h"
#include "base/page.h"
#include "base/spin.h"
#include "memory/mapping.h"

namespace tensorwire {

// Called by the driving thread, never concurrently.
class Handler {
 public:
  virtual ~Handler() = default;
  virtual void on_ready(uint32_t events) = 0;
  // Called before the driver sleeps if the handler asked for it with flush_later().
  virtual void on_flush() {}
  // Whether it works for others than the waiters here, such as to answer a peer.
  virtual bool serves() const { return true; }
};

// A device that is driven by looking at it. Driving thread only.
class Poller {
 public:
  virtual ~Poller() = default;
  // Does what there is to do; true if anything happened.
  virtual bool poll() = 0;
  // Before the loop sleeps: true if the descriptor becomes readable at the next event, false if
  // there is one already.
  virtual bool arm() = 0;
  virtual int descriptor() const = 0;
};

// An eventfd for an event loop that cannot block in wait(): readable after any change while armed.
class Notifier {
 public:
  Notifier();
  int descriptor() const { return event_.get(); }
  void drain();

 private:
  friend class Progress;
  Descriptor event_;
  std::atomic<bool> armed_{false};
};

class Progress;

// A doorbell that one peer of this host rings to wake this Node: an eventfd that is never read. Its
// loop gets every ring (EPOLLET), not the value. The peer shares it, and still cannot block a
// thread that rings or closes it: see EventRaiser. Each peer has its own, so that none can take the
// rings of another.
class Doorbell : public Handler {
 public:
  // Rings reach that loop, which outlives it. Throws kBusy.
  static std::shared_ptr<Doorbell> hang(Progress& progress);
  int descriptor() const { return event_.get(); }
  void take_down();
  void on_ready(uint32_t) override;
  bool serves() const override { return false; }

 private:
  explicit Doorbell(Progress& progress);
  Progress& progress_;
  Descriptor event_;
};

class Progress {
 public:
  // shareable: peers can map its page.
  explicit Progress(bool shareable = true);
  ~Progress();  // stop() must have been called, or the process forked
  void stop();

  NodePage* page() const { return page_; }
  const std::shared_ptr<Mapping>& page_mapping() const { return page_mapping_; }

  // Handlers. Any thread. unwatch() returns at once; on_ready is not called again once a handler
  // unwatched itself from the driving thread.
  void watch(int fd, uint32_t events, std::shared_ptr<Handler> handler);
  void change(int fd, uint32_t events);
  void unwatch(int fd);
  void flush_later(std::shared_ptr<Handler> handler);  // driving thread only
  // Driving thread only. patient: waiters poll longer as long as there is one of those.
  void drive(std::shared_ptr<Poller> poller, bool patient = true);
  void undrive(const Poller& poller);

  // Jobs run in the driving thread. post: later, again while it returns true. run: now, and waits;
  // must not be called by a handler.
  // post and after refuse with false once stop() has run what was left.
  bool post(std::function<bool()> job);
  void run(const std::function<void()>& job);
  bool after(double seconds, std::function<void()> job);

  // Waits until ready() or the deadline; true if ready. ready must be cheap, may be called often
  // and must only read. Any thread but not from a handler.
  // pace: of waits for the same, which says how long to poll.
  // may_lead: see docs/internals/threads.md; a waiter that does not lead leaves the loop to the
  // thread, also afterwards.
  template <class Ready>
  bool wait(const Ready& ready, Deadline deadline, Pace* pace = nullptr, bool may_lead = true) {
    if (ready()) {
      if (pace != nullptr) pace->took(0);
      return true;
    }
    return wait_slow([](const void* r) { return (*static_cast<const Ready*>(r))(); }, &ready,
                     deadline, pace, may_lead);
  }

  // A condition may have become true: makes every waiter look again, rings notifiers. Any thread.
  void notify();
  // Does what notify() does once, at the end of the present round. Driving thread only.
  void changed() { changed_ = true; }
  // A peer rang: counts it, and does what changed() does. Driving thread only.
  void rang();
  // Work was queued that only a driver can finish. Any thread.
  void attention();
  // A GPU has begun work that a poller looks for (+1), or ended it (-1): the driver learns of it
  // before it sleeps. As with all events from outside, the thread may leave it for a millisecond to
  // waiters that come and go. Any thread.
  void expect_gpu(int change);
  // +1 when a stream starts to wait for room in its socket, -1 when it stops. Any thread.
  void backlog(int change);

  // While set, a signal that reaches a thread in wait() ends the wait as a timeout does, so that
  // an interpreter can run its handlers.
  static void set_interruptible(bool value) { interruptible_ = value; }

  void add(std::shared_ptr<Notifier> notifier);
  void remove(const std::shared_ptr<Notifier>& notifier);
  void arm(Notifier& notifier);
  void disarm(Notifier& notifier);

  struct Counters {
    std::atomic<uint64_t> rings{0}, sleeps{0}, rounds{0}, handovers{0};
  };
  const Counters& counters() const { return counters_; }
  // Every Transfer of this Node counts in these two, which are equal when nothing is in flight.
  struct alignas(64) Transfers {
    std::atomic<uint64_t> started{0}, completed{0};
  };
  Transfers& transfers() { return transfers_; }

 private:
  enum Driver : int { kNobody, kWaiter, kThread };
  using ReadyFunction = bool (*)(const void*);

  bool wait_slow(ReadyFunction ready, const void* argument, Deadline deadline, Pace* pace,
                 bool may_lead);
  bool try_drive(Driver who);
  void release_drive(Driver who);
  bool called() const;
  bool look_quickly();
  void drive_once(int timeout_ms);
  int bounded(int timeout_ms);
  bool poll();
  bool arm();
  void run_timers();
  bool run_jobs();
  void flush();
  void thread_main();
  void park();
  void unpark();
  void wake();
  void kick();

  std::shared_ptr<Mapping> page_mapping_;
  NodePage* page_ = nullptr;
  // Written under handlers_mutex_ and kick_mutex_; the driver reads them without.
  Descriptor epoll_, kick_;  // kick_ is an eventfd of this process alone
  std::mutex kick_mutex_;
  uint32_t epoch_ = 0;

  std::atomic<int> driver_{kNobody};
  std::atomic<uint32_t> event_seq_{0};  // futex
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<uint32_t> park_word_{0};  // futex
  std::atomic<int> park_state_{0};
  // How long the thread leaves the loop to waiters that come and go before it drives itself; and
  // where none but they needed it, from one time that they took it back to the next: to hand it
  // over costs two threads more than a wait does.
  static constexpr int64_t kParkNs = 1'000'000, kQuietParkNs = 8'000'000;
  std::atomic<int64_t> park_ns_{kParkNs};
  std::atomic<uint64_t> served_{0};  // times that anything but a waiter needed the loop
  uint64_t served_before_ = 0;       // when the thread gave it away last; the thread only
  std::atomic<int> backlog_{0};      // streams with bytes that the kernel did not take yet
  std::atomic<bool> yield_{false}, urgent_{false}, stopping_{false};
  std::atomic<uint64_t> leads_{0};  // times that a waiter took the lead
  bool changed_ = false;            // driving thread only

  std::mutex handlers_mutex_;
  std::unordered_map<int, std::shared_ptr<Handler>> handlers_;
  std::vector<std::shared_ptr<Handler>> to_flush_;  // driving thread only
  std::vector<std::shared_ptr<Poller>> pollers_;    // driving thread only
  std::atomic<bool> polled_{false};                 // there are patient ones
  std::atomic<int> expected_{0};                    // of GPUs

  std::mutex jobs_mutex_;
  std::deque<std::function<bool()>> jobs_;
  std::multimap<Clock::time_point, std::function<void()>> timers_;
  std::atomic<bool> have_jobs_{false}, have_timers_{false};
  bool drained_ = false;  // jobs_mutex_

  std::mutex notifiers_mutex_;
  std::vector<std::shared_ptr<Notifier>> notifiers_;
  std::atomic<uint32_t> armed_notifiers_{0};

  static thread_local bool interruptible_, interrupted_;

  Counters counters_;
  Transfers transfers_;
  std::thread thread_;
};

}  // namespace tensorwire
