// What rdma_fabric.cc and rdma.cc share and nobody else needs.
#pragma once

#include <chrono>

#include "rdma.h"

namespace tensorwire {

// One UCX endpoint. Lives until it is closed.
struct RdmaFabric::Link {
  RdmaFabric* fabric = nullptr;
  ucx::Endpoint endpoint = nullptr;
  std::weak_ptr<RdmaChannel> channel;
  Clock::time_point since = Clock::now();
  bool claimed = false;  // a channel's, not an arrival's that has not shown its token
  bool failed = false;
};

// UCX holds a plain pointer to it while a request is under way; the channel's flying_ owns it.
struct RdmaWork {
  std::shared_ptr<RdmaChannel> channel;
  TransferPtr transfer;
  std::vector<RemoteRegionPtr> regions;  // one per piece
  Header word;
  bool has_word = false;
  // Under the fabric's lock.
  size_t left = 1;  // requests under way, and one while they are being posted
  ucx::Status status = ucx::kOk;
  bool refused = false;  // the failure came from this side's UCX, not from the wire
  bool over = false;
};

inline constexpr unsigned kFrameMessage = 1;  // the only kind of active message

// What travels in it.
struct RdmaFrame {
  uint64_t token = 0;  // what the receiver gave the sender
  Header header;
};
static_assert(sizeof(RdmaFrame) == 72);

}  // namespace tensorwire
