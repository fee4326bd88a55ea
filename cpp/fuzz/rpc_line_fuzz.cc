// The headers of frames of calls. A second, obvious reading of the same bytes says which of them
// are frames, and where the first one is that is none.
//
// Input: bytes of a line, as they arrived.
#include <vector>

#include "expect.h"
#include "rpc/line.h"

namespace tensorwire::fuzz {
namespace {

// Read off docs/internals/rpc-wire.md once more; the frame's size, 0 for none.
uint32_t obvious(std::span<const uint8_t> bytes) {
  if (bytes.size() < 16) return 0;
  uint32_t size = bytes[0] | bytes[1] << 8 | bytes[2] << 16 | static_cast<uint32_t>(bytes[3]) << 24;
  if (size < 16 || size > bytes.size() || size > 16 + 256 + 65536 + 32768 + 49152) return 0;
  uint8_t kind = bytes[4], flags = bytes[5];
  if (kind < 1 || kind > 7 || flags > 31 || bytes[6] != 0 || bytes[7] != 0) return 0;
  bool part = kind == 2 && flags % 2 == 1;
  return part && size != 16 + 49152 ? 0 : size;
}

void run(Input input) {
  auto bytes = input.take(input.size());
  // Exactly as long as it must be, so that the sanitizer sees a byte too many.
  std::vector<char> copy(bytes.begin(), bytes.end());
  std::span<const char> left(copy.data(), copy.size());
  while (!left.empty()) {
    uint32_t expected = obvious(bytes.subspan(copy.size() - left.size()));
    try {
      auto header = rpc::first_frame(left);
      EXPECT(header.size == expected);
    } catch (const rpc::FrameError&) {
      EXPECT(expected == 0);
      return;
    }
    left = left.subspan(expected);
  }
}

}  // namespace
}  // namespace tensorwire::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  tensorwire::fuzz::run({data, size});
  return 0;
}
