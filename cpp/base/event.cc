#include "base/event.h"

#include <fcntl.h>
#include <linux/aio_abi.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <mutex>

namespace tensorwire {
namespace {

constexpr unsigned kInFlight = 64;   // raises that the system keeps room for
constexpr unsigned kTakeEvery = 16;  // raises, before what they completed is taken away
constexpr int kTries = 3;

struct Shared {
  std::mutex mutex;
  std::weak_ptr<EventRaiser> raiser;
};

}  // namespace

std::shared_ptr<EventRaiser> EventRaiser::shared() {
  auto& here = fork::of_this_process<Shared>();
  std::lock_guard lock(here.mutex);
  auto raiser = here.raiser.lock();
  if (!raiser) here.raiser = raiser = std::make_shared<EventRaiser>();
  return raiser;
}

EventRaiser::EventRaiser()
    : epoch_(fork::epoch()), zeros_(::open("/dev/zero", O_RDONLY | O_CLOEXEC)) {
  if (!zeros_ || ::syscall(SYS_io_setup, kInFlight, &context_) != 0) context_ = 0;
}

// A forked child inherits no context.
EventRaiser::~EventRaiser() {
  if (context_ != 0 && epoch_ == fork::epoch()) ::syscall(SYS_io_destroy, context_);
}

void EventRaiser::take() {
  io_event events[kInFlight];
  timespec now{};
  ::syscall(SYS_io_getevents, context_, 0, kInFlight, events, &now);
}

// False if it cannot be done so.
bool EventRaiser::submit(int eventfd) {
  if (context_ == 0) return false;
  iocb read{};
  read.aio_lio_opcode = IOCB_CMD_PREAD;
  read.aio_fildes = static_cast<uint32_t>(zeros_.get());
  read.aio_buf = reinterpret_cast<uintptr_t>(&byte_);
  read.aio_nbytes = 1;
  read.aio_flags = IOCB_FLAG_RESFD;
  read.aio_resfd = static_cast<uint32_t>(eventfd);
  iocb* list = &read;
  if (raised_.fetch_add(1, std::memory_order_relaxed) % kTakeEvery == 0) take();
  for (int tries = 0; tries < kTries; ++tries) {
    if (::syscall(SYS_io_submit, context_, 1, &list) == 1) return true;
    if (errno != EAGAIN) return false;
    take();  // its queue is full
  }
  return false;
}

void EventRaiser::raise(int eventfd) {
  if (submit(eventfd)) return;
  pollfd room{eventfd, POLLOUT, 0};
  if (::poll(&room, 1, 0) != 1 || !(room.revents & POLLOUT)) return;  // full: it is raised
  ::eventfd_write(eventfd, 1);
}

}  // namespace tensorwire
