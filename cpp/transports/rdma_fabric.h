// UCX for one Node: a context, a worker that the Node's loop drives, a listener, registered memory
// and endpoints. What is said over an endpoint is its user's (rdma.h).
//
// UCX is called, and calls back, under one lock. Callbacks only take notes; the driving thread
// deals with them afterwards without the lock.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/fork.h"
#include "loop/progress.h"
#include "memory/region.h"
#include "transports/rdma_ports.h"
#include "transports/ucx.h"
#include "wire/frame.h"

namespace tensorwire {

class RdmaFabric;

// Memory of this Node as NICs see it.
struct Exposed {
  std::shared_ptr<RdmaFabric> fabric;
  std::shared_ptr<Mapping> mapping;
  ucx::Memory memory = nullptr;
  uint64_t address = 0;
  std::string key;  // packed, for peers
  ~Exposed();
};

// A peer's memory as our NIC reaches it.
struct RemoteKey {
  std::shared_ptr<RdmaFabric> fabric;
  ucx::Key key = nullptr;
  uint64_t address = 0;
  // Under the fabric's lock.
  bool revoked = false;  // the owner freed it
  uint64_t in_flight = 0;
  ~RemoteKey();
};

// What travels in an active message, before the frame's body.
struct RdmaFrame {
  uint64_t token = 0;  // what the receiver gave the sender
  Header header;
};
static_assert(sizeof(RdmaFrame) == 72);
inline constexpr unsigned kRdmaFrameMessage = 1;  // UCX's id of such messages; the only one

struct RdmaMessage {
  Header header;
  std::string body;
  ucx::Endpoint from;  // told by the first message of a connection
};

struct RdmaWork;  // the user's: a call of several requests

// The user of an endpoint. Called in the driving thread without the lock.
class RdmaUser {
 public:
  virtual ~RdmaUser() = default;
  virtual void finished(const std::shared_ptr<RdmaWork>& work) = 0;
  virtual void received(const RdmaMessage& message) = 0;
  // The endpoint failed; nothing more comes by it.
  virtual void failed(ucx::Endpoint endpoint, const std::string& why) = 0;
};

// One UCX endpoint. Lives until it is closed.
struct RdmaLink {
  RdmaFabric* fabric = nullptr;
  ucx::Endpoint endpoint = nullptr;
  std::weak_ptr<RdmaUser> user;  // none: it has not shown its token yet
  Clock::time_point since = Clock::now();
  bool failed = false;
};

class RdmaFabric : public Poller, public std::enable_shared_from_this<RdmaFabric> {
 public:
  // device: "" or what usable_ports() takes. Throws kUnavailable (no UCX, no device, no active
  // port), kNoMemory (locked memory), each with the remedy.
  static std::shared_ptr<RdmaFabric> create(std::shared_ptr<Progress> progress,
                                            const std::string& device);
  ~RdmaFabric() override;

  // "port address address ...": where endpoints are accepted.
  const std::string& where() const { return where_; }
  // Registers a region. Throws kNoMemory or kUnavailable. One registration per region.
  std::shared_ptr<Exposed> expose(const Region& region);
  // Ends everything; nothing of UCX is touched afterwards. Driving thread only.
  void stop();

  // Poller, driving thread only.
  bool poll() override;
  bool arm() override;
  int descriptor() const override { return descriptor_; }

  // For users. Everything below needs the lock; a callback may take it again.
  std::recursive_mutex& mutex() { return mutex_; }
  const ucx::Library& ucx() const { return *ucx_; }
  // Messages with this token are for that user, until it is given none.
  void route(uint64_t token, std::weak_ptr<RdmaUser> user) { users_[token] = std::move(user); }
  void unroute(uint64_t token) { users_.erase(token); }
  // As many endpoints are accepted as are expected and not there yet.
  void expect(int change) { expected_ += static_cast<size_t>(change); }
  // The endpoint of an arrival, for the user whose token it has shown; null if it is gone.
  RdmaLink* claim(ucx::Endpoint endpoint, std::weak_ptr<RdmaUser> user);
  // Opens an endpoint; null, and why, if that fails at once.
  RdmaLink* dial(const std::string& host, uint16_t port, std::weak_ptr<RdmaUser> user,
                 std::string& failure);
  // Cuts the endpoint and waits a bounded time until `gone` says that nothing of it is under way.
  void close(RdmaLink* link, const std::function<bool()>& gone);
  // Null if the bytes are no key.
  std::shared_ptr<RemoteKey> unpack(RdmaLink& link, const Header& header, std::string_view bytes);
  // Takes note of what a callback saw; the user is told by the driving thread.
  void note_finished(std::shared_ptr<RdmaUser> user, std::shared_ptr<RdmaWork> work) {
    finished_.push_back({std::move(user), std::move(work)});
  }
  // Takes the finished works of one user that it was not told of yet; nobody tells it of them.
  std::vector<std::shared_ptr<RdmaWork>> take_finished(const RdmaUser& user);

 private:
  friend struct Exposed;
  friend struct RemoteKey;
  struct Arrived {
    uint64_t token;
    RdmaMessage message;
  };
  struct Failed {
    std::weak_ptr<RdmaUser> user;
    ucx::Endpoint endpoint;
    std::string why;
  };
  struct Finished {
    std::shared_ptr<RdmaUser> user;
    std::shared_ptr<RdmaWork> work;
  };

  explicit RdmaFabric(std::shared_ptr<Progress> progress);
  bool is_here() const { return epoch_ == fork::epoch(); }  // not in a forked child
  void start(const std::string& device);
  RdmaLink* make_link(ucx::EndpointParams& params, std::weak_ptr<RdmaUser> user,
                      ucx::Status& status);
  bool has_notes() const;
  void settle();
  void drop_orphans();

  static void on_connection(ucx::Connection connection, void* fabric);
  static void on_error(void* link, ucx::Endpoint, ucx::Status status);
  static ucx::Status on_message(void* fabric, const void* header, size_t header_size, void* data,
                                size_t size, const ucx::MessageInfo* info);

  std::shared_ptr<Progress> progress_;
  const uint32_t epoch_;
  const ucx::Library* ucx_ = nullptr;
  std::string where_;
  int descriptor_ = -1;  // the worker's

  std::recursive_mutex mutex_;
  ucx::Context context_ = nullptr;
  ucx::Worker worker_ = nullptr;
  ucx::Listener listener_ = nullptr;
  std::map<ucx::Endpoint, std::unique_ptr<RdmaLink>> links_;
  std::map<uint64_t, std::weak_ptr<RdmaUser>> users_;  // by the token that they gave out
  size_t expected_ = 0;
  std::set<Exposed*> exposed_;
  std::map<uint64_t, std::weak_ptr<Exposed>> by_generation_;
  std::set<RemoteKey*> keys_;
  std::vector<Finished> finished_;
  std::vector<Arrived> arrived_;
  std::vector<Failed> failed_;
};

}  // namespace tensorwire
