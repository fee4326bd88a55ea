// The server's side of the handshake, fed without a socket. What it refuses is in
// tests/peers/test_hostile.py and test_trust.py, and in fuzz/handshake_fuzz.cc.
#include "wire/handshake.h"

#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <vector>

#include "pair.h"

namespace tensorwire {
namespace {

using State = ServerHandshake::State;
using Bytes = std::vector<uint8_t>;

const Secret kSecret = {'s', 'i', 'x', 't', 'e', 'e', 'n', ' ', 's', 'e', 'c', 'r', 'e', 't', 's'};

Hello hello(const std::string& name) {
  Hello hello;
  hello.has_secret = true;
  hello.transports = kShmBit | kTcpBit;
  hello.incarnation = 0x1234;
  hello.nonce = random_nonce();
  hello.pid = 42;
  hello.port = 4242;
  hello.name = name;
  return hello;
}

// The server's side, with a note of what it did.
struct Server {
  Server() {
    context.me = hello("server");
    context.me.incarnation = 0x5678;
    context.secret = kSecret;
    context.admit = [this] {
      if (verdict.ok()) ++admitted;
      return verdict;
    };
    context.meet = [this](uint64_t) {
      ++met;
      return Meeting{Code::kOk, 99};
    };
  }

  ServerHandshake::Context context;
  int admitted = 0, met = 0;
  Status verdict;
};

template <size_t N>
std::array<uint8_t, N> array_of(const Bytes& bytes) {
  REQUIRE(bytes.size() == N);
  std::array<uint8_t, N> result;
  std::copy(bytes.begin(), bytes.end(), result.begin());
  return result;
}

std::array<uint8_t, kProofBytes> proof_of(const Digest& digest) {
  std::array<uint8_t, kProofBytes> proof{};
  std::copy(digest.begin(), digest.end(), proof.begin());
  return proof;
}

std::array<uint8_t, kChoiceBytes> choice_of(uint64_t bits, uint64_t socket = 0) {
  std::array<uint8_t, kChoiceBytes> choice{};
  std::memcpy(choice.data(), &bits, sizeof bits);
  std::memcpy(choice.data() + 8, &socket, sizeof socket);
  return choice;
}

// An exchange with that server, up to the point where its client knows the challenge.
struct Exchange {
  explicit Exchange(Server& side, const Hello& me = hello("client"))
      : server(side.context), mine(me.encode()) {
    REQUIRE(feed(mine) == State::kMore);
    theirs = array_of<kHelloBytes>(reply);
  }
  template <class Array>
  State feed(const Array& bytes) {
    reply.clear();
    return server.feed({bytes.data(), bytes.size()}, reply);
  }
  Keys keys() const { return Keys(kSecret, mine, theirs); }
  State prove() { return feed(proof_of(keys().client)); }
  State choose(uint64_t bits, uint64_t socket = 0) { return feed(choice_of(bits, socket)); }
  Welcome welcome() const { return Welcome::decode(array_of<kWelcomeBytes>(reply)); }

  ServerHandshake server;
  std::array<uint8_t, kHelloBytes> mine, theirs;
  Bytes reply;
};

TEST_CASE("handshake: who knows the secret is admitted") {
  Server side;
  Hello me = hello("client");
  Exchange with(side, me);
  Hello challenge = Hello::decode(with.theirs);
  CHECK(challenge.kind == HelloKind::kChallenge);
  CHECK(challenge.name == "server");
  CHECK(challenge.nonce != me.nonce);

  CHECK(with.prove() == State::kMore);
  CHECK(with.welcome().status.ok());
  CHECK(same_digest(with.welcome().proof, with.keys().server));
  CHECK(side.admitted == 1);
  CHECK(with.server.proven());

  CHECK(with.choose(kTcpBit) == State::kDone);
  CHECK(with.reply.empty());
  CHECK(with.server.chosen() == kTcpBit);
  CHECK(with.server.client().pid == 42);
  CHECK(with.server.client().port == 4242);
  // Nothing is taken after the end.
  CHECK(with.choose(kTcpBit) == State::kFailed);
}

TEST_CASE("handshake: byte by byte, and never more than was asked for") {
  Server side;
  ServerHandshake server(side.context);
  Bytes reply;
  auto drip = [&](const auto& bytes) {
    State state = State::kMore;
    for (size_t i = 0; i < bytes.size(); ++i) {
      CHECK(server.wanted() == bytes.size() - i);
      state = server.feed({bytes.data() + i, 1}, reply);
    }
    return state;
  };
  auto mine = hello("client").encode();
  CHECK(drip(mine) == State::kMore);
  auto theirs = array_of<kHelloBytes>(reply);
  reply.clear();
  CHECK(drip(proof_of(Keys(kSecret, mine, theirs).client)) == State::kMore);
  CHECK(reply.size() == kWelcomeBytes);
  CHECK(drip(choice_of(kTcpBit)) == State::kDone);

  ServerHandshake other(side.context);
  Bytes too_many(kHelloBytes + 1);
  CHECK(other.feed(too_many, reply) == State::kFailed);
}

TEST_CASE("handshake: every byte of both hellos is covered by the proof") {
  Server side;
  for (size_t at = 0; at < kHelloBytes; ++at) {
    for (bool in_mine : {true, false}) {
      Exchange with(side);
      (in_mine ? with.mine : with.theirs)[at] ^= 0x40;
      CHECK(with.prove() == State::kFailed);
    }
  }
  CHECK(side.admitted == 0);
}

TEST_CASE("handshake: a full Node says so after the proof, not before") {
  Server side;
  side.verdict = {Code::kBusy, "no room"};
  Exchange with(side);
  CHECK(with.prove() == State::kFailed);
  CHECK(with.welcome().status.code == Code::kBusy);
  CHECK(with.welcome().status.message == "no room");
}

TEST_CASE("handshake: only shm names a socket, and always does") {
  for (auto [transport, socket] : {std::pair(kShmBit, 0u), std::pair(kTcpBit, 7u)}) {
    Server side;
    Exchange with(side);
    REQUIRE(with.prove() == State::kMore);
    CHECK(with.choose(transport, socket) == State::kFailed);
    CHECK(side.met == 0);
  }
}

TEST_CASE("handshake: welcome survives the wire, and a malformed one is refused") {
  Welcome welcome;
  welcome.status = {Code::kBusy, "full"};
  welcome.proof.fill(9);
  Welcome back = Welcome::decode(welcome.encode());
  CHECK(back.status.code == Code::kBusy);
  CHECK(back.status.message == "full");
  CHECK(back.proof == welcome.proof);

  welcome.status.message = std::string(1000, 'x');
  CHECK(Welcome::decode(welcome.encode()).status.message == std::string(112, 'x'));

  auto bytes = welcome.encode();
  bytes[0] = kLastCode + 1;
  CHECK_THROWS_AS(Welcome::decode(bytes), Error);
  bytes = welcome.encode();
  bytes[2] = 113;
  CHECK_THROWS_AS(Welcome::decode(bytes), Error);
  bytes = welcome.encode();
  bytes[48] = '\n';
  CHECK(Welcome::decode(bytes).status.message == "(unprintable)");
}

}  // namespace
}  // namespace tensorwire
