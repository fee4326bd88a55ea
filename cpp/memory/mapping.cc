#include "memory/mapping.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "base/blocking.h"
#include "base/error.h"

namespace tensorwire {
namespace {

constexpr size_t kLargePageBytes = 2 << 20;
// Pinning takes all pages of the memory, which may be large and hardly used.
constexpr size_t kPinAtOnceBytes = 256 << 20;
constexpr uint64_t kPinAtPart = 16;

// What speaks against mapping so many bytes of this memory, which could fault later; "" if nothing.
std::string flaw(int memory, size_t pages) {
  int seals = ::fcntl(memory, F_GET_SEALS);
  constexpr int kNeeded = F_SEAL_SHRINK | F_SEAL_GROW;
  if (seals < 0 || (seals & kNeeded) != kNeeded) return "whose size is not sealed";
  // Pages of hugetlbfs, which has memfds too, can be missing when they are touched.
  struct statfs system{};
  if (::fstatfs(memory, &system) != 0 || system.f_type != TMPFS_MAGIC) {
    return "that is not on tmpfs";
  }
  struct stat info;
  if (::fstat(memory, &info) != 0 || static_cast<uint64_t>(info.st_size) < pages) {
    return "that is smaller than it claims";
  }
  return "";
}

int duplicate_descriptor(int descriptor) {
  int made = ::fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  if (made >= 0) return made;
  throw Error(errno == EBADF ? Code::kInvalid : Code::kBusy,
              system_message("cannot duplicate descriptor " + std::to_string(descriptor), errno));
}

}  // namespace

size_t page_bytes() {
  return fork::known<[] { return static_cast<size_t>(::sysconf(_SC_PAGESIZE)); }>();
}

size_t whole_pages(size_t size) { return (size + page_bytes() - 1) / page_bytes() * page_bytes(); }

Descriptor memory_file(const char* name, size_t size) {
  Descriptor memory(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory) {
    int error = errno;
    std::string why = system_message("cannot allocate shared memory", error);
    if (error == EMFILE || error == ENFILE) {
      throw Error(Code::kBusy, why + "; each region takes a descriptor");
    }
    if (error == ENOMEM) throw Error(Code::kNoMemory, why);
    throw Error(Code::kUnavailable,
                why +
                    " (memfd_create); the seccomp profile of the container has to allow it. A "
                    "Node whose transports are tcp alone does without, training does not");
  }
  if (::ftruncate(memory.get(), static_cast<off_t>(size)) != 0) {
    throw Error(Code::kNoMemory,
                system_message("cannot size a memfd to " + std::to_string(size) + " bytes", errno));
  }
  return memory;
}

void ask_for_large_pages(void* memory, size_t size) {
  if (size < kLargePageBytes) return;
  auto start = whole_pages(reinterpret_cast<size_t>(memory));
  size_t end = (reinterpret_cast<size_t>(memory) + size) / page_bytes() * page_bytes();
  // Where the system has none, or not for this, nothing changes.
  ::madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
}

void Mapping::map(int fd, size_t size, int protection, int flags) {
  void* address = ::mmap(nullptr, size, protection, flags, fd, 0);
  if (address == MAP_FAILED) {
    throw Error(Code::kNoMemory,
                system_message("cannot map " + std::to_string(size) + " bytes", errno));
  }
  data_ = static_cast<std::byte*>(address);
  mapped_ = size;
  epoch_ = fork::epoch();
  // For shared memory they must be switched on (see `tensorwire info`). Large copies are faster.
  ask_for_large_pages(address, size);
  fork::add_range(address, size);
}

std::shared_ptr<Mapping> Mapping::create(size_t size, bool shareable, bool later_writes) {
  std::shared_ptr<Mapping> result(new Mapping);
  size_t pages = whole_pages(size);
  result->size_ = size;
  if (!shareable) {
    result->map(-1, pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS);
    return result;
  }
  Descriptor memory = memory_file("tensorwire", pages);
  result->map(memory.get(), pages, PROT_READ | PROT_WRITE, MAP_SHARED);
  int seals = F_SEAL_SHRINK | F_SEAL_GROW | (later_writes ? 0 : F_SEAL_FUTURE_WRITE) | F_SEAL_SEAL;
  if (::fcntl(memory.get(), F_ADD_SEALS, seals) != 0) {
    throw Error(Code::kUnavailable,
                system_message("cannot seal shared memory (Linux 5.1 or newer is needed)", errno));
  }
  result->descriptor_ = std::move(memory);
  return result;
}

std::shared_ptr<Mapping> Mapping::import(int memory, size_t size, bool writable) {
  size_t pages = whole_pages(size);
  if (std::string wrong = flaw(memory, pages); !wrong.empty()) {
    throw Error(Code::kInvalid, "a peer offered memory " + wrong);
  }
  std::shared_ptr<Mapping> result(new Mapping);
  result->size_ = size;
  result->map(memory, pages, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED);
  result->writable_ = writable;
  return result;
}

std::shared_ptr<Mapping> Mapping::of(std::unique_ptr<GpuMemory> memory, size_t size) {
  std::shared_ptr<Mapping> result(new Mapping);
  result->data_ = memory->data();
  result->size_ = size;
  result->epoch_ = fork::epoch();
  result->descriptor_ = memory->take_descriptor();
  result->gpu_ = &memory->gpu();
  result->gpu_memory_ = std::move(memory);
  return result;
}

std::shared_ptr<Mapping> Mapping::create_on(int gpu, size_t size, bool shareable) {
  return of(GpuMemory::create(Gpu::at(gpu), size, shareable), size);
}

std::shared_ptr<Mapping> Mapping::import_from_gpu(int memory, size_t size, bool writable) {
  return of(GpuMemory::import(memory, size, writable), size);
}

std::shared_ptr<Mapping> Mapping::restore_on_gpu(int memory, size_t size) {
  Descriptor own(duplicate_descriptor(memory));
  std::shared_ptr<Mapping> result = import_from_gpu(memory, size, true);
  result->descriptor_ = std::move(own);
  return result;
}

std::shared_ptr<Mapping> Mapping::restore(int memory, size_t size) {
  Descriptor own(duplicate_descriptor(memory));
  auto refuse = [](const std::string& why) {
    return Error(Code::kInvalid, "a region cannot be restored over this descriptor: it is " + why);
  };
  int seals = ::fcntl(own.get(), F_GET_SEALS);
  if (seals < 0) throw refuse("no memory of a region");
  size_t pages = whole_pages(size);
  if (std::string wrong = flaw(own.get(), pages); !wrong.empty()) throw refuse("memory " + wrong);
  struct stat info;
  if (::fstat(own.get(), &info) != 0 || static_cast<uint64_t>(info.st_size) != pages) {
    throw refuse("memory of another size than that of a region of " + std::to_string(size) +
                 " bytes");
  }
  if ((seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)) != 0) {
    throw refuse(
        "memory that is sealed against writing, as that of regions with access 'r' is; "
        "allocate what shall be restored with another access");
  }
  if ((::fcntl(own.get(), F_GETFL) & O_ACCMODE) != O_RDWR) {
    throw refuse("memory that was opened for reading alone");
  }
  std::shared_ptr<Mapping> result(new Mapping);
  result->size_ = size;
  result->map(own.get(), pages, PROT_READ | PROT_WRITE, MAP_SHARED);
  result->descriptor_ = std::move(own);
  return result;
}

std::shared_ptr<Mapping> Mapping::lend(int memory, size_t size) {
  Descriptor own(duplicate_descriptor(memory));
  std::string wrong = flaw(own.get(), whole_pages(size));
  if (wrong.empty() && (::fcntl(own.get(), F_GETFL) & O_ACCMODE) != O_RDONLY) {
    wrong = "that is not opened for reading alone";
  }
  if (!wrong.empty()) throw Error(Code::kInvalid, "a region cannot lend memory " + wrong);
  std::shared_ptr<Mapping> result(new Mapping);
  result->size_ = size;
  result->map(own.get(), whole_pages(size), PROT_READ, MAP_SHARED);
  result->writable_ = false;
  result->descriptor_ = std::move(own);
  return result;
}

int Mapping::duplicate() {
  std::lock_guard lock(mutex_);
  if (retired_) throw Error(Code::kClosed, "the Node of this region is closed");
  if (!descriptor_) {
    throw Error(Code::kUnavailable,
                "the region's memory is not shared memory and has no descriptor: its Node's "
                "transports leave out shm");
  }
  return duplicate_descriptor(descriptor_.get());
}

void Mapping::retire() {
  if (!usable()) return;
  std::lock_guard lock(mutex_);
  retired_ = true;
  descriptor_.reset();
  if (views_ == 0) give_back();
}

bool Mapping::add_view(bool shown) {
  std::lock_guard lock(mutex_);
  if (retired_) return false;
  shown_ = shown_ || shown;
  ++views_;
  return true;
}

void Mapping::drop_view() {
  if (!usable()) return;
  std::lock_guard lock(mutex_);
  if (--views_ == 0 && retired_) give_back();
}

void Mapping::give_back() {
  if (gone_.exchange(true)) return;
  pin_.reset();
  if (gpu_ != nullptr) return let_go_of_gpu();
  // Other threads may look at the pages meanwhile, and see the old ones or zeros. As a plain system
  // call, because ThreadSanitizer takes mmap() for a write to each byte.
  long result = ::syscall(SYS_mmap, data_, mapped_, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (result == -1) return;  // the old memory stays until the destructor takes it away
  ::madvise(data_, mapped_, MADV_DONTFORK);
}

void Mappings::add(const std::shared_ptr<Mapping>& mapping) {
  std::lock_guard lock(mutex_);
  if (retired_) return mapping->retire();
  if (list_.size() >= prune_at_) {
    std::erase_if(list_, [](const auto& each) { return each.expired(); });
    prune_at_ = 2 * list_.size() + 64;
  }
  list_.push_back(mapping);
}

void Mappings::retire_all() {
  std::vector<std::weak_ptr<Mapping>> list;
  {
    std::lock_guard lock(mutex_);
    retired_ = true;
    list.swap(list_);
  }
  for (const auto& each : list) {
    if (auto mapping = each.lock()) mapping->retire();
  }
}

void Mapping::discard() {
  std::lock_guard lock(mutex_);
  if (gpu_ != nullptr) {
    throw Error(Code::kInvalid, "memory of a GPU has no pages to give back: free the region");
  }
  if (pinned_) {
    throw Error(Code::kInvalid, "a GPU has this memory pinned: its pages cannot be given back");
  }
  if (retired_) throw Error(Code::kClosed, "the Node of this region is closed");
  if (keep_.load()) {
    throw Error(Code::kInvalid, "a NIC has this memory registered: its pages cannot be given back");
  }
  if (::madvise(data_, mapped_, descriptor_ ? MADV_REMOVE : MADV_DONTNEED) != 0) {
    throw Error(Code::kUnavailable, system_message("cannot give pages back", errno));
  }
}

// What a tensor showed may still be used by streams of this process, and waiting for them must hold
// up nobody. Its mapping has no other user any more.
void Mapping::let_go_of_gpu() {
  if (!shown_) {
    gpu_memory_.reset();
    return;
  }
  std::shared_ptr<GpuMemory> memory(gpu_memory_.release());
  try {
    spawn_blocking([memory] { memory->settle(); });
  } catch (const Error&) {
    new std::shared_ptr<GpuMemory>(memory);  // without a thread it stays until the process ends
  }
}

bool Mapping::reach(Gpu& gpu, uint64_t copied) {
  if (gpu_ != nullptr || pinned_.load(std::memory_order_acquire)) return true;
  std::lock_guard lock(pin_mutex_);
  if (pinned_) return true;
  if (unpinnable_) return false;
  copied_ += copied;
  if (mapped_ > kPinAtOnceBytes && copied_ < mapped_ / kPinAtPart) return false;
  pin_ = GpuPin::pin(gpu, data_, mapped_, writable_);
  unpinnable_ = pin_ == nullptr;
  pinned_.store(!unpinnable_, std::memory_order_release);
  return !unpinnable_;
}

MappingView::MappingView(std::shared_ptr<Mapping> mapping) : mapping_(std::move(mapping)) {
  if (mapping_->add_view()) return;
  mapping_.reset();
  throw Error(Code::kClosed, "the Node of this region is closed");
}

Mapping::~Mapping() {
  if (data_ == nullptr || epoch_ != fork::epoch()) return;
  pin_.reset();
  if (gpu_memory_) let_go_of_gpu();
  if (gpu_ != nullptr) return;
  fork::remove_range(data_);
  ::munmap(data_, mapped_);
}

}  // namespace tensorwire
