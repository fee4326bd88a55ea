#include "memory/write_tracking.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string>

#include "base/fork.h"

namespace tensorwire {
namespace {

// Of kernels that are newer than the headers may be (include/uapi/linux/userfaultfd.h and fs.h).
constexpr int kUserModeOnly = 1;  // needs no privilege
constexpr uint64_t kShmem = 1 << 12, kUnpopulated = 1 << 13, kAsynchronous = 1 << 15;
constexpr uint64_t kIsWritten = 1 << 1;

struct PageRegion {
  uint64_t start, end, categories;
};

struct ScanArguments {
  uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
  uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};

const unsigned long kScan = _IOWR('f', 16, ScanArguments);

bool large_pages_are_off() {
  Descriptor file(
      ::open("/sys/kernel/mm/transparent_hugepage/shmem_enabled", O_RDONLY | O_CLOEXEC));
  if (!file) return errno == ENOENT;  // a kernel without them
  std::array<char, 256> text;
  ssize_t got = ::read(file.get(), text.data(), text.size());
  if (got <= 0) return false;
  std::string found(text.data(), static_cast<size_t>(got));
  return found.find("[never]") != std::string::npos || found.find("[deny]") != std::string::npos;
}

}  // namespace

std::optional<WriteTracking> WriteTracking::begin(std::byte* data, size_t size) {
  if (!fork::known<large_pages_are_off>()) return std::nullopt;
  Descriptor descriptor(
      static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | kUserModeOnly)));
  if (!descriptor) return std::nullopt;
  uffdio_api api{};
  api.api = UFFD_API;
  api.features = UFFD_FEATURE_PAGEFAULT_FLAG_WP | kShmem | kUnpopulated | kAsynchronous;
  if (::ioctl(descriptor.get(), UFFDIO_API, &api) != 0) return std::nullopt;
  uffdio_register range{};
  range.range = {reinterpret_cast<uintptr_t>(data), size};
  range.mode = UFFDIO_REGISTER_MODE_WP;
  if (::ioctl(descriptor.get(), UFFDIO_REGISTER, &range) != 0) return std::nullopt;
  WriteTracking made(std::move(descriptor), data, size);
  if (!made.restart() || !made.written()) return std::nullopt;
  return made;
}

bool WriteTracking::restart() {
  uffdio_writeprotect protect{};
  protect.range = {reinterpret_cast<uintptr_t>(data_), size_};
  protect.mode = UFFDIO_WRITEPROTECT_MODE_WP;
  return ::ioctl(descriptor_.get(), UFFDIO_WRITEPROTECT, &protect) == 0;
}

std::optional<std::vector<ByteRange>> WriteTracking::written() const {
  // Opened for each look: a descriptor that is kept would be a parent's in a forked child.
  Descriptor pagemap(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  if (!pagemap) return std::nullopt;
  std::array<PageRegion, 64> regions;
  std::vector<ByteRange> ranges;
  const auto base = reinterpret_cast<uintptr_t>(data_);
  ScanArguments scan{};
  scan.size = sizeof scan;
  scan.start = base;
  scan.end = base + size_;
  scan.vec = reinterpret_cast<uintptr_t>(regions.data());
  scan.vec_len = regions.size();
  scan.category_mask = scan.return_mask = kIsWritten;
  while (scan.start < scan.end) {
    int got = ::ioctl(pagemap.get(), kScan, &scan);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 || scan.walk_end <= scan.start) return std::nullopt;
    for (int i = 0; i < got; ++i) {
      const PageRegion& region = regions[static_cast<size_t>(i)];
      ranges.emplace_back(region.start - base, region.end - base);
    }
    scan.start = scan.walk_end;
  }
  return ranges;
}

}  // namespace tensorwire
