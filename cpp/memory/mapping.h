// Memory that can be shared: an owned mapping of a sealed memfd, of anonymous pages, or of memory
// of a GPU.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/fork.h"
#include "gpu/gpu.h"

namespace tensorwire {

size_t page_bytes();
size_t whole_pages(size_t size);  // rounded up to them
// Memory that was not touched yet comes in large pages, as far as it fills some and the system has
// them. Any address.
void ask_for_large_pages(void* memory, size_t size);

// A memfd of that size, in bytes, without pages, that can be sealed. Throws kNoMemory, kBusy (no
// descriptor), kUnavailable (the system refuses it). Any thread.
Descriptor memory_file(const char* name, size_t size);

class Mapping {
 public:
  // Zeroed memory of this process. Shareable memory is a memfd that can neither shrink nor grow;
  // unless later mappings of it may be written, it is sealed against them. Throws kNoMemory, kBusy,
  // kUnavailable.
  static std::shared_ptr<Mapping> create(size_t size, bool shareable, bool later_writes);

  // Maps memory that a peer made; the descriptor stays the caller's. Verified first: a memfd on
  // tmpfs of at least `size` bytes whose size is sealed, so that no access can fault later. Looks
  // at the seals first, which blocks for no kind of file. Throws kInvalid or kNoMemory.
  static std::shared_ptr<Mapping> import(int memory, size_t size, bool writable);

  // Maps memory that create() made in an earlier process, of exactly this size; its content stays.
  // Verified as by import(). The descriptor stays the caller's, and the mapping has one of its own.
  // Throws kInvalid, kNoMemory or kBusy.
  static std::shared_ptr<Mapping> restore(int memory, size_t size);

  // Maps memory of a GPU, at least `size` bytes of it, that create_on() made shareable. Throws like
  // GpuMemory::import, and kBusy.
  static std::shared_ptr<Mapping> restore_on_gpu(int memory, size_t size);

  // Maps memory of another Node of this process for reading alone, at least `size` bytes of it. The
  // descriptor was opened for reading alone, so that a peer that gets it cannot map it for writing;
  // the caller keeps it, and the mapping has one of its own. Verified as by import(). Throws
  // kInvalid, kNoMemory or kBusy.
  static std::shared_ptr<Mapping> lend(int memory, size_t size);

  // Zeroed memory of a GPU. Throws as Gpu::at and GpuMemory::create.
  static std::shared_ptr<Mapping> create_on(int gpu, size_t size, bool shareable);
  // Maps memory of a GPU that a peer made. Throws as GpuMemory::import.
  static std::shared_ptr<Mapping> import_from_gpu(int memory, size_t size, bool writable);

  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  // Memory of a GPU is at an address of that GPU, to which only the driver's copies and kernels may
  // go: see gpu().
  std::byte* data() const { return data_; }
  // Whose memory it is; null for the host's.
  Gpu* gpu() const { return gpu_; }
  // Whether a GPU may copy to and from the memory by itself. Memory of the host is pinned for that,
  // once: at the first call if it is small, else when copies of a part of its size were asked for.
  // Any thread; may take some tenths of a second.
  bool reach(Gpu& gpu, uint64_t copied);
  size_t size() const { return size_; }
  // False in a forked child, where the range is not accessible.
  bool usable() const { return epoch_ == fork::epoch(); }
  // Gives the pages back to the system: the bytes become zero. Not while a NIC has them registered.
  // Throws kInvalid if one has, kUnavailable, kClosed once it is retired.
  void discard();

  // Called when the Node is closed: closes the descriptor, and gives the memory back now, or with
  // the last view. Zeros take its place, so that a late thread touches no other memory. No NIC has
  // the memory registered any more.
  void retire();
  // A view of the memory keeps it. False, and no view, once it is retired.
  // shown: to whom it is not known what his streams do with it.
  bool add_view(bool shown = false);
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
  static std::shared_ptr<Mapping> of(std::unique_ptr<GpuMemory> memory, size_t size);
  void map(int fd, size_t size, int protection, int flags);
  void give_back();  // locked
  void let_go_of_gpu();
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  size_t mapped_ = 0;
  bool writable_ = true;
  uint32_t epoch_ = 0;
  std::atomic<bool> keep_{false};
  Gpu* gpu_ = nullptr;
  std::unique_ptr<GpuMemory> gpu_memory_;

  std::mutex pin_mutex_;
  std::unique_ptr<GpuPin> pin_;
  std::atomic<bool> pinned_{false};
  bool unpinnable_ = false;
  uint64_t copied_ = 0;
  Descriptor descriptor_;

  std::mutex mutex_;
  size_t views_ = 0;
  bool retired_ = false;
  bool shown_ = false;
  std::atomic<bool> gone_{false};
};

// A view as long as it lives.
class MappingView {
 public:
  // Throws kClosed if the mapping is retired.
  explicit MappingView(std::shared_ptr<Mapping> mapping);
  ~MappingView() {
    if (mapping_) mapping_->drop_view();
  }
  MappingView(MappingView&& other) noexcept = default;
  MappingView& operator=(MappingView&&) = delete;

 private:
  std::shared_ptr<Mapping> mapping_;
};

// The mappings of one Node, of its own regions and of peers' memory, while they are used.
// Thread-safe.
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
