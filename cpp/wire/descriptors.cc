#include "wire/descriptors.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/blocking.h"
#include "memory/region.h"

namespace tensorwire {
namespace {

constexpr size_t kMostDescriptors = 253;  // that Linux lets one message carry (SCM_MAX_FD)

sockaddr_un address_of(uint64_t name, socklen_t& size) {
  char text[40];
  int length =
      std::snprintf(text, sizeof text, "tensorwire-%016llx", static_cast<unsigned long long>(name));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, text, static_cast<size_t>(length));
  size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  return address;
}

void connect_to_name(int socket, uint64_t name) {
  socklen_t size;
  sockaddr_un address = address_of(name, size);
  if (::connect(socket, reinterpret_cast<sockaddr*>(&address), size) != 0) {
    throw Error(Code::kUnavailable, system_message("the socket for descriptors", errno));
  }
}

uint64_t bind_to_name(int socket) {
  uint64_t name = random_id();
  socklen_t size;
  sockaddr_un address = address_of(name, size);
  if (::bind(socket, reinterpret_cast<sockaddr*>(&address), size) != 0) {
    throw Error(Code::kUnavailable, system_message("cannot bind a unix socket", errno));
  }
  return name;
}

Descriptor open_socket() {
  Descriptor made(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!made) throw Error(Code::kBusy, system_message("socket", errno));
  return made;
}

}  // namespace

// ---- a message

DescriptorMessage::DescriptorMessage(int socket) {
  // Room for everything that can come: what does not fit would be closed at once.
  alignas(
      cmsghdr) char control[CMSG_SPACE(kMostDescriptors * sizeof(int)) + CMSG_SPACE(sizeof(ucred))];
  std::byte bytes[sizeof(Header) + 1];
  iovec part{bytes, sizeof bytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t size = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (size < 0) {
    status_ = {Code::kInvalid, "no descriptors came with what announced them"};
    return;
  }
  const ucred* sender = nullptr;
  ucred who{};
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET) continue;
    if (c->cmsg_type == SCM_CREDENTIALS) {
      std::memcpy(&who, CMSG_DATA(c), sizeof who);
      sender = &who;
    } else if (c->cmsg_type == SCM_RIGHTS) {
      descriptors_.resize((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
      std::memcpy(descriptors_.data(), CMSG_DATA(c), descriptors_.size() * sizeof(int));
    }
  }
  if (sender == nullptr || sender->uid != ::geteuid()) {
    status_ = {Code::kUnavailable, "it runs as another user"};
  } else if (message.msg_flags & MSG_CTRUNC) {
    status_ = {Code::kBusy, system_message("cannot receive shared memory", EMFILE)};
  } else if (static_cast<size_t>(size) != sizeof(Header)) {
    status_ = {Code::kInvalid, "a message with descriptors of a wrong size"};
  } else {
    std::memcpy(&header_, bytes, sizeof header_);
  }
}

DescriptorMessage::~DescriptorMessage() {
  // Not as a Descriptor, which closes under a lock that all of them share.
  for (int fd : descriptors_) ::close(fd);
}

std::shared_ptr<Mapping> DescriptorMessage::map(size_t index, size_t size, bool writable) const {
  return Mapping::import(descriptors_.at(index), size, writable);
}

std::shared_ptr<Mapping> DescriptorMessage::map_gpu(size_t index, size_t size,
                                                    bool writable) const {
  return Mapping::import_from_gpu(descriptors_.at(index), size, writable);
}

std::shared_ptr<PrivateMapping> DescriptorMessage::map_private(
    size_t index, std::shared_ptr<Mapping> shared) const {
  return std::make_shared<PrivateMapping>(std::move(shared), descriptors_.at(index));
}

Descriptor DescriptorMessage::doorbell(size_t index) const {
  int fd = descriptors_.at(index);
  char path[48], kind[64] = {};
  std::snprintf(path, sizeof path, "/proc/thread-self/fd/%d", fd);
  if (::readlink(path, kind, sizeof kind - 1) < 0 ||
      std::strcmp(kind, "anon_inode:[eventfd]") != 0) {
    throw Error(Code::kInvalid, "a peer offered a doorbell that is not an eventfd");
  }
  Descriptor own(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!own) throw Error(Code::kBusy, system_message("a peer's doorbell", errno));
  return own;
}

ssize_t pass_descriptors(int socket, std::string_view bytes, std::span<const int> descriptors) {
  alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))] = {};
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
  cmsghdr* rights = CMSG_FIRSTHDR(&message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(descriptors.size_bytes());
  std::memcpy(CMSG_DATA(rights), descriptors.data(), descriptors.size_bytes());
  return ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

// ---- the socket

std::shared_ptr<DescriptorSocket> DescriptorSocket::offer() {
  Descriptor socket = open_socket();
  sock_filter drop_all = BPF_STMT(BPF_RET | BPF_K, 0);
  sock_fprog program{1, &drop_all};
  if (::setsockopt(socket.get(), SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) != 0) {
    throw Error(Code::kUnavailable, system_message("cannot filter a unix socket", errno));
  }
  uint64_t name = bind_to_name(socket.get());
  auto made = std::make_shared<DescriptorSocket>(std::move(socket));
  made->name_ = name;
  return made;
}

std::shared_ptr<DescriptorSocket> DescriptorSocket::answer(uint64_t name) {
  Descriptor socket = open_socket();
  connect_to_name(socket.get(), name);
  uint64_t mine = bind_to_name(socket.get());
  auto made = std::make_shared<DescriptorSocket>(std::move(socket));
  made->name_ = mine;
  return made;
}

void DescriptorSocket::join(uint64_t name) {
  connect_to_name(socket_.get(), name);
  int none = 0;
  if (::setsockopt(socket_.get(), SOL_SOCKET, SO_DETACH_FILTER, &none, sizeof none) != 0) {
    throw Error(Code::kUnavailable, system_message("cannot use a unix socket", errno));
  }
}

DescriptorSocket::DescriptorSocket(Descriptor connected) : socket_(std::move(connected)) {
  // The kernel then says with every message whose it is. Not before the socket has its name: one
  // that asks for this gets a name as soon as it connects, and is in reach of strangers for a
  // moment.
  int one = 1;
  ::setsockopt(socket_.get(), SOL_SOCKET, SO_PASSCRED, &one, sizeof one);
}

// The last user is gone, so nobody receives. What is still in the queue is closed with the socket.
DescriptorSocket::~DescriptorSocket() {
  int fd = socket_.release();
  if (fd < 0) return;
  char byte;
  ::shutdown(fd, SHUT_RDWR);  // from now on nothing gets into the queue
  // Any other error is the other end's doing, and says nothing of the queue.
  bool empty = ::recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN;
  if (empty) {
    ::close(fd);
    return;
  }
  try {
    spawn_blocking([fd] { ::close(fd); });
  } catch (const Error&) {
    // Without a thread nobody may close it: it stays until the process ends.
  }
}

void DescriptorSocket::start(std::shared_ptr<Progress> progress,
                             std::function<void(Status)> failed) {
  progress_ = std::move(progress);
  failed_ = std::move(failed);
}

void DescriptorSocket::send(const Header& header, std::span<const int> descriptors,
                            std::shared_ptr<void> keep, std::function<void()> sent) {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    waiting_.push_back(
        {header, {descriptors.begin(), descriptors.end()}, std::move(keep), std::move(sent)});
    if (sending_ || full_) return;
    sending_ = true;
  }
  begin_sending();
}

size_t DescriptorSocket::queued() {
  std::lock_guard lock(mutex_);
  return waiting_.size();
}

void DescriptorSocket::begin_sending() {
  try {
    spawn_blocking([self = shared_from_this()] { self->send_all(); });
  } catch (const Error& error) {
    std::unique_lock lock(mutex_);
    sending_ = false;
    lock.unlock();
    fail(error.status());
  }
}

// On a thread that may block.
void DescriptorSocket::send_all() {
  auto self = shared_from_this();
  for (;;) {
    auto message = std::make_shared<Waiting>();
    {
      std::lock_guard lock(mutex_);
      if (waiting_.empty()) {
        sending_ = false;
        return;
      }
      *message = std::move(waiting_.front());
      waiting_.pop_front();
    }
    std::string_view bytes(reinterpret_cast<const char*>(&message->header), sizeof(Header));
    ssize_t size;
    do {
      size = pass_descriptors(socket_.get(), bytes, message->descriptors);
    } while (size < 0 && errno == EINTR);
    if (size >= 0) {
      progress_->post([message] {
        message->sent();
        return false;
      });
      continue;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      {
        std::lock_guard lock(mutex_);
        sending_ = false;
        if (closed_) return;
        full_ = true;
        waiting_.push_front(std::move(*message));
      }
      progress_->post([self] {
        self->wait_for_room();
        return false;
      });
      return;
    }
    const int error = errno;
    std::unique_lock lock(mutex_);
    sending_ = false;
    lock.unlock();
    const bool many = error == ETOOMANYREFS;
    std::string why = system_message("cannot pass shared memory", error);
    Status status{many ? Code::kBusy : Code::kPeerLost,
                  why + (many ? " (descriptors on their way; see ulimit -n)" : "")};
    progress_->post([self, status] {
      self->fail(status);
      return false;
    });
    return;
  }
}

void DescriptorSocket::wait_for_room() {
  if (closed_) return;
  try {
    progress_->watch(socket_.get(), EPOLLOUT, shared_from_this());
    watched_ = true;
  } catch (const Error& error) {
    fail(error.status());
  }
}

void DescriptorSocket::on_ready(uint32_t) {
  progress_->unwatch(socket_.get());
  watched_ = false;
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    full_ = false;
    sending_ = true;
  }
  begin_sending();
}

void DescriptorSocket::fail(Status status) {
  auto self = shared_from_this();  // failed_ may drop it
  if (closed_) return;
  close();
  failed_(std::move(status));
}

void DescriptorSocket::receive(std::function<void(const DescriptorMessage&)> examine) {
  std::lock_guard lock(mutex_);
  examiners_.push_back(std::move(examine));
  if (receiving_) return;
  try {
    spawn_blocking([self = shared_from_this()] { self->receive_all(); });
    receiving_ = true;
  } catch (const Error&) {
    examiners_.pop_back();
    throw;
  }
}

void DescriptorSocket::receive_all() {
  for (;;) {
    std::function<void(const DescriptorMessage&)> examine;
    {
      std::lock_guard lock(mutex_);
      receiving_ = !examiners_.empty();
      if (!receiving_) return;
      examine = std::move(examiners_.front());
      examiners_.pop_front();
    }
    DescriptorMessage message(socket_.get());
    examine(message);
  }
}

bool DescriptorSocket::busy() {
  std::lock_guard lock(mutex_);
  return receiving_ || sending_;
}

void DescriptorSocket::close() {
  std::deque<Waiting> unsent;  // what they keep ends here, not under the lock
  std::lock_guard lock(mutex_);
  if (std::exchange(closed_, true)) return;
  if (std::exchange(watched_, false)) progress_->unwatch(socket_.get());
  unsent.swap(waiting_);
}

}  // namespace tensorwire
