// The page of a Node: what its peers on the same host may read without asking. Peers map it
// read-only.
#pragma once

#include <atomic>
#include <cstdint>

namespace tensorwire {

inline constexpr uint32_t kMaxRegions = 16384;
inline constexpr uint64_t kPageMagic = 0x3130656761705754;  // "TWpage01"

struct NodePage {
  uint64_t magic = kPageMagic;
  uint64_t incarnation = 0;
  // Waiters of the Node that have stopped spinning (and armed asyncio notifiers). A writer stores
  // its word, fences, and rings the Node's doorbell if this is not 0.
  alignas(64) std::atomic<uint32_t> armed{0};
  // The generation of the region in each slot; 0 where there is none. A handle whose generation
  // differs is stale.
  alignas(64) std::atomic<uint64_t> generations[kMaxRegions] = {};
};

}  // namespace tensorwire
