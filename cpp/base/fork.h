// Takes the descriptors and the mapped memory of its parent's Nodes away from a forked child.
//
// In the child every registered descriptor is closed (else a dead parent would look alive to its
// peers) and every registered range becomes inaccessible (else a stray write would reach a peer).
// fork::epoch() grows by one in each child; objects made in another epoch are dead there.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace tensorwire {
namespace fork {

uint32_t epoch();

void add_descriptor(int fd);
void close_descriptor(int fd);  // and forgets it, as one step for forks
void forget_descriptor(int fd);
// The range must be private to the caller's process until remove_range; it is marked so that the
// kernel does not copy it into children.
void add_range(void* address, size_t size);
void remove_range(void* address);

// What a function finds out about this machine, kept. A local static would have a lock, which a
// child that is forked while another thread finds it out has to wait for, for ever. Here threads at
// the same time find out the same.
template <auto find>
auto known() {
  using Value = decltype(find());
  constinit static std::atomic<Value> value{};
  constinit static std::atomic<bool> is_known{false};
  if (!is_known.load(std::memory_order_acquire)) {
    value.store(find(), std::memory_order_relaxed);
    is_known.store(true, std::memory_order_release);
  }
  return value.load(std::memory_order_relaxed);
}

// The T of this process. Never destroyed, since threads may outlive every static destructor. A
// forked child gets one of its own: locks in its copy of the parent's may be held for ever.
template <class T>
T& of_this_process() {
  struct Made {
    const uint32_t made_in = epoch();
    T value;
  };
  static std::atomic<Made*> current{nullptr};
  Made* found = current.load(std::memory_order_acquire);
  while (found == nullptr || found->made_in != epoch()) {
    auto* made = new Made;
    if (current.compare_exchange_strong(found, made)) return made->value;
    delete made;
  }
  return found->value;
}

}  // namespace fork

// An owned descriptor, close-on-exec, closed in forked children too.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd);
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept;
  Descriptor& operator=(Descriptor&& other) noexcept;
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();
  // Gives it up without closing it; -1 if there is none, or in a forked child. For what may block
  // in close(), since reset() closes under a lock that all of them share.
  int release();

 private:
  int fd_ = -1;
  uint32_t epoch_ = 0;
};

}  // namespace tensorwire
