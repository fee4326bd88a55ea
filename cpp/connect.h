// The client's half of the handshake, on blocking sockets with a deadline: from an address to a
// stream that both sides trust.
#pragma once

#include <string>

#include "clock.h"
#include "fork.h"
#include "handshake.h"
#include "resolve.h"

namespace tensorwire {

struct Connection {
  Descriptor socket;
  uint32_t transport = kTcpBit;
  Hello server;
  std::string address;
  std::string reason;  // why this path
};

// `me` offers transports; `require` is 0 or the only bit that will do. `no_rdma` says why rdma is
// not taken although it may be offered ("" = it may be taken). Throws kPeerLost (cannot reach, hung
// up), kPermission (secrets differ), kUnavailable (no common or required path), kTimeout, kBusy
// (the other side is full).
Connection connect_to(const std::string& host, uint16_t port, Hello me, const Secret& secret,
                      uint32_t require, std::string no_rdma, double peer_timeout_s,
                      Deadline deadline, const Interrupted& interrupted);

}  // namespace tensorwire
