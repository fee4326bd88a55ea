// A Peer: another process, used as memory. Joins the stream (control, and data on tcp), the channel
// (the data path) and the service (what the peer may do here).
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "node/questions.h"
#include "transports/exposures.h"
#include "transports/fault.h"
#include "transports/gpu_relay.h"
#include "transports/rdma.h"
#include "transports/service.h"
#include "transports/shm.h"
#include "transports/tcp.h"
#include "transports/transport.h"
#include "wire/descriptors.h"
#include "wire/handshake.h"
#include "wire/stream.h"

namespace tensorwire {

// The goodbye of a side that gives no other reason.
inline constexpr std::string_view kClosedByUser = "closed by its user";

// The parts of its Node that a Peer uses. Outlives the Peer.
struct Fabric {
  std::shared_ptr<Progress> progress;
  std::shared_ptr<Traffic> traffic;
  RegionTable* regions = nullptr;
  std::shared_ptr<Mappings> mappings;  // of regions here and at peers
  uint64_t quota_bytes = 0;            // of all regions that peers allocated here
  bool shareable = false;
  uint64_t incarnation = 0;
  std::shared_ptr<GpuQueue> gpu_queue;
  std::shared_ptr<GpuTraffic> gpu_traffic;
  std::shared_ptr<RdmaFabric> rdma;                                 // null: not offered
  std::function<void(const std::shared_ptr<Region>&)> free_region;  // driving thread
};

class Peer : public FrameSink, public std::enable_shared_from_this<Peer> {
 public:
  // `id` is this Node's own number for the connection.
  Peer(Fabric fabric, uint64_t id, Hello remote, std::string address, uint32_t transport,
       std::string reason);

  // Takes over the connected socket, and on shm the one for descriptors; the peer works once it is
  // ready(), on tcp at once. accepting: the other side connected.
  void start(Link link, std::shared_ptr<DescriptorSocket> descriptors, bool accepting,
             std::function<void(Peer&)> on_ready, std::function<void(Peer&)> on_lost);

  // This connection was lost, and `successor` is one to the same Node, perhaps in another process.
  // From then on all questions and operations, and what is told of this peer, are the successor's;
  // what was under way has failed. Again after each further loss. Returns when a look-up by the
  // successor gives the mappings that were granted here. Any thread but not a handler. Throws
  // kInvalid (this peer is not lost, or the successor is of another Node here or there),
  // kUnavailable (not on shm), kClosed.
  void succeed(const std::shared_ptr<Peer>& successor);
  // This, or what has succeeded it: never null, and for as long as this peer.
  Peer* latest() const;
  // What was asked of one of them goes to the connection of the other.
  bool follows(const Peer& other) const { return latest() == other.latest(); }

  // Of a successor these two are the same, and its transport is shm as well.
  const std::string& name() const { return remote_.name; }
  uint64_t incarnation() const { return remote_.incarnation; }
  const std::string& address() const { return latest()->address_; }
  uint32_t pid() const { return latest()->remote_.pid; }
  std::string transport() const { return name_of(transport_); }
  static const char* name_of(uint32_t transport_bit);
  std::vector<std::string> offered() const;  // transports, by the other side
  // What carries the bytes below the transport: "rc_verbs/rxe0:1"; "" where the name says it all.
  std::string wire() const { return rdma_ ? rdma_->wire() : ""; }
  const std::string& reason() const { return latest()->reason_; }
  // Frames to and from it travel by TLS.
  bool encrypted() const { return latest()->encrypted_; }
  uint64_t id() const { return id_; }
  bool ready() const { return ready_.load(std::memory_order_acquire); }
  bool lost() const { return latest()->broken(); }
  Status lost_status() const;
  // This connection is over, whatever has succeeded it.
  bool broken() const { return lost_.load(std::memory_order_acquire); }

  // Regions of the peer. Non-blocking: wait for ->transfer; finish() gives the region or throws.
  AskedPtr ask_allocate(uint64_t size, const std::string& name, Access access);
  // await: the answer comes when there is a region of that name.
  AskedPtr ask_lookup(const std::string& name, bool await = false);
  AskedPtr ask_attach(uint32_t id, uint64_t generation, bool copied = false);
  AskedPtr ask_free(const RemoteRegion& region);
  RemoteRegionPtr finish(const AskedPtr& asked) const;
  // Nobody waits any more: a region that still comes is given back. To be told to the peer that was
  // asked, see latest().
  void abandon(const AskedPtr& asked) { questions_.abandon(asked); }

  // One-sided operations. Throws kInvalid, kPermission or kStaleHandle for what can be seen here;
  // everything else is told by the transfer.
  TransferPtr write(std::span<const Piece> pieces, const SignalTo& signal, const How& how);
  TransferPtr read(std::span<const Piece> pieces, const How& how);
  TransferPtr signal(const SignalTo& signal, std::span<const TransferPtr> after);
  TransferPtr fetch_add(const RemoteRegion& region, uint64_t offset, uint64_t value);
  void check(std::span<const Piece> pieces, bool write) const;
  void check_word(const RemoteRegion& region, uint64_t offset) const;

  // Lets a plan act on operations and questions; null ends that.
  void inject(std::shared_ptr<FaultPlan> plan);

  // Driving thread only. Idempotent; the first status stays. The goodbye, if any, tells the other
  // side why: presentable text of at most kMaxBodyBytes.
  void lose(Status status, std::string_view goodbye = {});
  void revoke(const Region& region);
  // There is a region with a new name.
  void answer_awaited() { service_.answer_awaited(); }
  // The peer may still have writes under way to the memory of a region that was freed. Any thread.
  bool revoking(uint64_t generation) const { return exposures_.revoking(generation); }

  // FrameSink, driving thread.
  bool begin_payload(const Header& header, std::byte** target) override;
  bool end_payload(const Header& header) override;
  bool control(const Header& header, std::string_view body) override;

 private:
  std::string describe() const;
  void check_alive() const;
  void check_region(const RemoteRegion& region) const;
  void check_gpu(std::span<const Piece> pieces, const How& how) const;
  // Throws that the grant does not allow it.
  [[noreturn]] void refuse(const RemoteRegion& region, const char* how, const char* why = "") const;
  // Loses the peer, if there still is one.
  std::function<void(Status)> on_failure();
  AskedPtr ask(const Header& header, std::string_view body, Asked::Wants wants);
  // The descriptors that came with a frame on the socket for descriptors.
  struct Passed : Granted {
    Descriptor doorbell;
  };
  bool granted(const Header& header, std::string_view body);
  void start_shm(std::shared_ptr<DescriptorSocket> descriptors);
  void offer_memory();
  // Has the message that belongs to this frame examined, and goes on with it in the driving thread;
  // what returns false there is a breach.
  bool receive_memory(const Header& frame,
                      std::function<void(const DescriptorMessage&, Passed&)> examine,
                      std::function<bool(Passed&)> then);
  bool attached_shm(const Header& header, std::string_view body);
  bool wait_for_memory(const Header& header, std::string_view body);
  bool attached_rdma(const Header& header, std::string_view body);
  void became_ready();
  void start_rdma();
  bool revoked(const Header& header);
  // The successor that must be asked in place of this peer, or null.
  Peer* successor() const { return successor_.load(std::memory_order_acquire); }
  Status succeed_here(const std::shared_ptr<Peer>& successor);  // driving thread
  // Where operations go: to the channel, unless a plan of faults is followed.
  Channel& channel() const {
    FaultyChannel* faulty = faulty_.load(std::memory_order_acquire);
    return faulty == nullptr ? *channel_ : *faulty;
  }

  const Fabric fabric_;
  const uint64_t id_;
  const Hello remote_;
  const std::string address_, reason_;
  const uint32_t transport_;
  bool accepting_ = false, attaching_ = false, encrypted_ = false;
  const uint32_t epoch_;
  std::atomic<uint64_t> next_id_{1};
  std::shared_ptr<Stream> stream_;
  std::shared_ptr<ShmChannel> shm_;
  std::shared_ptr<DescriptorSocket> descriptors_;  // shm
  std::shared_ptr<Doorbell> doorbell_;             // shm: that the peer rings
  std::shared_ptr<TcpChannel> tcp_;
  std::shared_ptr<RdmaChannel> rdma_;
  std::shared_ptr<Channel> channel_;
  Service service_;
  Questions questions_;
  Exposures exposures_;  // rdma
  std::function<void(Peer&)> on_ready_, on_lost_;
  struct Early {
    Header header;
    std::string body;
  };
  std::vector<Early> early_;  // shm: what came before ready(), in order
  Header key_header_;         // the last kKey, which belongs to the kGrant behind it
  std::string key_;
  std::atomic<bool> ready_{false}, lost_{false};

  std::mutex awaited_mutex_;
  std::map<std::string, std::weak_ptr<Asked>> awaited_;  // look-ups that wait for a region
  mutable std::mutex mutex_;
  Status lost_status_;
  std::vector<std::shared_ptr<FaultyChannel>> faults_;  // one for each plan that ever was
  std::atomic<FaultyChannel*> faulty_{nullptr};         // of the plan that is followed

  // Every successor that ever was stays as long as this peer, since calls may be in it. None of
  // them had a successor when it became one, so that no two peers keep each other.
  std::vector<std::shared_ptr<Peer>> successors_;  // driving thread only
  std::atomic<Peer*> successor_{nullptr};          // the last of them
};

using PeerPtr = std::shared_ptr<Peer>;

}  // namespace tensorwire
