// Descriptors between two processes of one host: a datagram socket that no other process can reach.
//
// A descriptor from outside can block its user: a TCP socket lingers in close(), a file
// on a FUSE hangs in fstat(), and a message that is thrown away closes what it carried. Sending
// throws away all that came, if the other end is closed. So only the threads of spawn_blocking()
// send, receive, examine and close; the driving thread gets mappings and doorbells that were
// verified.
//
// How the two sockets meet, so that at no moment a stranger can put anything into their queues:
// a datagram socket that is connected takes messages of its partner alone. The client binds its
// socket behind a filter that drops everything, in the sender. The server connects to it and only
// then takes a name. The client connects to that name and only then takes the filter away.
#pragma once

#include <sys/types.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/fork.h"
#include "loop/progress.h"
#include "memory/mapping.h"
#include "memory/private_mapping.h"
#include "wire/frame.h"

namespace tensorwire {

// A message that came. Lives on the thread that received it, and closes its descriptors there.
class DescriptorMessage {
 public:
  explicit DescriptorMessage(int socket);
  ~DescriptorMessage();
  DescriptorMessage(const DescriptorMessage&) = delete;
  DescriptorMessage& operator=(const DescriptorMessage&) = delete;

  // kUnavailable: the sender is another user; kBusy: no descriptor was left here; kInvalid: no
  // message was there, or none of this form.
  const Status& status() const { return status_; }
  const Header& header() const { return header_; }
  size_t count() const { return descriptors_.size(); }

  // Maps the memfd at this place, see Mapping::import. Throws kInvalid, kNoMemory.
  std::shared_ptr<Mapping> map(size_t index, size_t size, bool writable) const;
  // Maps the memory of a GPU at this place, see Mapping::import_from_gpu. Throws as that does.
  std::shared_ptr<Mapping> map_gpu(size_t index, size_t size, bool writable) const;
  // Maps the memory that is `shared` once more, copy-on-write. Throws kNoMemory.
  std::shared_ptr<PrivateMapping> map_private(size_t index, std::shared_ptr<Mapping> shared) const;
  // The doorbell at this place. Throws kInvalid if it is not an eventfd, kBusy.
  Descriptor doorbell(size_t index) const;

 private:
  Header header_;
  std::vector<int> descriptors_;
  Status status_;
};

// Sends bytes with descriptors beside them, without waiting; as sendmsg.
ssize_t pass_descriptors(int socket, std::string_view bytes, std::span<const int> descriptors);

class DescriptorSocket : public Handler, public std::enable_shared_from_this<DescriptorSocket> {
 public:
  // The client's end, under a random name. Throws kBusy, kUnavailable.
  static std::shared_ptr<DescriptorSocket> offer();
  // The server's end, for the client's of this name. Throws kUnavailable if it cannot be reached
  // (from another network namespace, say), kBusy.
  static std::shared_ptr<DescriptorSocket> answer(uint64_t name);
  // The client, once it knows the server's name. Throws kUnavailable.
  void join(uint64_t name);
  // An end that is connected already; for tests.
  explicit DescriptorSocket(Descriptor connected);
  ~DescriptorSocket() override;

  uint64_t name() const { return name_; }

  // Before the first send. failed is called by the driving thread, at most once.
  void start(std::shared_ptr<Progress> progress, std::function<void(Status)> failed);
  // Sends a message soon, or when there is room, and then calls sent, in the driving thread. keep
  // owns the descriptors. Driving thread only.
  void send(const Header& header, std::span<const int> descriptors, std::shared_ptr<void> keep,
            std::function<void()> sent);
  // Messages that are not sent yet. Any thread.
  size_t queued();
  // Takes the next message, which must be there already, and has it examined on a thread that may
  // block. One after the other. Any thread. Throws kBusy.
  void receive(std::function<void(const DescriptorMessage&)> examine);
  // A thread sends, receives or examines a message.
  bool busy();
  // Nothing is sent any more. Driving thread only; idempotent.
  void close();

  void on_ready(uint32_t events) override;

 private:
  struct Waiting {
    Header header;
    std::vector<int> descriptors;
    std::shared_ptr<void> keep;
    std::function<void()> sent;
  };
  void begin_sending();
  void send_all();
  void wait_for_room();
  void fail(Status status);
  void receive_all();

  Descriptor socket_;
  uint64_t name_ = 0;
  std::shared_ptr<Progress> progress_;
  std::function<void(Status)> failed_;
  bool watched_ = false;  // driving thread only

  std::mutex mutex_;
  std::deque<Waiting> waiting_;
  std::deque<std::function<void(const DescriptorMessage&)>> examiners_;
  bool sending_ = false;  // a thread does
  bool full_ = false;     // the driving thread waits for room
  bool receiving_ = false, closed_ = false;
};

}  // namespace tensorwire
