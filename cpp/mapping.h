// Memory that can be shared: an owned mapping of a sealed memfd, or of anonymous pages.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "fork.h"

namespace tensorwire {

class Mapping {
 public:
  // Zeroed memory of this process. Shareable memory is a memfd that can neither shrink nor grow;
  // if peers may not write it, it is sealed so that no later mapping of it can be written.
  // Throws kNoMemory.
  static std::shared_ptr<Mapping> create(size_t size, bool shareable, bool peers_write);

  // Maps memory that a peer made; the descriptor stays the caller's. Verified first: a memfd on
  // tmpfs of at least `size` bytes whose size is sealed, so that no access can fault later. Looks
  // at the seals first, which blocks for no kind of file. Throws kInvalid or kNoMemory.
  static std::shared_ptr<Mapping> import(int memory, size_t size, bool writable);

  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  // False in a forked child, where the range is not accessible.
  bool usable() const { return epoch_ == fork::epoch(); }
  // Gives the pages back to the system: the bytes become zero. Not while a NIC has them registered.
  // Throws kInvalid if one has, kUnavailable.
  void discard();
  // A NIC has, or once had, the pages registered; it would go on with those that were given back.
  void keep_pages() { keep_.store(true); }
  // The memfd of shareable memory, else -1. Imported memory keeps none.
  int descriptor() const { return descriptor_.get(); }

 private:
  Mapping() = default;
  void map(int fd, size_t size, int protection, int flags);
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  size_t mapped_ = 0;
  uint32_t epoch_ = 0;
  std::atomic<bool> keep_{false};
  Descriptor descriptor_;
};

}  // namespace tensorwire
