// What every tcp stream is set to.
#include "node/listener.h"

#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <fstream>

using namespace tensorwire;

namespace {

int option(const Descriptor& socket, int level, int name) {
  int value = -1;
  socklen_t size = sizeof value;
  CHECK(::getsockopt(socket.get(), level, name, &value, &size) == 0);
  return value;
}

// Both ends of a connection within this host; no descriptors where it has no such address.
struct TcpEnds {
  explicit TcpEnds(int family) {
    sockaddr_storage address{};
    address.ss_family = static_cast<sa_family_t>(family);
    if (family == AF_INET) {
      reinterpret_cast<sockaddr_in*>(&address)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    } else {
      reinterpret_cast<sockaddr_in6*>(&address)->sin6_addr = in6addr_loopback;
    }
    socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    Descriptor door(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!door || ::bind(door.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) return;
    REQUIRE(::listen(door.get(), 1) == 0);
    REQUIRE(::getsockname(door.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0);
    Descriptor dialled(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    REQUIRE(::connect(dialled.get(), reinterpret_cast<sockaddr*>(&address), size) == 0);
    near = std::move(dialled);
    far = Descriptor(::accept(door.get(), nullptr, nullptr));
    REQUIRE(far);
  }
  Descriptor near, far;
};

}  // namespace

TEST_CASE("listener: a stream within one host has a short queue, with both addresses") {
  int most = 0, queue = 1 << 20;  // of 512 KiB, which the kernel doubles
  std::ifstream("/proc/sys/net/core/wmem_max") >> most;
  if (most < 512 << 10) queue = option(TcpEnds(AF_INET).near, SOL_SOCKET, SO_SNDBUF);
  for (int family : {AF_INET, AF_INET6}) {
    CAPTURE(family);
    TcpEnds ends(family);
    if (!ends.near) {
      MESSAGE("this host has no such address");
      continue;
    }
    for (Descriptor* end : {&ends.near, &ends.far}) {
      tune_tcp(end->get(), 10.0);
      CHECK(option(*end, SOL_SOCKET, SO_SNDBUF) == queue);
      CHECK(option(*end, IPPROTO_TCP, TCP_NODELAY) == 1);
      CHECK(option(*end, SOL_SOCKET, SO_KEEPALIVE) == 1);
      CHECK(option(*end, IPPROTO_TCP, TCP_KEEPIDLE) == 2);
      CHECK(option(*end, IPPROTO_TCP, TCP_KEEPCNT) == 5);
    }
  }
}

TEST_CASE("listener: a stream that is not known to stay within one host has the kernel's queue") {
  Descriptor alone(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  int before = option(alone, SOL_SOCKET, SO_SNDBUF);
  tune_tcp(alone.get(), 10.0);
  CHECK(option(alone, SOL_SOCKET, SO_SNDBUF) == before);
  CHECK(option(alone, IPPROTO_TCP, TCP_NODELAY) == 1);
}
