// A mount answers what a device says, also where that makes no sense. The device is one end of a
// socket that keeps messages whole, as /dev/fuse does.
#include "fuse/fuse.h"

#include <doctest/doctest.h>
#include <errno.h>
#include <linux/fuse.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace tensorwire::fuse {
namespace {

class Device {
 public:
  Device() {
    REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends_) == 0);
    mount_ = std::make_unique<Mount>(ends_[1]);
  }
  ~Device() {
    mount_.reset();
    ::close(ends_[0]);
  }

  Mount& mount() { return *mount_; }

  void send(const std::string& bytes) {
    REQUIRE(::send(ends_[0], bytes.data(), bytes.size(), MSG_EOR) ==
            static_cast<ssize_t>(bytes.size()));
  }

  template <class Body>
  void send(uint32_t operation, uint64_t unique, const Body& body, size_t size = sizeof(Body)) {
    fuse_in_header header{};
    header.opcode = operation;
    header.unique = unique;
    header.nodeid = 1;
    header.len = static_cast<uint32_t>(sizeof header + size);
    std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
    bytes.append(reinterpret_cast<const char*>(&body), size);
    send(bytes);
  }

  // A request that is handed over, so that `next` returns.
  void send_last(uint64_t unique) { send(FUSE_LOOKUP, unique, "name"); }

  // The next answer; nothing if there is none.
  std::optional<std::pair<fuse_out_header, std::string>> answer() {
    std::string bytes(2 << 20, 0);
    ssize_t size = ::recv(ends_[0], bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (size < 0) return std::nullopt;
    fuse_out_header header;
    REQUIRE(size >= static_cast<ssize_t>(sizeof header));
    std::memcpy(&header, bytes.data(), sizeof header);
    CHECK(header.len == static_cast<uint32_t>(size));
    return std::pair{header,
                     bytes.substr(sizeof header, static_cast<size_t>(size) - sizeof header)};
  }

 private:
  int ends_[2];
  std::unique_ptr<Mount> mount_;
};

Content content_of(const std::vector<std::string>& pieces) {
  auto owner = std::make_shared<std::vector<std::string>>(pieces);
  Content content;
  for (const std::string& each : *owner) {
    content.pieces.emplace_back(reinterpret_cast<const std::byte*>(each.data()), each.size());
  }
  content.owner = owner;
  return content;
}

TEST_CASE("fuse: the first request is answered, and one of another protocol refused") {
  for (auto [major, minor, size, error] :
       std::vector<std::tuple<uint32_t, uint32_t, size_t, int>>{{7, 31, 16, 0},
                                                                {7, 31, 64, 0},
                                                                {7, 99, 64, 0},
                                                                {7, 30, 64, EPROTO},
                                                                {6, 50, 64, EPROTO},
                                                                {8, 0, 64, EPROTO},
                                                                {7, 31, 0, EPROTO},
                                                                {7, 31, 4, EPROTO}}) {
    Device device;
    fuse_init_in asked{};
    asked.major = major;
    asked.minor = minor;
    asked.flags = ~0u;
    asked.flags2 = ~0u;
    device.send(FUSE_INIT, 5, asked, size);
    device.send_last(6);
    CHECK(device.mount().next()->unique == 6);
    auto answer = device.answer();
    REQUIRE(answer);
    CHECK(answer->first.unique == 5);
    CHECK(answer->first.error == -error);
    CHECK(answer->second.size() == (error == 0 ? sizeof(fuse_init_out) : 0));
    // A socket is no device: the kernel backs nothing, whatever was agreed.
    if (error == 0) CHECK(device.mount().backs() == false);
    if (error != 0) CHECK(!device.mount().backs());
  }
}

TEST_CASE("fuse: reads of what is served are answered, as far as there is something") {
  Device device;
  std::string whole = "abcdefghij";
  device.mount().serve(7, content_of({"abc", "", "defg", "h", "ij"}));
  for (uint64_t offset : {0ull, 1ull, 3ull, 9ull, 10ull, 11ull, 1ull << 40, ~0ull, ~0ull - 5}) {
    for (uint32_t size : {0u, 1u, 3u, 10u, 4096u, ~0u}) {
      fuse_read_in read{};
      read.fh = 7;
      read.offset = offset;
      read.size = size;
      device.send(FUSE_READ, 3, read);
      device.send_last(4);
      CHECK(device.mount().next()->unique == 4);
      auto answer = device.answer();
      REQUIRE(answer);
      CHECK(answer->first.error == 0);
      CHECK(answer->second == (offset < whole.size() ? whole.substr(offset, size) : ""));
    }
  }
  device.mount().unserve(7);
  device.mount().unserve(7);
  fuse_read_in read{};
  read.fh = 7;
  device.send(FUSE_READ, 8, read);
  auto found = device.mount().next();
  REQUIRE(found);
  CHECK(found->unique == 8);
  CHECK(found->body.size() == sizeof read);
  CHECK(!device.answer());
}

TEST_CASE("fuse: no answer is longer than what may be asked for") {
  Device device;
  std::string large(3 * kMostBytes, 'x');
  device.mount().serve(1, content_of({large}));
  fuse_read_in read{};
  read.fh = 1;
  read.size = ~0u;
  device.send(FUSE_READ, 3, read);
  device.send_last(4);
  CHECK(device.mount().next()->unique == 4);
  auto answer = device.answer();
  if (answer) CHECK(answer->second.size() == kMostBytes);  // a socket may have no room for it
}

TEST_CASE("fuse: bytes that are no request hurt nobody") {
  Device device;
  device.mount().serve(0, content_of({"zero"}));
  std::mt19937 random(1);
  for (int turn = 0; turn < 20'000; ++turn) {
    std::string bytes(random() % 200, 0);
    for (char& each : bytes) each = static_cast<char>(random() % 4 == 0 ? random() : 0);
    if (bytes.size() >= 8 && random() % 2 == 0) {
      uint32_t operation = random() % 60;  // those that there are, of any length
      std::memcpy(bytes.data() + 4, &operation, sizeof operation);
    }
    if (bytes.empty()) continue;  // of a socket that would be its end
    device.send(bytes);
    device.send_last(1'000'000 + static_cast<uint64_t>(turn));
    int handed_over = 0;
    for (;;) {
      auto found = device.mount().next();
      REQUIRE(found);
      if (found->unique == 1'000'000 + static_cast<uint64_t>(turn)) break;
      ++handed_over;
      CHECK(found->body == bytes.substr(sizeof(fuse_in_header)));
    }
    CHECK(handed_over <= 1);
    int answers = 0;
    while (device.answer()) ++answers;
    CHECK(handed_over + answers == (bytes.size() < sizeof(fuse_in_header) ? 0 : 1));
  }
}

TEST_CASE("fuse: a device that ends, and end(), end the waiting") {
  {
    Device device;
    device.mount().end();
    CHECK(!device.mount().next());
  }
  int ends[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0, ends) == 0);
  Mount mount(ends[1]);
  CHECK_THROWS(mount.back(0));
  mount.unback(17);
  mount.wake_poll(3);
  mount.end();
  mount.end();
  CHECK(!mount.next());
  ::close(ends[0]);
}

}  // namespace
}  // namespace tensorwire::fuse
