#include "peer.h"

#include <sys/epoll.h>

#include <cerrno>
#include <cstdio>

#include "text.h"

namespace tensorwire {
namespace {

// Of an honest peer there are only the questions of its first round trip.
constexpr size_t kMaxEarlyFrames = 1024;

}  // namespace

const char* Peer::name_of(uint32_t transport_bit) {
  return transport_bit == kShmBit ? "shm" : transport_bit == kRdmaBit ? "rdma" : "tcp";
}

Peer::Peer(Fabric fabric, uint64_t id, Hello remote, std::string address, uint32_t transport,
           std::string reason)
    : fabric_(std::move(fabric)),
      id_(id),
      remote_(std::move(remote)),
      address_(std::move(address)),
      reason_(std::move(reason)),
      transport_(transport),
      epoch_(fork::epoch()),
      service_(*fabric_.regions, fabric_.progress, fabric_.traffic, fabric_.limits,
               fabric_.shareable, id, fabric_.free_region) {}

Peer::~Peer() = default;

void Peer::start(Descriptor socket, std::shared_ptr<DescriptorSocket> descriptors, bool accepting,
                 std::function<void(Peer&)> on_ready, std::function<void(Peer&)> on_lost) {
  on_ready_ = std::move(on_ready);
  on_lost_ = std::move(on_lost);
  accepting_ = accepting;
  // The stream keeps the peer until lose() closes it.
  stream_ = std::make_shared<Stream>(
      fabric_.progress, std::move(socket), *this,
      [this](Status status) { lose(std::move(status)); }, shared_from_this());
  service_.attach(stream_);
  if (transport_ == kShmBit) {
    start_shm(std::move(descriptors));
  } else if (transport_ == kRdmaBit) {
    start_rdma();
  } else {
    tcp_ = std::make_shared<TcpChannel>(fabric_.progress, fabric_.counters, fabric_.traffic,
                                        stream_, next_id_);
    channel_ = tcp_;
    ready_ = true;
  }
  stream_->start();
  if (shm_ && !accepting) {
    offer_memory();
  } else if (rdma_) {
    Header header;
    header.type = FrameType::kAttach;
    header.value = rdma_->offer(accepting);
    std::string where = accepting ? fabric_.rdma->where() : "";
    header.length = where.size();
    stream_->send(header, where);
  }
  if (ready_) on_ready_(*this);
}

std::string Peer::describe() const {
  char incarnation[20];
  std::snprintf(incarnation, sizeof incarnation, "%016llx",
                static_cast<unsigned long long>(remote_.incarnation));
  return "peer '" + remote_.name + "' (" + address_ + ", pid " + std::to_string(remote_.pid) +
         ", incarnation " + incarnation + ")";
}

Status Peer::lost_status() const {
  std::lock_guard lock(mutex_);
  return lost_status_;
}

void Peer::check_alive() const {
  if (epoch_ != fork::epoch()) {
    throw Error(Code::kClosed, "this process is a fork of the one that connected to " + describe() +
                                   "; create a Node of its own here");
  }
}

void Peer::check_region(const RemoteRegion& region) const {
  if (region.incarnation != remote_.incarnation) {
    throw Error(Code::kStaleHandle, "the region belongs to another process than " + describe() +
                                        "; ask this peer for its own");
  }
}

void Peer::check(std::span<const Piece> pieces, bool write) const {
  for (const Piece& piece : pieces) {
    check_region(*piece.remote);
    if (!piece.remote->contains(piece.offset, piece.length)) {
      throw Error(Code::kInvalid, std::to_string(piece.length) + " bytes at offset " +
                                      std::to_string(piece.offset) + " do not fit the region of " +
                                      std::to_string(piece.remote->size) + " bytes");
    }
    if (write && !piece.remote->access.write) {
      throw Error(Code::kPermission, "the region '" + piece.remote->name + "' of " + describe() +
                                         " was granted read-only");
    }
    if (!write && !piece.remote->access.read) {
      throw Error(Code::kPermission, "the region '" + piece.remote->name + "' of " + describe() +
                                         " was granted without read access");
    }
  }
}

void Peer::check_word(const RemoteRegion& region, uint64_t offset) const {
  check_region(region);
  if (offset % sizeof(uint64_t) != 0 || !region.contains(offset, sizeof(uint64_t))) {
    throw Error(Code::kInvalid, "a word is 8 bytes at a multiple of 8 inside the region; offset " +
                                    std::to_string(offset) + " of " + std::to_string(region.size) +
                                    " bytes is not");
  }
  if (!region.access.write) {
    throw Error(Code::kPermission,
                "the region '" + region.name + "' of " + describe() + " was granted read-only");
  }
}

TransferPtr Peer::finished(const Status& status, uint64_t bytes) {
  auto transfer = std::make_shared<Transfer>(fabric_.progress, fabric_.counters, bytes);
  transfer->complete(status.code, status.message);
  return transfer;
}

// ---- one-sided operations

TransferPtr Peer::write(std::span<const Piece> pieces, const SignalTo& signal,
                        uint64_t inline_limit) {
  check_alive();
  check(pieces, true);
  if (signal.region != nullptr) check_word(*signal.region, signal.offset);
  if (!faulty()) return channel_->write(pieces, signal, inline_limit);
  std::vector<Piece> kept(pieces.begin(), pieces.end());
  std::vector<RemoteRegionPtr> regions;
  for (const Piece& piece : pieces) regions.push_back(piece.remote->shared_from_this());
  if (signal.region != nullptr) regions.push_back(signal.region->shared_from_this());
  uint64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.length;
  return guarded(bytes, [this, self = shared_from_this(), kept, regions, signal, inline_limit] {
    return channel_->write(kept, signal, inline_limit);
  });
}

TransferPtr Peer::read(std::span<const Piece> pieces, uint64_t inline_limit) {
  check_alive();
  check(pieces, false);
  if (!faulty()) return channel_->read(pieces, inline_limit);
  std::vector<Piece> kept(pieces.begin(), pieces.end());
  std::vector<RemoteRegionPtr> regions;
  for (const Piece& piece : pieces) regions.push_back(piece.remote->shared_from_this());
  uint64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.length;
  return guarded(bytes, [this, self = shared_from_this(), kept, regions, inline_limit] {
    return channel_->read(kept, inline_limit);
  });
}

TransferPtr Peer::signal(const SignalTo& signal, std::span<const TransferPtr> after) {
  check_alive();
  check_word(*signal.region, signal.offset);
  auto issue = [this, self = shared_from_this(), signal,
                region = signal.region->shared_from_this()] { return channel_->signal(signal); };
  auto start = [this, issue] { return faulty() ? guarded(0, issue) : issue(); };
  for (const auto& transfer : after) {
    if (transfer->progress() != fabric_.progress) {
      throw Error(Code::kInvalid, "after= takes transfers of the same Node; wait for others first");
    }
  }
  bool all_done = true;
  for (const auto& transfer : after) all_done = all_done && transfer->done();
  if (all_done) {
    for (const auto& transfer : after) {
      if (!transfer->status().ok()) return finished(transfer->status());
    }
    return start();
  }
  // The word is raised when the last of them is placed; if one fails, it is not raised at all.
  struct Waiting {
    std::atomic<size_t> left;
    std::vector<TransferPtr> after;
    TransferPtr outer;
  };
  auto waiting = std::make_shared<Waiting>();
  waiting->left = after.size();
  waiting->after.assign(after.begin(), after.end());
  waiting->outer = std::make_shared<Transfer>(fabric_.progress, fabric_.counters, 0);
  auto progress = fabric_.progress;
  auto one_less = [waiting, start, progress] {
    if (waiting->left.fetch_sub(1) != 1) return;
    auto list = std::move(waiting->after);  // ends the cycle through their then()
    for (const auto& transfer : list) {
      if (transfer->status().ok()) continue;
      waiting->outer->complete(transfer->status().code, transfer->status().message);
      progress->notify();
      return;
    }
    auto inner = start();
    inner->then([inner = inner.get(), outer = waiting->outer, progress] {
      outer->complete(inner->status().code, inner->status().message, inner->value());
      progress->notify();
    });
  };
  for (const auto& transfer : after) transfer->then(one_less);
  return waiting->outer;
}

TransferPtr Peer::fetch_add(const RemoteRegion& region, uint64_t offset, uint64_t value) {
  check_alive();
  check_word(region, offset);
  if (!region.access.read) {
    throw Error(Code::kPermission, "fetch_add tells the old value, and the region '" + region.name +
                                       "' of " + describe() + " was granted without read access");
  }
  if (!faulty()) return channel_->fetch_add(region, offset, value);
  return guarded(0, [this, self = shared_from_this(), kept = region.shared_from_this(), offset,
                     value] { return channel_->fetch_add(*kept, offset, value); });
}

// ---- regions of the peer

AskedPtr Peer::ask(Header header, std::string_view body, bool wants_region, bool leases,
                   bool wants_copied) {
  check_alive();
  auto asked = std::make_shared<Asked>();
  asked->wants_region = wants_region;
  asked->wants_copied = wants_copied;
  asked->leases = leases;
  asked->transfer = std::make_shared<Transfer>(fabric_.progress, fabric_.counters, 0);
  header.transfer = next_id_.fetch_add(1, std::memory_order_relaxed);
  header.length = body.size();
  auto send = [this, self = shared_from_this(), asked, header, text = std::string(body)] {
    {
      std::lock_guard lock(mutex_);
      if (!lost_) {
        asked_.emplace(header.transfer, asked);
      } else {
        asked->transfer->complete(lost_status_.code, lost_status_.message);
        return asked->transfer;
      }
    }
    stream_->send(header, text);
    return asked->transfer;
  };
  if (!faulty()) {
    send();
    return asked;
  }
  // The fault may give another transfer; the question ends as that one does.
  auto transfer = guarded(0, send);
  if (transfer != asked->transfer) {
    auto outer = std::make_shared<Asked>();
    outer->wants_region = wants_region;
    outer->transfer = std::make_shared<Transfer>(fabric_.progress, fabric_.counters, 0);
    transfer->then([outer, asked, inner = transfer.get(), progress = fabric_.progress] {
      outer->region = asked->region;
      outer->transfer->complete(inner->status().code, inner->status().message);
      progress->notify();
    });
    if (!asked->transfer->done()) {
      // Never sent, or not yet: only a delayed one completes the inner transfer by itself.
      transfer->then([asked] {
        if (!asked->transfer->done()) asked->transfer->complete(Code::kUnavailable, "never sent");
      });
    }
    return outer;
  }
  return asked;
}

AskedPtr Peer::ask_allocate(uint64_t size, const std::string& name, Access access) {
  if (size == 0) throw Error(Code::kInvalid, "a region has at least 1 byte");
  check_region_name(name);
  Header header;
  header.type = FrameType::kAllocate;
  header.total = size;
  header.flags = (access.read ? kReadable : 0) | (access.write ? kWritable : 0);
  return ask(header, name, true, true);
}

AskedPtr Peer::ask_lookup(const std::string& name) {
  if (name.empty())
    throw Error(Code::kInvalid, "a region is looked up by a name of 1 byte or more");
  check_region_name(name);
  Header header;
  header.type = FrameType::kLookup;
  return ask(header, name, true);
}

AskedPtr Peer::ask_attach(uint32_t id, uint64_t generation, bool copied) {
  Header header;
  header.type = FrameType::kLookup;
  header.region = id;
  header.generation = generation;
  return ask(header, {}, true, false, copied);
}

AskedPtr Peer::ask_free(const RemoteRegion& region) {
  check_region(region);
  Header header;
  header.type = FrameType::kFree;
  header.region = region.id;
  header.generation = region.generation;
  return ask(header, {}, false);
}

RemoteRegionPtr Peer::finish(const AskedPtr& asked) const {
  const Status& status = asked->transfer->status();
  if (status.ok()) return asked->region;
  bool ours = status.code == Code::kPeerLost || status.code == Code::kClosed;
  throw Error(status.code, ours ? status.message : describe() + ": " + status.message);
}

void Peer::abandon(const AskedPtr& asked) {
  {
    std::lock_guard lock(mutex_);
    asked->abandoned = true;
    if (!asked->granted) return;  // granted() gives it back when it comes
  }
  if (asked->leases && asked->region) give_back(*asked->region);
}

void Peer::give_back(const RemoteRegion& region) {
  Header header;
  header.type = FrameType::kFree;
  header.region = region.id;
  header.generation = region.generation;
  header.transfer = next_id_.fetch_add(1, std::memory_order_relaxed);
  auto nobody = std::make_shared<Asked>();
  nobody->wants_region = false;
  nobody->transfer = std::make_shared<Transfer>(fabric_.progress, fabric_.counters, 0);
  {
    std::lock_guard lock(mutex_);
    if (lost_) {
      nobody->transfer->complete();
      return;
    }
    asked_.emplace(header.transfer, nobody);
  }
  stream_->send(header);
}

bool Peer::granted(const Header& header, std::string_view body, Passed passed) {
  AskedPtr asked;
  {
    std::lock_guard lock(mutex_);
    auto found = asked_.find(header.transfer);
    if (found == asked_.end()) return false;
    asked = found->second;
    asked_.erase(found);
  }
  Status status{static_cast<Code>(header.status),
                presentable(body) ? std::string(body) : "(unprintable)"};
  bool well_formed = true;
  if (header.type == FrameType::kGrant && status.ok()) {
    auto region = std::make_shared<RemoteRegion>();
    region->id = header.region;
    region->generation = header.generation;
    region->size = header.total;
    region->incarnation = remote_.incarnation;
    region->access = {(header.flags & kReadable) != 0, (header.flags & kWritable) != 0};
    region->name = body;
    status.message.clear();
    if (shm_ && (region->access.read || region->access.write)) {
      auto found = known_.find(region->generation);
      auto known = found == known_.end() ? nullptr : found->second.lock();
      if (known && known->id == region->id && known->size == region->size &&
          known->access.write == region->access.write) {
        region->mapping = known->mapping;  // one mapping, however often it is looked up
        if (asked->wants_copied) status = passed.status;
      } else {
        region->mapping = std::move(passed.mapping);
        status = passed.status;
        if (region->mapping) fabric_.mappings->add(region->mapping);
      }
      // Out of address space or descriptors is our trouble; anything else is a lie.
      well_formed = status.ok() || status.code == Code::kNoMemory || status.code == Code::kBusy;
      region->copied = std::move(passed.copied);
      if (status.ok()) known_[region->generation] = region;
      std::erase_if(known_, [](const auto& entry) { return entry.second.expired(); });
    }
    if (rdma_ && (region->access.read || region->access.write)) {
      bool told = key_header_.transfer == header.transfer && !key_.empty() &&
                  key_header_.generation == header.generation;
      region->key = told ? rdma_->unpack(key_header_, key_) : nullptr;
      if (!region->key) well_formed = false;
      key_.clear();
    }
    if (header.total == 0 || header.generation == 0 || !presentable(body)) well_formed = false;
    bool unwanted;
    {
      std::lock_guard lock(mutex_);
      if (status.ok()) asked->region = region;
      asked->granted = true;
      unwanted = asked->abandoned;
    }
    // Also if it cannot be mapped here: nobody else knows of it.
    if (well_formed && asked->leases && (!status.ok() || unwanted)) {
      give_back(*region);
    }
  }
  asked->transfer->complete(status.code, std::move(status.message));
  fabric_.progress->changed();
  return well_formed;
}

// ---- frames

bool Peer::begin_payload(const Header& header, std::byte** target) {
  if (lost()) return false;
  if (shm_ && !ready_) return false;
  if (header.type == FrameType::kWrite) return service_.begin_write(header, target);
  return tcp_ && tcp_->begin_data(header, target);
}

bool Peer::end_payload(const Header& header) {
  if (header.type == FrameType::kWrite) return service_.end_write(header);
  return tcp_ && tcp_->end_data(header);
}

// ---- shm

// What the other side sends once it has our memory, while we still examine its. Nothing is served
// before we know whose it is.
bool Peer::wait_for_memory(const Header& header, std::string_view body) {
  if (early_.size() == kMaxEarlyFrames) return false;
  early_.push_back({header, std::string(body)});
  return true;
}

void Peer::start_shm(std::shared_ptr<DescriptorSocket> descriptors) {
  shm_ = std::make_shared<ShmChannel>(fabric_.progress, fabric_.counters, fabric_.traffic);
  channel_ = shm_;
  descriptors_ = std::move(descriptors);
  auto weak = weak_from_this();
  descriptors_->start(fabric_.progress, [weak](Status status) {
    if (auto self = weak.lock()) self->lose(std::move(status));
  });
  // The frame follows its message, so whoever reads the frame finds the message there.
  service_.attach(
      [weak](const Header& answer, const std::shared_ptr<Region>& region) {
        auto self = weak.lock();
        if (!self) return;
        int memory = region->mapping->descriptor();
        self->descriptors_->send(answer, {&memory, 1}, region, [weak, answer, region] {
          if (auto self = weak.lock()) self->stream_->send(answer, region->name, false);
        });
      },
      [weak] {
        auto self = weak.lock();
        return self && self->descriptors_ ? self->descriptors_->queued() : 0;
      });
}

void Peer::offer_memory() {
  Header header;
  header.type = FrameType::kAttach;
  header.generation = fabric_.incarnation;
  try {
    doorbell_ = Doorbell::hang(*fabric_.progress);
  } catch (const Error& error) {
    lose({error.code(), error.what()});
    return;
  }
  int memory[] = {fabric_.page->descriptor(), doorbell_->descriptor()};
  auto keep = std::make_shared<std::pair<std::shared_ptr<Mapping>, std::shared_ptr<Doorbell>>>(
      fabric_.page, doorbell_);
  descriptors_->send(header, memory, keep, [weak = weak_from_this(), header] {
    if (auto self = weak.lock()) self->stream_->send(header);
  });
}

bool Peer::receive_memory(const Header& frame,
                          std::function<void(const DescriptorMessage&, Passed&)> examine,
                          std::function<bool(Passed&)> then) {
  auto weak = weak_from_this();
  auto go_on = [weak, then = std::move(then)](const std::shared_ptr<Passed>& passed) {
    auto self = weak.lock();
    if (!self || self->lost() || then(*passed)) return;
    self->lose({Code::kPeerLost, "the peer broke the protocol: memory that was not as announced"});
  };
  try {
    descriptors_->receive([frame, progress = fabric_.progress, examine = std::move(examine),
                           go_on = std::move(go_on)](const DescriptorMessage& message) {
      auto passed = std::make_shared<Passed>();
      passed->status = message.status();
      bool same = message.header().type == frame.type &&
                  message.header().generation == frame.generation &&
                  message.header().transfer == frame.transfer;
      if (passed->status.ok() && !same) {
        passed->status = {Code::kInvalid, "the memory of another frame"};
      }
      try {
        if (passed->status.ok()) examine(message, *passed);
      } catch (const Error& error) {
        passed->status = {error.code(), error.what()};
      }
      progress->post([passed, go_on] {
        go_on(passed);
        return false;
      });
    });
  } catch (const Error& error) {
    lose({error.code(), error.what()});
  }
  return true;
}

// The page and the doorbell of the other side, the client's first. A server that sees another user
// says so instead of sending its own.
bool Peer::attached_shm(const Header& header, std::string_view body) {
  if (std::exchange(attaching_, true)) return false;
  if (header.status != 0) {
    if (accepting_) return false;
    std::string why = presentable(body) ? std::string(body) : "(unprintable)";
    lose({static_cast<Code>(header.status), why});
    return true;
  }
  auto examine = [](const DescriptorMessage& message, Passed& passed) {
    if (message.count() != 2) throw Error(Code::kInvalid, "two descriptors were expected");
    passed.mapping = message.map(0, sizeof(NodePage), false);
    passed.doorbell = message.doorbell(1);
  };
  return receive_memory(header, examine, [this](Passed& passed) {
    Status status = passed.status;
    try {
      if (status.ok()) {
        shm_->attach(std::move(passed.mapping), std::move(passed.doorbell), remote_.incarnation);
      }
    } catch (const Error& error) {
      status = {error.code(), error.what()};
    }
    if (status.code == Code::kInvalid) return false;
    if (!status.ok()) {
      if (accepting_) {
        Header answer;
        answer.type = FrameType::kAttach;
        answer.status = static_cast<uint16_t>(status.code);
        answer.length = status.message.size();
        stream_->send(answer, status.message);
      }
      lose(std::move(status));
      return true;
    }
    if (accepting_) offer_memory();
    if (lost()) return true;
    became_ready();
    for (const auto& [early, text] : std::exchange(early_, {})) {
      if (lost()) return true;
      if (!control(early, text)) return false;
    }
    return true;
  });
}

void Peer::became_ready() {
  ready_.store(true, std::memory_order_release);
  on_ready_(*this);
  fabric_.progress->changed();
}

// ---- rdma

void Peer::start_rdma() {
  auto weak = weak_from_this();
  RdmaChannel::Events events;
  events.on_ready = [weak] {
    if (auto self = weak.lock(); self && !self->lost()) self->became_ready();
  };
  events.on_lost = [weak](Status status) {
    if (auto self = weak.lock()) self->lose(std::move(status));
  };
  events.on_frame = [weak](const Header& header, std::string_view body) {
    auto self = weak.lock();
    return !self || self->lost() || self->control(header, body);
  };
  events.on_idle = [weak](uint32_t region, uint64_t generation) {
    auto self = weak.lock();
    if (!self || self->lost()) return;
    Header header;
    header.type = FrameType::kRevoke;
    header.flags = kLast;
    header.region = region;
    header.generation = generation;
    self->stream_->send(header);
  };
  rdma_ = std::make_shared<RdmaChannel>(fabric_.rdma, fabric_.progress, fabric_.counters,
                                        fabric_.traffic, next_id_, std::move(events));
  channel_ = rdma_;
  service_.attach(
      [weak](const Header& header, std::string_view body) {
        if (auto self = weak.lock()) self->rdma_->send(header, body);
      },
      [weak](const Header& request, const std::shared_ptr<Region>& region) {
        if (auto self = weak.lock()) self->expose(request, region);
      });
}

bool Peer::attached_rdma(const Header& header, std::string_view body) {
  return !ready_ && rdma_->attach(header.value, body, accepting_);
}

void Peer::expose(const Header& request, const std::shared_ptr<Region>& region) {
  auto exposed = fabric_.rdma->expose(*region);
  if (exposed->key.size() > kMaxBodyBytes) {
    throw Error(Code::kUnavailable, "the key of registered memory has " +
                                        std::to_string(exposed->key.size()) +
                                        " bytes; let UCX use fewer devices (UCX_NET_DEVICES)");
  }
  Header header;
  header.type = FrameType::kKey;
  header.transfer = request.transfer;
  header.region = region->id;
  header.generation = region->generation;
  header.value = exposed->address;
  header.length = exposed->key.size();
  stream_->send(header, exposed->key, false);
  std::lock_guard lock(mutex_);
  exposed_[region->generation] = std::move(exposed);
}

void Peer::revoke(const Region& region) {
  service_.revoke(region);
  if (!rdma_) return;
  {
    std::lock_guard lock(mutex_);
    if (lost_ || !exposed_.contains(region.generation)) return;
    if (!revoking_.insert(region.generation).second) return;
  }
  Header header;
  header.type = FrameType::kRevoke;
  header.region = region.id;
  header.generation = region.generation;
  stream_->send(header);
}

bool Peer::revoking(uint64_t generation) const {
  std::lock_guard lock(mutex_);
  return revoking_.contains(generation);
}

// Of a region here, by a peer that has nothing under way to it any more; or of a region there.
bool Peer::revoked(const Header& header) {
  if (!rdma_) return false;
  if (header.flags & kLast) {
    std::shared_ptr<Exposed> gone;  // unregistered without the lock
    std::lock_guard lock(mutex_);
    if (revoking_.erase(header.generation) == 0) return false;
    auto found = exposed_.find(header.generation);
    gone = std::move(found->second);
    exposed_.erase(found);
    fabric_.progress->changed();
    return true;
  }
  rdma_->revoke(header.region, header.generation);
  return true;
}

bool Peer::control(const Header& header, std::string_view body) {
  if (lost()) return false;  // by an earlier frame that came with this one
  bool may_come = header.type == FrameType::kAttach || header.type == FrameType::kGoodbye;
  if (shm_ && !ready_ && !may_come) return wait_for_memory(header, body);
  switch (header.type) {
    case FrameType::kDone: {
      bool mine;
      {
        std::lock_guard lock(mutex_);
        auto found = asked_.find(header.transfer);
        mine = found != asked_.end();
        if (mine && found->second->wants_region) return false;
      }
      if (mine) return granted(header, body, {});
      return tcp_ ? tcp_->done(header, body) : rdma_ && rdma_->done(header, body);
    }
    case FrameType::kGrant: {
      bool copied;
      {
        std::lock_guard lock(mutex_);
        auto found = asked_.find(header.transfer);
        if (found == asked_.end() || !found->second->wants_region) return false;
        copied = found->second->wants_copied;
      }
      bool memory = header.status == 0 && (header.flags & (kReadable | kWritable)) != 0;
      if (!shm_ || !memory) return granted(header, body, {});
      auto examine = [header, copied](const DescriptorMessage& message, Passed& passed) {
        if (message.count() != 1) throw Error(Code::kInvalid, "one descriptor was expected");
        passed.mapping = message.map(0, header.total, (header.flags & kWritable) != 0);
        if (copied) passed.copied = message.map_private(0, passed.mapping);
      };
      return receive_memory(header, examine,
                            [this, header, name = std::string(body)](Passed& passed) {
                              return granted(header, name, std::move(passed));
                            });
    }
    case FrameType::kAttach:
      return rdma_ ? attached_rdma(header, body) : shm_ && attached_shm(header, body);
    case FrameType::kKey:
      if (!rdma_) return false;
      key_header_ = header;
      key_ = body;
      return true;
    case FrameType::kRevoke:
      return revoked(header);
    case FrameType::kGoodbye:
      lose({Code::kPeerLost,
            "it said goodbye: " + (presentable(body) ? std::string(body) : "(unprintable)")});
      return false;
    default:
      return service_.request(header, body);
  }
}

// ---- the end

void Peer::lose(Status status, std::string_view goodbye) {
  auto self = shared_from_this();
  std::unordered_map<uint64_t, AskedPtr> asked;
  std::vector<TransferPtr> dropped;
  {
    std::lock_guard lock(mutex_);
    if (lost_) return;
    status.message =
        (status.code == Code::kPeerLost ? "lost " : "") + describe() + ": " + status.message;
    lost_status_ = status;
    channel_->refuse(status);
    lost_.store(true, std::memory_order_release);
    asked.swap(asked_);
    dropped.swap(dropped_);
  }
  if (!goodbye.empty()) {
    Header header;
    header.type = FrameType::kGoodbye;
    header.length = goodbye.size();
    stream_->send(header, goodbye);
  }
  // First the stream: afterwards nothing touches the memory of transfers.
  stream_->close();
  if (descriptors_) descriptors_->close();
  descriptors_.reset();
  if (doorbell_) doorbell_->take_down();
  doorbell_.reset();
  service_.close();
  channel_->shutdown(status);
  {
    // No endpoint, so nobody reaches this memory any more.
    std::unordered_map<uint64_t, std::shared_ptr<Exposed>> exposed;
    std::lock_guard lock(mutex_);
    exposed.swap(exposed_);
    revoking_.clear();
  }
  for (auto& [id, question] : asked) question->transfer->complete(status.code, status.message);
  for (auto& transfer : dropped) transfer->complete(status.code, status.message);
  if (on_lost_) on_lost_(*this);
  fabric_.progress->changed();
}

// ---- faults

void Peer::inject(std::shared_ptr<FaultPlan> plan) {
  std::lock_guard lock(mutex_);
  has_plan_ = plan != nullptr;
  plan_ = std::move(plan);
}

TransferPtr Peer::guarded(uint64_t bytes, const std::function<TransferPtr()>& operation) {
  std::shared_ptr<FaultPlan> plan;
  {
    std::lock_guard lock(mutex_);
    plan = plan_;
  }
  auto action = plan ? plan->next() : FaultPlan::Action::kNone;
  auto pending = [&] {
    return std::make_shared<Transfer>(fabric_.progress, fabric_.counters, bytes);
  };
  switch (action) {
    case FaultPlan::Action::kNone:
      return operation();
    case FaultPlan::Action::kFail:
      return finished({Code::kUnavailable, "an injected fault: this operation failed"}, bytes);
    case FaultPlan::Action::kCut:
      fabric_.progress->post([self = shared_from_this()] {
        self->lose({Code::kPeerLost, "an injected fault: the connection was cut"});
        return false;
      });
      [[fallthrough]];
    case FaultPlan::Action::kDrop: {
      auto transfer = pending();
      std::lock_guard lock(mutex_);
      if (lost_) {
        transfer->complete(lost_status_.code, lost_status_.message);
      } else {
        dropped_.push_back(transfer);
      }
      return transfer;
    }
    case FaultPlan::Action::kDelay: {
      auto outer = pending();
      bool taken =
          fabric_.progress->after(plan->delay_s, [outer, operation, progress = fabric_.progress] {
            auto inner = operation();
            inner->then([inner = inner.get(), outer, progress] {
              outer->complete(inner->status().code, inner->status().message, inner->value());
              progress->notify();
            });
          });
      if (!taken) outer->complete(Code::kClosed, "the Node is closed");
      return outer;
    }
  }
  return operation();
}

}  // namespace tensorwire
