#include "loop/gpu_queue.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

namespace tensorwire {
namespace {

constexpr size_t kLooks = 32;         // at events per round, in turn
constexpr double kLookAgainS = 0.05;  // while asleep: a GPU that has failed wakes nobody
constexpr double kStopS = 10;

// kNotReady if it did not pass in time.
cuda::Result wait_here(const GpuEvent& event) {
  Deadline deadline = Deadline::after(kStopS);
  for (;;) {
    cuda::Result result = event.query();
    if (result != cuda::kNotReady || deadline.passed()) return result;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

Status status_of(const Gpu& gpu, cuda::Result result) {
  if (result == cuda::kSuccess) return {};
  return gpu.driver().status(gpu.label() + " failed", result);
}

}  // namespace

GpuLane::GpuLane(Gpu& gpu) : gpu_(gpu), stream_(gpu.take_stream()), shared_(stream_ == nullptr) {
  if (shared_) stream_ = gpu.shared_stream();
}

GpuLane::~GpuLane() {
  if (!shared_) gpu_.give_back(stream_);
}

GpuQueue::GpuQueue(std::shared_ptr<Progress> progress) : progress_(std::move(progress)) {}

void GpuQueue::start() {
  if (started_.load(std::memory_order_acquire)) return;
  std::lock_guard lock(mutex_);
  if (started_) return;
  auto wake = std::make_shared<Wake>();
  wake->event = Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake->event) throw Error(Code::kBusy, system_message("eventfd", errno));
  wake_ = std::move(wake);
  bool taken = progress_->post([self = shared_from_this()] {
    if (!self->stopped_) self->progress_->drive(self, false);
    return false;
  });
  if (!taken) throw Error(Code::kClosed, "the Node is closed");
  started_.store(true, std::memory_order_release);
}

void GpuQueue::when(std::shared_ptr<GpuLane> lane, GpuEventPtr event, GpuThen then) {
  {
    std::unique_lock lock(mutex_);
    if (stopped_) {
      lock.unlock();
      cuda::Result result = wait_here(*event);
      if (result == cuda::kNotReady) {
        leave({std::move(lane), std::move(event), std::move(then)});
      } else {
        lane.reset();
        then({status_of(event->gpu(), result)});
      }
      return;
    }
    arrived_.push_back({std::move(lane), std::move(event), std::move(then)});
    any_arrived_.store(true, std::memory_order_release);
  }
  progress_->expect_gpu(1);
}

void GpuQueue::when(GpuEventPtr event, GpuThen then) {
  when(nullptr, std::move(event), std::move(then));
}

void GpuQueue::take() {
  if (!any_arrived_.load(std::memory_order_acquire)) return;
  std::lock_guard lock(mutex_);
  any_arrived_ = false;
  for (Waiting& one : arrived_) waiting_.push_back(std::move(one));
  arrived_.clear();
}

bool GpuQueue::look() {
  take();
  size_t looks = std::min(kLooks, waiting_.size());
  if (looks == 0) return false;
  std::vector<Waiting> passed;
  std::vector<Status> statuses;
  GpuScope scope(waiting_.front().event->gpu());
  for (size_t i = 0; i < looks && !waiting_.empty(); ++i) {
    if (next_ >= waiting_.size()) next_ = 0;
    Waiting& one = waiting_[next_];
    cuda::Result result = one.event->query();
    if (result == cuda::kNotReady) {
      ++next_;
      continue;
    }
    statuses.push_back(status_of(one.event->gpu(), result));
    passed.push_back(std::move(one));
    if (next_ + 1 != waiting_.size()) waiting_[next_] = std::move(waiting_.back());
    waiting_.pop_back();
  }
  for (size_t i = 0; i < passed.size(); ++i) {
    passed[i].lane.reset();
    passed[i].then({statuses[i]});
    progress_->expect_gpu(-1);
  }
  return !passed.empty();
}

bool GpuQueue::poll() { return look(); }

bool GpuQueue::arm() {
  eventfd_t count;
  ::eventfd_read(wake_->event.get(), &count);
  if (any_arrived_) return false;
  if (waiting_.empty()) return true;
  for (Waiting& one : waiting_) {
    if (one.armed) continue;
    one.armed = true;
    try {
      if (!one.lane) {
        auto lane = std::make_shared<GpuLane>(one.event->gpu());
        if (lane->shared()) continue;  // then it is looked at now and then
        one.event->hold(lane->gpu(), lane->stream());
        one.lane = std::move(lane);
      }
      auto* wake = new std::shared_ptr<Wake>(wake_);
      GpuScope scope(one.lane->gpu());
      cuda::Result result = one.lane->gpu().driver().cuLaunchHostFunc(
          one.lane->stream(),
          [](void* given) {
            auto* wake = static_cast<std::shared_ptr<Wake>*>(given);
            (*wake)->ring();
            delete wake;
          },
          wake);
      if (result != cuda::kSuccess) delete wake;
    } catch (const Error&) {
      // It is looked at now and then.
    }
  }
  look_again();
  return !look();
}

void GpuQueue::look_again() {
  if (looking_again_) return;
  looking_again_ = progress_->after(kLookAgainS, [weak = weak_from_this()] {
    auto self = weak.lock();
    if (!self) return;
    self->looking_again_ = false;
  });
}

void GpuQueue::Wake::ring() {
  std::lock_guard lock(mutex);
  if (event) ::eventfd_write(event.get(), 1);
}

void GpuQueue::stop() {
  Deadline deadline = Deadline::after(kStopS);
  for (;;) {
    while (look()) {
    }
    if (!deadline.passed() && !(waiting_.empty() && !any_arrived_)) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      continue;
    }
    std::lock_guard lock(mutex_);
    if (any_arrived_ && !deadline.passed()) continue;
    stopped_ = true;
    break;
  }
  if (started_) {
    progress_->undrive(*this);
    std::lock_guard lock(wake_->mutex);
    wake_->event.reset();
  }
  take();
  for (Waiting& one : std::exchange(waiting_, {})) {
    progress_->expect_gpu(-1);
    leave(std::move(one));
  }
}

// What it holds must stay, since the GPU may still use it.
void GpuQueue::leave(Waiting one) {
  auto* left = new Waiting(std::move(one));
  left->then({{Code::kClosed,
               "the Node was closed, and a stream of a GPU has held up the copy for too long"},
              true});
}

}  // namespace tensorwire
