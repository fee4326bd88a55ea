// Asks the kernel which pages of a private mapping may have been written since it was made.
//
// The kernel write-protects the pages, lets each first write through and notes it (userfaultfd in
// its asynchronous mode; Linux 6.7, Documentation/admin-guide/mm/userfaultfd.rst), and one call
// finds the notes (PAGEMAP_SCAN). That takes about a nanosecond per page, because it reads page
// tables alone; /proc/self/pagemap looks at the kernel's record of every page too, and takes 25.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/fork.h"

namespace tensorwire {

// [start, stop) in bytes.
using ByteRange = std::pair<uint64_t, uint64_t>;

class WriteTracking {
 public:
  // Begins to track a private mapping of whole pages that was not touched yet; empty where the
  // kernel or a sandbox does not allow it, or where shared memory may be mapped in large pages,
  // which tracking would split.
  static std::optional<WriteTracking> begin(std::byte* data, size_t size);

  // Pages among which are all that were written since begin() or restart(), rising; nothing if the
  // kernel does not tell.
  std::optional<std::vector<ByteRange>> written() const;
  // All written pages were given back. False: it is not tracked any more.
  bool restart();

 private:
  WriteTracking(Descriptor descriptor, std::byte* data, size_t size)
      : descriptor_(std::move(descriptor)), data_(data), size_(size) {}

  Descriptor descriptor_;  // of the userfaultfd: what is noted ends with it
  std::byte* data_;
  size_t size_;
};

}  // namespace tensorwire
