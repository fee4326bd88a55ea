// Two Nodes in one process, over each transport, under the sanitizers. What a transport must do and
// refuse is in tensorwire.testing.check_transport; threads that hammer are in traffic_test.cc.
#include "node/node.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "pair.h"

namespace tensorwire {
namespace {

TEST_CASE("node: bytes of many chunks arrive whole, copied by whoever") {
  for (const std::string transport : kTransports) {
    Pair pair(transport);
    auto region = pair.far->allocate((5u << 20) + 3, "", {true, true});
    auto remote = grant(*pair.to_far, *region);
    auto bytes = pattern(region->size, 4), back = pattern(region->size, 5);
    for (uint64_t inline_limit : {0, 1}) {
      pair.far->progress()->run([] {});  // TSan does not see that the socket orders us
      std::memset(region->data(), 0, region->size);
      CHECK(outcome(write(*pair.to_far, bytes, *remote, 0, {}, inline_limit)) == Code::kOk);
      CHECK(std::equal(bytes.begin(), bytes.end(), region->data()));
      std::fill(back.begin(), back.end(), std::byte{0});
      CHECK(outcome(read(*pair.to_far, back, *remote, 0, inline_limit)) == Code::kOk);
      CHECK(back == bytes);
    }
  }
}

TEST_CASE("node: a look-up waits until there is a region of the name") {
  for (const std::string transport : kTransports) {
    CAPTURE(transport);
    Pair pair(transport);
    // Threads allocate while look-ups arrive: none of them is overlooked.
    std::vector<std::thread> threads;
    for (const std::string& half : {"a", "b"}) {
      threads.emplace_back([&pair, half] {
        for (int i = 0; i < 50; ++i) pair.far->allocate(8, half + std::to_string(i), {true, true});
      });
    }
    for (int i = 0; i < 50; ++i) {
      auto a = pair.to_far->ask_lookup("a" + std::to_string(i), true);
      auto b = pair.to_far->ask_lookup("b" + std::to_string(i), true);
      CHECK(answer(*pair.to_far, a)->size == 8);
      CHECK(answer(*pair.to_far, b)->size == 8);
    }
    for (auto& thread : threads) thread.join();
    auto never = pair.to_far->ask_lookup("never", true);
    CHECK(pair.to_far->ask_lookup("never", true) == never);
    pair.far->close();
    CHECK(outcome(never->transfer) == Code::kPeerLost);
  }
}

TEST_CASE("node: a Node is a peer like any other, also to itself") {
  for (const std::string transport : kTransports) {
    auto node = make_node("self");
    auto region = node->allocate(1 << 20, "", {true, true});
    auto peer = connect(*node, *node, transport);
    auto remote = grant(*peer, *region);
    auto bytes = pattern(300'000, 1);
    CHECK(outcome(write(*peer, bytes, *remote, 0)) == Code::kOk);
    CHECK(outcome(write(*peer, {region->data(), 300'000}, *remote, 400'000)) == Code::kOk);
    CHECK(std::equal(bytes.begin(), bytes.end(), region->data() + 400'000));
    node->close();
    CHECK(node->transfers().started == node->transfers().completed);
  }
}

}  // namespace
}  // namespace tensorwire
