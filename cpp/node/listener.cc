#include "node/listener.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>
#include <span>

#include "base/blocking.h"
#include "base/fork.h"
#include "wire/resolve.h"

namespace tensorwire {
namespace {

// Connections that nobody has accepted yet; the kernel cuts it (net.core.somaxconn).
constexpr int kBacklog = 4096;

// Callers that want another limit, or heed signals, resolve the name themselves.
constexpr double kResolveS = 10;

// With so many jobs that somebody holds up, nobody gets a chance to hold up another one. Each holds
// a descriptor; the others are for honest peers.
size_t most_stuck() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  return std::min<rlim_t>(limit.rlim_cur / 4, 1024);
}

// "127.0.0.1" or "[::1]" of a connected socket's other end.
std::string remote_host(int socket) {
  SocketAddress address = SocketAddress::of(socket, true);
  if (address.size == 0) return "127.0.0.1";
  std::string host = address.text();
  if (address.storage.ss_family == AF_INET6) host.append("]").insert(host.begin(), '[');
  return host;
}

}  // namespace

Descriptor listen_at(const std::string& host, uint16_t port) {
  Resolved found = resolve(host, port, Deadline::after(kResolveS), nullptr);
  if (found.addresses.empty()) {
    throw Error(Code::kInvalid, "cannot listen at '" + host + "': " + found.failure);
  }
  const SocketAddress& address = found.addresses.front();
  Descriptor fd(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw Error(Code::kBusy, system_message("socket", errno));
  int one = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (::bind(fd.get(), address.get(), address.size) != 0 || ::listen(fd.get(), kBacklog) != 0) {
    throw Error(Code::kUnavailable,
                system_message("cannot listen at " + host + ":" + std::to_string(port), errno));
  }
  return fd;
}

Descriptor listen_on(int socket) {
  auto option = [&](int name) {
    int value = -1;
    socklen_t size = sizeof value;
    return ::getsockopt(socket, SOL_SOCKET, name, &value, &size) == 0 ? value : -1;
  };
  int domain = option(SO_DOMAIN);
  if (option(SO_ACCEPTCONN) != 1 || option(SO_PROTOCOL) != IPPROTO_TCP ||
      (domain != AF_INET && domain != AF_INET6)) {
    throw Error(Code::kInvalid,
                "descriptor " + std::to_string(socket) + " is no TCP socket that listens");
  }
  Descriptor own(::fcntl(socket, F_DUPFD_CLOEXEC, 0));
  int flags = own ? ::fcntl(own.get(), F_GETFL) : -1;
  if (flags < 0 || ::fcntl(own.get(), F_SETFL, flags | O_NONBLOCK) != 0) {
    throw Error(Code::kBusy, system_message("cannot take over a listening socket", errno));
  }
  return own;
}

// This option of Linux 6.15 is younger than many headers.
#ifndef TCP_RTO_MAX_MS
#define TCP_RTO_MAX_MS 44
#endif

namespace {

// In the kernel small frames cannot overtake any more. A full chunk fits.
constexpr int kMaxUnsentBytes = 1280 << 10;

// Between two processes of one host whatever is sent is at once in the receiver's queue, and with a
// short one the pages that it is copied through are still in the cache when they are used again:
// both ways at once that is a third faster. The kernel doubles it. A network needs longer queues,
// and how long the kernel finds out.
constexpr int kSameHostSendBytes = 512 << 10;

// What SO_SNDBUF is cut to (net.core.wmem_max); 0 if that is not known. Shorter than wanted is
// worse than what the kernel chooses.
int largest_send_queue() {
  int bytes = 0;
  std::ifstream("/proc/sys/net/core/wmem_max") >> bytes;
  return bytes;
}

}  // namespace

// An idle link is asked about every `period`, a fifth of the timeout, and data or a question for
// room is sent again as often, where the kernel can be told. Silence decides: it reads
// the timeout back as their product.
void tune_tcp(int socket, double peer_timeout_s) {
  int timeout = static_cast<int>(std::clamp(peer_timeout_s, 3.0, 86400.0));
  int one = 1, period = std::max(1, timeout / 5), probes = timeout / period;
  int again_ms = std::min(period, 120) * 1000;
  int unsent = kMaxUnsentBytes;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  ::setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &period, sizeof period);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &period, sizeof period);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  ::setsockopt(socket, IPPROTO_TCP, TCP_RTO_MAX_MS, &again_ms, sizeof again_ms);
  ::setsockopt(socket, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof unsent);
  if (both_ends_here(socket) && fork::known<largest_send_queue>() >= kSameHostSendBytes) {
    int queue = kSameHostSendBytes;
    ::setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &queue, sizeof queue);
  }
  // Not TCP_USER_TIMEOUT: it also ends a connection whose other side answers but has no room, such
  // as a process that is stopped.
}

bool must_encrypt(TlsUse use, int socket) {
  return use == TlsUse::kOn || (use == TlsUse::kAuto && !both_ends_here(socket));
}

bool leaves_host(TlsUse use, const Secret& secret, const Hello& me, const Hello& other) {
  return use == TlsUse::kAuto && !secret.empty() && me.host != other.host;
}

// A connection in the handshake.
class Listener::Stranger : public Handler, public std::enable_shared_from_this<Stranger> {
 public:
  Stranger(Listener& listener, Descriptor socket)
      : listener_(listener.shared_from_this()),
        progress_(listener.progress_),
        link_(std::move(socket)),
        host_(remote_host(link_.get())) {}

  // Most have sent their Hello when they are accepted: it is read at once.
  void start(Clock::time_point deadline) {
    deadline_ = deadline;
    handshake_.emplace(listener_.lock()->context(weak_from_this()));
    progress_->watch(link_.get(), EPOLLIN, shared_from_this());
    on_ready(EPOLLIN);
  }
  Clock::time_point deadline() const { return deadline_; }

  void on_ready(uint32_t) override {
    auto keep = shared_from_this();
    auto listener = listener_.lock();
    std::array<uint8_t, kHelloBytes> bytes;
    while (listener && link_) {
      if (!opened_ && !open(listener->options_)) return;
      iovec part{bytes.data(), std::min(bytes.size(), handshake_->wanted())};
      ssize_t size = link_.receive({&part, 1});
      if (size < 0 && errno == EINTR) continue;
      if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
      if (size <= 0) return end();
      std::vector<uint8_t> reply;
      auto state = handshake_->feed({bytes.data(), static_cast<size_t>(size)}, reply);
      if (state == ServerHandshake::State::kMore && tunnelled(listener->options_)) {
        refuse(HelloKind::kEncrypts);
        return;
      }
      if (!reply.empty() && !answer(reply)) return end();
      if (state == ServerHandshake::State::kFailed) return end();
      if (state == ServerHandshake::State::kDone) return arrive(*listener);
    }
  }

  void end() {
    if (!link_) return;
    progress_->unwatch(link_.get());
    link_.reset();
    descriptors_.reset();
    if (auto listener = listener_.lock()) listener->forget(*this);
  }

  // Ends it with the advice to come again, unless it is in the middle of TLS.
  void turn_away() {
    if (opened_ || !link_.encrypted()) answer(Hello::refusal(HelloKind::kBusy).encode());
    end();
  }

  const ServerHandshake& handshake() const { return *handshake_; }
  // It has begun as a peer would.
  bool greeted() const {
    return handshake_->greeted() || (link_.encrypted() && link_.tls()->answered());
  }

  Meeting meet(uint64_t name) {
    // Members can pass descriptors that take long to close, each of which holds a thread.
    if (stuck_jobs() >= most_stuck()) return {Code::kUnavailable, 0};
    try {
      descriptors_ = DescriptorSocket::answer(name);
      return {Code::kOk, descriptors_->name()};
    } catch (const Error& error) {
      return {error.code(), 0};
    }
  }

 private:
  // Its first bytes say whether it encrypts. True once that is agreed, and TLS, if any, is there.
  bool open(const Options& options) {
    if (!link_.encrypted()) {
      auto first = link_.first();
      if (first == Link::First::kNothing) return false;
      bool plain = first == Link::First::kPlain;
      if (first == Link::First::kEnd) return refuse();
      if (plain && must_encrypt(options.tls, link_.get())) return refuse(HelloKind::kEncrypts);
      if (plain) return opened_ = true;
      if (options.tls == TlsUse::kOff || options.secret.empty()) return refuse(HelloKind::kPlain);
      try {
        link_.encrypt(Tls::Side::kServer, options.secret);
      } catch (const Error&) {
        return refuse(HelloKind::kPlain);
      }
    }
    auto step = link_.tls()->handshake();
    if (step == Tls::Step::kFailed || link_.unsent()) end();
    return opened_ = link_ && step == Tls::Step::kDone;
  }

  bool refuse(std::optional<HelloKind> kind = {}) {
    link_.skip();
    if (kind) answer(Hello::refusal(*kind).encode());
    end();
    return false;
  }

  // Its Hello is there, came in the clear, and came from another host.
  bool tunnelled(const Options& options) const {
    return handshake_->greeted() && !link_.encrypted() &&
           leaves_host(options.tls, options.secret, options.me, handshake_->client());
  }

  // A few hundred bytes always fit an empty socket; whoever does not read is not served.
  bool answer(std::span<const uint8_t> bytes) {
    iovec part{const_cast<uint8_t*>(bytes.data()), bytes.size()};
    return link_.send({&part, 1}) == static_cast<ssize_t>(bytes.size()) && !link_.unsent();
  }

  void arrive(Listener& listener) {
    progress_->unwatch(link_.get());
    const Hello& client = handshake_->client();
    Connection made{.link = std::move(link_),
                    .transport = handshake_->chosen(),
                    .descriptors = std::move(descriptors_),
                    .remote = client,
                    .address = host_ + ":" + std::to_string(client.port),
                    .reason = "the peer connected this way"};
    listener.forget(*this);
    if (!listener.options_.room_for_peer(0).ok())
      return;  // this Node connected elsewhere meanwhile
    listener.options_.on_arrival(std::move(made));
  }

  std::weak_ptr<Listener> listener_;
  std::shared_ptr<Progress> progress_;
  Link link_;
  bool opened_ = false;
  std::string host_;
  Clock::time_point deadline_;
  std::optional<ServerHandshake> handshake_;
  std::shared_ptr<DescriptorSocket> descriptors_;
};

Listener::Listener(std::shared_ptr<Progress> progress, Descriptor listening)
    : progress_(std::move(progress)), tcp_(std::move(listening)) {
  port_ = SocketAddress::of(tcp_.get()).port();
}

bool Listener::outside() const { return !SocketAddress::of(tcp_.get()).loopback(); }

void Listener::start(Options options) {
  options_ = std::move(options);
  keep_spare();
  progress_->watch(tcp_.get(), EPOLLIN, shared_from_this());
}

int Listener::duplicate() const {
  if (!tcp_) return -1;
  int made = ::fcntl(tcp_.get(), F_DUPFD_CLOEXEC, 0);
  if (made < 0) throw Error(Code::kBusy, system_message("cannot duplicate a socket", errno));
  return made;
}

ServerHandshake::Context Listener::context(std::weak_ptr<Stranger> stranger) {
  ServerHandshake::Context context;
  context.me = options_.me;
  context.secret = options_.secret;
  context.admit = [weak = weak_from_this()]() -> Status {
    auto self = weak.lock();
    if (!self || self->closed_) return {Code::kClosed, "this Node is closing"};
    Status status = self->options_.room_for_peer(self->proven_);
    if (status.ok()) ++self->proven_;
    return status;
  };
  context.meet = [stranger](uint64_t name) -> Meeting {
    auto self = stranger.lock();
    return self ? self->meet(name) : Meeting{Code::kClosed, 0};
  };
  return context;
}

// The listening socket is ready.
void Listener::on_ready(uint32_t) {
  for (int i = 0; i < 16 && !closed_; ++i) {
    Descriptor socket(::accept4(tcp_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      bool out = errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS;
      // The kernel looks for a descriptor first, and only then whether anybody is at the door.
      pollfd queue{tcp_.get(), POLLIN, 0};
      if (out && ::poll(&queue, 1, 0) > 0) {
        // Out of descriptors: close the door for a moment instead of turning round it.
        make_room();
        refuse_one();
        progress_->change(tcp_.get(), 0);
        progress_->after(0.1, [weak = weak_from_this()] {
          auto self = weak.lock();
          if (self && !self->closed_) self->progress_->change(self->tcp_.get(), EPOLLIN);
        });
      }
      return;
    }
    tune_tcp(socket.get(), options_.peer_timeout_s);
    if (strangers_.size() - proven_ >= kMaxHandshakes) make_room();
    auto stranger = std::make_shared<Stranger>(*this, std::move(socket));
    strangers_.push_back(stranger);
    try {
      stranger->start(Clock::now() +
                      std::chrono::duration_cast<Clock::duration>(
                          std::chrono::duration<double>(options_.handshake_timeout_s)));
    } catch (const Error&) {
      stranger->end();  // no room in the kernel's tables
    }
    if (!timing_) time_out();
  }
}

void Listener::keep_spare() {
  if (!spare_) spare_ = Descriptor(::fcntl(tcp_.get(), F_DUPFD_CLOEXEC, 0));
}

// The process has no descriptor left: whoever waits longest at the door is told so.
void Listener::refuse_one() {
  spare_.reset();
  if (Descriptor socket{::accept4(tcp_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)}) {
    auto bytes = Hello::refusal(HelloKind::kBusy).encode();
    (void)!::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  keep_spare();
}

void Listener::make_room() {
  std::shared_ptr<Stranger> oldest;
  for (const auto& stranger : strangers_) {
    if (stranger->handshake().proven()) continue;
    if (!oldest) oldest = stranger;
    if (stranger->greeted()) continue;
    oldest = stranger;
    break;
  }
  if (oldest) oldest->turn_away();
}

// One timer for all: strangers have equal patience, so the oldest is the first to go.
void Listener::time_out() {
  auto now = Clock::now();
  while (!strangers_.empty() && strangers_.front()->deadline() <= now) {
    std::shared_ptr<Stranger>(strangers_.front())->end();
  }
  timing_ = !strangers_.empty() && !closed_;
  if (!timing_) return;
  std::chrono::duration<double> left = strangers_.front()->deadline() - now;
  progress_->after(left.count() + 0.01, [weak = weak_from_this()] {
    if (auto self = weak.lock()) self->time_out();
  });
}

void Listener::forget(Stranger& stranger) {
  if (stranger.handshake().proven()) --proven_;
  strangers_.remove_if([&](const auto& other) { return other.get() == &stranger; });
}

void Listener::close() {
  if (closed_) return;
  closed_ = true;
  progress_->unwatch(tcp_.get());
  tcp_.reset();
  spare_.reset();
  while (!strangers_.empty()) std::shared_ptr<Stranger>(strangers_.front())->end();
}

}  // namespace tensorwire
