// A Node: this process on the fabric. Owns regions, peers, doors and the progress loop.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "node/connect.h"
#include "node/listener.h"
#include "node/peer.h"

namespace tensorwire {

struct NodeOptions {
  std::string name;
  std::string host = "127.0.0.1";
  uint16_t port = 0;  // 0 = any free one
  int listener = -1;  // a TCP socket that listens, in place of one at host and port; see listen_on
  uint64_t incarnation = 0;  // of the Node that this one goes on as; 0 = random
  Secret secret;             // empty = none
  TlsUse tls = TlsUse::kAuto;
  uint32_t transports = kShmBit | kTcpBit;
  // rdma is taken up where it can be had. Asked for among `transports`, it is an error not to have
  // it.
  bool try_rdma = false;
  std::string rdma_device;  // which NIC and port, see usable_ports(); "" = any active one
  uint64_t quota_bytes = uint64_t{4} << 30;
  size_t max_peers = 1024;
  double handshake_timeout_s = 10;
  double peer_timeout_s = 10;
};

// "shm,tcp" <-> bits. Throws kInvalid for an unknown name, kUnavailable for one that is not built.
uint32_t transport_bits(const std::vector<std::string>& names);

class Node : public std::enable_shared_from_this<Node> {
 public:
  static std::shared_ptr<Node> create(NodeOptions options);
  ~Node();
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  const std::string& name() const { return options_.name; }
  uint16_t port() const { return port_; }
  uint64_t incarnation() const { return incarnation_; }
  bool closed() const { return closed_ || epoch_ != fork::epoch(); }
  const std::shared_ptr<Progress>& progress() const { return fabric_.progress; }
  const Traffic& traffic() const { return *fabric_.traffic; }
  const GpuTraffic& gpu_traffic() const { return *fabric_.gpu_traffic; }
  const std::shared_ptr<GpuQueue>& gpu_queue() const { return fabric_.gpu_queue; }
  const Progress::Transfers& transfers() const { return fabric_.progress->transfers(); }

  // Throws kClosed unless this process made the Node and has not closed it.
  void check_open() const;

  // mappable: this process can map the memory again, also if no peer can.
  // gpu: see RegionTable::allocate.
  std::shared_ptr<Region> allocate(uint64_t size, const std::string& name, Access access,
                                   bool mappable = false, int gpu = -1);
  // A region of an earlier process, see RegionTable::restore. Throws kUnavailable without shm.
  std::shared_ptr<Region> restore(int memory, const RegionFacts& facts);
  // A region over memory of another Node of this process, see RegionTable::lend. Throws
  // kUnavailable with rdma.
  std::shared_ptr<Region> lend(int memory, uint64_t size, const std::string& name);
  std::shared_ptr<Region> region(const std::string& name) const;
  // Takes the region away from peers; returns when none of them can place bytes in it through
  // this Node any more. (On shm a peer that mapped it keeps its mapping of the old memory.)
  void free(const std::shared_ptr<Region>& region);

  // Connects, proves the secret and chooses the path: shm if the peer proves to be on this host,
  // else rdma if both sides offer it and their NICs reach each other, else tcp. require names the
  // only path that will do, "" any. interrupted is called when a signal arrives and may throw.
  PeerPtr connect(const std::string& host, uint16_t port, Deadline deadline,
                  const std::string& require, const Interrupted& interrupted);
  // Another descriptor of the socket that listens, which is the caller's. Throws kBusy, kClosed.
  int duplicate_listener() const;
  // The next peer that connected to us; null if the deadline passed (or a signal came).
  PeerPtr accept(Deadline deadline);
  // Accepts no more peers, and closes the descriptors of the socket. Throws kClosed.
  void stop_listening();
  // The peers that are connected and ready for use.
  std::vector<PeerPtr> peers() const;

  // Waits until the word at offset is >= value. False if the deadline passed (or a signal came).
  // Throws kClosed if the Node is closed meanwhile, kStaleHandle if the region is freed, and the
  // peer's own status if watch is given and lost first.
  // pace: as for Progress::wait.
  bool wait_word(const Region& region, uint64_t offset, uint64_t value, Deadline deadline,
                 const PeerPtr& watch = nullptr, Pace* pace = nullptr);

  // Raises a word of this Node's own, as a peer would. Throws as wait_word does.
  void raise_word(Region& region, uint64_t offset, uint64_t value);

  void close();

 private:
  explicit Node(NodeOptions options);
  void start();
  Hello hello() const;
  Status full() const;  // of peers
  // Driving thread.
  PeerPtr adopt(Connection made, bool accepted);
  PeerPtr connect_once(const std::string& host, uint16_t port, Deadline deadline, uint32_t require,
                       const Refused& refused, const Interrupted& interrupted, uint32_t& transport);
  void start_rdma();
  std::vector<PeerPtr> all_peers() const;  // whether they are ready or not
  void forget(Peer& peer);
  void free_here(const std::shared_ptr<Region>& region);  // driving thread

  NodeOptions options_;
  const uint32_t epoch_;
  const uint64_t incarnation_;
  uint16_t port_ = 0;
  Fabric fabric_;
  std::unique_ptr<RegionTable> regions_;
  std::shared_ptr<Listener> listener_;
  std::atomic<bool> closed_{false};

  mutable std::mutex mutex_;
  uint64_t next_peer_ = 1;
  std::map<uint64_t, PeerPtr> peers_;
  std::deque<PeerPtr> accepted_;
  std::atomic<size_t> accepted_count_{0};
};

}  // namespace tensorwire
