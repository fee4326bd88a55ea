#include "memory_limit.h"

#include <unistd.h>

#include <fstream>
#include <optional>
#include <sstream>

namespace tensorwire {
namespace {

// A mounted hierarchy of control groups with their memory limits.
struct Hierarchy {
  std::string inside;  // the group that is mounted: "/", or above it what a container cannot see
  std::string where;
  const char* limit_file;
};

bool names_memory(const std::string& list) {
  return ("," + list + ",").find(",memory,") != std::string::npos;
}

// Reads a line of /proc/self/mountinfo: "36 35 98:0 /inside /where options [optional] - type device
// options of the filesystem".
std::optional<Hierarchy> hierarchy_of(const std::string& line, bool version_2) {
  std::istringstream words(line);
  std::string skip, inside, where, word, type, device, options;
  words >> skip >> skip >> skip >> inside >> where;
  while (words >> word && word != "-") {
  }
  words >> type >> device >> options;
  if (version_2 && type == "cgroup2") return Hierarchy{inside, where, "memory.max"};
  if (!version_2 && type == "cgroup" && names_memory(options)) {
    return Hierarchy{inside, where, "memory.limit_in_bytes"};
  }
  return std::nullopt;
}

std::optional<Hierarchy> find_hierarchy(const std::string& root, bool version_2) {
  std::ifstream mounts(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    if (auto found = hierarchy_of(line, version_2)) return found;
  }
  return std::nullopt;
}

// None for "max", and where there is no such file: the topmost group has none.
std::optional<uint64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  return file >> value ? std::optional(value) : std::nullopt;
}

// The group and those above it bound what is in it.
void apply(const std::string& root, const Hierarchy& mounted, std::string group,
           MemoryLimit& least) {
  if (mounted.inside != "/") {
    bool below = group.rfind(mounted.inside, 0) == 0;
    group = below ? group.substr(mounted.inside.size()) : "";
  }
  for (;;) {
    while (!group.empty() && group.back() == '/') group.pop_back();
    auto limit = number_in(root + mounted.where + group + "/" + mounted.limit_file);
    if (limit && *limit < least.bytes) {
      least = {*limit, "the memory limit of the control group " + (group.empty() ? "/" : group)};
    }
    if (group.empty()) return;
    group.resize(group.rfind('/') == std::string::npos ? 0 : group.rfind('/'));
  }
}

}  // namespace

MemoryLimit memory_limit(const std::string& root) {
  MemoryLimit least{static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
                        static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)),
                    "this host's memory"};
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "number:controllers:/group"
    std::istringstream parts(line);
    std::string number, controllers, group;
    std::getline(parts, number, ':');
    std::getline(parts, controllers, ':');
    if (!std::getline(parts, group)) continue;
    bool version_2 = controllers.empty();
    if (!version_2 && !names_memory(controllers)) continue;
    if (auto mounted = find_hierarchy(root, version_2)) apply(root, *mounted, group, least);
  }
  return least;
}

}  // namespace tensorwire
