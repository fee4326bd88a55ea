// Raises an event of another process without ever blocking on it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "base/fork.h"

namespace tensorwire {

// Adds 1 to an eventfd whose open file another process shares, and wakes its waiters. A plain write
// may block there: the other side can fill the counter and make the file a blocking one at any
// time. So the kernel adds it, at the end of a read of one byte with Linux's asynchronous I/O
// (io_submit, IOCB_FLAG_RESFD), which never waits. Where the system has no such I/O, it checks
// that there is room, and then writes.
class EventRaiser {
 public:
  // Returns the raiser of this process, which lives as long as any pointer to it.
  static std::shared_ptr<EventRaiser> shared();
  EventRaiser();
  ~EventRaiser();
  EventRaiser(const EventRaiser&) = delete;
  EventRaiser& operator=(const EventRaiser&) = delete;

  void raise(int eventfd);  // any thread

 private:
  bool submit(int eventfd);
  void take();

  const uint32_t epoch_;
  Descriptor zeros_;
  unsigned long context_ = 0;  // aio_context_t; 0 = none
  std::atomic<unsigned> raised_{0};
  char byte_ = 0;  // zero, written over and over
};

}  // namespace tensorwire
