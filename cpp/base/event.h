// Raising an event of somebody else's without ever being held up by it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "base/fork.h"

namespace tensorwire {

// Adds 1 to an eventfd of which another process holds the same open file, and wakes who waits for
// it. A plain write may block there: the other side can fill the counter and make the file a
// blocking one at any moment. So the kernel adds it, as the end of a read of one byte with Linux's
// asynchronous I/O (io_submit, IOCB_FLAG_RESFD), which waits for nothing. Where the system offers
// none, it is a look whether there is room and then a write.
class EventRaiser {
 public:
  // The one of this process, as long as somebody has it.
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
