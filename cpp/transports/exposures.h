// Exposures: the memory of this Node that one peer's NIC reaches, by regions that were granted to
// it.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>

#include "memory/region.h"
#include "transports/rdma_fabric.h"
#include "wire/frame.h"
#include "wire/stream.h"

namespace tensorwire {

class Exposures {
 public:
  void attach(std::shared_ptr<RdmaFabric> fabric, std::shared_ptr<Stream> stream) {
    fabric_ = std::move(fabric);
    stream_ = std::move(stream);
  }
  // Driving thread. Sends the peer the key that goes before its grant; throws kUnavailable if no
  // frame can carry it.
  void expose(const Header& request, const std::shared_ptr<Region>& region);
  // Driving thread. The region was freed: the peer is asked to say when nothing is under way to it.
  void revoke(const Region& region);
  // Driving thread. The peer has said so; false if it was not asked.
  bool revoked(const Header& header);
  // The peer has not said so yet. Any thread.
  bool revoking(uint64_t generation) const;
  // The peer has no endpoint any more, so nobody reaches this memory.
  void close();

 private:
  std::shared_ptr<RdmaFabric> fabric_;
  std::shared_ptr<Stream> stream_;
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<Exposed>> exposed_;  // by generation
  std::set<uint64_t> revoking_;  // generations in exposed_ of regions that were freed here
};

}  // namespace tensorwire
