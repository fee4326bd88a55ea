#include "base/text.h"

#include <cstddef>
#include <cstdint>

namespace tensorwire {

bool presentable(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    auto lead = static_cast<uint8_t>(text[i]);
    if (lead < 0x20 || lead == 0x7f) return false;
    if (lead < 0x80) {
      ++i;
      continue;
    }
    // RFC 3629: no continuation first, nothing overlong, no surrogates, nothing above U+10FFFF.
    size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
    if (lead < 0xc2 || lead > 0xf4 || i + length > text.size()) return false;
    uint32_t point = lead & (0x7f >> length);
    for (size_t k = 1; k < length; ++k) {
      auto next = static_cast<uint8_t>(text[i + k]);
      if ((next & 0xc0) != 0x80) return false;
      point = point << 6 | (next & 0x3f);
    }
    constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
    bool surrogate = point >= 0xd800 && point < 0xe000;
    if (point < kLeast[length] || surrogate || point > 0x10ffff) return false;
    if (point >= 0x80 && point < 0xa0) return false;  // more control characters
    i += length;
  }
  return true;
}

std::string presented(std::string_view text) {
  return presentable(text) ? std::string(text) : "(unprintable)";
}

}  // namespace tensorwire
