#include "loop/transfer.h"

#include <cstdio>
#include <cstdlib>

namespace tensorwire {

Transfer::~Transfer() {
  // A transfer that nobody completed would have left somebody waiting for ever.
  for (auto& keepalive : held_) keepalive.release(keepalive.object);
}

void Transfer::complete(Status status, uint64_t value) {
  std::vector<Keepalive> held;
  std::vector<std::function<void()>> then;
  {
    std::lock_guard lock(mutex_);
    if (done_.load(std::memory_order_relaxed)) {
      std::fputs("tensorwire: a transfer completed twice; this is a bug\n", stderr);
      std::abort();
    }
    status_ = std::move(status);
    value_ = value;
    held.swap(held_);
    then.swap(then_);
    done_.store(true, std::memory_order_release);
  }
  progress_->transfers().completed.fetch_add(1, std::memory_order_relaxed);
  for (auto& keepalive : held) keepalive.release(keepalive.object);
  for (auto& function : then) function();
}

void Transfer::abandon(Status status) {
  {
    std::lock_guard lock(mutex_);
    new std::vector<Keepalive>(std::move(held_));
    held_.clear();
  }
  complete(std::move(status));
}

bool Transfer::hold(Keepalive keepalive) {
  std::lock_guard lock(mutex_);
  if (done_.load(std::memory_order_relaxed)) return false;
  held_.push_back(keepalive);
  return true;
}

void Transfer::then(std::function<void()> function) {
  {
    std::lock_guard lock(mutex_);
    if (!done_.load(std::memory_order_relaxed)) {
      then_.push_back(std::move(function));
      return;
    }
  }
  function();
}

}  // namespace tensorwire
