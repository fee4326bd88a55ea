// The listener: the doors of a Node. Accepts connections on tcp and on an abstract unix socket and
// takes them through the handshake; whoever passes is handed on as a new peer.
//
// Bounded: at most kMaxHandshakes strangers at a time, the oldest makes room; each has a deadline.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>

#include "clock.h"
#include "fork.h"
#include "handshake.h"
#include "progress.h"

namespace tensorwire {

inline constexpr size_t kMaxHandshakes = 128;

// The name of the unix socket of a Node, in the abstract name space (no file is left behind).
std::string unix_name(uint64_t incarnation);
// "127.0.0.1" or "[::1]" of a connected socket's other end.
std::string remote_host(int socket);
// Sets what every tcp stream of ours has: no delay, keep-alive, a limit for silence; within one
// host a short queue. The socket is connected.
void tune_tcp(int socket, double peer_timeout_s);

class Listener : public std::enable_shared_from_this<Listener> {
 public:
  struct Arrival {
    Descriptor socket;
    uint32_t transport = kTcpBit;
    Hello client;
    std::string address;  // host:port where the client itself listens
  };
  struct Options {
    Hello me;
    Secret secret;
    double handshake_timeout_s = 10;
    double peer_timeout_s = 10;
    // Given how many were promised a place and have not taken it.
    std::function<Status(size_t promised)> room_for_peer;
    std::function<void(Arrival)> on_arrival;
  };

  // Binds at once. Throws kInvalid or kUnavailable.
  Listener(std::shared_ptr<Progress> progress, const std::string& host, uint16_t port);
  uint16_t port() const { return port_; }

  void start(Options options);
  void close();  // driving thread

 private:
  class Door;
  class Stranger;
  friend class Door;
  friend class Stranger;

  void accept(int door, bool is_unix);
  void forget(Stranger& stranger);
  void time_out();
  ServerHandshake::Context context(bool attach_only, const std::string& address);

  std::shared_ptr<Progress> progress_;
  Options options_;
  uint16_t port_ = 0;
  Descriptor tcp_, unix_;
  bool closed_ = false, timing_ = false;
  // Driving thread only.
  std::list<std::shared_ptr<Stranger>> strangers_;  // oldest first
  struct OpenSession {
    Session session;
    std::string address;
  };
  std::map<uint64_t, OpenSession> sessions_;
};

}  // namespace tensorwire
