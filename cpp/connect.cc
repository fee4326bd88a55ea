#include "connect.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

#include "error.h"
#include "listener.h"
#include "resolve.h"

namespace tensorwire {
namespace {

// How long a process that dies may hang on to its streams after its unix socket is gone. Waited for
// only where the alternative is to report that there is no way to reach it.
constexpr int kDyingMs = 500;

// One stream in the handshake: blocking reads and writes with a deadline.
class Line {
 public:
  Line(Descriptor socket, std::string where, Deadline deadline, const Interrupted& interrupted)
      : socket_(std::move(socket)),
        where_(std::move(where)),
        deadline_(deadline),
        interrupted_(interrupted) {}

  Descriptor& socket() { return socket_; }
  // The other side ended the stream, or does so within this time.
  bool hangs_up(int patience_ms) const {
    pollfd entry{socket_.get(), POLLRDHUP, 0};
    return ::poll(&entry, 1, patience_ms) > 0;
  }

  void wait(short events) {
    if (wait_ready(socket_.get(), events, deadline_, interrupted_)) return;
    throw Error(Code::kTimeout,
                "no answer from " + where_ + " in time; is a Node running there, and is it awake?");
  }
  void send(const void* data, size_t size) {
    auto* bytes = static_cast<const char*>(data);
    while (size > 0) {
      ssize_t sent = ::send(socket_.get(), bytes, size, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent > 0) {
        bytes += sent, size -= static_cast<size_t>(sent);
      } else if (errno == EAGAIN || errno == EINTR) {
        wait(POLLOUT);
      } else {
        throw Error(Code::kPeerLost, system_message("handshake with " + where_, errno));
      }
    }
  }
  void receive(void* data, size_t size) {
    auto* bytes = static_cast<char*>(data);
    while (size > 0) {
      ssize_t got = ::recv(socket_.get(), bytes, size, MSG_DONTWAIT);
      if (got > 0) {
        bytes += got, size -= static_cast<size_t>(got);
      } else if (got == 0) {
        throw Error(
            Code::kPeerLost,
            where_ +
                " hung up during the handshake; it is not a tensorwire Node, speaks "
                "another version, is closing, is out of descriptors (ulimit -n), or has too "
                "many strangers");
      } else if (errno == EAGAIN || errno == EINTR) {
        wait(POLLIN);
      } else {
        throw Error(Code::kPeerLost, system_message("handshake with " + where_, errno));
      }
    }
  }

 private:
  Descriptor socket_;
  std::string where_;
  Deadline deadline_;
  const Interrupted& interrupted_;
};

Descriptor dial(const sockaddr* address, socklen_t size, const std::string& where,
                Deadline deadline, const Interrupted& interrupted) {
  Descriptor fd(::socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw Error(Code::kBusy, system_message("socket", errno));
  if (::connect(fd.get(), address, size) == 0) return fd;
  if (errno != EINPROGRESS) {
    throw Error(Code::kPeerLost, system_message("cannot reach " + where, errno));
  }
  Line line(std::move(fd), where, deadline, interrupted);
  line.wait(POLLOUT);
  int error = 0;
  socklen_t length = sizeof error;
  ::getsockopt(line.socket().get(), SOL_SOCKET, SO_ERROR, &error, &length);
  if (error != 0) {
    throw Error(Code::kPeerLost, system_message("cannot reach " + where, error) +
                                     (error == ECONNREFUSED ? "; is the Node running?" : ""));
  }
  return std::move(line.socket());
}

Descriptor dial_tcp(const std::string& host, uint16_t port, const std::string& where,
                    Deadline deadline, const Interrupted& interrupted) {
  Resolved found = resolve(host, port, deadline, interrupted);
  if (found.addresses.empty()) {
    throw Error(Code::kPeerLost, "cannot resolve '" + host + "': " + found.failure);
  }
  for (size_t i = 0;; ++i) {
    try {
      const SocketAddress& each = found.addresses[i];
      return dial(each.get(), each.size, where, deadline, interrupted);
    } catch (const Error& error) {
      if (i + 1 == found.addresses.size() || error.code() != Code::kPeerLost) throw;
    }
  }
}

struct Trusted {
  Hello server;
  uint64_t session;
  Digest key;
};

// Everything up to the welcome; both sides have proved the secret afterwards.
Trusted shake_hands(Line& line, Hello me, std::span<const uint8_t> secret,
                    const std::string& where) {
  me.nonce = random_nonce();
  auto mine = me.encode();
  line.send(mine.data(), mine.size());
  std::array<uint8_t, kHelloBytes> theirs;
  line.receive(theirs.data(), theirs.size());
  Hello server;
  try {
    server = Hello::decode(theirs);
  } catch (const Error& error) {
    throw Error(Code::kPeerLost, where + ": " + error.what());
  }
  if (server.kind != HelloKind::kChallenge) {
    throw Error(Code::kPeerLost, where + " answered out of turn");
  }
  Keys keys(secret, mine, theirs);
  std::array<uint8_t, kProofBytes> proof{};
  std::memcpy(proof.data(), keys.client.data(), keys.client.size());
  line.send(proof.data(), proof.size());
  std::array<uint8_t, kWelcomeBytes> answer;
  line.receive(answer.data(), answer.size());
  Welcome welcome = Welcome::decode(answer);
  if (!welcome.status.ok()) {
    std::string advice = welcome.status.code == Code::kPermission
                             ? "; give every process of a job the same secret "
                               "(TENSORWIRE_SECRET_FILE, TENSORWIRE_SECRET or Node(secret=...))"
                             : "";
    throw Error(welcome.status.code,
                where + " refused the connection: " + welcome.status.message + advice);
  }
  if (!same_digest(welcome.proof, keys.server)) {
    throw Error(Code::kPermission, where + " could not prove that it knows the secret");
  }
  return {server, welcome.session, keys.session};
}

}  // namespace

Connection connect_to(const std::string& host, uint16_t port, Hello me, const Secret& secret,
                      uint32_t require, std::string no_rdma, double peer_timeout_s,
                      Deadline deadline, const Interrupted& interrupted) {
  std::string where =
      (host.find(':') == std::string::npos ? host : "[" + host + "]") + ":" + std::to_string(port);
  me.kind = HelloKind::kSession;
  me.has_secret = !secret.empty();
  Line line(dial_tcp(host, port, where, deadline, interrupted), where, deadline, interrupted);
  tune_tcp(line.socket().get(), peer_timeout_s);
  Trusted trusted = shake_hands(line, me, secret, where);

  Connection result;
  result.server = trusted.server;
  result.address = where;
  uint32_t common = me.transports & trusted.server.transports;
  uint32_t wanted = require != 0 ? require : (kShmBit | kRdmaBit | kTcpBit);
  std::string no_shm;
  if (!(common & kShmBit)) {
    no_shm = "one side does not offer shm";
  } else if (me.host != trusted.server.host) {
    no_shm = "the peer is on another host";
  } else if (wanted & kShmBit) {
    bool reached = false;
    try {
      std::string name = unix_name(trusted.server.incarnation);
      sockaddr_un address{};
      address.sun_family = AF_UNIX;
      std::memcpy(address.sun_path + 1, name.data(), name.size());
      auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
      Line second(dial(reinterpret_cast<sockaddr*>(&address), size, where, deadline, interrupted),
                  where, deadline, interrupted);
      reached = true;
      ucred who{};
      socklen_t length = sizeof who;
      ::getsockopt(second.socket().get(), SOL_SOCKET, SO_PEERCRED, &who, &length);
      if (who.uid != ::geteuid()) throw Error(Code::kPermission, "it runs as another user");
      Hello again = me;
      again.kind = HelloKind::kAttach;
      again.session = trusted.session;
      shake_hands(second, again, trusted.key, where);
      result.socket = std::move(second.socket());
      result.transport = kShmBit;
      result.reason = "the peer is on this host";
      return result;
    } catch (const Error& error) {
      // A socket that cannot be reached may be in another network namespace; one that was reached
      // and then hung up is dead.
      bool fatal =
          error.code() == Code::kTimeout || error.code() == Code::kBusy ||
          (error.code() == Code::kPeerLost &&
           (reached || line.hangs_up(common & wanted & (kTcpBit | kRdmaBit) ? 0 : kDyingMs)));
      if (fatal) throw;
      no_shm = "same host, but its shared memory cannot be reached (" + std::string(error.what()) +
               "): another network namespace or user?";
    }
  }
  if (no_rdma.empty() && !(common & kRdmaBit)) {
    // Worth a word only where somebody wanted it.
    if ((me.transports | trusted.server.transports) & kRdmaBit) {
      no_rdma =
          std::string(me.transports & kRdmaBit ? "the peer" : "this Node") + " does not offer rdma";
    }
  }
  bool rdma = (common & wanted & kRdmaBit) && no_rdma.empty();
  if (!rdma && !(common & wanted & kTcpBit)) {
    std::string and_rdma = no_rdma.empty() ? "" : ", " + no_rdma;
    std::string which =
        require == kShmBit   ? "shm is required, but " + no_shm
        : require == kTcpBit ? "tcp is required, but one side does not offer it"
        : require == kRdmaBit
            ? "rdma is required, but " + (no_rdma.empty() ? "one side does not offer it" : no_rdma)
            : "no common transport: " + no_shm + and_rdma + ", and one side does not offer tcp";
    throw Error(Code::kUnavailable, where + ": " + which);
  }
  std::array<uint8_t, kChoiceBytes> choice{};
  result.transport = rdma ? kRdmaBit : kTcpBit;
  std::memcpy(choice.data(), &result.transport, sizeof result.transport);
  line.send(choice.data(), choice.size());
  result.socket = std::move(line.socket());
  if (require != 0) {
    result.reason = std::string(rdma ? "rdma" : "tcp") + " was required";
  } else {
    result.reason = no_shm + (rdma || no_rdma.empty() ? "" : "; " + no_rdma);
  }
  return result;
}

}  // namespace tensorwire
