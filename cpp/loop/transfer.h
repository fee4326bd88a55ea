// A Transfer: one or a batch of operations in flight. Completes exactly once.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.h"
#include "gpu/gpu.h"
#include "loop/progress.h"

namespace tensorwire {

// Something that must live until a transfer is over. release may be called on any thread.
struct Keepalive {
  void* object = nullptr;
  void (*release)(void*) = nullptr;
};

class Transfer {
 public:
  Transfer(std::shared_ptr<Progress> progress, uint64_t bytes)
      : bytes(bytes), progress_(std::move(progress)) {
    progress_->transfers().started.fetch_add(1, std::memory_order_relaxed);
  }
  ~Transfer();
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  const uint64_t bytes;

  bool done() const { return done_.load(std::memory_order_acquire); }
  // False if the deadline passed first; the operation goes on all the same.
  bool wait(Deadline deadline, bool may_lead = true) const {
    return progress_->wait([this] { return done(); }, deadline, nullptr, may_lead);
  }
  const std::shared_ptr<Progress>& progress() const { return progress_; }
  // Valid when done.
  const Status& status() const { return status_; }
  uint64_t value() const { return value_; }  // of fetch_add: what the word held before

  // Completes it; called exactly once by the code that carries it out.
  void complete(Status status = {}, uint64_t value = 0);

  // Completes an operation that may still touch its memory: what it keeps stays for ever.
  void abandon(Status status);
  // The event that streams of a GPU may wait for instead; set before others see the transfer.
  void set_landing(GpuEventPtr event) { landing_ = std::move(event); }
  const GpuEventPtr& landing() const { return landing_; }

  // Keeps an object until the end. False if the transfer is over already: the caller releases.
  bool hold(Keepalive keepalive);
  // Runs the function at the end, on the completing thread; at once if it is over already.
  void then(std::function<void()> function);

 private:
  std::shared_ptr<Progress> progress_;
  std::atomic<bool> done_{false};
  Status status_;
  uint64_t value_ = 0;
  std::mutex mutex_;
  std::vector<Keepalive> held_;
  std::vector<std::function<void()>> then_;
  GpuEventPtr landing_;
};

using TransferPtr = std::shared_ptr<Transfer>;

}  // namespace tensorwire
