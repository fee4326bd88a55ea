// Descriptors between processes: who can send any, what is taken for what it claims to be, and that
// nothing which came holds up whoever did not ask for it.
#include "wire/descriptors.h"

#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <string>
#include <thread>

#include "base/blocking.h"
#include "base/clock.h"
#include "base/event.h"

namespace tensorwire {
namespace {

constexpr int kLingerS = 20;

// Two that have met; the client sends.
struct Ends {
  Ends() {
    client->join(server->name());
    client->start(progress, [](Status) {});
  }
  ~Ends() { progress->stop(); }
  void send(int fd) {
    std::promise<void> sent;
    progress->run([&] { client->send({}, {&fd, 1}, nullptr, [&] { sent.set_value(); }); });
    sent.get_future().get();
  }

  std::shared_ptr<Progress> progress = std::make_shared<Progress>();
  std::shared_ptr<DescriptorSocket> client = DescriptorSocket::offer();
  std::shared_ptr<DescriptorSocket> server = DescriptorSocket::answer(client->name());
};

// What the next message holds; the descriptors are looked at by `examine`.
Status receive(DescriptorSocket& socket,
               const std::function<void(const DescriptorMessage&)>& examine = {}) {
  std::promise<Status> came;
  socket.receive([&](const DescriptorMessage& message) {
    if (message.status().ok() && examine) examine(message);
    came.set_value(message.status());
  });
  return came.get_future().get();
}

// A connected TCP socket with bytes that nobody takes: whoever closes it last waits for kLingerS.
// The other end is closed by `other`.
int lingering(Descriptor& other) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  Descriptor door(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  REQUIRE(::bind(door.get(), reinterpret_cast<sockaddr*>(&address), size) == 0);
  REQUIRE(::listen(door.get(), 1) == 0);
  REQUIRE(::getsockname(door.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0);
  int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  REQUIRE(::connect(fd, reinterpret_cast<sockaddr*>(&address), size) == 0);
  other = Descriptor(::accept(door.get(), nullptr, nullptr));
  std::string bytes(1 << 20, 'x');
  while (::send(fd, bytes.data(), bytes.size(), MSG_DONTWAIT) > 0) {
  }
  linger wait{1, kLingerS};
  REQUIRE(::setsockopt(fd, SOL_SOCKET, SO_LINGER, &wait, sizeof wait) == 0);
  return fd;
}

// A datagram to that name from a socket of nobody's: 0 or the error.
int stray(uint64_t name) {
  Descriptor stranger(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  int length = std::snprintf(address.sun_path + 1, sizeof address.sun_path - 1,
                             "tensorwire-%016llx", static_cast<unsigned long long>(name));
  auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  char byte = 0;
  auto sent = ::sendto(stranger.get(), &byte, 1, 0, reinterpret_cast<sockaddr*>(&address), size);
  return sent < 0 ? errno : 0;
}

double seconds(const std::function<void()>& function) {
  auto start = Clock::now();
  function();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

TEST_CASE("descriptors: at no moment a stranger gets anything into a queue") {
  auto client = DescriptorSocket::offer();
  CHECK(stray(client->name()) == 0);  // the filter drops it, which the sender is not told
  CHECK_FALSE(receive(*client).ok());
  auto server = DescriptorSocket::answer(client->name());
  CHECK(stray(server->name()) == EPERM);
  CHECK(stray(client->name()) == 0);
  client->join(server->name());
  CHECK(stray(client->name()) == EPERM);
  CHECK(receive(*client).code == Code::kInvalid);
  CHECK(receive(*server).code == Code::kInvalid);
}

TEST_CASE("descriptors: memory and a doorbell arrive, and what they are is checked") {
  Ends ends;
  auto memory = Mapping::create(5000, true, true);
  memory->data()[4999] = std::byte{7};
  ends.send(memory->descriptor());
  std::shared_ptr<Mapping> mapped;
  CHECK(receive(*ends.server, [&](const DescriptorMessage& message) {
          CHECK(message.count() == 1);
          mapped = message.map(0, 5000, false);
          CHECK_THROWS_AS(message.doorbell(0), Error);
          CHECK_THROWS_AS(message.map(0, 50000, false), Error);
        }).ok());
  CHECK(mapped->data()[4999] == std::byte{7});

  Descriptor event(::eventfd(0, EFD_CLOEXEC));
  ends.send(event.get());
  Descriptor bell;
  CHECK(receive(*ends.server, [&](const DescriptorMessage& message) {
          bell = message.doorbell(0);
          CHECK_THROWS_AS(message.map(0, 1, false), Error);
        }).ok());
  auto raiser = EventRaiser::shared();
  for (int ring = 0; ring < 100; ++ring) raiser->raise(bell.get());
  uint64_t rings = 0;
  CHECK(::read(event.get(), &rings, sizeof rings) == sizeof rings);
  CHECK(rings == 100);

  Descriptor timer(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC));
  ends.send(timer.get());
  CHECK(receive(*ends.server, [](const DescriptorMessage& message) {
          CHECK_THROWS_AS(message.doorbell(0), Error);
        }).ok());
}

TEST_CASE("descriptors: one that blocks in close holds up neither the driver nor other peers") {
  Ends ends;
  Ends others;
  Descriptor taker;
  int fd = lingering(taker);
  ends.send(fd);
  ::close(fd);  // the last one is with the message
  auto memory = Mapping::create(1, true, true);
  std::promise<void> examined;
  // From here on that thread is in close().
  ends.server->receive([&](const DescriptorMessage&) { examined.set_value(); });
  examined.get_future().get();
  CHECK(seconds([&] {
          others.send(memory->descriptor());
          CHECK(receive(*others.server).ok());
          ends.progress->run([] {});
        }) < kLingerS / 2);
  taker.reset();
}

TEST_CASE("descriptors: what nobody takes holds up nobody when the socket ends") {
  Ends ends;
  Descriptor taker;
  int fd = lingering(taker);
  ends.send(fd);
  ::close(fd);
  CHECK(seconds([&] { ends.server.reset(); }) < kLingerS / 2);
  taker.reset();
}

TEST_CASE("descriptors: what nobody takes holds up nobody when the other end has left") {
  Ends ends;
  Descriptor taker;
  int fd = lingering(taker);
  ends.send(fd);
  ::close(fd);
  ends.client.reset();
  std::promise<Status> failed;
  ends.server->start(ends.progress, [&](Status status) { failed.set_value(status); });
  auto memory = Mapping::create(1, true, true);
  fd = memory->descriptor();
  CHECK(seconds([&] {  // to send throws away what came
          ends.progress->run([&] { ends.server->send({}, {&fd, 1}, memory, [] {}); });
          while (ends.server->queued() > 0) std::this_thread::yield();
          ends.progress->run([] {});
        }) < kLingerS / 2);
  taker.reset();
  CHECK(failed.get_future().get().code == Code::kPeerLost);
}

TEST_CASE("descriptors: an error of the other end's making does not stand for an empty queue") {
  int ends[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, ends) == 0);
  auto server = std::make_shared<DescriptorSocket>(Descriptor(ends[0]));
  Descriptor other(ends[1]), taker;
  int fd = lingering(taker);
  REQUIRE(pass_descriptors(other.get(), "x", {&fd, 1}) == 1);
  ::close(fd);
  sockaddr nowhere{};
  nowhere.sa_family = AF_UNSPEC;
  REQUIRE(::connect(other.get(), &nowhere, sizeof nowhere) == 0);  // server's next call: ECONNRESET
  CHECK(seconds([&] { server.reset(); }) < kLingerS / 2);
  taker.reset();
}

TEST_CASE("descriptors: a queue without room is waited for, in order") {
  Ends ends;
  auto memory = Mapping::create(1, true, true);
  constexpr int kMany = 300;
  std::vector<int> order;  // driving thread
  ends.progress->run([&] {
    for (int i = 0; i < kMany; ++i) {
      int fd = memory->descriptor();
      Header header;
      header.transfer = static_cast<uint64_t>(i);
      ends.client->send(header, {&fd, 1}, memory, [&order, i] { order.push_back(i); });
    }
    CHECK(ends.client->queued() > 0);
  });
  for (int i = 0; i < kMany; ++i) {
    std::atomic<uint64_t> came{0};
    Status status;
    do {
      status =
          receive(*ends.server, [&](const DescriptorMessage& m) { came = m.header().transfer; });
    } while (status.code == Code::kInvalid);  // the next one is not there yet
    CHECK(came == static_cast<uint64_t>(i));
  }
  ends.progress->run([&] { CHECK(order.size() == kMany); });
  CHECK(std::is_sorted(order.begin(), order.end()));
}

TEST_CASE("event: raising one never waits, also if it is full and its file blocks") {
  Descriptor event(::eventfd(0, EFD_CLOEXEC));
  uint64_t full = 0xfffffffffffffffe;
  REQUIRE(::write(event.get(), &full, sizeof full) == sizeof full);
  CHECK(seconds([&] {
          auto raiser = EventRaiser::shared();
          for (int i = 0; i < 200; ++i) raiser->raise(event.get());
        }) < 5);
}

TEST_CASE("blocking: each job that blocks has a thread of its own") {
  constexpr int kJobs = 12;
  std::promise<void> go;
  auto gate = go.get_future().share();
  std::atomic<int> inside{0}, done{0};
  for (int i = 0; i < kJobs; ++i) {
    spawn_blocking([&, gate] {
      ++inside;
      gate.wait();
      ++done;
    });
  }
  auto limit = Deadline::after(20.0);
  while (inside < kJobs && !limit.passed()) ::usleep(1000);
  CHECK(inside == kJobs);
  go.set_value();
  while (done < kJobs && !limit.passed()) ::usleep(1000);
  CHECK(done == kJobs);
}

}  // namespace tensorwire
