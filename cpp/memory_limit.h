// How much memory this process may have: that of the host, or what its control groups grant.
#pragma once

#include <cstdint>
#include <string>

namespace tensorwire {

struct MemoryLimit {
  uint64_t bytes = 0;
  std::string of;  // "this host's memory", or which control group sets the limit
};

// The least of the host's physical memory and the memory limits of the control groups (versions 1
// and 2) that this process is in. Reads a few small files below root ("" = the system's) each time,
// since limits change; what cannot be read sets no limit.
MemoryLimit memory_limit(const std::string& root = "");

}  // namespace tensorwire
