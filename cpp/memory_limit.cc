#include "memory_limit.h"

#include <unistd.h>

#include <charconv>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>

namespace tensorwire {
namespace {

// A mounted hierarchy of control groups with their memory limits.
struct Hierarchy {
  std::string inside;  // the group that is mounted: "/", or above it what a container cannot see
  std::string where;
  const char* limit_file;
};

bool has_word(std::string_view list, std::string_view word) {
  while (!list.empty()) {
    size_t comma = list.find(',');
    if (list.substr(0, comma) == word) return true;
    list = comma == std::string_view::npos ? "" : list.substr(comma + 1);
  }
  return false;
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
  if (!version_2 && type == "cgroup" && has_word(options, "memory")) {
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
  std::string word;
  file >> word;
  uint64_t value = 0;
  auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  bool whole = !word.empty() && error == std::errc{} && end == word.data() + word.size();
  return whole ? std::optional(value) : std::nullopt;
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
    size_t first = line.find(':');
    size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    std::string_view controllers = std::string_view(line).substr(first + 1, second - first - 1);
    bool version_2 = controllers.empty();
    if (!version_2 && !has_word(controllers, "memory")) continue;
    if (auto mounted = find_hierarchy(root, version_2)) {
      apply(root, *mounted, line.substr(second + 1), least);
    }
  }
  return least;
}

}  // namespace tensorwire
