// Threads that hammer on two connected Nodes: nothing is mixed up, and however it ends - closed,
// lost, freed, in the midst of traffic - every transfer completes exactly once.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/word.h"
#include "pair.h"
#include "threads.h"

namespace tensorwire {
namespace {

constexpr uint64_t kSliceBytes = 512 << 10;

// Sizes from a few bytes to more than a frame's buffer, each now and then.
uint64_t size_of(uint64_t round) {
  constexpr uint64_t kSizes[] = {1, 100, 4096, 33'000, 300'000};
  return kSizes[round * 7 % 5] + round % 50;
}

TEST_CASE("traffic: threads in both directions, each sees its own bytes") {
  for (const std::string transport : kTransports) {
    CAPTURE(transport);
    Pair pair(transport);
    constexpr int kThreads = 3;
    constexpr uint64_t kRounds = 60;
    std::atomic<int> wrong{0};
    auto hammer = [&](Peer& peer, Node& target, const Region& region, const RemoteRegion& remote,
                      int slot) {
      uint64_t base = slot * kSliceBytes;
      for (uint64_t round = 1; round <= kRounds && wrong == 0; ++round) {
        auto bytes = pattern(size_of(round), round * 10 + slot);
        std::vector<std::byte> back(bytes.size());
        uint64_t inline_limit = round % 2;
        auto transfer =
            write(peer, bytes, remote, base + 8 + round, {&remote, base, round}, inline_limit);
        if (!target.wait_word(region, base, round, soon())) ++wrong;
        if (std::memcmp(region.data() + base + 8 + round, bytes.data(), bytes.size()) != 0) ++wrong;
        if (outcome(transfer) != Code::kOk) ++wrong;
        if (outcome(read(peer, back, remote, base + 8 + round, inline_limit)) != Code::kOk) ++wrong;
        if (back != bytes) ++wrong;
      }
    };
    auto there = pair.far->allocate(kThreads * kSliceBytes, "", {true, true});
    auto here = pair.near->allocate(kThreads * kSliceBytes, "", {true, true});
    auto to_there = grant(*pair.to_far, *there), to_here = grant(*pair.to_near, *here);
    run_threads(2 * kThreads, [&](int i) {
      if (i % 2 == 0) {
        hammer(*pair.to_far, *pair.far, *there, *to_there, i / 2);
      } else {
        hammer(*pair.to_near, *pair.near, *here, *to_here, i / 2);
      }
    });
    CHECK(wrong == 0);
  }
}

TEST_CASE("traffic: fetch_add loses nothing, whoever adds") {
  for (const std::string transport : kTransports) {
    Pair pair(transport);
    auto region = pair.far->allocate(8, "", {true, true});
    auto remote = grant(*pair.to_far, *region);
    std::atomic<uint64_t> seen{0};
    run_threads(4, [&](int) {
      for (int i = 0; i < 300; ++i) {
        auto added = pair.to_far->fetch_add(*remote, 0, 1);
        if (outcome(added) == Code::kOk) seen += added->value();
      }
    });
    CHECK(word_at(region->data()).load() == 1200);
    CHECK(seen == 1200 * 1199 / 2);
  }
}

TEST_CASE("traffic: far more transfers than the window holds, then one wait for the last") {
  for (const std::string transport : kTransports) {
    Pair pair(transport);
    auto region = pair.far->allocate(64 << 10, "", {true, true});
    auto remote = grant(*pair.to_far, *region);
    auto bytes = pattern(64 << 10, 9);
    std::vector<std::byte> back(bytes.size());
    std::vector<TransferPtr> transfers;
    constexpr uint64_t kPiece = 16;
    for (uint64_t at = 0; at < bytes.size(); at += kPiece) {
      transfers.push_back(write(*pair.to_far, std::span(bytes).subspan(at, kPiece), *remote, at));
    }
    for (const auto& transfer : transfers) CHECK(outcome(transfer) == Code::kOk);
    CHECK(std::equal(bytes.begin(), bytes.end(), region->data()));
    // One batched read of many pieces asks piece by piece.
    std::vector<Piece> pieces;
    for (uint64_t at = 0; at < bytes.size(); at += kPiece) {
      pieces.push_back({back.data() + at, remote.get(), at, kPiece});
    }
    CHECK(outcome(pair.to_far->read(pieces, 0)) == Code::kOk);
    CHECK(back == bytes);
  }
}

// Starts transfers of every kind until one says that it is over. The buffers outlive the peer.
// What the calling thread copies and what the loop copies stay apart, so that TSan sees any race
// that is not made here.
class Storm {
 public:
  Storm(Peer& peer, const RemoteRegion& remote, uint64_t threads) : lanes_(threads) {
    for (uint64_t t = 0; t < threads; ++t) {
      lanes_[t].source = pattern(kMaxBytes, t);
      lanes_[t].back[0] = lanes_[t].back[1] = lanes_[t].source;
      threads_.emplace_back([&, t] { blow(peer, remote, lanes_[t], t); });
    }
  }
  static constexpr uint64_t region_bytes(uint64_t threads) { return 64 + 2 * threads * kMaxBytes; }
  // The first error that is neither kClosed nor kPeerLost.
  std::string join() {
    for (auto& thread : threads_) thread.join();
    return surprise_;
  }

  std::atomic<uint64_t> rounds{0};

 private:
  static constexpr uint64_t kMaxBytes = 200'000;
  struct Lane {
    std::vector<std::byte> source, back[2];
  };

  void blow(Peer& peer, const RemoteRegion& remote, Lane& lane, uint64_t t) {
    std::span<const std::byte> source(lane.source);
    const SignalTo word{&remote, 8 * t, 1};
    for (uint64_t i = 1;; ++i) {
      uint64_t by_loop = i % 2, offset = 64 + (2 * t + by_loop) * kMaxBytes;
      uint64_t size = 2 + size_of(i) % (kMaxBytes - 1);  // above the limit of 1 the loop copies
      std::span<std::byte> back(lane.back[by_loop]);
      TransferPtr last;
      Status status;
      try {
        auto first = write(peer, source.first(size), remote, offset, word, by_loop);
        read(peer, back.first(size), remote, offset, by_loop);
        peer.fetch_add(remote, 32 + 8 * t, 1);
        peer.ask_attach(remote.id, remote.generation);
        last = peer.signal(word, {&first, 1});
        if (i % 8 == 0) last->wait(soon());
        if (last->done()) status = last->status();
      } catch (const Error& error) {
        status = error.status();
      }
      ++rounds;
      rounds.notify_all();
      if (status.ok()) continue;
      if (status.code == Code::kClosed || status.code == Code::kPeerLost) return;
      std::lock_guard lock(mutex_);
      surprise_ = status.message;
      return;
    }
  }

  std::vector<Lane> lanes_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::string surprise_;
};

TEST_CASE("traffic: closed in the midst of it, by either side, every transfer completes once") {
  for (const std::string transport : kTransports) {
    for (int run = 0; run < 12; ++run) {
      CAPTURE(transport);
      CAPTURE(run);
      auto near = make_node("near"), far = make_node("far");
      auto peer = connect(*near, *far, transport);
      auto region = far->allocate(Storm::region_bytes(3), "", {true, true});
      auto remote = grant(*peer, *region);
      Storm storm(*peer, *remote, 3);
      for (uint64_t seen; (seen = storm.rounds) < run * 15u;) storm.rounds.wait(seen);
      switch (run % 4) {
        case 0:
          near->close();
          break;
        case 1:
          far->close();
          break;
        case 2:
          near->progress()->run(
              [&] { peer->lose({Code::kClosed, "closed by the test"}, "closed by the test"); });
          break;
        case 3:
          far->progress()->run([&] {
            for (const auto& each : far->peers()) each->lose({Code::kClosed, "dropped"});
          });
          break;
      }
      CHECK(storm.join() == "");
      CHECK(peer->lost());
      near->close();
      far->close();
      CHECK(near->transfers().started == near->transfers().completed);
      CHECK(far->transfers().started == far->transfers().completed);
    }
  }
}

TEST_CASE("traffic: whoever waits for a word learns that the Node was closed or the peer lost") {
  for (const std::string transport : kTransports) {
    for (bool close_near : {true, false}) {
      Pair pair(transport);
      auto region = pair.near->allocate(64, "", {true, true});
      std::atomic<int> right{0};
      std::vector<std::thread> threads;
      for (int t = 0; t < 3; ++t) {
        threads.emplace_back([&] {
          Code code = thrown([&] {
            pair.near->wait_word(*region, 0, 1, soon(), close_near ? nullptr : pair.to_far);
          });
          if (code == (close_near ? Code::kClosed : Code::kPeerLost)) ++right;
        });
      }
      (close_near ? pair.near : pair.far)->close();
      for (auto& thread : threads) thread.join();
      CHECK(right == 3);
    }
  }
}

TEST_CASE("traffic: after free returns, a peer's frames do not reach the memory") {
  for (int run = 0; run < 20; ++run) {
    Pair pair("tcp");
    auto region = pair.far->allocate(4 << 20, "", {true, true});
    auto remote = grant(*pair.to_far, *region);
    auto bytes = pattern(4 << 20, 1);
    std::vector<TransferPtr> transfers;
    for (int i = 0; i < 4; ++i) transfers.push_back(write(*pair.to_far, bytes, *remote, 0));
    if (run % 2 == 0) pair.far->progress()->run([] {});
    pair.far->free(region);
    std::memset(region->data(), 0x77, region->size);  // TSan would see a write beside it
    for (const auto& transfer : transfers) {
      Code code = outcome(transfer);
      CHECK((code == Code::kOk || code == Code::kStaleHandle));
    }
    CHECK(std::all_of(region->data(), region->data() + region->size,
                      [](std::byte b) { return b == std::byte{0x77}; }));
    CHECK(pair.to_far->lost_status().message == "");
  }
}

TEST_CASE("traffic: regions come and go while threads use them") {
  for (const std::string transport : kTransports) {
    Pair pair(transport);
    std::atomic<int> wrong{0};
    run_threads(3, [&](int t) {
      auto bytes = pattern(10'000, t);
      for (int i = 0; i < 40; ++i) {
        std::string name = "lease " + std::to_string(t);
        auto remote = answer(*pair.to_far, pair.to_far->ask_allocate(10'000, name, {true, true}));
        auto local = pair.far->region(name);
        if (outcome(write(*pair.to_far, bytes, *remote, 0)) != Code::kOk) ++wrong;
        if (std::memcmp(local->data(), bytes.data(), bytes.size()) != 0) ++wrong;
        if (i % 2 == 0) {
          answer(*pair.to_far, pair.to_far->ask_free(*remote));
        } else {
          pair.far->free(local);
        }
        if (outcome(write(*pair.to_far, bytes, *remote, 0)) != Code::kStaleHandle) ++wrong;
      }
    });
    CHECK(wrong == 0);
  }
}

TEST_CASE("traffic: peers() shows only peers that can be used, while they come and go") {
  for (const std::string transport : kTransports) {
    auto server = make_node("server");
    auto region = server->allocate(8, "here", {true, true});
    std::atomic<bool> over{false};
    std::atomic<int> wrong{0};
    std::thread looker([&] {
      while (!over) {
        for (const auto& peer : server->peers()) {
          Code code = thrown([&] {
            auto asked = peer->ask_lookup("there");
            if (!asked->transfer->wait(soon())) ++wrong;
            auto remote = peer->finish(asked);
            outcome(peer->fetch_add(*remote, 0, 1));
          });
          if (code != Code::kOk && code != Code::kPeerLost && code != Code::kStaleHandle) ++wrong;
        }
      }
    });
    run_threads(2, [&](int) {
      for (int i = 0; i < 15; ++i) {
        auto node = make_node("comer");
        node->allocate(8, "there", {true, true});
        auto peer = connect(*node, *server, transport);
        auto here = answer(*peer, peer->ask_lookup("here"));
        if (outcome(peer->fetch_add(*here, 0, 1)) != Code::kOk) ++wrong;
        node->close();
        if (node->transfers().started != node->transfers().completed) ++wrong;
      }
    });
    over = true;
    looker.join();
    CHECK(word_at(region->data()).load() == 30);
    server->close();
    CHECK(wrong == 0);
    CHECK(server->transfers().started == server->transfers().completed);
  }
}

}  // namespace
}  // namespace tensorwire
