// The tools of every fuzzer: a check that ends the run, and a reader that takes an input apart.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>

// Not assert: it holds in every build.
#define EXPECT(condition)                                                          \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: broken: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (0)

namespace tensorwire::fuzz {

// Reads an input from the front; zeros when it is used up.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : left_(data, size) {}

  bool empty() const { return left_.empty(); }
  size_t size() const { return left_.size(); }

  uint8_t byte() { return number<uint8_t>(); }
  template <class T>
  T number() {
    T value{};
    auto bytes = take(sizeof value);
    if (!bytes.empty()) std::memcpy(&value, bytes.data(), bytes.size());
    return value;
  }
  // Returns the next `size` bytes, or fewer at the end of the input.
  std::span<const uint8_t> take(size_t size) {
    auto result = left_.first(std::min(size, left_.size()));
    left_ = left_.subspan(result.size());
    return result;
  }

 private:
  std::span<const uint8_t> left_;
};

}  // namespace tensorwire::fuzz
