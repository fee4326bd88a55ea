// Two Nodes of this process, connected, and short forms of what tests do with them.
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "node/node.h"

namespace tensorwire {

inline constexpr const char* kTransports[] = {"shm", "tcp"};

// Far longer than anything in these tests takes.
inline Deadline soon() { return Deadline::after(60.0); }

inline std::shared_ptr<Node> make_node(const std::string& name,
                                       const std::function<void(NodeOptions&)>& change = {}) {
  NodeOptions options;
  options.name = name;
  if (change) change(options);
  return Node::create(std::move(options));
}

inline PeerPtr connect(Node& from, Node& to, const std::string& require = {}) {
  return from.connect("127.0.0.1", to.port(), soon(), require, {});
}

struct Pair {
  explicit Pair(const std::string& transport, const std::function<void(NodeOptions&)>& change = {})
      : near(make_node("near", change)), far(make_node("far", change)) {
    to_far = connect(*near, *far, transport);
    to_near = far->accept(soon());
    REQUIRE(to_near);
  }
  ~Pair() {
    near->close();
    far->close();
    check_all_completed();
  }
  void check_all_completed() const {
    for (const auto& node : {near, far}) {
      CHECK(node->transfers().started == node->transfers().completed);
    }
  }

  std::shared_ptr<Node> near, far;
  PeerPtr to_far, to_near;
};

// The answer to a question, or the error that it ended with.
inline RemoteRegionPtr answer(Peer& peer, const AskedPtr& asked) {
  REQUIRE(asked->transfer->wait(soon()));
  return peer.finish(asked);
}

// A region of `far` as `near` sees it.
inline RemoteRegionPtr grant(Peer& peer, const Region& region) {
  return answer(peer, peer.ask_attach(region.id, region.generation));
}

inline TransferPtr write(Peer& peer, std::span<const std::byte> bytes, const RemoteRegion& region,
                         uint64_t offset, const SignalTo& signal = {}, uint64_t inline_limit = 0) {
  Piece piece{const_cast<std::byte*>(bytes.data()), &region, offset, bytes.size()};
  return peer.write({&piece, 1}, signal, inline_limit);
}

inline TransferPtr read(Peer& peer, std::span<std::byte> bytes, const RemoteRegion& region,
                        uint64_t offset, uint64_t inline_limit = 0) {
  Piece piece{bytes.data(), &region, offset, bytes.size()};
  return peer.read({&piece, 1}, inline_limit);
}

// How it ended; a transfer that does not end fails the test.
inline Code outcome(const TransferPtr& transfer) {
  if (!transfer->wait(soon())) FAIL("a transfer did not complete");
  return transfer->status().code;
}

// The code of the Error that the function throws; kOk if it throws none.
inline Code thrown(const std::function<void()>& function) {
  try {
    function();
    return Code::kOk;
  } catch (const Error& error) {
    return error.code();
  }
}

inline std::vector<std::byte> pattern(size_t size, uint64_t seed) {
  std::vector<std::byte> bytes(size);
  uint64_t state = seed * 0x9e3779b97f4a7c15 + 1;
  for (auto& byte : bytes) {
    state = state * 6364136223846793005 + 1442695040888963407;
    byte = static_cast<std::byte>(state >> 56);
  }
  return bytes;
}

}  // namespace tensorwire
