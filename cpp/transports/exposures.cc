#include "transports/exposures.h"

namespace tensorwire {

void Exposures::expose(const Header& request, const std::shared_ptr<Region>& region) {
  if (region->on_gpu) {
    throw Error(Code::kUnavailable,
                "memory of a GPU cannot be reached by rdma: connect by tcp, or by shm on one host");
  }
  auto exposed = fabric_->expose(*region);
  if (exposed->key.size() > kMaxBodyBytes) {
    throw Error(Code::kUnavailable, "the key of registered memory has " +
                                        std::to_string(exposed->key.size()) +
                                        " bytes; let UCX use fewer devices (UCX_NET_DEVICES)");
  }
  Header header{.type = FrameType::kKey,
                .region = region->id,
                .generation = region->generation,
                .length = exposed->key.size(),
                .transfer = request.transfer,
                .value = exposed->address};
  stream_->send(header, exposed->key, false);
  std::lock_guard lock(mutex_);
  exposed_[region->generation] = std::move(exposed);
}

void Exposures::revoke(const Region& region) {
  {
    std::lock_guard lock(mutex_);
    if (!exposed_.contains(region.generation)) return;
    if (!revoking_.insert(region.generation).second) return;
  }
  stream_->send({.type = FrameType::kRevoke, .region = region.id, .generation = region.generation});
}

bool Exposures::revoked(const Header& header) {
  std::shared_ptr<Exposed> gone;  // unregistered without the lock
  std::lock_guard lock(mutex_);
  if (revoking_.erase(header.generation) == 0) return false;
  auto found = exposed_.find(header.generation);
  gone = std::move(found->second);
  exposed_.erase(found);
  return true;
}

bool Exposures::revoking(uint64_t generation) const {
  std::lock_guard lock(mutex_);
  return revoking_.contains(generation);
}

void Exposures::close() {
  std::unordered_map<uint64_t, std::shared_ptr<Exposed>> exposed;  // unregistered without the lock
  std::lock_guard lock(mutex_);
  exposed.swap(exposed_);
  revoking_.clear();
}

}  // namespace tensorwire
