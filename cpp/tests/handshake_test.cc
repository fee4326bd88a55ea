// The handshake: who passes, who does not, and that nothing recorded or reflected helps.
#include "handshake.h"

#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <vector>

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

template <class Array>
State feed(ServerHandshake& server, const Array& bytes, Bytes& reply) {
  reply.clear();
  return server.feed({bytes.data(), bytes.size()}, reply);
}

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

// A client up to the point where it knows the server's challenge.
struct Client {
  Client(ServerHandshake& server, Hello me) : mine(me.encode()) {
    Bytes reply;
    REQUIRE(feed(server, mine, reply) == State::kMore);
    theirs = array_of<kHelloBytes>(reply);
  }
  Keys keys(const Secret& secret) const { return Keys(secret, mine, theirs); }
  std::array<uint8_t, kHelloBytes> mine, theirs;
};

Welcome welcome_of(const Bytes& reply) { return Welcome::decode(array_of<kWelcomeBytes>(reply)); }

TEST_CASE("handshake: who knows the secret is admitted") {
  Server side;
  ServerHandshake server(side.context);
  Hello me = hello("client");
  Client client(server, me);
  Hello challenge = Hello::decode(client.theirs);
  CHECK(challenge.kind == HelloKind::kChallenge);
  CHECK(challenge.name == "server");
  CHECK(challenge.nonce != me.nonce);

  Bytes reply;
  Keys keys = client.keys(kSecret);
  CHECK(feed(server, proof_of(keys.client), reply) == State::kMore);
  Welcome welcome = welcome_of(reply);
  CHECK(welcome.status.ok());
  CHECK(same_digest(welcome.proof, keys.server));
  CHECK(side.admitted == 1);
  CHECK(server.proven());

  CHECK(feed(server, choice_of(kTcpBit), reply) == State::kDone);
  CHECK(reply.empty());
  CHECK(server.chosen() == kTcpBit);
  CHECK(server.client().pid == 42);
  CHECK(server.client().port == 4242);
  // Nothing is taken after the end.
  CHECK(feed(server, choice_of(kTcpBit), reply) == State::kFailed);
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
  ServerHandshake server(side.context);
  Client client(server, hello("client"));
  Secret wrong = kSecret;
  wrong.back() ^= 1;
  Bytes reply;
  CHECK(feed(server, proof_of(client.keys(wrong).client), reply) == State::kFailed);
  Welcome welcome = welcome_of(reply);
  CHECK(welcome.status.code == Code::kPermission);
  CHECK(welcome.status.message == "wrong secret");
  CHECK(welcome.proof == Digest{});
  CHECK(side.admitted == 0);
  CHECK(server.failure().code == Code::kPermission);
  CHECK(feed(server, proof_of(client.keys(kSecret).client), reply) == State::kFailed);
  CHECK(reply.empty());
}

TEST_CASE("handshake: every bit of the proof counts") {
  Server side;
  for (size_t bit = 0; bit < 256; ++bit) {
    ServerHandshake server(side.context);
    Client client(server, hello("client"));
    auto proof = proof_of(client.keys(kSecret).client);
    proof[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
    Bytes reply;
    CHECK(feed(server, proof, reply) == State::kFailed);
  }
  CHECK(side.admitted == 0);
}

TEST_CASE("handshake: every byte of both hellos is covered by the proof") {
  Server side;
  for (size_t at = 0; at < kHelloBytes; ++at) {
    for (bool in_mine : {true, false}) {
      ServerHandshake server(side.context);
      Client client(server, hello("client"));
      (in_mine ? client.mine : client.theirs)[at] ^= 0x40;
      Bytes reply;
      CHECK(feed(server, proof_of(client.keys(kSecret).client), reply) == State::kFailed);
    }
  }
  CHECK(side.admitted == 0);
}

TEST_CASE("handshake: one side without a secret is told so, right proof or not") {
  for (bool server_has : {true, false}) {
    Server side(server_has ? kSecret : Secret{});
    ServerHandshake server(side.context);
    Client client(server, hello("client", !server_has));
    CHECK(Hello::decode(client.theirs).has_secret == server_has);
    Bytes reply;
    auto proof = proof_of(client.keys(side.context.secret).client);
    CHECK(feed(server, proof, reply) == State::kFailed);
    Welcome welcome = welcome_of(reply);
    CHECK(welcome.status.code == Code::kPermission);
    CHECK(welcome.status.message.find("no secret") == (server_has ? std::string::npos : 14));
    CHECK(side.admitted == 0);
  }
}

TEST_CASE("handshake: without secrets both sides still agree") {
  Server side(Secret{});
  ServerHandshake server(side.context);
  Client client(server, hello("client", false));
  Bytes reply;
  CHECK(feed(server, proof_of(client.keys({}).client), reply) == State::kMore);
  CHECK(welcome_of(reply).status.ok());
}

TEST_CASE("handshake: a recorded exchange cannot be replayed") {
  Server side;
  auto mine = hello("client").encode();
  Bytes reply;
  ServerHandshake first(side.context);
  REQUIRE(feed(first, mine, reply) == State::kMore);
  auto recorded = proof_of(Keys(kSecret, mine, array_of<kHelloBytes>(reply)).client);
  REQUIRE(feed(first, recorded, reply) == State::kMore);
  REQUIRE(side.admitted == 1);

  ServerHandshake second(side.context);
  REQUIRE(feed(second, mine, reply) == State::kMore);
  CHECK(feed(second, recorded, reply) == State::kFailed);
  CHECK(welcome_of(reply).status.code == Code::kPermission);
  CHECK(side.admitted == 1);
}

TEST_CASE("handshake: a server's own words cannot be reflected") {
  Server side;
  Bytes reply;
  // Its challenge is no hello of a client,
  ServerHandshake first(side.context), second(side.context);
  REQUIRE(feed(first, hello("client").encode(), reply) == State::kMore);
  auto challenge = array_of<kHelloBytes>(reply);
  CHECK(feed(second, challenge, reply) == State::kFailed);
  CHECK(reply.empty());
  // and the proof that it gives is none that a client could give.
  ServerHandshake third(side.context);
  Client client(third, hello("client"));
  CHECK(feed(third, proof_of(client.keys(kSecret).server), reply) == State::kFailed);
  // Nor do two servers vouch for each other: the transcript has an order.
  ServerHandshake fifth(side.context);
  Client swapped(fifth, hello("client"));
  std::swap(swapped.mine, swapped.theirs);
  CHECK(feed(fifth, proof_of(swapped.keys(kSecret).client), reply) == State::kFailed);
  CHECK(side.admitted == 0);
}

TEST_CASE("handshake: a full Node says so after the proof, not before") {
  Server side;
  side.verdict = {Code::kBusy, "no room"};
  ServerHandshake server(side.context);
  Client client(server, hello("client"));
  Bytes reply;
  CHECK(feed(server, proof_of(client.keys(kSecret).client), reply) == State::kFailed);
  CHECK(welcome_of(reply).status.code == Code::kBusy);
  CHECK(welcome_of(reply).status.message == "no room");
}

TEST_CASE("handshake: only what both offer can be chosen") {
  for (uint64_t choice : {uint64_t{0}, uint64_t{3}, uint64_t{4}, uint64_t{8}, uint64_t{1} << 32,
                          (uint64_t{1} << 32) | kTcpBit, ~uint64_t{0}}) {
    Server side;
    ServerHandshake server(side.context);
    Client client(server, hello("client"));
    Bytes reply;
    REQUIRE(feed(server, proof_of(client.keys(kSecret).client), reply) == State::kMore);
    CHECK(feed(server, choice_of(choice), reply) == State::kFailed);
    CHECK(reply.empty());
  }
  Server tcp_only;
  tcp_only.context.me.transports = kTcpBit;
  ServerHandshake server(tcp_only.context);
  Client client(server, hello("client"));
  Bytes reply;
  REQUIRE(feed(server, proof_of(client.keys(kSecret).client), reply) == State::kMore);
  CHECK(feed(server, choice_of(kShmBit), reply) == State::kFailed);
}

// A server whose client has been admitted.
struct Admitted {
  explicit Admitted(Server& side) : server(side.context) {
    Client client(server, hello("client"));
    Bytes reply;
    REQUIRE(feed(server, proof_of(client.keys(kSecret).client), reply) == State::kMore);
  }
  ServerHandshake server;
};

TEST_CASE("handshake: a choice of shm is answered with a socket to meet at") {
  Server side;
  Admitted with(side);
  Bytes reply;
  CHECK(feed(with.server, choice_of(kShmBit, 7), reply) == State::kDone);
  CHECK(with.server.chosen() == kShmBit);
  CHECK(side.met == std::vector<uint64_t>{7});
  Meeting meeting = Meeting::decode(array_of<kMeetingBytes>(reply));
  CHECK(meeting.code == Code::kOk);
  CHECK(meeting.socket == 99);
}

TEST_CASE("handshake: where shm cannot be had another choice follows, but shm no second time") {
  for (bool again : {false, true}) {
    Server side;
    side.meeting = {Code::kUnavailable, 0};
    Admitted with(side);
    Bytes reply;
    CHECK(feed(with.server, choice_of(kShmBit, 7), reply) == State::kMore);
    CHECK(Meeting::decode(array_of<kMeetingBytes>(reply)).code == Code::kUnavailable);
    State state = feed(with.server, again ? choice_of(kShmBit, 8) : choice_of(kTcpBit), reply);
    CHECK(state == (again ? State::kFailed : State::kDone));
    CHECK(side.met.size() == 1);
  }
}

TEST_CASE("handshake: only shm names a socket, and always does") {
  for (auto [transport, socket] : {std::pair(kShmBit, 0), std::pair(kTcpBit, 7)}) {
    Server side;
    Admitted with(side);
    Bytes reply;
    auto choice = choice_of(transport, static_cast<uint64_t>(socket));
    CHECK(feed(with.server, choice, reply) == State::kFailed);
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
  Bytes reply;
  for (HelloKind kind : {HelloKind::kClient, HelloKind::kBusy, HelloKind::kChallenge}) {
    ServerHandshake server(side.context);
    Hello me = hello("client");
    me.kind = kind;
    bool right = kind == HelloKind::kClient;
    CHECK((feed(server, me.encode(), reply) == State::kMore) == right);
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
    try {
      Hello::decode(changed);
      return false;
    } catch (const Error& error) {
      return error.code() == Code::kInvalid;
    }
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

TEST_CASE("handshake: nonces differ") {
  auto a = random_nonce(), b = random_nonce();
  CHECK(a != b);
}

}  // namespace
}  // namespace tensorwire
