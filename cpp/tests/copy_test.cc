// Copies around the caches copy what memcpy copies, and not a byte more.
#include "base/copy.h"

#include <doctest/doctest.h>

#include <cstring>
#include <vector>

namespace tensorwire {
namespace {

TEST_CASE("copy: every alignment and every rest of a block, and nothing beyond") {
  // Above 32 MiB the copy goes around the caches on every machine that can do so.
  constexpr size_t kSize = (33u << 20) + 70'000, kMargin = 64;
  std::vector<std::byte> source(kSize), target(kSize + 2 * kMargin);
  for (size_t i = 0; i < kSize; ++i) source[i] = static_cast<std::byte>(i * 31 + (i >> 11));
  size_t from = 0, to = 0;
  for (size_t cut : {0, 1, 63, 64, 65, 4095, 4097, 16383, 16385, 70'000}) {
    size_t size = kSize - cut - from;
    std::memset(target.data(), 0x5a, target.size());
    copy_out(target.data() + kMargin + to, source.data() + from, size);
    CHECK(std::memcmp(target.data() + kMargin + to, source.data() + from, size) == 0);
    for (size_t i = 0; i < kMargin + to; ++i) REQUIRE(target[i] == std::byte{0x5a});
    for (size_t i = kMargin + to + size; i < target.size(); ++i) {
      REQUIRE(target[i] == std::byte{0x5a});
    }
    from = (from + 7) % 64;
    to = (to + 13) % 64;
  }
}

TEST_CASE("copy: ranges that overlap are moved") {
  std::vector<std::byte> bytes(40u << 20), before;
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7 + (i >> 9));
  before = bytes;
  size_t size = bytes.size() - 1000;
  copy_out(bytes.data() + 1000, bytes.data(), size);
  CHECK(std::memcmp(bytes.data() + 1000, before.data(), size) == 0);
  before = bytes;
  copy_out(bytes.data(), bytes.data() + 1000, size);
  CHECK(std::memcmp(bytes.data(), before.data() + 1000, size) == 0);
}

TEST_CASE("copy: nothing from nowhere") { copy_out(nullptr, nullptr, 0); }

}  // namespace
}  // namespace tensorwire
