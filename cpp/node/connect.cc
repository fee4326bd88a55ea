#include "node/connect.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "base/error.h"
#include "wire/resolve.h"

namespace tensorwire {
namespace {

// Whoever is turned away comes again after a pause between these; a connection that ends before the
// other side has said a word may be no Node at all, and is tried so often.
constexpr double kLeastPauseS = 0.005, kMostPauseS = 0.08;
constexpr int kSilentTries = 6;

// The other side is a Node and has no room for another handshake just now, or seems so.
struct TurnedAway {
  bool silent = false;  // it ended the connection without a word
  Error error;
};

// What seemed to stay on this host does not, or the other side wants TLS for it.
struct Encrypts {};

// One link in the handshake: blocking reads and writes with a deadline.
class Line {
 public:
  Line(Link link, std::string where, Deadline deadline, const Interrupted& interrupted)
      : link_(std::move(link)),
        where_(std::move(where)),
        deadline_(deadline),
        interrupted_(interrupted) {}

  Link& link() { return link_; }
  const std::string& where() const { return where_; }
  void wait(short events) {
    if (wait_ready(link_.get(), events, deadline_, interrupted_)) return;
    throw Error(Code::kTimeout,
                "no answer from " + where_ + " in time; is a Node running there, and is it awake?");
  }
  void send(std::span<const uint8_t> bytes) {
    move(bytes, POLLOUT, [this](std::span<const uint8_t> left) {
      iovec part{const_cast<uint8_t*>(left.data()), left.size()};
      return link_.send({&part, 1});
    });
    while (link_.unsent()) {
      if (link_.send({}) < 0) again(POLLOUT);
    }
  }
  void receive(std::span<uint8_t> bytes) {
    move(bytes, POLLIN, [this](std::span<uint8_t> left) {
      iovec part{left.data(), left.size()};
      return link_.receive({&part, 1});
    });
  }

 private:
  // Until the call has moved all bytes.
  template <class Bytes, class Call>
  void move(Bytes bytes, short events, const Call& call) {
    while (!bytes.empty()) {
      ssize_t moved = call(bytes);
      if (moved > 0) {
        bytes = bytes.subspan(static_cast<size_t>(moved));
      } else if (moved == 0) {
        throw Error(Code::kPeerLost,
                    where_ +
                        " hung up during the handshake; it is not a tensorwire Node, speaks "
                        "another version, is closing, or is out of descriptors (ulimit -n)");
      } else {
        again(events);
      }
    }
  }
  // Waits for a call that could not go on, or throws what it failed of.
  void again(short events) {
    if (errno == EAGAIN || errno == EINTR) return wait(events);
    std::string call = "handshake with " + where_;
    throw Error(Code::kPeerLost, link_.encrypted() ? call + ": " + link_.failure("TLS", errno)
                                                   : system_message(call, errno));
  }

  Link link_;
  std::string where_;
  Deadline deadline_;
  const Interrupted& interrupted_;
};

Link dial(const sockaddr* address, socklen_t size, const std::string& where, Deadline deadline,
          const Interrupted& interrupted) {
  Descriptor fd(::socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw Error(Code::kBusy, system_message("socket", errno));
  if (::connect(fd.get(), address, size) == 0) return Link(std::move(fd));
  if (errno != EINPROGRESS) {
    throw Error(Code::kPeerLost, system_message("cannot reach " + where, errno));
  }
  Line line(std::move(fd), where, deadline, interrupted);
  line.wait(POLLOUT);
  int error = 0;
  socklen_t length = sizeof error;
  ::getsockopt(line.link().get(), SOL_SOCKET, SO_ERROR, &error, &length);
  if (error != 0) {
    throw Error(Code::kPeerLost, system_message("cannot reach " + where, error) +
                                     (error == ECONNREFUSED ? "; is the Node running?" : ""));
  }
  return std::move(line.link());
}

Link dial_tcp(const std::string& host, uint16_t port, const std::string& where, Deadline deadline,
              const Interrupted& interrupted) {
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

// Receives a message of the handshake. greeted: the other side has proved to be a Node before.
template <size_t N>
std::array<uint8_t, N> receive_message(Line& line, bool greeted) {
  std::array<uint8_t, N> bytes;
  try {
    line.receive(bytes);
  } catch (const Error& error) {
    if (error.code() != Code::kPeerLost) throw;
    throw TurnedAway{!greeted, error};
  }
  return bytes;
}

const char* const kSetAlike =
    "; TENSORWIRE_TLS (off, on or auto) decides it: set the same for every process of a job";

// A Hello is as long as a Welcome, so that it can stand for either.
void check_refusal(std::span<const uint8_t, kHelloBytes> bytes, const std::string& where) {
  Hello hello;
  try {
    hello = Hello::decode(bytes);
  } catch (const Error&) {
    return;  // whoever reads it says what is wrong
  }
  if (hello.kind == HelloKind::kEncrypts) throw Encrypts{};
  if (hello.kind == HelloKind::kPlain) {
    throw Error(Code::kPermission, where +
                                       " does not encrypt this connection, which this Node "
                                       "does not use without" +
                                       kSetAlike);
  }
  if (hello.kind != HelloKind::kBusy) return;
  throw TurnedAway{
      false,
      Error(Code::kBusy, where + " has no room for another handshake now: too many are under "
                                 "way, or it has no descriptors left (ulimit -n there)")};
}

const char* const kSameSecret =
    "; give every process of a job the same secret (TENSORWIRE_SECRET_FILE, TENSORWIRE_SECRET or "
    "Node(secret=...))";

// Both sides have proved the secret afterwards, and nobody between them reads what follows.
void begin_tls(Line& line, const Secret& secret) {
  Link& link = line.link();
  const std::string& where = line.where();
  if (secret.empty()) {
    throw Error(Code::kPermission,
                where +
                    " is on another host, and a connection is encrypted with the secret, of "
                    "which this Node has none" +
                    kSameSecret);
  }
  Tls& tls = link.encrypt(Tls::Side::kClient, secret);
  for (bool answered = false;;) {
    auto step = tls.handshake();
    if (step == Tls::Step::kDone) return;
    if (step == Tls::Step::kFailed) {
      Status status = tls.failure();
      Error error(status.code, where + ": " + status.message);
      if (tls.cut()) throw TurnedAway{!answered, error};
      if (status.code != Code::kPermission) throw error;
      throw Error(status.code, where + " refused the connection: " + status.message + kSameSecret);
    }
    line.wait(link.unsent() ? POLLIN | POLLOUT : POLLIN);
    auto first = answered ? Link::First::kNothing : link.first();
    answered = answered || first == Link::First::kTls;
    if (first == Link::First::kTls || first == Link::First::kNothing) continue;
    link.give_up_tls();
    auto refusal = receive_message<kHelloBytes>(line, false);
    check_refusal(refusal, where);
    throw Error(Code::kPeerLost, where + " answered without TLS" + kSetAlike);
  }
}

// Everything up to the welcome; both sides have proved the secret afterwards.
Hello shake_hands(Line& line, Hello me, const Secret& secret, TlsUse tls,
                  const std::string& where) {
  static_assert(kHelloBytes == kWelcomeBytes);
  me.nonce = random_nonce();
  auto mine = me.encode();
  line.send(mine);
  auto theirs = receive_message<kHelloBytes>(line, line.link().encrypted());
  check_refusal(theirs, where);
  Hello server;
  try {
    server = Hello::decode(theirs);
  } catch (const Error& error) {
    throw Error(Code::kPeerLost, where + ": " + error.what());
  }
  if (server.kind != HelloKind::kChallenge) {
    throw Error(Code::kPeerLost, where + " answered out of turn");
  }
  if (!line.link().encrypted() && leaves_host(tls, secret, me, server)) throw Encrypts{};
  Keys keys(secret, mine, theirs);
  std::array<uint8_t, kProofBytes> proof{};
  std::memcpy(proof.data(), keys.client.data(), keys.client.size());
  try {
    line.send(proof);
  } catch (const Error& error) {
    if (error.code() != Code::kPeerLost) throw;
    throw TurnedAway{false, error};
  }
  auto answer = receive_message<kWelcomeBytes>(line, true);
  check_refusal(answer, where);
  Welcome welcome = Welcome::decode(answer);
  if (!welcome.status.ok()) {
    std::string advice = welcome.status.code == Code::kPermission ? kSameSecret : "";
    throw Error(welcome.status.code,
                where + " refused the connection: " + welcome.status.message + advice);
  }
  if (!same_digest(welcome.proof, keys.server)) {
    throw Error(Code::kPermission, where + " could not prove that it knows the secret");
  }
  return server;
}

// Two sockets for descriptors that have met. Null where they cannot, and why.
std::shared_ptr<DescriptorSocket> meet(Line& line, const std::string& where, std::string& why) {
  auto mine = DescriptorSocket::offer();
  line.send(Choice{kShmBit, mine->name()}.encode());
  std::array<uint8_t, kMeetingBytes> bytes;
  line.receive(bytes);
  Meeting meeting = Meeting::decode(bytes);
  if (meeting.code == Code::kBusy) {
    throw Error(Code::kBusy, where + " has no descriptors left; see ulimit -n there");
  }
  if (meeting.code != Code::kOk) {
    why =
        "same host, but its shared memory cannot be reached: it is in another network namespace, "
        "or its peers have passed too many descriptors that do not close";
    return nullptr;
  }
  try {
    mine->join(meeting.socket);
  } catch (const Error& error) {
    throw Error(Code::kPeerLost, where + " went away during the handshake: " + error.what());
  }
  return mine;
}

Connection connect_once(const std::string& host, uint16_t port, const std::string& where,
                        const Hello& me, const Secret& secret, TlsUse tls, uint32_t require,
                        const Refused& refused, double peer_timeout_s, Deadline deadline,
                        const Interrupted& interrupted) {
  Line line(dial_tcp(host, port, where, deadline, interrupted), where, deadline, interrupted);
  tune_tcp(line.link().get(), peer_timeout_s);
  if (must_encrypt(tls, line.link().get())) begin_tls(line, secret);
  Connection result;
  result.remote = shake_hands(line, me, secret, tls, where);
  result.address = where;
  uint32_t common = me.transports & result.remote.transports;
  uint32_t wanted = require != 0 ? require : (kShmBit | kRdmaBit | kTcpBit);
  std::string no_shm = refused.shm, no_rdma = refused.rdma;
  if (!(common & kShmBit)) {
    no_shm = "one side does not offer shm";
  } else if (me.host != result.remote.host) {
    no_shm = "the peer is on another host";
  } else if (no_shm.empty() && (wanted & kShmBit)) {
    result.descriptors = meet(line, where, no_shm);
    if (result.descriptors) {
      result.link = std::move(line.link());
      result.transport = kShmBit;
      result.reason = "the peer is on this host";
      return result;
    }
  }
  if (no_rdma.empty() && !(common & kRdmaBit)) {
    // Worth a word only where somebody wanted it.
    if ((me.transports | result.remote.transports) & kRdmaBit) {
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
  result.transport = rdma ? kRdmaBit : kTcpBit;
  line.send(Choice{result.transport, 0}.encode());
  result.link = std::move(line.link());
  if (require != 0) {
    result.reason = std::string(rdma ? "rdma" : "tcp") + " was required";
  } else {
    result.reason = no_shm + (rdma || no_rdma.empty() ? "" : "; " + no_rdma);
  }
  return result;
}

// Sleeps, but not beyond the deadline.
void pause(double seconds, Deadline deadline, const std::function<void()>& interrupted) {
  if (!deadline.never())
    seconds = std::min(seconds, 1e-9 * static_cast<double>(deadline.left_ns()));
  if (::poll(nullptr, 0, static_cast<int>(seconds * 1000) + 1) < 0 && interrupted) interrupted();
}

}  // namespace

Connection connect_to(const std::string& host, uint16_t port, Hello me, const Secret& secret,
                      TlsUse tls, uint32_t require, const Refused& refused, double peer_timeout_s,
                      Deadline deadline, const std::function<void()>& interrupted) {
  std::string where =
      (host.find(':') == std::string::npos ? host : "[" + host + "]") + ":" + std::to_string(port);
  me.kind = HelloKind::kClient;
  me.has_secret = !secret.empty();
  int silent = 0;
  std::string told;  // why it was turned away last
  for (double pause_s = kLeastPauseS;; pause_s = std::min(2 * pause_s, kMostPauseS)) {
    try {
      return connect_once(host, port, where, me, secret, tls, require, refused, peer_timeout_s,
                          deadline, interrupted);
    } catch (const Encrypts&) {
      if (tls != TlsUse::kAuto) {
        throw Error(Code::kPermission, where +
                                           " takes encrypted connections only, and this Node "
                                           "does not encrypt this one" +
                                           kSetAlike);
      }
      tls = TlsUse::kOn;  // something between us passes it on, so that it seemed to be here
    } catch (const Error& error) {
      if (error.code() != Code::kTimeout || told.empty()) throw;
      throw Error(Code::kTimeout, told);
    } catch (const TurnedAway& away) {
      if (!away.silent) told = away.error.what();
      if (away.silent && ++silent == kSilentTries) throw away.error;
      if (deadline.passed()) throw Error(Code::kTimeout, away.error.what());
      pause(pause_s, deadline, interrupted);
    }
  }
}

}  // namespace tensorwire
