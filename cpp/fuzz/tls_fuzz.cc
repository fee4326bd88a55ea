// What is read by TLS before the other side is proven: raw bytes as a whole flight, and an honest
// exchange of which the input changes, drops or repeats bytes. No session may be done with anybody
// but the honest other end, unchanged.
#include <sys/socket.h>

#include <vector>

#include "expect.h"
#include "wire/handshake.h"
#include "wire/link.h"

namespace tensorwire::fuzz {
namespace {

using Step = Tls::Step;

const Secret kSecret(32, 'k');

struct End {
  explicit End(Tls::Side side) {
    int ends[2];
    EXPECT(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
    other = Descriptor(ends[1]);
    link = Link(Descriptor(ends[0]));
    link.encrypt(side, kSecret);
  }
  std::vector<uint8_t> said() {
    std::vector<uint8_t> bytes(64 << 10);
    ssize_t size = ::recv(other.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    bytes.resize(size > 0 ? static_cast<size_t>(size) : 0);
    return bytes;
  }
  Step hear(std::span<const uint8_t> bytes) {
    if (!bytes.empty()) (void)!::send(other.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    Step step = link.tls()->handshake();
    if (step == Step::kFailed) EXPECT(!link.tls()->failure().message.empty());
    return step;
  }
  Descriptor other;
  Link link;
};

// Changes bytes as the input says; true if anything is not as it was.
bool change(std::vector<uint8_t>& bytes, Input& input) {
  auto before = bytes;
  for (int i = input.byte() % 4; i > 0 && !bytes.empty(); --i) {
    size_t at = input.number<uint16_t>() % bytes.size();
    uint8_t how = input.byte();
    if (how == 0) {
      bytes.resize(at);
    } else if (how == 1) {
      bytes.insert(bytes.end(), before.begin(), before.end());
    } else {
      bytes[at] ^= how;
    }
  }
  return bytes != before;
}

void raw(Input input, Tls::Side side) {
  End end(side);
  end.link.tls()->handshake();
  while (!input.empty()) {
    Step step = end.hear(input.take(size_t{1} + 16 * input.byte()));
    EXPECT(step != Step::kDone);
    if (step == Step::kFailed) break;
  }
}

void between(Input input) {
  End client(Tls::Side::kClient), server(Tls::Side::kServer);
  client.link.tls()->handshake();
  bool changed = false, over = false, client_done = false;
  for (int round = 0; round < 3 && !over; ++round) {
    auto question = client.said();
    changed |= change(question, input);
    Step there = server.hear(question);
    auto answer = server.said();
    changed |= change(answer, input);
    Step here = client.hear(answer);
    EXPECT(changed || (here != Step::kFailed && there != Step::kFailed));
    over = here == Step::kFailed || there == Step::kFailed;
    // A server is done only with a client that was.
    EXPECT(there != Step::kDone || client_done);
    over = over || there == Step::kDone;
    client_done = client_done || here == Step::kDone;
  }
  EXPECT(changed || over);
}

}  // namespace
}  // namespace tensorwire::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tensorwire::fuzz;
  Input input(data, size);
  switch (input.byte() % 3) {
    case 0:
      raw(input, tensorwire::Tls::Side::kServer);
      break;
    case 1:
      raw(input, tensorwire::Tls::Side::kClient);
      break;
    default:
      between(input);
  }
  return 0;
}
