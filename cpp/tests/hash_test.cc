// SHA-256 and HMAC against the vectors of FIPS 180-4 (NIST's examples) and RFC 4231.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "base/sha256.h"

namespace tensorwire {
namespace {

std::string hex(const Digest& digest) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (uint8_t byte : digest) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

std::string sha256(const std::string& message) {
  Sha256 hash;
  hash.update(message.data(), message.size());
  return hex(hash.finish());
}

TEST_CASE("sha256: NIST's examples") {
  CHECK(sha256("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(sha256("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(sha256("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklm"
               "nopqrlmnopqrsmnopqrstnopqrstu") ==
        "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  CHECK(sha256(std::string(1'000'000, 'a')) ==
        "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST_CASE("sha256: cuts do not matter") {
  std::string message;
  for (int i = 0; i < 300; ++i) message += static_cast<char>(i * 7);
  for (size_t length : {0, 1, 55, 56, 57, 63, 64, 65, 119, 120, 128, 300}) {
    const std::string text = message.substr(0, length);
    const std::string whole = sha256(text);
    for (size_t step : {1, 3, 63, 64, 65}) {
      Sha256 hash;
      for (size_t at = 0; at < length; at += step) {
        hash.update(text.data() + at, std::min(step, length - at));
      }
      CHECK(hex(hash.finish()) == whole);
    }
  }
}

struct Vector {
  std::vector<uint8_t> key;
  std::string message;
  std::string mac;
};

std::vector<uint8_t> counting_key() {
  std::vector<uint8_t> key;
  for (uint8_t i = 1; i <= 25; ++i) key.push_back(i);
  return key;
}

TEST_CASE("hmac: RFC 4231") {
  const std::vector<uint8_t> jefe = {'J', 'e', 'f', 'e'};
  const Vector vectors[] = {
      {std::vector<uint8_t>(20, 0x0b), "Hi There",
       "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
      {jefe, "what do ya want for nothing?",
       "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
      {std::vector<uint8_t>(20, 0xaa), std::string(50, '\xdd'),
       "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
      {counting_key(), std::string(50, '\xcd'),
       "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"},
      {std::vector<uint8_t>(20, 0x0c), "Test With Truncation", "a3b6167473100ee06e0c796c2955552b"},
      {std::vector<uint8_t>(131, 0xaa), "Test Using Larger Than Block-Size Key - Hash Key First",
       "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
      {std::vector<uint8_t>(131, 0xaa),
       "This is a test using a larger than block-size key and a larger than block-size data. The "
       "key needs to be hashed before being used by the HMAC algorithm.",
       "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"},
  };
  for (const Vector& vector : vectors) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(vector.message.data());
    std::span<const uint8_t> message(bytes, vector.message.size());
    CHECK(hex(hmac(vector.key, "", message)).substr(0, vector.mac.size()) == vector.mac);
    // The role is a prefix of what is authenticated.
    std::string_view role(vector.message.data(), 5);
    CHECK(hex(hmac(vector.key, role, message.subspan(5))).substr(0, vector.mac.size()) ==
          vector.mac);
  }
}

TEST_CASE("same_digest: every bit counts") {
  Digest a{}, b{};
  for (size_t i = 0; i < a.size(); ++i) a[i] = b[i] = static_cast<uint8_t>(i);
  CHECK(same_digest(a, b));
  for (size_t bit = 0; bit < 8 * a.size(); ++bit) {
    b[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
    CHECK_FALSE(same_digest(a, b));
    b[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
  }
}

}  // namespace
}  // namespace tensorwire
