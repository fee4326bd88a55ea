// Signal words: 64-bit values in shared memory that only grow.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace tensorwire {

inline std::atomic_ref<uint64_t> word_at(std::byte* address) {
  return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(address));
}

// Stores value if it is larger than the stored one. Release: a thread that reads it with acquire
// sees everything that the caller wrote before.
inline void store_max(std::byte* address, uint64_t value) {
  auto word = word_at(address);
  uint64_t seen = word.load(std::memory_order_relaxed);
  while (seen < value && !word.compare_exchange_weak(seen, value, std::memory_order_release,
                                                     std::memory_order_relaxed)) {
  }
}

}  // namespace tensorwire
