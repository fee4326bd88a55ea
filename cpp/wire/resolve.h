// Names of hosts to addresses, and waiting for a descriptor: both with a deadline, and open to
// signals.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/clock.h"

namespace tensorwire {

// Called in the waiting thread when a signal may have come; may throw, which ends the waiting.
using Interrupted = std::function<void()>;

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  std::string text() const;  // "127.0.0.1", "::1", "fe80::1%eth0"
  uint16_t port() const;
  bool loopback() const;
  void set_port(uint16_t port);
  // Returns the address of one end of a socket; without size if it has no internet address.
  static SocketAddress of(int socket, bool other_end = false);
};

// Both ends of a connected socket are addresses of this host, and its bytes do not leave it.
bool both_ends_here(int socket);

struct Resolved {
  std::vector<SocketAddress> addresses;  // for streams, the best first; with the port
  std::string failure;                   // why there are none
};

// The address that `host` is, if it is one; asks nobody.
Resolved read_address(const std::string& host, uint16_t port);

// What the system finds for a name, or the address that `host` is. The system's resolver cannot be
// stopped, so it works in a thread of its own, which is left to itself when the time is over; who
// asks for the same name meanwhile waits for the same thread. Throws kTimeout, kBusy (no thread).
Resolved resolve(const std::string& host, uint16_t port, Deadline deadline,
                 const Interrupted& interrupted);

// As poll for one descriptor: false once the deadline has passed. Looks for signals twice a second
// too, since one that comes just before the call does not end it.
bool wait_ready(int fd, short events, Deadline deadline, const Interrupted& interrupted);

}  // namespace tensorwire
