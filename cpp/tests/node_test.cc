// Two Nodes in one process, over each transport, under the sanitizers. What a transport must do and
// refuse is in tensorwire.testing.check_transport; threads that hammer are in traffic_test.cc.
#include "node.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "pair.h"
#include "prepared.h"
#include "word.h"

namespace tensorwire {
namespace {

uint64_t word(const Region& region, uint64_t offset) {
  return word_at(region.data() + offset).load(std::memory_order_acquire);
}

TEST_CASE("node: write, read, signal and fetch_add") {
  for (const std::string transport : kTransports) {
    CAPTURE(transport);
    Pair pair(transport);
    CHECK(pair.to_far->transport() == transport);
    CHECK(pair.to_near->transport() == transport);
    CHECK(pair.to_far->name() == "far");
    CHECK(pair.to_near->incarnation() == pair.near->incarnation());

    auto region = pair.far->allocate(5000, "r", {true, true});
    auto remote = answer(*pair.to_far, pair.to_far->ask_lookup("r"));
    CHECK(remote->size == 5000);
    auto bytes = pattern(3001, 1), back = pattern(3001, 2);
    CHECK(outcome(write(*pair.to_far, bytes, *remote, 1992, {remote.get(), 8, 5})) == Code::kOk);
    CHECK(std::equal(bytes.begin(), bytes.end(), region->data() + 1992));
    CHECK(word(*region, 8) == 5);
    CHECK(outcome(read(*pair.to_far, back, *remote, 1992)) == Code::kOk);
    CHECK(back == bytes);

    CHECK(outcome(pair.to_far->signal({remote.get(), 8, 4}, {})) == Code::kOk);
    CHECK(word(*region, 8) == 5);  // a word never falls
    auto added = pair.to_far->fetch_add(*remote, 8, 10);
    CHECK(outcome(added) == Code::kOk);
    CHECK(added->value() == 5);
    CHECK(word(*region, 8) == 15);

    auto leased = answer(*pair.to_near, pair.to_near->ask_allocate(64, "lease", {true, true}));
    CHECK(pair.near->region("lease")->size == 64);
    CHECK(outcome(write(*pair.to_near, pattern(64, 3), *leased, 0)) == Code::kOk);
    answer(*pair.to_near, pair.to_near->ask_free(*leased));
    CHECK(thrown([&] { pair.near->region("lease"); }) == Code::kNotFound);
  }
}

TEST_CASE("node: a batch of pieces is one transfer") {
  for (const std::string transport : kTransports) {
    Pair pair(transport);
    auto region = pair.far->allocate(1 << 20, "", {true, true});
    auto remote = grant(*pair.to_far, *region);
    auto bytes = pattern(100'000, 1);
    std::vector<Prepared::Item> items;
    for (uint64_t i = 0; i < 100; ++i) {
      items.push_back({bytes.data() + 1000 * i, remote, 8 + 2000 * i, 1000});
    }
    items.push_back({bytes.data(), remote, 300'000, 10});
    items.push_back({bytes.data() + 10, remote, 300'010, 90});  // touches the one before
    Prepared prepared(pair.to_far, true, items);
    CHECK(prepared.size() == 102);
    CHECK(prepared.runs() == 101);
    CHECK(prepared.bytes() == 100'100);
    CHECK(outcome(prepared.start({remote.get(), 0, 1}, 0)) == Code::kOk);
    CHECK(word(*region, 0) == 1);
    for (uint64_t i = 0; i < 100; ++i) {
      CHECK(std::memcmp(region->data() + 8 + 2000 * i, bytes.data() + 1000 * i, 1000) == 0);
    }
    CHECK(std::memcmp(region->data() + 300'000, bytes.data(), 100) == 0);

    std::memset(region->data() + 8, 0, 300'000);
    const int64_t chosen[] = {3, 7};
    CHECK(outcome(prepared.start(chosen, {}, 0)) == Code::kOk);
    CHECK(std::memcmp(region->data() + 6008, bytes.data() + 3000, 1000) == 0);
    CHECK(region->data()[8] == std::byte{0});
    const int64_t wrong[] = {102};
    CHECK(thrown([&] { prepared.start(wrong, {}, 0); }) == Code::kInvalid);
  }
}

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

TEST_CASE("node: a signal waits for the transfers that it comes after") {
  for (const std::string transport : kTransports) {
    Pair pair(transport);
    auto region = pair.far->allocate(4 << 20, "", {true, true});
    auto remote = grant(*pair.to_far, *region);
    auto bytes = pattern(2 << 20, 1);
    for (uint64_t round = 1; round <= 5; ++round) {
      std::vector<TransferPtr> after = {
          write(*pair.to_far, std::span(bytes).first(1 << 20), *remote, 64, {}, 1),
          write(*pair.to_far, std::span(bytes).last(1 << 20), *remote, 2 << 20, {}, 1)};
      auto signal = pair.to_far->signal({remote.get(), 0, round}, after);
      CHECK(pair.far->wait_word(*region, 0, round, soon()));
      CHECK(std::memcmp(region->data() + 64, bytes.data(), 1 << 20) == 0);
      CHECK(std::memcmp(region->data() + (2 << 20), bytes.data() + (1 << 20), 1 << 20) == 0);
      CHECK(outcome(signal) == Code::kOk);
      std::memset(region->data() + 64, 0, (4 << 20) - 64);
    }
  }
}

TEST_CASE("node: what a grant does not allow is refused before anything moves") {
  for (const std::string transport : kTransports) {
    Pair pair(transport);
    auto read_only = pair.far->allocate(64, "r", {true, false});
    auto write_only = pair.far->allocate(64, "w", {false, true});
    auto r = grant(*pair.to_far, *read_only), w = grant(*pair.to_far, *write_only);
    auto bytes = pattern(64, 1);
    CHECK(thrown([&] { write(*pair.to_far, bytes, *r, 0); }) == Code::kPermission);
    CHECK(thrown([&] { read(*pair.to_far, bytes, *w, 0); }) == Code::kPermission);
    CHECK(thrown([&] { pair.to_far->signal({r.get(), 0, 1}, {}); }) == Code::kPermission);
    CHECK(thrown([&] { pair.to_far->fetch_add(*r, 0, 1); }) == Code::kPermission);
    CHECK(thrown([&] { pair.to_far->fetch_add(*w, 0, 1); }) == Code::kPermission);
    CHECK(thrown([&] { write(*pair.to_far, bytes, *w, 1); }) == Code::kInvalid);
    CHECK(thrown([&] { write(*pair.to_far, bytes, *w, ~uint64_t{0}); }) == Code::kInvalid);
    CHECK(thrown([&] { pair.to_far->signal({w.get(), 4, 1}, {}); }) == Code::kInvalid);
    CHECK(thrown([&] { pair.to_far->signal({w.get(), 64, 1}, {}); }) == Code::kInvalid);
    CHECK(word(*write_only, 0) == 0);
    CHECK(read_only->data()[0] == std::byte{0});
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

TEST_CASE("node: accept gives each peer once, in order, or nothing in time") {
  auto server = make_node("server"), a = make_node("a"), b = make_node("b");
  CHECK(server->accept(Deadline::after(0.01)) == nullptr);
  connect(*a, *server);
  connect(*b, *server);
  CHECK(server->accept(soon())->name() == "a");
  CHECK(server->accept(soon())->name() == "b");
  CHECK(server->accept(Deadline::after(0.0)) == nullptr);
  std::thread closer([&] { server->close(); });
  CHECK(thrown([&] { server->accept(soon()); }) == Code::kClosed);
  closer.join();
  a->close();
  b->close();
}

}  // namespace
}  // namespace tensorwire
