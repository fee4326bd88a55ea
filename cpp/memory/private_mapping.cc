#include "memory/private_mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace tensorwire {
namespace {

// Bits of an entry of /proc/PID/pagemap (Documentation/admin-guide/mm/pagemap.rst).
constexpr uint64_t kPresent = uint64_t{1} << 63, kSwapped = uint64_t{1} << 62;
constexpr uint64_t kFileOrShared = uint64_t{1} << 61;

bool is_private(uint64_t entry) {
  return (entry & (kPresent | kSwapped)) != 0 && (entry & kFileOrShared) == 0;
}

void add(std::vector<ByteRange>& ranges, uint64_t start, uint64_t stop) {
  if (!ranges.empty() && ranges.back().second == start) {
    ranges.back().second = stop;
  } else {
    ranges.emplace_back(start, stop);
  }
}

bool try_kernel() {
  try {
    auto shared = Mapping::create(3 * page_bytes(), true, true);
    std::memset(shared->data(), 1, shared->size());
    PrivateMapping mapping(shared, shared->descriptor());
    auto* first = reinterpret_cast<volatile char*>(mapping.data());
    if (*first != 1 || !mapping.written(false).empty()) return false;
    first[page_bytes()] = 2;
    return mapping.written(false) == std::vector<ByteRange>{{page_bytes(), 2 * page_bytes()}};
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

PrivateMapping::PrivateMapping(std::shared_ptr<Mapping> shared, int memory)
    : shared_(std::move(shared)), epoch_(fork::epoch()) {
  mapped_ = whole_pages(shared_->size());
  void* address = ::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE, memory, 0);
  if (address == MAP_FAILED) {
    throw Error(Code::kNoMemory,
                system_message("cannot map " + std::to_string(mapped_) + " bytes", errno));
  }
  // Where all memory of the process is to be locked (mlockall), every page is a copy by now, which
  // follows nothing.
  if (::munlock(address, mapped_) != 0 || ::madvise(address, mapped_, MADV_DONTNEED) != 0) {
    int error = errno;
    ::munmap(address, mapped_);
    throw Error(Code::kUnavailable, system_message("cannot unlock private memory", error));
  }
  data_ = static_cast<std::byte*>(address);
  tracking_ = WriteTracking::begin(data_, mapped_);
  fork::add_range(address, mapped_);
}

PrivateMapping::~PrivateMapping() {
  if (!usable()) return;
  fork::remove_range(data_);
  ::munmap(data_, mapped_);
}

bool PrivateMapping::told_by_kernel() { return fork::known<try_kernel>(); }

std::vector<ByteRange> PrivateMapping::written(bool compare) {
  return compare ? compared() : told();
}

std::vector<ByteRange> PrivateMapping::told() {
  const uint64_t pages = mapped_ / page_bytes();
  std::vector<ByteRange> candidates{{0, mapped_}};
  if (tracking_) {
    if (auto found = tracking_->written()) {
      if (found->empty()) return {};
      candidates = std::move(*found);
    } else {
      tracking_.reset();
    }
  }
  // Opened for each look: a descriptor that is kept would be a parent's in a forked child.
  Descriptor pagemap(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  std::vector<ByteRange> ranges;
  for (auto [start, stop] : candidates) {
    add_private(ranges, pagemap.get(), start / page_bytes(), std::min(pages, stop / page_bytes()));
  }
  return ranges;
}

void PrivateMapping::add_private(std::vector<ByteRange>& ranges, int pagemap, uint64_t begin,
                                 uint64_t end) const {
  std::array<uint64_t, 4096> entries;
  const uint64_t page = page_bytes();
  const uint64_t first = reinterpret_cast<uintptr_t>(data_) / page;
  for (uint64_t at = begin; at < end;) {
    size_t wanted = std::min<uint64_t>(entries.size(), end - at) * sizeof(uint64_t);
    ssize_t got = ::pread(pagemap, entries.data(), wanted,
                          static_cast<off_t>((first + at) * sizeof(uint64_t)));
    if (got < 0 && errno == EINTR) continue;
    if (got < static_cast<ssize_t>(sizeof(uint64_t))) {
      throw Error(Code::kUnavailable, system_message("cannot read /proc/self/pagemap", errno));
    }
    for (size_t i = 0; i < static_cast<size_t>(got) / sizeof(uint64_t); ++i, ++at) {
      if (is_private(entries[i]))
        add(ranges, at * page, std::min<uint64_t>((at + 1) * page, size()));
    }
  }
}

std::vector<ByteRange> PrivateMapping::compared() {
  const uint64_t page = page_bytes(), pages = mapped_ / page;
  const uint64_t begin = pages * next_ / kLooks, end = pages * (next_ + 1) / kLooks;
  next_ = (next_ + 1) % kLooks;
  std::vector<ByteRange> ranges;
  for (uint64_t at = begin; at < end; ++at) {
    uint64_t start = at * page, stop = std::min<uint64_t>(start + page, size());
    if (std::memcmp(data_ + start, shared_->data() + start, stop - start) != 0) {
      add(ranges, start, stop);
    }
  }
  return ranges;
}

void PrivateMapping::revert() {
  if (::madvise(data_, mapped_, MADV_DONTNEED) == 0) {
    if (tracking_ && !tracking_->restart()) tracking_.reset();
    return;
  }
  throw Error(Code::kUnavailable,
              system_message("cannot let go of written pages (is all memory of this process "
                             "locked, by mlockall?)",
                             errno));
}

uint64_t checksum(std::span<const std::byte> bytes) {
  // Eight chains, so that multiplications overlap. Zero stays zero in each.
  constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;
  std::array<uint64_t, 8> chains{};
  auto mix = [](uint64_t& chain, uint64_t word) { chain = std::rotl((chain ^ word) * kOdd, 29); };
  size_t at = 0;
  for (; at + sizeof chains <= bytes.size(); at += sizeof chains) {
    std::array<uint64_t, 8> words;
    std::memcpy(words.data(), bytes.data() + at, sizeof words);
    for (size_t i = 0; i < words.size(); ++i) mix(chains[i], words[i]);
  }
  std::array<uint64_t, 8> rest{};
  std::memcpy(rest.data(), bytes.data() + at, bytes.size() - at);
  for (size_t i = 0; i < rest.size(); ++i) mix(chains[i], rest[i]);
  uint64_t result = 0;
  for (uint64_t chain : chains) mix(result, chain);
  return result;
}

}  // namespace tensorwire
