#include "base/copy.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/fork.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tensorwire {
namespace {

#if defined(__x86_64__)

constexpr size_t kLine = 64;
constexpr size_t kPage = 4096;
constexpr size_t kStreams = 4;  // pages that are copied side by side
constexpr size_t kAheadBytes = 8 * kLine;

size_t threshold() {
  if (!__builtin_cpu_supports("avx2")) return SIZE_MAX;
  long cache = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
  return std::clamp<size_t>(cache > 0 ? static_cast<size_t>(cache) : 0, 16 << 20, 32 << 20);
}

// target is aligned to a line; whole blocks of kStreams pages. Several pages at once, because each
// page starts with a miss of the address translation.
__attribute__((target("avx2"))) void stream_blocks(std::byte* target, const std::byte* source,
                                                   size_t blocks) {
  for (size_t block = 0; block < blocks; ++block) {
    for (size_t line = 0; line < kPage; line += kLine) {
      for (size_t stream = 0; stream < kStreams; ++stream) {
        const std::byte* from = source + stream * kPage + line;
        auto* to = reinterpret_cast<__m256i*>(target + stream * kPage + line);
        _mm_prefetch(reinterpret_cast<const char*>(from + kAheadBytes), _MM_HINT_T0);
        __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32));
        _mm256_stream_si256(to, low);
        _mm256_stream_si256(to + 1, high);
      }
    }
    source += kStreams * kPage;
    target += kStreams * kPage;
  }
  _mm_sfence();
}

void copy_around_caches(std::byte* target, const std::byte* source, size_t size) {
  size_t head = (kLine - reinterpret_cast<uintptr_t>(target) % kLine) % kLine;
  std::memcpy(target, source, head);
  size_t blocks = (size - head) / (kStreams * kPage);
  stream_blocks(target + head, source + head, blocks);
  size_t done = head + blocks * kStreams * kPage;
  std::memcpy(target + done, source + done, size - done);
}

#endif

}  // namespace

void copy_out(std::byte* target, const std::byte* source, size_t size) {
  if (size == 0) return;  // either may be null then, which memmove does not take
#if defined(__x86_64__)
  auto to = reinterpret_cast<uintptr_t>(target), from = reinterpret_cast<uintptr_t>(source);
  bool apart = to + size <= from || from + size <= to;
  if (size >= fork::known<threshold>() && apart) {
    copy_around_caches(target, source, size);
    return;
  }
#endif
  std::memmove(target, source, size);
}

}  // namespace tensorwire
