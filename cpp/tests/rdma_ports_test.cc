#include "transports/rdma_ports.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/error.h"

using namespace tensorwire;
namespace fs = std::filesystem;

namespace {

// A sysfs of our own.
struct Tree {
  Tree() : root(fs::temp_directory_path() / ("tw-sysfs-" + std::to_string(::getpid()))) {
    fs::remove_all(root);
    fs::create_directories(root);
  }
  ~Tree() { fs::remove_all(root); }
  void port(const std::string& device, int number, const std::string& state,
            const std::string& netdev) {
    fs::path folder = root / "class/infiniband" / device / "ports" / std::to_string(number);
    fs::create_directories(folder / "gid_attrs/ndevs");
    std::ofstream(folder / "state") << state << "\n";
    for (const char* index : {"0", "1"}) {
      std::ofstream(folder / "gid_attrs/ndevs" / index) << netdev << "\n";
    }
  }
  fs::path root;
};

std::string refusal(const std::vector<RdmaPort>& ports, const std::string& wanted = "") {
  try {
    usable_ports(ports, wanted);
  } catch (const Error& error) {
    CHECK(error.code() == Code::kUnavailable);
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("rdma_ports: none") {
  Tree tree;
  auto ports = rdma_ports(tree.root);
  CHECK(ports.empty());
  CHECK(refusal(ports).find("rdma link add rxe0") != std::string::npos);
}

TEST_CASE("rdma_ports: read and chosen by any of their names") {
  Tree tree;
  tree.port("mlx5_0", 1, "4: ACTIVE", "lo");  // loopback always has an address
  tree.port("mlx5_0", 2, "1: DOWN", "eth9");
  tree.port("mlx5_1", 1, "4: ACTIVE", "eth8");
  tree.port("mlx5_2", 1, "5: ACTIVE_DEFER", "lo");
  auto ports = rdma_ports(tree.root);
  REQUIRE(ports.size() == 4);
  CHECK(ports[0].name() == "mlx5_0:1");
  CHECK(ports[0].active);
  CHECK(ports[0].netdevs == std::vector<std::string>{"lo"});
  CHECK(ports[0].addresses.front() == "127.0.0.1");
  CHECK(!ports[1].active);
  for (const char* wanted : {"", "mlx5_0", "mlx5_0:1", "lo"}) {
    auto usable = usable_ports(ports, wanted);
    REQUIRE(usable.size() == 1);
    CHECK(usable[0].name() == "mlx5_0:1");
  }
  CHECK(refusal(ports, "mlx5_0:2").find("no RDMA port is active: mlx5_0:2 (1: DOWN, eth9)") !=
        std::string::npos);
  CHECK(refusal(ports, "mlx5_1").find("ip addr add") != std::string::npos);
  CHECK(refusal(ports, "mlx5_2").find("ACTIVE_DEFER") != std::string::npos);
  CHECK(refusal(ports, "mlx5_7").find("there are mlx5_0:1 (4: ACTIVE, lo)") != std::string::npos);
}
