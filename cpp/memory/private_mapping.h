// Shared memory seen copy-on-write, and bytes compared: what this process writes here stays here.
//
// A page shows what others write into the memory until this process writes to the page; then the
// kernel gives it a copy of its own, which no longer follows. Which pages these are is asked of the
// kernel (/proc/self/pagemap, for all pages or for those that WriteTracking names), or found by
// comparing where it does not tell.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "memory/mapping.h"
#include "memory/write_tracking.h"

namespace tensorwire {

// Not for several threads at a time.
class PrivateMapping {
 public:
  // When pages have to be compared, one look takes this part of them; the next one goes on.
  static constexpr size_t kLooks = 32;

  // `memory` is the memfd that `shared` maps; it stays the caller's. Throws kNoMemory.
  PrivateMapping(std::shared_ptr<Mapping> shared, int memory);
  ~PrivateMapping();
  PrivateMapping(const PrivateMapping&) = delete;
  PrivateMapping& operator=(const PrivateMapping&) = delete;

  std::byte* data() const { return data_; }
  size_t size() const { return shared_->size(); }
  const Mapping& shared() const { return *shared_; }
  bool usable() const { return epoch_ == fork::epoch(); }
  // Whether the kernel reports which pages were written: tried once per process.
  static bool told_by_kernel();
  // Whether that takes a nanosecond per page; else 25.
  bool tracked() const { return tracking_.has_value(); }
  // Whole pages that this process has written, rising. compare: by comparing a part of the pages,
  // which sees only what differs, after kLooks calls anywhere. Throws kUnavailable if the kernel
  // stops telling.
  std::vector<ByteRange> written(bool compare);
  // Lets go of the written pages: all bytes are the shared ones again. Throws kUnavailable.
  void revert();

 private:
  std::vector<ByteRange> told();
  void add_private(std::vector<ByteRange>& ranges, int pagemap, uint64_t begin, uint64_t end) const;
  std::vector<ByteRange> compared();

  std::shared_ptr<Mapping> shared_;
  std::byte* data_ = nullptr;
  size_t mapped_ = 0;
  size_t next_ = 0;  // part to be compared
  uint32_t epoch_ = 0;
  std::optional<WriteTracking> tracking_;
};

// A number for some bytes: equal for equal bytes, 0 if all are zero, and with other bytes almost
// surely another number. Not for secrets.
uint64_t checksum(std::span<const std::byte> bytes);

}  // namespace tensorwire
