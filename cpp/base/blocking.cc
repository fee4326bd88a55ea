#include "base/blocking.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <iterator>
#include <list>
#include <memory>
#include <mutex>
#include <system_error>

#include "base/error.h"
#include "base/fork.h"

namespace tensorwire {
namespace {

// How long a thread without work stays: the next job of a burst finds it.
constexpr auto kIdle = std::chrono::milliseconds(200);

// A job that takes longer is held up by somebody.
constexpr auto kStuck = std::chrono::seconds(1);

using Clock = std::chrono::steady_clock;

struct Pool {
  std::mutex mutex;
  std::condition_variable work;
  std::deque<std::function<void()>> jobs;
  std::list<Clock::time_point> started;  // when the running jobs began, the oldest first
  size_t idle = 0, threads = 0;
};

void work(Pool& pool) {
  ::pthread_setname_np(::pthread_self(), "tw-blocking");
  std::unique_lock lock(pool.mutex);
  for (;;) {
    ++pool.idle;
    bool found = pool.work.wait_for(lock, kIdle, [&] { return !pool.jobs.empty(); });
    --pool.idle;
    if (!found) break;
    auto job = std::move(pool.jobs.front());
    pool.jobs.pop_front();
    auto started = pool.started.insert(pool.started.end(), Clock::now());
    lock.unlock();
    job();
    job = nullptr;  // what it owns may block too
    lock.lock();
    pool.started.erase(started);
  }
  --pool.threads;
}

}  // namespace

std::thread start_thread(std::function<void()> run) {
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  auto restore = [](sigset_t* mask) { ::pthread_sigmask(SIG_SETMASK, mask, nullptr); };
  std::unique_ptr<sigset_t, decltype(restore)> at_return(&before, restore);
  return std::thread(std::move(run));
}

void spawn_blocking(std::function<void()> job) {
  Pool& here = fork::of_this_process<Pool>();
  std::lock_guard lock(here.mutex);
  here.jobs.push_back(std::move(job));
  if (here.idle >= here.jobs.size()) {
    here.work.notify_one();
    return;
  }
  try {
    start_thread([&here] { work(here); }).detach();
    ++here.threads;
  } catch (const std::system_error& error) {
    if (here.threads > 0) return;  // a thread that ends its job takes this one
    here.jobs.pop_back();
    throw Error(Code::kBusy, std::string("cannot start a thread: ") + error.what());
  }
}

size_t stuck_jobs() {
  Pool& here = fork::of_this_process<Pool>();
  std::lock_guard lock(here.mutex);
  auto now = Clock::now();
  auto young = std::find_if(here.started.begin(), here.started.end(),
                            [&](Clock::time_point each) { return now - each < kStuck; });
  return static_cast<size_t>(std::distance(here.started.begin(), young));
}

}  // namespace tensorwire
