// The listener of a Node: accepts connections on tcp and takes them through the handshake; a
// connection that passes becomes a new peer.
//
// Bounded: each connection has a deadline, and at most kMaxHandshakes have not proved the secret
// yet. The oldest of them makes room, one that has said nothing before one that has sent its Hello,
// and is told to come again. A connection that has proved the secret stays, within the limit of
// peers.
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <string>

#include "base/clock.h"
#include "base/fork.h"
#include "loop/progress.h"
#include "wire/descriptors.h"
#include "wire/handshake.h"
#include "wire/link.h"

namespace tensorwire {

inline constexpr size_t kMaxHandshakes = 128;

// Sets what every tcp stream of ours has: no delay, keep-alive, a limit for silence; within one
// host a short queue. The socket is connected.
void tune_tcp(int socket, double peer_timeout_s);

// Whether nothing may be said on this connected socket before TLS. Both ends find the same, unless
// something between them changes addresses.
bool must_encrypt(TlsUse use, int socket);

// Whether a plain connection goes on to another host all the same, by a tunnel or a proxy, and can
// be encrypted. The proofs cover what both Hellos say of it.
bool leaves_host(TlsUse use, const Secret& secret, const Hello& me, const Hello& other);

// A socket that listens at this address. Throws kInvalid or kUnavailable.
Descriptor listen_at(const std::string& host, uint16_t port);
// Another descriptor of a TCP socket that listens already, made non-blocking; the first one stays
// the caller's. Throws kInvalid, kBusy.
Descriptor listen_on(int socket);

// A stream that both sides trust, and what will go over it.
struct Connection {
  Link link;
  uint32_t transport = kTcpBit;
  std::shared_ptr<DescriptorSocket> descriptors;  // shm
  Hello remote;
  std::string address;  // host:port where the other side listens
  std::string reason;   // why this path
};

class Listener : public Handler, public std::enable_shared_from_this<Listener> {
 public:
  struct Options {
    Hello me;
    Secret secret;
    TlsUse tls = TlsUse::kAuto;
    double handshake_timeout_s = 10;
    double peer_timeout_s = 10;
    // Given how many were promised a place and have not taken it.
    std::function<Status(size_t promised)> room_for_peer;
    std::function<void(Connection)> on_arrival;
  };

  Listener(std::shared_ptr<Progress> progress, Descriptor listening);
  uint16_t port() const { return port_; }
  // Others than processes of this host may come.
  bool outside() const;
  // Another descriptor of its socket, which is the caller's; -1 once it is closed. Driving thread.
  // Throws kBusy.
  int duplicate() const;

  void start(Options options);
  void close();  // driving thread
  void on_ready(uint32_t events) override;

 private:
  class Stranger;
  friend class Stranger;

  void keep_spare();
  void refuse_one();
  void make_room();
  void forget(Stranger& stranger);
  void time_out();
  ServerHandshake::Context context(std::weak_ptr<Stranger> stranger);

  std::shared_ptr<Progress> progress_;
  Options options_;
  uint16_t port_ = 0;
  Descriptor tcp_;
  Descriptor spare_;  // given up for who comes when the process has no descriptor left
  // Driving thread only.
  bool closed_ = false, timing_ = false;
  size_t proven_ = 0;                               // strangers that have proved the secret
  std::list<std::shared_ptr<Stranger>> strangers_;  // oldest first
};

}  // namespace tensorwire
