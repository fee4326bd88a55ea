// The handshake: who passes, who does not, and that nothing recorded or reflected helps.
#include "handshake.h"

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

Hello hello(const std::string& name, bool has_secret = true) {
  Hello hello;
  hello.has_secret = has_secret;
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
  explicit Server(Secret secret = kSecret) {
    context.me = hello("server");
    context.me.incarnation = 0x5678;
    context.secret = std::move(secret);
    context.admit = [this] {
      if (verdict.ok()) ++admitted;
      return verdict;
    };
    context.meet = [this](uint64_t name) {
      met.push_back(name);
      return meeting;
    };
  }

  ServerHandshake::Context context;
  int admitted = 0;
  Status verdict;
  std::vector<uint64_t> met;
  Meeting meeting{Code::kOk, 99};
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
  Keys keys(const Secret& secret = kSecret) const { return Keys(secret, mine, theirs); }
  State prove(const Secret& secret = kSecret) { return feed(proof_of(keys(secret).client)); }
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

TEST_CASE("handshake: a wrong secret is refused with a reason and without a proof") {
  Server side;
  Exchange with(side);
  Secret wrong = kSecret;
  wrong.back() ^= 1;
  CHECK(with.prove(wrong) == State::kFailed);
  CHECK(with.welcome().status.code == Code::kPermission);
  CHECK(with.welcome().status.message == "wrong secret");
  CHECK(with.welcome().proof == Digest{});
  CHECK(side.admitted == 0);
  CHECK(with.server.failure().code == Code::kPermission);
  CHECK(with.prove() == State::kFailed);
  CHECK(with.reply.empty());
}

TEST_CASE("handshake: every bit of the proof counts") {
  Server side;
  for (size_t bit = 0; bit < 256; ++bit) {
    Exchange with(side);
    auto proof = proof_of(with.keys().client);
    proof[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
    CHECK(with.feed(proof) == State::kFailed);
  }
  CHECK(side.admitted == 0);
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

TEST_CASE("handshake: one side without a secret is told so, right proof or not") {
  for (bool server_has : {true, false}) {
    Server side(server_has ? kSecret : Secret{});
    Exchange with(side, hello("client", !server_has));
    CHECK(Hello::decode(with.theirs).has_secret == server_has);
    CHECK(with.prove(side.context.secret) == State::kFailed);
    Welcome welcome = with.welcome();
    CHECK(welcome.status.code == Code::kPermission);
    CHECK(welcome.status.message.find("no secret") == (server_has ? std::string::npos : 14));
    CHECK(side.admitted == 0);
  }
}

TEST_CASE("handshake: a recorded exchange cannot be replayed") {
  Server side;
  Hello me = hello("client");
  Exchange first(side, me), second(side, me);
  auto recorded = proof_of(first.keys().client);
  REQUIRE(first.feed(recorded) == State::kMore);
  REQUIRE(side.admitted == 1);
  CHECK(second.feed(recorded) == State::kFailed);
  CHECK(second.welcome().status.code == Code::kPermission);
  CHECK(side.admitted == 1);
}

TEST_CASE("handshake: a server's own words cannot be reflected") {
  Server side;
  Bytes reply;
  // Its challenge is no hello of a client,
  Exchange first(side), third(side), swapped(side);
  ServerHandshake second(side.context);
  CHECK(second.feed(first.theirs, reply) == State::kFailed);
  CHECK(reply.empty());
  // and the proof that it gives is none that a client could give.
  CHECK(third.feed(proof_of(third.keys().server)) == State::kFailed);
  // Nor do two servers vouch for each other: the transcript has an order.
  std::swap(swapped.mine, swapped.theirs);
  CHECK(swapped.prove() == State::kFailed);
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

TEST_CASE("handshake: only what both offer can be chosen") {
  auto refused = [](uint32_t offered, uint64_t choice) {
    Server side;
    side.context.me.transports = offered;
    Exchange with(side);
    REQUIRE(with.prove() == State::kMore);
    return with.choose(choice) == State::kFailed && with.reply.empty();
  };
  for (uint64_t choice : {uint64_t{0}, uint64_t{3}, uint64_t{4}, uint64_t{8}, uint64_t{1} << 32,
                          (uint64_t{1} << 32) | kTcpBit, ~uint64_t{0}}) {
    CHECK(refused(kShmBit | kTcpBit, choice));
  }
  CHECK(refused(kTcpBit, kShmBit));
}

TEST_CASE("handshake: a choice of shm is answered with a socket to meet at") {
  Server side;
  Exchange with(side);
  REQUIRE(with.prove() == State::kMore);
  CHECK(with.choose(kShmBit, 7) == State::kDone);
  CHECK(with.server.chosen() == kShmBit);
  CHECK(side.met == std::vector<uint64_t>{7});
  Meeting meeting = Meeting::decode(array_of<kMeetingBytes>(with.reply));
  CHECK(meeting.code == Code::kOk);
  CHECK(meeting.socket == 99);
}

TEST_CASE("handshake: where shm cannot be had another choice follows, but shm no second time") {
  for (bool again : {false, true}) {
    Server side;
    side.meeting = {Code::kUnavailable, 0};
    Exchange with(side);
    REQUIRE(with.prove() == State::kMore);
    CHECK(with.choose(kShmBit, 7) == State::kMore);
    CHECK(Meeting::decode(array_of<kMeetingBytes>(with.reply)).code == Code::kUnavailable);
    State state = again ? with.choose(kShmBit, 8) : with.choose(kTcpBit);
    CHECK(state == (again ? State::kFailed : State::kDone));
    CHECK(side.met.size() == 1);
  }
}

TEST_CASE("handshake: only shm names a socket, and always does") {
  for (auto [transport, socket] : {std::pair(kShmBit, 0u), std::pair(kTcpBit, 7u)}) {
    Server side;
    Exchange with(side);
    REQUIRE(with.prove() == State::kMore);
    CHECK(with.choose(transport, socket) == State::kFailed);
    CHECK(side.met.empty());
  }
}

TEST_CASE("handshake: secrets that HMAC takes for the same key are told apart") {
  Hello first = hello("client");
  auto challenge = hello("server").encode();
  auto client_proof = [&](const Hello& me, const Secret& secret) {
    return Keys(secret, me.encode(), challenge).client;
  };
  Secret zero = kSecret, zeros = kSecret, full(64, 'x'), beyond(65, 'x');
  zero.push_back(0);
  zeros.resize(64, 0);
  Sha256 hash;
  hash.update(beyond.data(), beyond.size());
  Digest hashed = hash.finish();
  Secret digest(hashed.begin(), hashed.end());
  CHECK_FALSE(same_digest(client_proof(first, kSecret), client_proof(first, zero)));
  CHECK_FALSE(same_digest(client_proof(first, zero), client_proof(first, zeros)));
  CHECK_FALSE(same_digest(client_proof(first, beyond), client_proof(first, digest)));
  CHECK(same_digest(client_proof(first, zero), client_proof(first, zero)));
  // All others are what HMAC makes of the two Hellos alone.
  for (const auto& [me, secret] : {std::pair{first, kSecret}, {first, full}}) {
    Bytes both;
    auto mine = me.encode();
    both.insert(both.end(), mine.begin(), mine.end());
    both.insert(both.end(), challenge.begin(), challenge.end());
    CHECK(same_digest(client_proof(me, secret), hmac(secret, "tensorwire client proof", both)));
  }
}

TEST_CASE("handshake: only a client may begin") {
  Server side;
  for (HelloKind kind : {HelloKind::kClient, HelloKind::kBusy, HelloKind::kChallenge}) {
    ServerHandshake server(side.context);
    Hello me = hello("client");
    me.kind = kind;
    Bytes reply;
    bool right = kind == HelloKind::kClient;
    CHECK((server.feed(me.encode(), reply) == State::kMore) == right);
    CHECK(reply.empty() != right);
  }
}

TEST_CASE("handshake: hello survives the wire, and nothing else passes for one") {
  Hello me = hello(std::string(kMaxNodeNameBytes, 'n'));
  me.kind = HelloKind::kChallenge;
  me.port = 65535;
  me.host.fill(0xab);
  auto bytes = me.encode();
  Hello back = Hello::decode(bytes);
  CHECK(back.encode() == bytes);
  CHECK(back.name == me.name);
  CHECK(back.host == me.host);

  auto refused = [](std::array<uint8_t, kHelloBytes> changed) {
    return thrown([&] { Hello::decode(changed); }) == Code::kInvalid;
  };
  auto changed = [&](size_t at, uint8_t value) {
    auto copy = hello("short").encode();
    copy[at] = value;
    return copy;
  };
  CHECK_FALSE(refused(changed(16, 1)));
  for (size_t at = 0; at < 10; ++at) CHECK(refused(changed(at, 0xff)));  // magic, version
  CHECK(refused(changed(10, 0)));                                        // kind
  CHECK(refused(changed(10, 4)));
  CHECK(refused(changed(11, 2)));                      // has secret
  CHECK(refused(changed(86, kMaxNodeNameBytes + 1)));  // length of the name
  CHECK(refused(changed(86, 4)));                      // a byte behind the name
  CHECK(refused(changed(24, 1)));                      // reserved
  CHECK(refused(changed(87, 1)));
  CHECK(refused(changed(88, '\n')));  // names are printable
  CHECK(refused(changed(159, 1)));
  Hello nobody = hello("nobody");
  nobody.incarnation = 0;
  CHECK(refused(nobody.encode()));
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
