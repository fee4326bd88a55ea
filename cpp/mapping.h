// Memory that can be shared: an owned mapping of a sealed memfd, or of anonymous pages.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "fork.h"

namespace tensorwire {

size_t page_bytes();
size_t whole_pages(size_t size);  // rounded up to them

class Mapping {
 public:
  // Zeroed memory of this process. Shareable memory is a memfd that can neither shrink nor grow;
  // unless later mappings of it may be written, it is sealed against them. Throws kNoMemory.
  static std::shared_ptr<Mapping> create(size_t size, bool shareable, bool later_writes);

  // Maps memory that a peer made; the descriptor stays the caller's. Verified first: a memfd on
  // tmpfs of at least `size` bytes whose size is sealed, so that no access can fault later. Looks
  // at the seals first, which blocks for no kind of file. Throws kInvalid or kNoMemory.
  static std::shared_ptr<Mapping> import(int memory, size_t size, bool writable);

  // Maps memory that create() made in an earlier process, of exactly this size; its content stays.
  // Verified as by import(). The descriptor stays the caller's, and the mapping has one of its own.
  // Throws kInvalid, kNoMemory or kBusy.
  static std::shared_ptr<Mapping> restore(int memory, size_t size);

  // Maps memory of another Node of this process for reading alone, at least `size` bytes of it. The
  // descriptor was opened for reading alone, so that who gets it cannot map it for writing; it
  // stays the caller's, and the mapping has one of its own. Verified as by import(). Throws
  // kInvalid, kNoMemory or kBusy.
  static std::shared_ptr<Mapping> lend(int memory, size_t size);

  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  // False in a forked child, where the range is not accessible.
  bool usable() const { return epoch_ == fork::epoch(); }
  // Gives the pages back to the system: the bytes become zero. Not while a NIC has them registered.
  // Throws kInvalid if one has, kUnavailable, kClosed once it is retired.
  void discard();

  // The Node is closed: the descriptor is closed now, and the memory is given back now, or with the
  // last view. Where it was lie zeros from then on, so that a thread that is late touches nothing
  // of anybody. No NIC has the memory registered any more.
  void retire();
  // A view of the memory keeps it. False, and no view, once it is retired.
  bool add_view();
  void drop_view();
  // The bytes are gone; what was read before this was looked at is true.
  bool gone() const { return gone_.load(std::memory_order_acquire); }

  // A NIC has, or once had, the pages registered; it would go on with those that were given back.
  void keep_pages() { keep_.store(true); }
  // The memfd of shareable memory, else -1. Imported memory keeps none.
  int descriptor() const { return descriptor_.get(); }
  // Another descriptor of it, which is the caller's. Throws kUnavailable if there is none, kClosed
  // once the mapping is retired, kBusy.
  int duplicate();

 private:
  Mapping() = default;
  void map(int fd, size_t size, int protection, int flags);
  void give_back();  // locked
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  size_t mapped_ = 0;
  uint32_t epoch_ = 0;
  std::atomic<bool> keep_{false};
  Descriptor descriptor_;

  std::mutex mutex_;
  size_t views_ = 0;
  bool retired_ = false;
  std::atomic<bool> gone_{false};
};

// The mappings of one Node, those of its own regions and those of peers' memory, as long as
// somebody uses them. Thread-safe.
class Mappings {
 public:
  // Retired at once if all are.
  void add(const std::shared_ptr<Mapping>& mapping);
  void retire_all();

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<Mapping>> list_;
  size_t prune_at_ = 64;
  bool retired_ = false;
};

}  // namespace tensorwire
