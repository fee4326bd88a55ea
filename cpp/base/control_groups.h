// How much of this host the process may have: all of it, or what its control groups grant. The one
// reader of both versions' files, for C++ and Python.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tensorwire {

struct ControlGroup {
  std::string folder;  // with its files, below root
  std::string name;    // for people: its path below the mount, or "/"
  bool version_2;
};

// The groups of this process that can have limits of a controller ("cpu", "memory"), of both
// versions: its own and those above it, which bound what is in them. In a container the topmost is
// the container's. Reads files below root ("" = the system's); empty where they say nothing.
std::vector<ControlGroup> control_groups(const std::string& controller,
                                         const std::string& root = "");

struct MemoryLimit {
  uint64_t bytes = 0;
  std::string of;  // "this host's memory", or which control group sets the limit
};

// The least of the host's physical memory and the memory limits of the control groups. Reads them
// each time, since limits change; what cannot be read sets no limit.
MemoryLimit memory_limit(const std::string& root = "");

// The cores that the control groups grant, such as 0.5: the least of cpu.max (version 2) and
// cpu.cfs_quota_us / cpu.cfs_period_us. None if they set no limit or cannot be read.
std::optional<double> cpu_quota(const std::string& root = "");

// How many cores this process can keep busy: those that it may run on at present, or fewer where
// the control groups grant fewer. The quota is read once per process. More than 0. Any thread.
double cores();

}  // namespace tensorwire
