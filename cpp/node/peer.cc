#include "node/peer.h"

#include <algorithm>
#include <cstdio>

#include "base/text.h"

namespace tensorwire {
namespace {

// An honest peer sends only the questions of its first round trip this early.
constexpr size_t kMaxEarlyFrames = 1024;

}  // namespace

const char* Peer::name_of(uint32_t transport_bit) {
  return transport_bit == kShmBit ? "shm" : transport_bit == kRdmaBit ? "rdma" : "tcp";
}

std::vector<std::string> Peer::offered() const {
  std::vector<std::string> names;
  for (uint32_t bit : {kShmBit, kTcpBit, kRdmaBit}) {
    if (latest()->remote_.transports & bit) names.emplace_back(name_of(bit));
  }
  return names;
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
      service_(*fabric_.regions, fabric_.progress, fabric_.traffic, fabric_.quota_bytes,
               fabric_.shareable, id, fabric_.free_region),
      questions_(fabric_.progress, fabric_.mappings, next_id_, transport_, remote_.incarnation) {}

void Peer::start(Link link, std::shared_ptr<DescriptorSocket> descriptors, bool accepting,
                 std::function<void(Peer&)> on_ready, std::function<void(Peer&)> on_lost) {
  on_ready_ = std::move(on_ready);
  on_lost_ = std::move(on_lost);
  accepting_ = accepting;
  encrypted_ = link.encrypted();
  // The stream keeps the peer until lose() closes it.
  stream_ = std::make_shared<Stream>(
      fabric_.progress, std::move(link), *this, [this](Status status) { lose(std::move(status)); },
      shared_from_this());
  service_.attach(stream_, fabric_.gpu_queue);
  questions_.attach(stream_);
  if (transport_ == kShmBit) {
    start_shm(std::move(descriptors));
  } else if (transport_ == kRdmaBit) {
    start_rdma();
  } else {
    tcp_ = std::make_shared<TcpChannel>(fabric_.progress, fabric_.traffic, stream_, next_id_);
    channel_ =
        std::make_shared<GpuRelay>(fabric_.progress, fabric_.gpu_queue, fabric_.gpu_traffic, tcp_);
    ready_ = true;
  }
  stream_->start();
  if (shm_ && !accepting) {
    offer_memory();
  } else if (rdma_) {
    std::string where = accepting ? fabric_.rdma->where() : "";
    uint64_t token = rdma_->offer(accepting);
    stream_->send({.type = FrameType::kAttach, .length = where.size(), .value = token}, where);
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

Peer* Peer::latest() const {
  auto* peer = const_cast<Peer*>(this);
  while (Peer* next = peer->successor()) peer = next;
  return peer;
}

Status Peer::lost_status() const {
  const Peer& now = *latest();
  std::lock_guard lock(now.mutex_);
  return now.lost_status_;
}

void Peer::check_alive() const {
  if (epoch_ != fork::epoch()) {
    throw Error(Code::kClosed, "this process is a fork of the one that connected to " + describe() +
                                   "; create a Node of its own here");
  }
}

// ---- one-sided operations

TransferPtr Peer::write(std::span<const Piece> pieces, const SignalTo& signal, const How& how) {
  if (Peer* next = successor()) return next->write(pieces, signal, how);
  check_alive();
  check(pieces, true);
  if (signal.region != nullptr) check_word(*signal.region, signal.offset);
  check_gpu(pieces, how);
  return channel().write(pieces, signal, how);
}

TransferPtr Peer::read(std::span<const Piece> pieces, const How& how) {
  if (Peer* next = successor()) return next->read(pieces, how);
  check_alive();
  check(pieces, false);
  check_gpu(pieces, how);
  return channel().read(pieces, how);
}

TransferPtr Peer::signal(const SignalTo& signal, std::span<const TransferPtr> after) {
  if (Peer* next = successor()) return next->signal(signal, after);
  check_alive();
  check_word(*signal.region, signal.offset);
  for (const auto& transfer : after) {
    if (transfer->progress() != fabric_.progress) {
      throw Error(Code::kInvalid, "after= takes transfers of the same Node; wait for others first");
    }
  }
  auto placed = [](const TransferPtr& one) { return one->done() && one->status().ok(); };
  if (std::all_of(after.begin(), after.end(), placed)) return channel().signal(signal);
  // The word is raised when the last of them is placed; if one fails, it is not raised at all.
  struct Waiting {
    std::atomic<size_t> left;
    std::vector<TransferPtr> after;
    TransferPtr outer;
  };
  auto waiting = std::make_shared<Waiting>();
  waiting->left = after.size();
  waiting->after.assign(after.begin(), after.end());
  waiting->outer = std::make_shared<Transfer>(fabric_.progress, 0);
  auto progress = fabric_.progress;
  auto one_less = [self = shared_from_this(), signal, region = signal.region->shared_from_this(),
                   waiting, progress] {
    if (waiting->left.fetch_sub(1) != 1) return;
    auto list = std::move(waiting->after);  // ends the cycle through their then()
    for (const auto& transfer : list) {
      if (transfer->status().ok()) continue;
      waiting->outer->complete(transfer->status());
      progress->notify();
      return;
    }
    auto inner = self->latest()->channel().signal(signal);
    inner->then([inner = inner.get(), outer = waiting->outer, progress] {
      outer->complete(inner->status(), inner->value());
      progress->notify();
    });
  };
  for (const auto& transfer : after) transfer->then(one_less);
  return waiting->outer;
}

TransferPtr Peer::fetch_add(const RemoteRegion& region, uint64_t offset, uint64_t value) {
  if (Peer* next = successor()) return next->fetch_add(region, offset, value);
  check_alive();
  check_word(region, offset);
  if (!region.access.read) {
    refuse(region, "without read access", "fetch_add tells the old value, and ");
  }
  return channel().fetch_add(region, offset, value);
}

// ---- regions of the peer

AskedPtr Peer::ask(const Header& header, std::string_view body, Asked::Wants wants) {
  check_alive();
  auto asked = std::make_shared<Asked>(wants);
  auto send = [self = shared_from_this(), asked, header, text = std::string(body)] {
    return self->questions_.send(asked, header, text);
  };
  FaultyChannel* faulty = faulty_.load(std::memory_order_acquire);
  asked->transfer = faulty == nullptr ? send() : faulty->run(0, send);
  return asked;
}

AskedPtr Peer::ask_allocate(uint64_t size, const std::string& name, Access access) {
  if (size == 0) throw Error(Code::kInvalid, "a region has at least 1 byte");
  check_region_name(name);
  return ask({.type = FrameType::kAllocate, .flags = flags_of(access), .total = size}, name,
             {.lease = true});
}

AskedPtr Peer::ask_lookup(const std::string& name, bool await) {
  if (name.empty())
    throw Error(Code::kInvalid, "a region is looked up by a name of 1 byte or more");
  check_region_name(name);
  if (!await) return ask({.type = FrameType::kLookup}, name, {});
  check_alive();
  std::lock_guard lock(awaited_mutex_);
  std::erase_if(awaited_, [](const auto& one) {
    AskedPtr asked = one.second.lock();
    return !asked || asked->transfer->done();
  });
  auto& known = awaited_[name];  // asked once, however many wait and however often they give up
  AskedPtr asked = known.lock();
  if (!asked) known = asked = ask({.type = FrameType::kLookup, .flags = kAwait}, name, {});
  return asked;
}

AskedPtr Peer::ask_attach(uint32_t id, uint64_t generation, bool copied) {
  return ask({.type = FrameType::kLookup, .region = id, .generation = generation}, {},
             {.copied = copied});
}

AskedPtr Peer::ask_free(const RemoteRegion& region) {
  check_region(region);
  return ask(Questions::to_free(region), {}, {.region = false});
}

RemoteRegionPtr Peer::finish(const AskedPtr& asked) const {
  const Status& status = asked->transfer->status();
  if (status.ok()) return asked->region;
  bool ours = status.code == Code::kPeerLost || status.code == Code::kClosed;
  throw Error(status.code, ours ? status.message : describe() + ": " + status.message);
}

// ---- frames

bool Peer::begin_payload(const Header& header, std::byte** target) {
  if (broken()) return false;
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
  shm_ = std::make_shared<ShmChannel>(fabric_.progress, fabric_.traffic, fabric_.gpu_queue,
                                      fabric_.gpu_traffic);
  channel_ = shm_;
  descriptors_ = std::move(descriptors);
  auto weak = weak_from_this();
  descriptors_->start(fabric_.progress, on_failure());
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
  Header header{.type = FrameType::kAttach, .generation = fabric_.incarnation};
  try {
    doorbell_ = Doorbell::hang(*fabric_.progress);
  } catch (const Error& error) {
    lose(error.status());
    return;
  }
  int memory[] = {fabric_.progress->page_mapping()->descriptor(), doorbell_->descriptor()};
  auto keep = std::make_shared<std::pair<std::shared_ptr<Mapping>, std::shared_ptr<Doorbell>>>(
      fabric_.progress->page_mapping(), doorbell_);
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
    if (!self || self->broken() || then(*passed)) return;
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
      try {
        if (passed->status.ok() && !same) {
          throw Error(Code::kInvalid, "the memory of another frame");
        }
        if (passed->status.ok()) examine(message, *passed);
      } catch (const Error& error) {
        passed->status = error.status();
      }
      progress->post([passed, go_on] {
        go_on(passed);
        return false;
      });
    });
  } catch (const Error& error) {
    lose(error.status());
  }
  return true;
}

// The page and the doorbell of the other side, the client's first. A server that sees another user
// says so instead of sending its own.
bool Peer::attached_shm(const Header& header, std::string_view body) {
  if (std::exchange(attaching_, true)) return false;
  if (header.status != 0) {
    if (accepting_) return false;
    lose({static_cast<Code>(header.status), presented(body)});
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
      status = error.status();
    }
    if (status.code == Code::kInvalid) return false;
    if (!status.ok()) {
      if (accepting_) {
        stream_->send({.type = FrameType::kAttach,
                       .status = static_cast<uint16_t>(status.code),
                       .length = status.message.size()},
                      status.message);
      }
      lose(std::move(status));
      return true;
    }
    if (accepting_) offer_memory();
    if (broken()) return true;
    became_ready();
    for (const auto& [early, text] : std::exchange(early_, {})) {
      if (broken()) return true;
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
    if (auto self = weak.lock(); self && !self->broken()) self->became_ready();
  };
  events.on_lost = on_failure();
  events.on_frame = [weak](const Header& header, std::string_view body) {
    auto self = weak.lock();
    return !self || self->broken() || self->control(header, body);
  };
  events.on_idle = [weak](uint32_t region, uint64_t generation) {
    auto self = weak.lock();
    if (!self || self->broken()) return;
    self->stream_->send(
        {.type = FrameType::kRevoke, .flags = kLast, .region = region, .generation = generation});
  };
  rdma_ = std::make_shared<RdmaChannel>(fabric_.rdma, fabric_.progress, fabric_.traffic, next_id_,
                                        std::move(events));
  channel_ = rdma_;
  exposures_.attach(fabric_.rdma, stream_);
  service_.attach(
      [weak](const Header& header, std::string_view body) {
        if (auto self = weak.lock()) self->rdma_->send(header, body);
      },
      [weak](const Header& request, const std::shared_ptr<Region>& region) {
        if (auto self = weak.lock()) self->exposures_.expose(request, region);
      });
}

bool Peer::attached_rdma(const Header& header, std::string_view body) {
  return !ready_ && rdma_->attach(header.value, body, accepting_);
}

void Peer::revoke(const Region& region) {
  service_.revoke(region);
  exposures_.revoke(region);
}

// The peer has nothing under way to a region of ours any more, or it has freed one of its own.
bool Peer::revoked(const Header& header) {
  if (!rdma_) return false;
  if ((header.flags & kLast) == 0) {
    rdma_->revoke(header.region, header.generation);
    return true;
  }
  if (!exposures_.revoked(header)) return false;
  fabric_.progress->changed();
  return true;
}

bool Peer::granted(const Header& header, std::string_view body) {
  auto asked = questions_.find(header.transfer);
  if (!asked || !asked->wants.region) return false;
  bool memory = header.status == 0 && access_of(header).any();
  Granted given;
  if (memory && rdma_) {
    bool told = key_header_.transfer == header.transfer && !key_.empty() &&
                key_header_.generation == header.generation;
    if (told) given.key = rdma_->unpack(key_header_, key_);
    key_.clear();
  }
  if (!memory || !shm_) return questions_.answered(header, body, std::move(given));
  auto examine = [header, copied = asked->wants.copied](const DescriptorMessage& message,
                                                        Passed& passed) {
    if (message.count() != 1) throw Error(Code::kInvalid, "one descriptor was expected");
    bool writable = (header.flags & kWritable) != 0;
    if (header.flags & kOnGpu) {
      if (copied) throw Error(Code::kUnavailable, "memory of a GPU has no private mapping");
      passed.mapping = message.map_gpu(0, header.total, writable);
      return;
    }
    passed.mapping = message.map(0, header.total, writable);
    if (copied) passed.copied = message.map_private(0, passed.mapping);
  };
  return receive_memory(header, examine, [this, header, name = std::string(body)](Passed& passed) {
    return questions_.answered(header, name, std::move(passed));
  });
}

bool Peer::control(const Header& header, std::string_view body) {
  if (broken()) return false;  // by an earlier frame that came with this one
  bool may_come = header.type == FrameType::kAttach || header.type == FrameType::kGoodbye;
  if (shm_ && !ready_ && !may_come) return wait_for_memory(header, body);
  switch (header.type) {
    case FrameType::kDone:
      if (auto asked = questions_.find(header.transfer)) {
        return !asked->wants.region && questions_.answered(header, body, {});
      }
      return tcp_ ? tcp_->done(header, body) : rdma_ && rdma_->done(header, body);
    case FrameType::kGrant:
      return granted(header, body);
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
      lose({Code::kPeerLost, "it said goodbye: " + presented(body)});
      return false;
    default:
      return service_.request(header, body);
  }
}

// ---- the end

std::function<void(Status)> Peer::on_failure() {
  return [weak = weak_from_this()](Status status) {
    if (auto self = weak.lock()) self->lose(std::move(status));
  };
}

void Peer::lose(Status status, std::string_view goodbye) {
  auto self = shared_from_this();
  std::vector<std::shared_ptr<FaultyChannel>> faults;
  {
    std::lock_guard lock(mutex_);
    if (lost_) return;
    status.message =
        (status.code == Code::kPeerLost ? "lost " : "") + describe() + ": " + status.message;
    lost_status_ = status;
    channel_->refuse(status);
    faults = faults_;
    lost_.store(true, std::memory_order_release);
  }
  if (!goodbye.empty()) {
    stream_->send({.type = FrameType::kGoodbye, .length = goodbye.size()}, goodbye);
  }
  // First the stream: afterwards nothing touches the memory of transfers.
  stream_->close();
  if (descriptors_) descriptors_->close();
  descriptors_.reset();
  if (doorbell_) doorbell_->take_down();
  doorbell_.reset();
  service_.close();
  channel_->shutdown(status);
  for (const auto& faulty : faults) faulty->shutdown(status);
  exposures_.close();
  questions_.close(status);
  if (on_lost_) on_lost_(*this);
  fabric_.progress->changed();
}

// ---- successors

void Peer::succeed(const std::shared_ptr<Peer>& successor) {
  check_alive();
  if (successor->fabric_.progress != fabric_.progress) {
    throw Error(Code::kInvalid,
                "the successor of " + describe() + " is a peer of another Node of this process");
  }
  // All successions of a Node are in its driving thread, one after the other.
  Status status{Code::kClosed, "this Node was closed"};
  fabric_.progress->run([&] { status = succeed_here(successor); });
  if (!status.ok()) throw Error(status);
}

Status Peer::succeed_here(const std::shared_ptr<Peer>& successor) {
  std::shared_ptr<Peer> heir = successor->latest()->shared_from_this();
  const Peer& now = *latest();
  if (transport_ != kShmBit || heir->transport_ != kShmBit) {
    return {Code::kUnavailable, "a peer has a successor only over shared memory, and " +
                                    describe() + " is reached by " + transport() +
                                    ", its successor by " + heir->transport()};
  }
  if (heir->remote_.name != remote_.name || heir->remote_.incarnation != remote_.incarnation) {
    return {Code::kInvalid, heir->describe() + " is not the same Node as " + describe() +
                                ": a successor has its name and its incarnation"};
  }
  if (!now.broken()) {
    return {Code::kInvalid, now.describe() + " is not lost, so it has no successor"};
  }
  if (heir.get() == &now) {
    return {Code::kInvalid, describe() + " cannot be its own successor: connect to the Node anew"};
  }
  heir->questions_.inherit(now.questions_);
  successors_.push_back(heir);
  successor_.store(heir.get(), std::memory_order_release);
  return {};
}

// ---- faults

void Peer::inject(std::shared_ptr<FaultPlan> plan) {
  if (Peer* next = successor()) return next->inject(std::move(plan));
  std::lock_guard lock(mutex_);
  faulty_ = nullptr;
  if (!plan) return;
  // Whoever holds this pointer to the channel holds the peer.
  std::shared_ptr<Channel> channel(shared_from_this(), channel_.get());
  faults_.push_back(
      std::make_shared<FaultyChannel>(std::move(plan), channel, fabric_.progress, on_failure()));
  if (lost_) faults_.back()->shutdown(lost_status_);
  faulty_ = faults_.back().get();
}

}  // namespace tensorwire
