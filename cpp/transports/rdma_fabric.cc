#include "transports/rdma_fabric.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "base/error.h"
#include "wire/resolve.h"

namespace tensorwire {
namespace {

constexpr int kRoundsPerPoll = 32;
// How long an endpoint may be open without showing its token.
constexpr auto kOrphanLife = std::chrono::seconds(10);
// Closing an endpoint takes the NIC a moment; one that does not answer is given up.
constexpr auto kClosePatience = std::chrono::seconds(2);

std::string locked_limit() {
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  if (limit.rlim_cur == RLIM_INFINITY) return "";
  return "; this process may lock " + std::to_string(limit.rlim_cur >> 10) +
         " KiB: ulimit -l unlimited, or LimitMEMLOCK=infinity (systemd), "
         "--ulimit memlock=-1 (docker)";
}

}  // namespace

Exposed::~Exposed() {
  if (!fabric->is_here()) return;
  std::lock_guard lock(fabric->mutex_);
  if (memory != nullptr) fabric->ucx_->ucp_mem_unmap(fabric->context_, memory);
  fabric->exposed_.erase(this);
}

RemoteKey::~RemoteKey() {
  if (!fabric->is_here()) return;
  std::lock_guard lock(fabric->mutex_);
  if (key != nullptr) fabric->ucx_->ucp_rkey_destroy(key);
  fabric->keys_.erase(this);
}

std::shared_ptr<RdmaFabric> RdmaFabric::create(std::shared_ptr<Progress> progress,
                                               const std::string& device) {
  std::shared_ptr<RdmaFabric> fabric(new RdmaFabric(std::move(progress)));
  try {
    fabric->start(device);
  } catch (...) {
    fabric->stop();
    throw;
  }
  return fabric;
}

RdmaFabric::RdmaFabric(std::shared_ptr<Progress> progress)
    : progress_(std::move(progress)), epoch_(fork::epoch()) {}

// A Node stops its fabric before it lets go of it; a forked child never touches it.
RdmaFabric::~RdmaFabric() = default;

void RdmaFabric::start(const std::string& device) {
  auto ports = usable_ports(rdma_ports(), device);
  ucx_ = &ucx::library();
  auto check = [&](ucx::Status status, const std::string& what) {
    if (status == ucx::kOk) return;
    std::string why = what + " failed: " + ucx_->text(status) + " (UCX " + ucx_->version + ")";
    if (status == ucx::kNoMemory) throw Error(Code::kNoMemory, why + locked_limit());
    if (status == ucx::kNoDevice) {
      why +=
          "; is /dev/infiniband/uverbs* there and readable, and are rdma-core's providers "
          "installed (Debian: ibverbs-providers)?";
    }
    throw Error(Code::kUnavailable, why + locked_limit());
  };

  ucx::Config config = nullptr;
  check(ucx_->ucp_config_read(nullptr, nullptr, &config), "reading UCX's configuration");
  std::unique_ptr<ucx::ConfigOpaque, void (*)(ucx::Config)> owner(config, ucx_->ucp_config_release);
  // Anything else would emulate one-sided access (docs/rdma.md); whoever sets UCX_TLS is obeyed,
  // and the path that results is checked when a peer connects.
  if (std::getenv("UCX_TLS") == nullptr) {
    check(ucx_->ucp_config_modify(config, "TLS", "rc"), "choosing UCX's transports");
  }
  if (std::getenv("UCX_NET_DEVICES") == nullptr) {
    std::string names;
    for (const RdmaPort& port : ports) {
      if (!names.empty()) names += ',';
      names += port.name();
    }
    check(ucx_->ucp_config_modify(config, "NET_DEVICES", names.c_str()), "choosing the NIC");
  }
  // The control stream watches for silence. UCX's own probe, a put of no bytes, ends endpoints on
  // soft-RoCE after 20 s.
  check(ucx_->ucp_config_modify(config, "KEEPALIVE_INTERVAL", "inf"), "setting up UCX");
  ucx::ContextParams context{};
  context.mask = ucx::ContextParams::kFeatures | ucx::ContextParams::kSharedByThreads |
                 ucx::ContextParams::kName;
  context.features = ucx::kFeatureRma | ucx::kFeatureAm | ucx::kFeatureWakeup;
  context.shared_by_threads = 1;
  context.name = "tensorwire";
  check(ucx_->ucp_init_version(1, 13, &context, config, &context_), "starting UCX");

  ucx::WorkerParams worker{};
  worker.mask = ucx::WorkerParams::kThreads;
  worker.threads = ucx::WorkerParams::kSerialized;
  check(ucx_->ucp_worker_create(context_, &worker, &worker_), "making a UCX worker");
  check(ucx_->ucp_worker_get_efd(worker_, &descriptor_), "getting the worker's descriptor");
  ucx::HandlerParams handler{};
  handler.mask =
      ucx::HandlerParams::kId | ucx::HandlerParams::kCall | ucx::HandlerParams::kArgument;
  handler.id = kRdmaFrameMessage;
  handler.call = on_message;
  handler.argument = this;
  check(ucx_->ucp_worker_set_am_recv_handler(worker_, &handler), "setting the message handler");

  std::string first = ports.front().addresses.front();
  bool v6 = first.find(':') != std::string::npos;
  sockaddr_storage any{};
  any.ss_family = v6 ? AF_INET6 : AF_INET;
  ucx::ListenerParams listener{};
  listener.mask = ucx::ListenerParams::kAddress | ucx::ListenerParams::kOnConnection;
  listener.address = {reinterpret_cast<sockaddr*>(&any),
                      static_cast<socklen_t>(v6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in))};
  listener.on_connection = {on_connection, this};
  check(ucx_->ucp_listener_create(worker_, &listener, &listener_), "listening for RDMA peers");
  ucx::ListenerAttributes attributes{};
  attributes.mask = ucx::ListenerAttributes::kAddress;
  check(ucx_->ucp_listener_query(listener_, &attributes), "asking for the listener's port");
  // The port lies at the same place in both kinds of address.
  where_ = std::to_string(ntohs(reinterpret_cast<sockaddr_in*>(&attributes.address)->sin_port));
  for (const RdmaPort& port : ports) {
    for (const auto& address : port.addresses) where_ += " " + address;
  }
}

void RdmaFabric::stop() {
  {
    std::lock_guard lock(mutex_);
    if (listener_ != nullptr) ucx_->ucp_listener_destroy(listener_);
    listener_ = nullptr;
    while (!links_.empty()) close(links_.begin()->second.get(), [] { return true; });
  }
  settle();  // whoever was cut off is told
  std::lock_guard lock(mutex_);
  for (RemoteKey* key : keys_) {
    ucx_->ucp_rkey_destroy(key->key);
    key->key = nullptr;
  }
  keys_.clear();
  for (Exposed* exposed : exposed_) {
    ucx_->ucp_mem_unmap(context_, exposed->memory);
    exposed->memory = nullptr;
  }
  exposed_.clear();
  if (worker_ != nullptr) ucx_->ucp_worker_destroy(worker_);
  worker_ = nullptr;
  if (context_ != nullptr) ucx_->ucp_cleanup(context_);
  context_ = nullptr;
}

std::shared_ptr<Exposed> RdmaFabric::expose(const Region& region) {
  std::lock_guard lock(mutex_);
  if (auto known = by_generation_[region.generation].lock()) return known;
  std::erase_if(by_generation_, [](const auto& entry) { return entry.second.expired(); });
  auto exposed = std::make_shared<Exposed>();
  exposed->fabric = shared_from_this();
  exposed->mapping = region.mapping;
  region.mapping->keep_pages();
  exposed->address = reinterpret_cast<uint64_t>(region.data());
  ucx::MemoryParams params{};
  params.mask = ucx::MemoryParams::kAddress | ucx::MemoryParams::kLength;
  params.address = region.data();
  params.length = region.size;
  ucx::Status status = ucx_->ucp_mem_map(context_, &params, &exposed->memory);
  if (status != ucx::kOk) {
    exposed->memory = nullptr;
    throw Error(Code::kNoMemory, "the NIC cannot register " + std::to_string(region.size) +
                                     " bytes: " + ucx_->text(status) + locked_limit());
  }
  exposed_.insert(exposed.get());
  void* packed = nullptr;
  size_t size = 0;
  status = ucx_->ucp_rkey_pack(context_, exposed->memory, &packed, &size);
  if (status != ucx::kOk) {
    throw Error(Code::kUnavailable, "no key for registered memory: " + ucx_->text(status));
  }
  exposed->key.assign(static_cast<const char*>(packed), size);
  ucx_->ucp_rkey_buffer_release(packed);
  by_generation_[region.generation] = exposed;
  return exposed;
}

// ---- endpoints

RdmaLink* RdmaFabric::make_link(ucx::EndpointParams& params, std::weak_ptr<RdmaUser> user,
                                ucx::Status& status) {
  auto link = std::make_unique<RdmaLink>();
  link->fabric = this;
  link->user = std::move(user);
  params.mask |= ucx::EndpointParams::kErrorMode | ucx::EndpointParams::kOnError;
  params.error_mode = ucx::EndpointParams::kPeerErrors;
  params.on_error = {on_error, link.get()};
  status = ucx_->ucp_ep_create(worker_, &params, &link->endpoint);
  if (status != ucx::kOk) return nullptr;
  RdmaLink* made = link.get();
  links_[made->endpoint] = std::move(link);
  return made;
}

RdmaLink* RdmaFabric::dial(const std::string& host, uint16_t port, std::weak_ptr<RdmaUser> user,
                           std::string& failure) {
  Resolved found = read_address(host, port);
  if (found.addresses.empty()) {
    failure = "not an address";
    return nullptr;
  }
  ucx::EndpointParams params{};
  params.mask = ucx::EndpointParams::kAddress | ucx::EndpointParams::kFlags;
  params.flags = ucx::EndpointParams::kClientServer;
  params.address = {found.addresses.front().get(), found.addresses.front().size};
  ucx::Status status = ucx::kOk;
  RdmaLink* link = make_link(params, std::move(user), status);
  if (link == nullptr) failure = ucx_->text(status);
  return link;
}

RdmaLink* RdmaFabric::claim(ucx::Endpoint endpoint, std::weak_ptr<RdmaUser> user) {
  auto found = links_.find(endpoint);
  if (found == links_.end() || found->second->failed || found->second->user.lock()) return nullptr;
  found->second->user = std::move(user);
  return found->second.get();
}

std::shared_ptr<RemoteKey> RdmaFabric::unpack(RdmaLink& link, const Header& header,
                                              std::string_view bytes) {
  auto key = std::make_shared<RemoteKey>();
  key->fabric = shared_from_this();
  key->address = header.value;
  if (ucx_->ucp_ep_rkey_unpack(link.endpoint, bytes.data(), &key->key) != ucx::kOk) {
    key->key = nullptr;
    return nullptr;
  }
  keys_.insert(key.get());
  return key;
}

std::vector<std::shared_ptr<RdmaWork>> RdmaFabric::take_finished(const RdmaUser& user) {
  std::vector<std::shared_ptr<RdmaWork>> taken;
  std::erase_if(finished_, [&](Finished& one) {
    if (one.user.get() != &user) return false;
    taken.push_back(std::move(one.work));
    return true;
  });
  return taken;
}

void RdmaFabric::close(RdmaLink* link, const std::function<bool()>& gone) {
  ucx::RequestParams params{};
  params.mask = ucx::RequestParams::kFlags;
  params.flags = ucx::RequestParams::kForce;
  void* request = ucx_->ucp_ep_close_nbx(link->endpoint, &params);
  if (ucx::is_error(request)) request = nullptr;
  auto end = Clock::now() + kClosePatience;
  auto closing = [&] {
    return request != nullptr && ucx_->ucp_request_check_status(request) == ucx::kInProgress;
  };
  while ((closing() || !gone()) && Clock::now() < end) {
    while (ucx_->ucp_worker_progress(worker_) != 0) {
    }
  }
  if (request != nullptr) ucx_->ucp_request_free(request);
  // What callbacks noted of it must not be looked at any more.
  std::erase_if(arrived_, [&](const Arrived& one) { return one.message.from == link->endpoint; });
  std::erase_if(failed_, [&](const Failed& one) { return one.endpoint == link->endpoint; });
  links_.erase(link->endpoint);
}

void RdmaFabric::on_connection(ucx::Connection connection, void* argument) {
  auto* fabric = static_cast<RdmaFabric*>(argument);
  std::lock_guard lock(fabric->mutex_);
  size_t orphans = 0;
  for (const auto& [endpoint, link] : fabric->links_) orphans += link->user.lock() ? 0 : 1;
  // Only peers that were told to come, and one at a time each.
  if (orphans >= fabric->expected_) {
    fabric->ucx_->ucp_listener_reject(fabric->listener_, connection);
    return;
  }
  ucx::EndpointParams params{};
  params.mask = ucx::EndpointParams::kConnection;
  params.connection = connection;
  ucx::Status status = ucx::kOk;
  fabric->make_link(params, {}, status);  // a failure: the peer sees its endpoint fail
}

void RdmaFabric::on_error(void* argument, ucx::Endpoint, ucx::Status status) {
  auto* link = static_cast<RdmaLink*>(argument);
  RdmaFabric* fabric = link->fabric;
  std::lock_guard lock(fabric->mutex_);
  if (link->failed) return;
  link->failed = true;
  fabric->failed_.push_back({link->user, link->endpoint, fabric->ucx_->text(status)});
}

ucx::Status RdmaFabric::on_message(void* argument, const void*, size_t, void* data, size_t size,
                                   const ucx::MessageInfo* info) {
  auto* fabric = static_cast<RdmaFabric*>(argument);
  std::lock_guard lock(fabric->mutex_);
  if (size < sizeof(RdmaFrame) || size > sizeof(RdmaFrame) + kMaxBodyBytes) return ucx::kOk;
  RdmaFrame frame;
  std::memcpy(&frame, data, sizeof frame);
  RdmaMessage message{frame.header, {}, nullptr};
  message.body.assign(static_cast<const char*>(data) + sizeof frame, size - sizeof frame);
  if ((info->mask & ucx::MessageInfo::kReplyTo) != 0) message.from = info->reply_to;
  fabric->arrived_.push_back({frame.token, std::move(message)});
  return ucx::kOk;
}

// ---- driving

bool RdmaFabric::has_notes() const {
  return !finished_.empty() || !arrived_.empty() || !failed_.empty();
}

bool RdmaFabric::poll() {
  bool any = false;
  {
    std::lock_guard lock(mutex_);
    if (worker_ == nullptr) return false;
    for (int i = 0; i < kRoundsPerPoll && ucx_->ucp_worker_progress(worker_) != 0; ++i) any = true;
    any = any || has_notes();
  }
  if (any) settle();
  return any;
}

bool RdmaFabric::arm() {
  std::lock_guard lock(mutex_);
  if (worker_ == nullptr) return true;
  if (has_notes() || ucx_->ucp_worker_arm(worker_) == ucx::kBusy) return false;
  // An armed queue tells of what comes later. Not every NIC tells of what came since the last look.
  return ucx_->ucp_worker_progress(worker_) == 0 && !has_notes();
}

// Frames before failures: a peer that answers and goes has answered.
void RdmaFabric::settle() {
  for (;;) {
    std::vector<Finished> finished;
    std::vector<std::pair<std::shared_ptr<RdmaUser>, RdmaMessage>> arrived;
    std::vector<Failed> failed;
    {
      std::lock_guard lock(mutex_);
      if (!has_notes()) break;
      finished.swap(finished_);
      failed.swap(failed_);
      for (Arrived& one : arrived_) {
        auto found = users_.find(one.token);
        auto user = found == users_.end() ? nullptr : found->second.lock();
        if (user) arrived.emplace_back(std::move(user), std::move(one.message));
      }
      arrived_.clear();
    }
    for (const Finished& one : finished) one.user->finished(one.work);
    for (const auto& [user, message] : arrived) user->received(message);
    for (const Failed& one : failed) {
      if (auto user = one.user.lock()) user->failed(one.endpoint, one.why);
    }
  }
  drop_orphans();
}

// Endpoints that nobody has: of strangers, and of peers that were lost while they connected.
void RdmaFabric::drop_orphans() {
  std::lock_guard lock(mutex_);
  auto is_orphan = [now = Clock::now()](const auto& entry) {
    const RdmaLink& link = *entry.second;
    return !link.user.lock() && (link.failed || now - link.since > kOrphanLife);
  };
  for (auto found = links_.begin(); found != links_.end();) {
    found = std::find_if(found, links_.end(), is_orphan);
    if (found == links_.end()) break;
    close((found++)->second.get(), [] { return true; });
  }
}

}  // namespace tensorwire
