// What a mount makes of the requests that come from its device, from an input that says what they
// are, and what is served meanwhile. A second, obvious reading of the same bytes says what is
// answered here and with which bytes, and what is handed over. The device is one end of a socket
// that keeps messages whole.
//
// Input: a list of steps. Each is a byte that says what is done, and what that needs:
//   a request as it stands (a length of two bytes, and so many bytes, or the rest),
//   a request with a header that is right, of an operation and a body of any length,
//   an INIT, a READ of one of four handles, a content that is served or not any more.
#include "fuse/fuse.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "expect.h"

namespace tensorwire::fuse {
namespace {

using fuzz::Input;

constexpr uint64_t kHandles = 4;
constexpr size_t kMostContent = 300;
constexpr uint64_t kLast = 0xfeedfacefeedface;  // the number of a request that ends a turn

struct Served {
  std::string bytes;
  size_t pieces = 0;
};

class Run {
 public:
  Run() {
    EXPECT(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends_) == 0);
    mount_ = std::make_unique<Mount>(ends_[1]);
  }
  ~Run() {
    mount_->end();
    EXPECT(!mount_->next());
    mount_.reset();
    ::close(ends_[0]);
  }

  void step(Input& input) {
    switch (input.byte() % 6) {
      case 0: {
        size_t size = input.byte();
        return ask(text(input.take(size + 256u * (input.byte() % 8))));
      }
      case 1: {
        uint32_t operation = input.byte();
        return ask(request(operation, text(input.take(input.byte()))));
      }
      case 2: {
        fuse_init_in init{};
        fill(init, input);
        return ask(request(FUSE_INIT, text(&init, input.byte() % 2 != 0 ? sizeof init : 16)));
      }
      case 3: {
        fuse_read_in read{};
        read.fh = input.byte() % (kHandles + 1);
        read.offset = input.byte();
        if (read.offset >= 250) read.offset = ~uint64_t{0} - input.byte();
        read.size = input.byte();
        if (read.size >= 250) read.size = ~uint32_t{0} - input.byte();
        return ask(request(FUSE_READ, text(&read, sizeof read)));
      }
      case 4:
        return serve(input);
      default: {
        uint64_t handle = input.byte() % (kHandles + 1);
        mount_->unserve(handle);
        if (handle < kHandles) served_[handle].reset();
      }
    }
  }

 private:
  static std::string text(std::span<const uint8_t> bytes) {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  static std::string text(const void* data, size_t size) {
    return {static_cast<const char*>(data), size};
  }
  template <class Value>
  static void fill(Value& value, Input& input) {
    auto bytes = input.take(sizeof value);
    if (!bytes.empty()) std::memcpy(&value, bytes.data(), bytes.size());
  }

  std::string request(uint32_t operation, const std::string& body) {
    fuse_in_header header{};
    header.len = static_cast<uint32_t>(sizeof header + body.size());
    header.opcode = operation;
    header.unique = ++unique_;
    return text(&header, sizeof header) + body;
  }

  void serve(Input& input) {
    uint64_t handle = input.byte() % kHandles;
    // More pieces than an answer can have, now and then.
    size_t count = input.byte() % 8 == 7 ? 1100 : input.byte() % 6;
    auto owner = std::make_shared<std::vector<std::string>>();
    Served made;
    Content content;
    for (size_t i = 0; i < count; ++i) {
      owner->push_back(count > 8 ? "x" : text(input.take(input.byte() % kMostContent)));
      made.bytes += owner->back();
      ++made.pieces;
    }
    for (const std::string& each : *owner) {
      content.pieces.emplace_back(reinterpret_cast<const std::byte*>(each.data()), each.size());
    }
    content.owner = owner;
    mount_->serve(handle, std::move(content));
    served_[handle] = std::move(made);
  }

  // Sends it, and a last one, which is always handed over; then nothing is left.
  void ask(const std::string& bytes) {
    if (bytes.empty()) return;  // of a socket that would be its end
    send(bytes);
    fuse_in_header last{};
    last.len = sizeof last;
    last.opcode = FUSE_LOOKUP;
    last.unique = kLast;
    send(text(&last, sizeof last));
    auto first = mount_->next();
    EXPECT(first);
    if (is_handed_over(bytes)) {
      fuse_in_header header;
      std::memcpy(&header, bytes.data(), sizeof header);
      EXPECT(first->operation == header.opcode && first->unique == header.unique);
      EXPECT(first->node == header.nodeid && first->body == bytes.substr(sizeof header));
      auto second = mount_->next();
      EXPECT(second && second->unique == kLast && second->body.empty());
    } else {
      EXPECT(first->unique == kLast && first->body.empty());
    }
    expect_answer(bytes);
    EXPECT(!receive());
  }

  void send(const std::string& bytes) {
    EXPECT(::send(ends_[0], bytes.data(), bytes.size(), MSG_EOR) ==
           static_cast<ssize_t>(bytes.size()));
  }

  std::optional<std::string> receive() {
    std::string bytes(4096, 0);
    ssize_t size = ::recv(ends_[0], bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (size < 0) return std::nullopt;
    bytes.resize(static_cast<size_t>(size));
    return bytes;
  }

  // What a read asks for: of bytes that are missing in it, zeros.
  static fuse_read_in read_of(const std::string& bytes) {
    fuse_read_in read{};
    size_t size = std::min(bytes.size() - sizeof(fuse_in_header), sizeof read);
    std::memcpy(&read, bytes.data() + sizeof(fuse_in_header), size);
    return read;
  }

  const Served* served_for(const std::string& bytes) const {
    uint64_t handle = read_of(bytes).fh;
    return handle < kHandles && served_[handle] ? &*served_[handle] : nullptr;
  }

  static uint32_t operation_of(const std::string& bytes) {
    fuse_in_header header;
    std::memcpy(&header, bytes.data(), sizeof header);
    return header.opcode;
  }

  bool is_handed_over(const std::string& bytes) const {
    if (bytes.size() < sizeof(fuse_in_header)) return false;
    uint32_t operation = operation_of(bytes);
    if (operation == FUSE_INIT) return false;
    return operation != FUSE_READ || expected_of(bytes) == std::nullopt;
  }

  // What a read is answered with here.
  std::optional<std::string> expected_of(const std::string& bytes) const {
    const Served* served = served_for(bytes);
    if (served == nullptr) return std::nullopt;
    auto read = read_of(bytes);
    std::string found;
    if (read.offset < served->bytes.size()) found = served->bytes.substr(read.offset, read.size);
    // A content of very many pieces is only answered where few of them are asked for.
    if (served->pieces > 8 && found.size() >= 1024) return std::nullopt;
    return found;
  }

  void expect_answer(const std::string& bytes) {
    if (bytes.size() < sizeof(fuse_in_header)) return;
    fuse_in_header asked;
    std::memcpy(&asked, bytes.data(), sizeof asked);
    bool is_read = asked.opcode == FUSE_READ;
    if (asked.opcode != FUSE_INIT && !(is_read && expected_of(bytes))) return;
    auto answer = receive();
    EXPECT(answer && answer->size() >= sizeof(fuse_out_header));
    fuse_out_header header;
    std::memcpy(&header, answer->data(), sizeof header);
    EXPECT(header.len == answer->size() && header.unique == asked.unique);
    std::string body = answer->substr(sizeof header);
    if (is_read) {
      EXPECT(header.error == 0 && body == *expected_of(bytes));
      return;
    }
    fuse_init_in init{};
    std::memcpy(&init, bytes.data() + sizeof asked,
                std::min(bytes.size() - sizeof asked, sizeof init));
    if (init.major != 7 || init.minor < 31) {
      EXPECT(header.error == -EPROTO && body.empty());
      return;
    }
    EXPECT(header.error == 0 && body.size() == sizeof(fuse_init_out));
    fuse_init_out told;
    std::memcpy(&told, body.data(), sizeof told);
    EXPECT(told.major == 7 && told.minor == 31 && told.max_write == kMostBytes);
    EXPECT((told.flags & ~init.flags) == 0);  // nothing that the kernel has not offered
    EXPECT(told.max_readahead == init.max_readahead);
    EXPECT(mount_->backs().has_value() && !*mount_->backs());  // a socket backs nothing
  }

  int ends_[2];
  std::unique_ptr<Mount> mount_;
  std::array<std::optional<Served>, kHandles> served_;
  uint64_t unique_ = 0;
};

void run(Input input) {
  Run made;
  while (input.size() > 0) made.step(input);
}

}  // namespace
}  // namespace tensorwire::fuse

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  tensorwire::fuse::run({data, size});
  return 0;
}
