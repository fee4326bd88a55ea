#include "transports/rdma_ports.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>

#include "base/error.h"

namespace tensorwire {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> entries(const fs::path& folder) {
  std::vector<fs::path> result;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) result.push_back(entry.path());
  std::sort(result.begin(), result.end());
  return result;
}

std::string first_line(const fs::path& file) {
  std::ifstream stream(file);
  std::string line;
  std::getline(stream, line);
  return line;
}

// The addresses of every interface that is up: IPv4 first, then IPv6 that another host can use.
std::multimap<std::string, std::string> interface_addresses() {
  std::multimap<std::string, std::string> v4, v6;
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return v4;
  std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(all, ::freeifaddrs);
  for (ifaddrs* each = all; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr) continue;
    char text[INET6_ADDRSTRLEN] = {};
    if (each->ifa_addr->sa_family == AF_INET) {
      auto* address = reinterpret_cast<sockaddr_in*>(each->ifa_addr);
      ::inet_ntop(AF_INET, &address->sin_addr, text, sizeof text);
      v4.emplace(each->ifa_name, text);
    } else if (each->ifa_addr->sa_family == AF_INET6) {
      auto* address = reinterpret_cast<sockaddr_in6*>(each->ifa_addr);
      if (IN6_IS_ADDR_LINKLOCAL(&address->sin6_addr)) continue;
      ::inet_ntop(AF_INET6, &address->sin6_addr, text, sizeof text);
      v6.emplace(each->ifa_name, text);
    }
  }
  v4.merge(v6);
  return v4;
}

bool named(const RdmaPort& port, const std::string& wanted) {
  return wanted == port.device || wanted == port.name() ||
         std::find(port.netdevs.begin(), port.netdevs.end(), wanted) != port.netdevs.end();
}

std::string listing(const std::vector<RdmaPort>& ports) {
  std::string text;
  for (const RdmaPort& port : ports) {
    text += (text.empty() ? "" : ", ") + port.name() + " (" + port.state;
    for (const auto& netdev : port.netdevs) text += ", " + netdev;
    text += ")";
  }
  return text;
}

}  // namespace

std::vector<RdmaPort> rdma_ports(const std::string& root) {
  auto addresses = interface_addresses();
  std::vector<RdmaPort> result;
  for (const auto& device : entries(fs::path(root) / "class/infiniband")) {
    for (const auto& folder : entries(device / "ports")) {
      RdmaPort port;
      port.device = device.filename();
      port.port = std::atoi(folder.filename().c_str());
      port.state = first_line(folder / "state");
      port.active = port.state.find("ACTIVE") != std::string::npos &&
                    port.state.find("ACTIVE_DEFER") == std::string::npos;
      for (const auto& entry : entries(folder / "gid_attrs/ndevs")) {
        std::string netdev = first_line(entry);
        if (netdev.empty()) continue;
        if (std::find(port.netdevs.begin(), port.netdevs.end(), netdev) == port.netdevs.end()) {
          port.netdevs.push_back(netdev);
        }
      }
      for (const auto& netdev : port.netdevs) {
        auto [begin, end] = addresses.equal_range(netdev);
        for (auto found = begin; found != end; ++found) port.addresses.push_back(found->second);
      }
      result.push_back(std::move(port));
    }
  }
  return result;
}

std::vector<RdmaPort> usable_ports(const std::vector<RdmaPort>& ports, const std::string& wanted) {
  if (ports.empty()) {
    throw Error(Code::kUnavailable,
                "rdma needs an RDMA device, and /sys/class/infiniband shows none; load the NIC's "
                "driver (lspci, dmesg), or make a software one: "
                "rdma link add rxe0 type rxe netdev eth0");
  }
  std::vector<RdmaPort> chosen;
  for (const RdmaPort& port : ports) {
    if (wanted.empty() || named(port, wanted)) chosen.push_back(port);
  }
  if (chosen.empty()) {
    throw Error(Code::kUnavailable,
                "no RDMA port is called '" + wanted + "'; there are " + listing(ports));
  }
  std::vector<RdmaPort> active, reachable;
  for (const RdmaPort& port : chosen) {
    if (!port.active) continue;
    active.push_back(port);
    if (!port.addresses.empty()) reachable.push_back(port);
  }
  if (active.empty()) {
    throw Error(Code::kUnavailable,
                "no RDMA port is active: " + listing(chosen) +
                    "; check the cable and the switch, and bring its interface up "
                    "(ip link set DEVICE up)");
  }
  if (reachable.empty()) {
    throw Error(Code::kUnavailable,
                "the RDMA port has no GID of an IP address: " + listing(active) +
                    "; give its interface one (ip addr add ADDRESS/24 dev DEVICE)");
  }
  return reachable;
}

}  // namespace tensorwire
