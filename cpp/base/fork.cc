#include "base/fork.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace tensorwire {
namespace fork {
namespace {

struct Registry {
  std::mutex mutex;
  std::set<int> descriptors;
  std::map<void*, size_t> ranges;
};

std::atomic<uint32_t> current_epoch{1};

// Never destroyed: descriptors may outlive every static destructor.
Registry& registry() {
  static Registry* instance = [] {
    auto* made = new Registry;
    pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                   [] {
                     Registry& r = registry();
                     for (int fd : r.descriptors) ::close(fd);
                     r.descriptors.clear();
                     for (auto [address, size] : r.ranges) {
                       ::mmap(address, size, PROT_NONE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
                     }
                     r.ranges.clear();
                     current_epoch.fetch_add(1);
                     r.mutex.unlock();
                   });
    return made;
  }();
  return *instance;
}

}  // namespace

uint32_t epoch() { return current_epoch.load(std::memory_order_relaxed); }

void add_descriptor(int fd) {
  std::lock_guard lock(registry().mutex);
  registry().descriptors.insert(fd);
}

void close_descriptor(int fd) {
  std::lock_guard lock(registry().mutex);
  registry().descriptors.erase(fd);
  ::close(fd);
}

void forget_descriptor(int fd) {
  std::lock_guard lock(registry().mutex);
  registry().descriptors.erase(fd);
}

void add_range(void* address, size_t size) {
  ::madvise(address, size, MADV_DONTFORK);
  std::lock_guard lock(registry().mutex);
  registry().ranges[address] = size;
}

void remove_range(void* address) {
  std::lock_guard lock(registry().mutex);
  registry().ranges.erase(address);
}

}  // namespace fork

Descriptor::Descriptor(int fd) : fd_(fd), epoch_(fork::epoch()) {
  if (fd_ >= 0) fork::add_descriptor(fd_);
}

Descriptor::Descriptor(Descriptor&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), epoch_(other.epoch_) {}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::exchange(other.fd_, -1);
    epoch_ = other.epoch_;
  }
  return *this;
}

void Descriptor::reset() {
  int fd = std::exchange(fd_, -1);
  // In a forked child the number may already belong to somebody else.
  if (fd < 0 || epoch_ != fork::epoch()) return;
  fork::close_descriptor(fd);
}

int Descriptor::release() {
  int fd = std::exchange(fd_, -1);
  if (fd < 0 || epoch_ != fork::epoch()) return -1;
  fork::forget_descriptor(fd);
  return fd;
}

}  // namespace tensorwire
