// The RDMA ports of this host, as the kernel tells them under /sys/class/infiniband. Needs no
// library: it decides whether one is worth loading, and what to say when RDMA cannot be had.
#pragma once

#include <string>
#include <vector>

namespace tensorwire {

struct RdmaPort {
  std::string device;  // "mlx5_0"
  int port = 1;
  bool active = false;
  std::string state;                   // "4: ACTIVE"
  std::vector<std::string> netdevs;    // "eth0"
  std::vector<std::string> addresses;  // of the netdevs, IPv4 first; no link-local ones

  std::string name() const { return device + ":" + std::to_string(port); }
};

// root: where sysfs is mounted; addresses come from this system in any case.
std::vector<RdmaPort> rdma_ports(const std::string& root = "/sys");

// The active ports among them that `wanted` names ("" = every one; "mlx5_0", "mlx5_0:1" or a netdev
// such as "eth0"). Throws kUnavailable with the remedy if there is none.
std::vector<RdmaPort> usable_ports(const std::vector<RdmaPort>& ports, const std::string& wanted);

}  // namespace tensorwire
