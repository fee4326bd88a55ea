#include "base/control_groups.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <fstream>
#include <limits>
#include <sstream>
#include <string_view>

namespace tensorwire {
namespace {

// Longer is no path of a group, and no file that the kernel writes.
constexpr size_t kMostPath = 4096, kMostBytes = 16 << 20;

// Empty if it cannot be read.
std::string text_of(const std::string& path) {
  std::string text;
  std::ifstream file(path);
  for (char part[4096]; text.size() < kMostBytes && (file.read(part, sizeof part), file.gcount());)
    text.append(part, static_cast<size_t>(file.gcount()));
  return text;
}

bool lists(const std::string& names, const std::string& name) {
  return ("," + names + ",").find("," + name + ",") != std::string::npos;
}

// The kernel writes a space, tab, newline or backslash of a path as three octal digits.
std::string unescaped(const std::string& text) {
  auto octal = [&](size_t at) { return at < text.size() && text[at] >= '0' && text[at] <= '7'; };
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && octal(i + 1) && octal(i + 2) && octal(i + 3)) {
      plain += static_cast<char>(std::stoi(text.substr(i + 1, 3), nullptr, 8));
      i += 3;
    } else {
      plain += text[i];
    }
  }
  return plain;
}

// A mounted hierarchy of control groups.
struct Mount {
  std::string inside;  // the group that is mounted: "/", or what a container sees as the topmost
  std::string where;
};

// Of /proc/self/mountinfo: "36 35 98:0 /inside /where options [optional] - type device options of
// the filesystem".
std::vector<Mount> mounts_of(const std::string& controller, bool version_2,
                             const std::string& root) {
  std::vector<Mount> found;
  std::istringstream lines(text_of(root + "/proc/self/mountinfo"));
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string skip, inside, where, word, type, device, options;
    words >> skip >> skip >> skip >> inside >> where;
    while (words >> word && word != "-") {
    }
    words >> type >> device >> options;
    if (version_2 ? type == "cgroup2" : type == "cgroup" && lists(options, controller)) {
      found.push_back({unescaped(inside), unescaped(where)});
    }
  }
  return found;
}

// The path of a group below a mount, "" for the mounted one; none if it is elsewhere. Mounted from
// outside the namespace, a group above all that it shows is "/..": which one is not told, but it
// bounds this one.
std::optional<std::string> below(const Mount& mount, const std::string& group) {
  std::string inside = mount.inside == "/" ? "" : mount.inside;
  bool above = !inside.empty() && inside.find_first_not_of("/.") == std::string::npos;
  if (above && !group.starts_with("/..")) return "";
  if (!group.starts_with(inside)) return std::nullopt;
  std::string rest = group.substr(inside.size());
  if (!(rest.empty() || rest[0] == '/') || rest.starts_with("/..")) return std::nullopt;
  return rest;
}

void add_groups(const Mount& mount, std::string group, bool version_2, const std::string& root,
                std::vector<ControlGroup>& found) {
  for (;;) {
    while (!group.empty() && group.back() == '/') group.pop_back();
    found.push_back({root + mount.where + group, group.empty() ? "/" : group, version_2});
    if (group.empty()) return;
    group.resize(group.rfind('/') == std::string::npos ? 0 : group.rfind('/'));
  }
}

// None for "max", which is no limit, and for what is no number at all.
std::optional<int64_t> number_in(std::string_view text) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  auto [rest, error] = std::from_chars(text.data(), end, value);
  bool whole = error == std::errc() && (rest == end || *rest == ' ' || *rest == '\n');
  return whole ? std::optional(value) : std::nullopt;
}

std::optional<double> quota_of(const ControlGroup& group) {
  std::optional<int64_t> quota, period;
  if (group.version_2) {  // "50000 100000", "max 100000"
    std::string text = text_of(group.folder + "/cpu.max");
    quota = number_in(text);
    size_t space = text.find(' ');
    if (space != std::string::npos) period = number_in(std::string_view(text).substr(space + 1));
  } else {  // -1: no limit
    quota = number_in(text_of(group.folder + "/cpu.cfs_quota_us"));
    period = number_in(text_of(group.folder + "/cpu.cfs_period_us"));
  }
  if (quota.value_or(0) <= 0 || period.value_or(0) <= 0) return std::nullopt;
  return static_cast<double>(*quota) / static_cast<double>(*period);
}

double may_run_on() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return std::max(1.0, static_cast<double>(::sysconf(_SC_NPROCESSORS_ONLN)));  // more than 1024
}

}  // namespace

std::vector<ControlGroup> control_groups(const std::string& controller, const std::string& root) {
  std::vector<ControlGroup> found;
  bool done[2] = {false, false};  // a process is in one group of each hierarchy
  std::istringstream lines(text_of(root + "/proc/self/cgroup"));
  for (std::string line; std::getline(lines, line);) {  // "number:controllers:/group"
    std::istringstream parts(line);
    std::string number, controllers, group;
    std::getline(parts, number, ':');
    std::getline(parts, controllers, ':');
    bool version_2 = controllers.empty();
    if (!std::getline(parts, group) || group.size() > kMostPath) continue;
    if ((!version_2 && !lists(controllers, controller)) || done[version_2]) continue;
    done[version_2] = true;
    auto mounts = mounts_of(controller, version_2, root);
    size_t before = found.size();
    for (const Mount& mount : mounts) {
      if (auto path = below(mount, group)) add_groups(mount, *path, version_2, root, found);
    }
    // A group that no mount shows: what a container shows as its own is the best guess.
    if (found.size() == before && !mounts.empty()) {
      add_groups(mounts.front(), "", version_2, root, found);
    }
  }
  return found;
}

MemoryLimit memory_limit(const std::string& root) {
  MemoryLimit least{static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
                        static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)),
                    "this host's memory"};
  for (const ControlGroup& group : control_groups("memory", root)) {
    const char* file = group.version_2 ? "/memory.max" : "/memory.limit_in_bytes";
    auto limit = number_in(text_of(group.folder + file));
    if (limit && *limit >= 0 && static_cast<uint64_t>(*limit) < least.bytes) {
      least = {static_cast<uint64_t>(*limit),
               "the memory limit of the control group " + group.name};
    }
  }
  return least;
}

std::optional<double> cpu_quota(const std::string& root) {
  std::optional<double> least;
  for (const ControlGroup& group : control_groups("cpu", root)) {
    auto quota = quota_of(group);
    if (quota && (!least || *quota < *least)) least = quota;
  }
  return least;
}

double cores() {
  // Not a static that is made at first use: a child that is forked meanwhile would wait for ever.
  static std::atomic<double> granted{0};
  double quota = granted.load(std::memory_order_relaxed);
  if (quota == 0) {
    quota = cpu_quota().value_or(std::numeric_limits<double>::infinity());
    granted.store(quota, std::memory_order_relaxed);
  }
  return std::min(may_run_on(), quota);
}

}  // namespace tensorwire
