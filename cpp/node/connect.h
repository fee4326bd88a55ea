// The client's half of the handshake, on blocking sockets with a deadline: from an address to a
// stream that both sides trust.
#pragma once

#include <string>

#include "base/clock.h"
#include "node/listener.h"
#include "wire/resolve.h"

namespace tensorwire {

// Why a transport is not taken although both sides may offer it; "" = it may be taken.
struct Refused {
  std::string shm, rdma;
};

// `me` offers transports; `require` is 0 or the only bit that will do. Comes again until the
// deadline while the other side has no room for another handshake. Throws kPeerLost (cannot reach,
// hung up), kPermission (secrets differ, one side
// encrypts and the other does not), kUnavailable (no common or required path), kTimeout,
// kBusy (the other side is full).
Connection connect_to(const std::string& host, uint16_t port, Hello me, const Secret& secret,
                      TlsUse tls, uint32_t require, const Refused& refused, double peer_timeout_s,
                      Deadline deadline, const Interrupted& interrupted);

}  // namespace tensorwire
