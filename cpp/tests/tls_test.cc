// A session of TLS on a pair of sockets, and what somebody between the two ends can do.
#include "wire/tls.h"

#include <doctest/doctest.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string>
#include <thread>

#include "pair.h"
#include "wire/link.h"

namespace tensorwire {
namespace {

using Bytes = std::vector<std::byte>;
using Step = Tls::Step;

const Secret kSecret(32, 's');

struct Sockets {
  Sockets() {
    int ends[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
    near = Descriptor(ends[0]);
    far = Descriptor(ends[1]);
  }
  Descriptor near, far;
};

Bytes drain(const Descriptor& socket) {
  static Bytes room(4 << 20);
  ssize_t size = ::recv(socket.get(), room.data(), room.size(), MSG_DONTWAIT);
  return {room.begin(), room.begin() + std::max<ssize_t>(size, 0)};
}

void put(const Descriptor& socket, std::span<const std::byte> bytes) {
  REQUIRE(::send(socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT) ==
          static_cast<ssize_t>(bytes.size()));
}

// Two ends and whoever is between them.
struct Session {
  explicit Session(const Secret& theirs = kSecret, uint64_t records_per_key = Tls::kRecordsPerKey)
      : client(left.near.get(), Tls::Side::kClient, kSecret, records_per_key),
        server(right.far.get(), Tls::Side::kServer, theirs, records_per_key) {}

  // Passes on what both have sent.
  void pass() {
    put(right.near, drain(left.far));
    put(left.far, drain(right.near));
  }
  void agree() {
    client.handshake();
    pass();
    CHECK(!server.answered());
    CHECK(server.handshake() == Step::kMore);
    CHECK(server.answered());
    pass();
    CHECK(client.handshake() == Step::kDone);
    pass();
    CHECK(server.handshake() == Step::kDone);
  }

  Sockets left, right;
  Tls client, server;
};

// With nobody between.
void agree(Tls& client, Tls& server) {
  client.handshake();
  server.handshake();
  REQUIRE(client.handshake() == Step::kDone);
  REQUIRE(server.handshake() == Step::kDone);
}

ssize_t send(Tls& tls, std::span<const std::byte> bytes) {
  iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  return tls.send({&part, 1});
}

ssize_t receive(Tls& tls, std::span<std::byte> bytes) {
  iovec part{bytes.data(), bytes.size()};
  return tls.receive({&part, 1});
}

// What comes out before the end, an error or a pause.
Bytes received(Tls& tls) {
  Bytes bytes(1 << 20);
  ssize_t size = receive(tls, bytes);
  bytes.resize(size > 0 ? static_cast<size_t>(size) : 0);
  return bytes;
}

bool holds(const Bytes& where, std::span<const std::byte> what) {
  return std::search(where.begin(), where.end(), what.begin(), what.end()) != where.end();
}

TEST_CASE("tls: bytes of any shape arrive as they were, and nobody between reads them") {
  Session session;
  session.agree();
  Bytes sent = pattern(100'000, 1);
  // Headers, small and large bodies, and parts that are empty.
  size_t cuts[] = {64, 64, 0, 10, 64, 20'000, 64, 1, 0, 50'000, 64};
  std::vector<iovec> parts;
  size_t at = 0;
  for (size_t cut : cuts) {
    parts.push_back({sent.data() + at, cut});
    at += cut;
  }
  parts.push_back({sent.data() + at, sent.size() - at});
  CHECK(session.client.send(parts) == 100'000);
  CHECK(!session.client.unsent());
  Bytes wire = drain(session.left.far);
  CHECK(wire.size() < sent.size() + 12 * 30);
  for (size_t i = 0; i + 16 <= sent.size(); i += 4096)
    CHECK(!holds(wire, std::span(sent).subspan(i, 16)));
  put(session.right.near, wire);
  Bytes got(sent.size());
  iovec to[] = {{got.data(), 30'000}, {got.data() + 30'000, 70'000}};
  CHECK(session.server.receive(to) == 100'000);
  CHECK(got == sent);
  CHECK(receive(session.server, got) == -1);
  CHECK(errno == EAGAIN);
  CHECK(!session.server.more());
}

TEST_CASE("tls: what is left in the session is announced") {
  Session session;
  session.agree();
  send(session.client, pattern(3000, 2));
  session.pass();
  Bytes got(1000);
  CHECK(receive(session.server, got) == 1000);
  CHECK(session.server.more());
  got.resize(5000);
  CHECK(receive(session.server, got) == 2000);
  CHECK(!session.server.more());
}

TEST_CASE("tls: a full socket takes no more, and what was taken goes later") {
  Sockets sockets;
  Tls client(sockets.near.get(), Tls::Side::kClient, kSecret);
  Tls server(sockets.far.get(), Tls::Side::kServer, kSecret);
  agree(client, server);
  Bytes sent = pattern(4 << 20, 3), got;
  size_t taken = 0;
  for (;;) {
    ssize_t size = send(client, std::span(sent).subspan(taken));
    if (size < 0) break;
    taken += static_cast<size_t>(size);
  }
  CHECK(errno == EAGAIN);
  CHECK(taken < sent.size());
  CHECK(client.unsent());
  while (got.size() < taken) {
    Bytes more = received(server);
    got.insert(got.end(), more.begin(), more.end());
    client.send({});
  }
  CHECK(!client.unsent());
  CHECK(std::equal(got.begin(), got.end(), sent.begin()));
}

TEST_CASE("tls: keys change after so many records, both ways") {
  Session session(kSecret, 3);
  session.agree();
  for (uint64_t i = 0; i < 20; ++i) {
    for (auto [from, to] : {std::pair(&session.client, &session.server),
                            std::pair(&session.server, &session.client)}) {
      Bytes sent = pattern(5000, i);
      send(*from, sent);
      session.pass();
      CHECK(received(*to) == sent);
    }
  }
}

TEST_CASE("tls: other secrets are refused, whatever they have in common") {
  Secret longer = kSecret, shorter = kSecret, zero = kSecret;
  longer.push_back('s');
  shorter.pop_back();
  zero.push_back(0);
  for (const Secret& theirs : {longer, shorter, zero, Secret{}, Secret(32, 't')}) {
    Session session(theirs);
    session.client.handshake();
    session.pass();
    CHECK(session.server.handshake() == Step::kFailed);
    CHECK(session.server.failure().code == Code::kPermission);
    CHECK(!session.server.answered());
    session.pass();
    CHECK(session.client.handshake() == Step::kFailed);
    CHECK(session.client.failure().code == Code::kPermission);
    CHECK(session.client.failure().message == "wrong secret");
  }
}

TEST_CASE("tls: any byte of the handshake that is changed ends it") {
  // Of the middle of both first flights every byte in turn.
  for (size_t at = 0; at < 400; at += 7) {
    for (bool of_client : {true, false}) {
      CAPTURE(at);
      CAPTURE(of_client);
      Session session;
      session.client.handshake();
      Bytes hello = drain(session.left.far);
      if (of_client && at >= hello.size()) continue;
      if (of_client) hello[at] ^= std::byte{0x20};
      put(session.right.near, hello);
      Step step = session.server.handshake();
      Bytes answer = drain(session.right.near);
      if (!of_client && at >= answer.size()) continue;
      if (!of_client) answer[at] ^= std::byte{0x20};
      put(session.left.far, answer);
      Step end = session.client.handshake();
      session.pass();
      if (end == Step::kDone) step = session.server.handshake();
      CHECK((end != Step::kDone || step != Step::kDone));
    }
  }
}

// What is done to the ciphertext of three records.
Bytes tampered(const std::string& how, std::span<const Bytes> records) {
  Bytes wire;
  auto add = [&](const Bytes& record) { wire.insert(wire.end(), record.begin(), record.end()); };
  Bytes changed = records[1];
  if (how == "flip") changed[changed.size() / 2] ^= std::byte{1};
  if (how == "flip length") changed[4] ^= std::byte{1};
  if (how == "flip tag") changed.back() ^= std::byte{1};
  if (how == "cut inside") changed.resize(changed.size() / 2);
  add(records[0]);
  if (how == "reorder") add(records[2]);
  if (how != "drop" && how != "end early") add(changed);
  if (how == "repeat") add(changed);
  if (how != "end early" && how != "cut inside") add(records[2]);
  return wire;
}

TEST_CASE("tls: what is changed between the ends is an error, and never a byte") {
  for (const char* how : {"flip", "flip length", "flip tag", "drop", "repeat", "reorder",
                          "cut inside", "end early"}) {
    CAPTURE(how);
    Session session;
    session.agree();
    std::vector<Bytes> plain, records;
    for (uint64_t i = 0; i < 3; ++i) {
      plain.push_back(pattern(5000, i));
      send(session.client, plain.back());
      records.push_back(drain(session.left.far));
    }
    put(session.right.near, tampered(how, records));
    session.right.near.reset();
    Bytes got;
    ssize_t size = 1;
    while (size > 0) {
      Bytes more(5000);
      size = receive(session.server, more);
      if (size > 0) got.insert(got.end(), more.begin(), more.begin() + size);
    }
    CHECK(size == -1);
    CHECK(errno == EPROTO);
    CHECK(session.server.failure().code == Code::kPeerLost);
    // At most what came before the change.
    bool second = std::string(how) == "repeat";
    Bytes right = plain[0];
    if (second) right.insert(right.end(), plain[1].begin(), plain[1].end());
    CHECK(got == right);
    Bytes more(1);
    CHECK(receive(session.server, more) == -1);
    CHECK(errno == EPROTO);
    CHECK(send(session.server, more) == -1);
  }
}

TEST_CASE("tls: records of an earlier session, or of the other direction, are refused") {
  Session before;
  before.agree();
  send(before.client, pattern(100, 1));
  Bytes old = drain(before.left.far);
  for (bool reflected : {false, true}) {
    Session session;
    session.agree();
    send(session.server, pattern(100, 1));
    Bytes own = drain(session.right.near);
    put(session.right.near, reflected ? own : old);
    Bytes got(100);
    CHECK(receive(session.server, got) == -1);
    CHECK(errno == EPROTO);
  }
}

TEST_CASE("tls: the proper end is none of an error") {
  Session session;
  session.agree();
  session.client.end();
  session.pass();
  Bytes got(10);
  CHECK(receive(session.server, got) == 0);
  CHECK(receive(session.server, got) == 0);
}

TEST_CASE("tls: one thread sends while another receives, both ways") {
  Sockets sockets;
  Tls client(sockets.near.get(), Tls::Side::kClient, kSecret, 5);
  Tls server(sockets.far.get(), Tls::Side::kServer, kSecret, 5);
  agree(client, server);
  const Bytes sent = pattern(3 << 20, 9);
  Bytes at_server(sent.size()), at_client(sent.size());
  auto push = [&](Tls& tls) {
    for (size_t at = 0; at < sent.size() || tls.unsent();) {
      ssize_t size = send(tls, std::span(sent).subspan(at));
      if (size > 0) at += static_cast<size_t>(size);
    }
  };
  auto pull = [](Tls& tls, Bytes& into) {
    for (size_t at = 0; at < into.size();) {
      ssize_t size = receive(tls, std::span(into).subspan(at));
      if (size > 0) at += static_cast<size_t>(size);
    }
  };
  std::thread threads[] = {std::thread([&] { push(client); }), std::thread([&] { push(server); }),
                           std::thread([&] { pull(client, at_client); }),
                           std::thread([&] { pull(server, at_server); })};
  for (auto& thread : threads) thread.join();
  CHECK(at_server == sent);
  CHECK(at_client == sent);
}

void with_tls(NodeOptions& options) {
  options.secret = kSecret;
  options.tls = TlsUse::kOn;
}

TEST_CASE("tls: Nodes that encrypt move bytes and words like others") {
  Pair pair("tcp", with_tls);
  CHECK(pair.to_far->encrypted());
  CHECK(pair.to_near->encrypted());
  auto region = pair.far->allocate(8 << 20, "target", {true, true});
  auto remote = grant(*pair.to_far, *region);
  for (size_t size : {size_t{1}, size_t{5000}, size_t{3} << 20, size_t{8} << 20}) {
    Bytes out = pattern(size, size), in(size);
    auto sent = write(*pair.to_far, out, *remote, 0);
    CHECK(outcome(sent) == Code::kOk);
    CHECK(outcome(read(*pair.to_far, in, *remote, 0)) == Code::kOk);
    CHECK(in == out);
  }
}

TEST_CASE("tls: on shared memory the frames beside it are encrypted") {
  Pair pair("shm", with_tls);
  CHECK(pair.to_far->encrypted());
  auto region = pair.far->allocate(4096, "target", {true, true});
  auto remote = grant(*pair.to_far, *region);
  CHECK(outcome(write(*pair.to_far, pattern(4096, 1), *remote, 0)) == Code::kOk);
}

TEST_CASE("tls: who does not encrypt and who does refuse each other") {
  for (bool server : {true, false}) {
    auto open = make_node("open", [](NodeOptions& options) {
      options.secret = kSecret;
      options.tls = TlsUse::kOff;
    });
    auto closed = make_node("closed", with_tls);
    try {
      connect(server ? *open : *closed, server ? *closed : *open);
      FAIL("connected");
    } catch (const Error& error) {
      CHECK(error.code() == Code::kPermission);
      CHECK(std::string(error.what()).find("TENSORWIRE_TLS") != std::string::npos);
    }
  }
}

TEST_CASE("tls: on loopback it is left out unless asked for, and then taken by the other side") {
  auto secret_only = [](NodeOptions& options) { options.secret = kSecret; };
  Pair pair("tcp", secret_only);
  CHECK(!pair.to_far->encrypted());
  auto asking = make_node("asking", with_tls);
  CHECK(connect(*asking, *pair.far)->encrypted());
  // The other way round the side that asks is found out, and the connection made anew.
  CHECK(connect(*pair.far, *asking)->encrypted());
}

TEST_CASE("tls: asked for without a secret it is an error") {
  CHECK(thrown([] {
          make_node("bare", [](NodeOptions& options) { options.tls = TlsUse::kOn; });
        }) == Code::kInvalid);
}

}  // namespace
}  // namespace tensorwire
