#include "node/node.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "base/text.h"
#include "base/word.h"

namespace tensorwire {
namespace {

constexpr double kRevokeS = 1;

// Equal for all processes of one booted system, and for no other.
std::array<uint8_t, 16> host_id() {
  char text[64] = {};
  Descriptor fd(::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
  ssize_t size = fd ? ::read(fd.get(), text, sizeof text) : -1;
  Sha256 hash;
  hash.update("tensorwire host", 15);
  if (size > 0) {
    hash.update(text, static_cast<size_t>(size));
  } else {
    auto unique = random_nonce();  // unknown: equal to nobody, so shm is not tried
    hash.update(unique.data(), unique.size());
  }
  Digest digest = hash.finish();
  std::array<uint8_t, 16> result;
  std::copy_n(digest.begin(), result.size(), result.begin());
  return result;
}

}  // namespace

uint32_t transport_bits(const std::vector<std::string>& names) {
  static constexpr std::array<std::pair<std::string_view, uint32_t>, 3> kBits{
      {{"shm", kShmBit}, {"tcp", kTcpBit}, {"rdma", kRdmaBit}}};
  uint32_t bits = 0;
  for (const auto& name : names) {
    auto found = std::ranges::find(kBits, name, [](const auto& bit) { return bit.first; });
    if (found == kBits.end()) {
      throw Error(Code::kInvalid,
                  "unknown transport '" + name + "'; there are 'shm', 'rdma' and 'tcp'");
    }
    bits |= found->second;
  }
  if (bits == 0) throw Error(Code::kInvalid, "a Node needs at least one transport");
  return bits;
}

Node::Node(NodeOptions options)
    : options_(std::move(options)),
      epoch_(fork::epoch()),
      incarnation_(options_.incarnation != 0 ? options_.incarnation : random_id()) {
  fabric_.shareable = (options_.transports & kShmBit) != 0;
  fabric_.progress = std::make_shared<Progress>(fabric_.shareable);
  fabric_.traffic = std::make_shared<Traffic>();
  fabric_.gpu_queue = std::make_shared<GpuQueue>(fabric_.progress);
  fabric_.gpu_traffic = std::make_shared<GpuTraffic>();
  NodePage* page = fabric_.progress->page();
  page->incarnation = incarnation_;
  fabric_.mappings = std::make_shared<Mappings>();
  regions_ = std::make_unique<RegionTable>(page, fabric_.mappings, [this] {
    fabric_.progress->post([this] {
      for (const auto& peer : all_peers()) peer->answer_awaited();
      return false;
    });
  });
  fabric_.regions = regions_.get();
  fabric_.quota_bytes = options_.quota_bytes;
  fabric_.incarnation = incarnation_;
  fabric_.free_region = [this](const std::shared_ptr<Region>& region) { free_here(region); };
}

std::shared_ptr<Node> Node::create(NodeOptions options) {
  if (options.name.size() > kMaxNodeNameBytes) {
    throw Error(Code::kInvalid, "a Node's name has at most " + std::to_string(kMaxNodeNameBytes) +
                                    " bytes in UTF-8, and this one has " +
                                    std::to_string(options.name.size()));
  }
  if (!presentable(options.name)) {
    throw Error(Code::kInvalid, "a Node's name is text without control characters");
  }
  // A forked child must not take apart what other threads of its parent were in the middle of: it
  // leaks its copy.
  options.handshake_timeout_s = std::clamp(options.handshake_timeout_s, 0.01, 86400.0);
  std::shared_ptr<Node> node(new Node(std::move(options)), [](Node* made) {
    if (made->epoch_ == fork::epoch()) delete made;
  });
  node->start();
  return node;
}

// The fabric is driven by the loop from here on; a peer may connect as soon as the doors open.
void Node::start_rdma() {
  bool asked = (options_.transports & kRdmaBit) != 0;
  if (!asked && !options_.try_rdma) return;
  try {
    fabric_.rdma = RdmaFabric::create(fabric_.progress, options_.rdma_device);
    fabric_.progress->run([this] { fabric_.progress->drive(fabric_.rdma); });
    options_.transports |= kRdmaBit;
  } catch (const Error&) {
    if (asked) throw;
  }
}

void Node::start() {
  start_rdma();
  listener_ = std::make_shared<Listener>(
      fabric_.progress, options_.listener < 0 ? listen_at(options_.host, options_.port)
                                              : listen_on(options_.listener));
  port_ = listener_->port();
  if (options_.tls == TlsUse::kOn && options_.secret.empty()) {
    throw Error(Code::kInvalid,
                "TENSORWIRE_TLS=on encrypts with the secret, and this Node has none: pass secret=, "
                "or set TENSORWIRE_SECRET_FILE");
  }
  if (options_.tls == TlsUse::kOn || (options_.tls == TlsUse::kAuto && listener_->outside())) {
    require_tls();
  }
  Listener::Options doors;
  doors.me = hello();
  doors.secret = options_.secret;
  doors.tls = options_.tls;
  doors.handshake_timeout_s = options_.handshake_timeout_s;
  doors.peer_timeout_s = options_.peer_timeout_s;
  doors.room_for_peer = [this](size_t promised) -> Status {
    std::lock_guard lock(mutex_);
    if (peers_.size() + promised < options_.max_peers) return {};
    return {Code::kBusy, "it already has its limit of " + std::to_string(options_.max_peers) +
                             " peers (max_peers)"};
  };
  doors.on_arrival = [this](Connection made) {
    try {
      adopt(std::move(made), true);
    } catch (const Error&) {
      // No descriptors left: the caller sees its connection end.
    }
  };
  listener_->start(std::move(doors));
}

Node::~Node() { close(); }

void Node::check_open() const {
  if (epoch_ != fork::epoch()) {
    throw Error(Code::kClosed, "the Node '" + options_.name +
                                   "' belongs to the process that this one was forked from; create "
                                   "a Node of its own here");
  }
  if (closed_) throw Error(Code::kClosed, "the Node '" + options_.name + "' is closed");
}

Hello Node::hello() const {
  Hello hello;
  hello.transports = options_.transports;
  hello.incarnation = incarnation_;
  hello.host = host_id();
  hello.pid = static_cast<uint32_t>(::getpid());
  hello.port = port_;
  hello.name = options_.name;
  hello.has_secret = !options_.secret.empty();
  return hello;
}

// ---- regions

std::shared_ptr<Region> Node::allocate(uint64_t size, const std::string& name, Access access,
                                       bool mappable, int gpu) {
  check_open();
  return regions_->allocate(size, name, access, fabric_.shareable || mappable, 0, gpu);
}

std::shared_ptr<Region> Node::restore(int memory, const RegionFacts& facts) {
  check_open();
  if (!fabric_.shareable) {
    throw Error(
        Code::kUnavailable,
        "a region is restored over shared memory, and this Node's transports leave out shm");
  }
  return regions_->restore(memory, facts);
}

std::shared_ptr<Region> Node::lend(int memory, uint64_t size, const std::string& name) {
  check_open();
  if (fabric_.rdma) {
    throw Error(Code::kUnavailable,
                "a NIC registers memory for writing: leave rdma out of the transports of a Node "
                "that lends memory for reading");
  }
  return regions_->lend(memory, size, name);
}

std::shared_ptr<Region> Node::region(const std::string& name) const {
  check_open();
  auto region = regions_->find(name);
  if (!region || region->lent) {
    throw Error(Code::kNotFound, "this Node has no region named '" + name + "'");
  }
  return region;
}

void Node::free(const std::shared_ptr<Region>& region) {
  check_open();
  fabric_.progress->run([&] { free_here(region); });
  if (!fabric_.rdma) return;
  // Peers on rdma say when nothing of theirs is under way; one that is not awake is not waited for
  // long: its bytes land in memory that nobody else gets.
  fabric_.progress->wait(
      [&] {
        for (const auto& peer : all_peers()) {
          if (peer->revoking(region->generation)) return false;
        }
        return true;
      },
      Deadline::after(kRevokeS));
}

void Node::free_here(const std::shared_ptr<Region>& region) {
  regions_->free(*region);
  for (const auto& peer : all_peers()) peer->revoke(*region);
}

// ---- peers

Status Node::full() const {
  return {Code::kBusy, "this Node already has its limit of " + std::to_string(options_.max_peers) +
                           " peers (max_peers)"};
}

PeerPtr Node::adopt(Connection made, bool accepted) {
  PeerPtr peer;
  {
    std::lock_guard lock(mutex_);
    if (closed_) throw Error(Code::kClosed, "the Node is closed");
    if (!accepted && peers_.size() >= options_.max_peers) throw Error(full());  // others connected
    uint64_t id = next_peer_++;
    peer = std::make_shared<Peer>(fabric_, id, std::move(made.remote), std::move(made.address),
                                  made.transport, std::move(made.reason));
    peers_[id] = peer;
  }
  auto on_ready = [this, accepted](Peer& ready) {
    if (!accepted) return;
    std::lock_guard lock(mutex_);
    accepted_.push_back(ready.shared_from_this());
    accepted_count_ = accepted_.size();
    fabric_.progress->changed();
  };
  try {
    peer->start(std::move(made.link), std::move(made.descriptors), accepted, on_ready,
                [this](Peer& lost) { forget(lost); });
  } catch (const Error& error) {
    peer->lose(error.status());
    throw;
  }
  return peer;
}

void Node::forget(Peer& peer) {
  PeerPtr gone;  // destroyed without the lock
  std::lock_guard lock(mutex_);
  auto found = peers_.find(peer.id());
  if (found == peers_.end()) return;
  gone = std::move(found->second);
  peers_.erase(found);
  std::erase(accepted_, gone);
  accepted_count_ = accepted_.size();
}

PeerPtr Node::connect(const std::string& host, uint16_t port, Deadline deadline,
                      const std::string& require, const Interrupted& interrupted) {
  check_open();
  uint32_t bit = require.empty() ? 0 : transport_bits({require});
  if (bit != 0 && (options_.transports & bit) == 0) {
    throw Error(Code::kUnavailable,
                "'" + require + "' is required, but this Node was made without it");
  }
  {
    std::lock_guard lock(mutex_);
    if (peers_.size() >= options_.max_peers) throw Error(full());
  }
  // Both sides offer shm or rdma, but they are of different users, or their NICs do not reach each
  // other: another path may do.
  Refused refused;
  for (;;) {
    uint32_t transport = 0;
    try {
      return connect_once(host, port, deadline, bit, refused, interrupted, transport);
    } catch (const Error& error) {
      if (bit != 0 || error.code() != Code::kUnavailable) throw;
      if (transport == kShmBit && refused.shm.empty()) {
        refused.shm =
            "same host, but its shared memory is out of reach: " + std::string(error.what());
      } else if (transport == kRdmaBit && (options_.transports & kTcpBit)) {
        refused.rdma = "rdma failed: " + std::string(error.what());
      } else {
        throw;
      }
    }
  }
}

PeerPtr Node::connect_once(const std::string& host, uint16_t port, Deadline deadline,
                           uint32_t require, const Refused& refused, const Interrupted& interrupted,
                           uint32_t& transport) {
  auto closed_or_interrupted = [&] {
    check_open();
    if (interrupted) interrupted();
  };
  Connection made = connect_to(host, port, hello(), options_.secret, options_.tls, require, refused,
                               options_.peer_timeout_s, deadline, closed_or_interrupted);
  transport = made.transport;
  PeerPtr peer;
  // In the driving thread, like every arrival: frames may come at once.
  Status failure{Code::kClosed, "the Node '" + options_.name + "' is closed"};
  fabric_.progress->run([&] {
    try {
      peer = adopt(std::move(made), false);
    } catch (const Error& error) {
      failure = error.status();
    }
  });
  if (!peer) throw Error(failure);
  for (;;) {
    Progress::set_interruptible(true);
    bool over = fabric_.progress->wait([&] { return peer->ready() || peer->broken(); },
                                       deadline.at_most(kLookForSignalsS));
    Progress::set_interruptible(false);
    if (over) break;
    try {
      if (interrupted) interrupted();
    } catch (...) {
      fabric_.progress->run([&] {
        peer->lose({Code::kClosed, "connecting was interrupted"}, "connecting was interrupted");
      });
      throw;
    }
    if (!deadline.passed()) continue;
    fabric_.progress->run([&] { peer->lose({Code::kTimeout, "it did not finish connecting"}); });
    throw Error(Code::kTimeout, peer->lost_status().message);
  }
  if (peer->broken()) throw Error(peer->lost_status());
  return peer;
}

int Node::duplicate_listener() const {
  check_open();
  int made = -1;
  Status failure;
  fabric_.progress->run([&] {
    try {
      made = listener_->duplicate();
    } catch (const Error& error) {
      failure = error.status();
    }
  });
  if (!failure.ok()) throw Error(failure);
  if (made < 0) throw Error(Code::kClosed, "the Node '" + options_.name + "' is closed");
  return made;
}

PeerPtr Node::accept(Deadline deadline) {
  check_open();
  for (;;) {
    bool ready = fabric_.progress->wait(
        [this] { return accepted_count_.load() > 0 || closed_.load(); }, deadline);
    check_open();
    if (!ready) return nullptr;
    std::lock_guard lock(mutex_);
    if (accepted_.empty()) continue;
    PeerPtr peer = std::move(accepted_.front());
    accepted_.pop_front();
    accepted_count_ = accepted_.size();
    if (peer->broken()) continue;  // just now, and about to be forgotten
    return peer;
  }
}

void Node::stop_listening() {
  check_open();
  fabric_.progress->run([this] { listener_->close(); });
}

std::vector<PeerPtr> Node::peers() const {
  if (epoch_ != fork::epoch()) check_open();
  auto result = all_peers();
  std::erase_if(result, [](const PeerPtr& peer) { return !peer->ready() || peer->broken(); });
  return result;
}

std::vector<PeerPtr> Node::all_peers() const {
  std::lock_guard lock(mutex_);
  std::vector<PeerPtr> result;
  for (const auto& [id, peer] : peers_) result.push_back(peer);
  return result;
}

bool Node::wait_word(const Region& region, uint64_t offset, uint64_t value, Deadline deadline,
                     const PeerPtr& watch, Pace* pace) {
  check_open();
  check_word(region, offset);
  auto word = word_at(region.data() + offset);
  const std::atomic<bool>* closed = &closed_;
  const Peer* peer = watch.get();
  fabric_.progress->wait(
      [&] {
        return word.load(std::memory_order_acquire) >= value ||
               closed->load(std::memory_order_relaxed) ||
               region.freed.load(std::memory_order_relaxed) || (peer != nullptr && peer->lost());
      },
      deadline, pace);
  if (word.load(std::memory_order_acquire) >= value) return true;
  check_open();
  // If another connection has succeeded a lost one meanwhile, nothing is wrong: the caller goes on.
  Status lost = peer == nullptr ? Status{} : peer->lost_status();
  if (!lost.ok()) throw Error(lost);
  if (region.freed) {
    throw Error(Code::kStaleHandle, "the region '" + region.name +
                                        "' was freed (by the peer that allocated it, if it went "
                                        "away); its words will not change any more");
  }
  return false;
}

void Node::raise_word(Region& region, uint64_t offset, uint64_t value) {
  check_open();
  check_word(region, offset);
  store_max(region.data() + offset, value);
  fabric_.progress->notify();
}

void Node::close() {
  if (epoch_ != fork::epoch() || closed_.exchange(true)) return;
  fabric_.progress->run([this] {
    if (listener_) listener_->close();
    for (const auto& peer : all_peers()) {
      peer->lose({Code::kClosed, "this Node was closed"}, kClosedByUser);
    }
    if (fabric_.rdma) {
      fabric_.progress->undrive(*fabric_.rdma);
      fabric_.rdma->stop();
    }
    fabric_.gpu_queue->stop();
  });
  fabric_.progress->stop();
  // Nobody drives any more. Objects of the user may stay; memory and descriptors do not, except
  // memory that a view shows.
  regions_->close();
  fabric_.mappings->retire_all();
}

}  // namespace tensorwire
