// Copying large ranges of memory: past the caches where that is faster.
#pragma once

#include <cstddef>

namespace tensorwire {

// As memmove. From a quarter of the last-level cache up, ranges that do not overlap are stored
// around the caches: that saves reading the target first, and what a peer will read soon would not
// have stayed in the cache anyway. Measured beside memcpy on 4 KiB pages: 1.2 to 1.9 times as fast
// at 16 and 64 MiB. Such stores are fenced before it returns.
void copy_memory(std::byte* target, const std::byte* source, size_t size);

}  // namespace tensorwire
