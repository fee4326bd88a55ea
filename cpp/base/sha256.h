// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), for the handshake only. Written here because a wheel
// that links libcrypto would carry a second copy of it into every Python process.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace tensorwire {

using Digest = std::array<uint8_t, 32>;
inline constexpr size_t kHmacBlockBytes = 64;

class Sha256 {
 public:
  Sha256();
  void update(const void* data, size_t size);
  Digest finish();

 private:
  void block(const uint8_t* bytes);
  std::array<uint32_t, 8> state_;
  std::array<uint8_t, 64> pending_;
  size_t pending_size_ = 0;
  uint64_t total_ = 0;
};

// HMAC-SHA256 over the concatenation of role and transcript.
Digest hmac(std::span<const uint8_t> key, std::string_view role,
            std::span<const uint8_t> transcript);

// In time that does not depend on where they differ.
bool same_digest(const Digest& a, const Digest& b);

}  // namespace tensorwire
