// An allocator for torch's CPU tensors that produces chosen ones in memory that was planned for
// them; the rest comes from the allocator that was there before.
//
// Not part of the core: it is compiled against the torch that it is loaded into, at first use
// (src/tensorwire/torch/placer.py), and is called through ctypes. It knows bytes and no plan.
//
// The idea is tracing: a step of training allocates as the step before it did. While a thread is
// in a *context* (between one mark and the next: after forward, after the gradient of a certain
// parameter was accumulated), its allocations are logged. Once the caller has seen at which address
// a gradient arrived, `learn` looks up which allocation that was: the n-th of so many bytes in that
// context. That is a *site*. From then on the site's allocation is the gradient's slot.
//
// A wrong prediction is harmless: some other tensor lies in the slot for a while, the gradient lies
// elsewhere, and whoever looks at its address sees it.
//
// Invariants
//   A slot is handed out only while no tensor has it: `held` is set by the allocation, cleared by
//   the deleter, and nothing else touches it.
//   Installed once and for ever: tensors may outlive everything, so nothing here is destroyed, and
//   the caller keeps the memory of a slot mapped while it is held.
//   Threads without a context, and a forked child, get memory as if this were not there.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

struct Slot {
  Slot(void* address, uint64_t bytes) : address(address), bytes(bytes) {}
  void* const address;
  const uint64_t bytes;
  std::atomic<bool> held{false};
};

struct Site {
  Slot* slot;
  uint32_t ordinal;  // among the allocations of its bytes in the context, from 1
  uint32_t seen;     // of these since the context was entered
};

struct Context {
  std::vector<Site> sites;
};

struct Entry {
  uint64_t visit;  // which stay in which context
  uint64_t bytes;
  void* data;
  Context* context;
};

constexpr size_t kLogged = 1 << 16;  // allocations that a thread remembers

struct Log {
  std::vector<Entry> entries = std::vector<Entry>(kLogged);
  uint64_t count = 0;
};

// Contexts and sites change rarely; an allocation in a context takes the lock without a wait.
std::mutex mutex;
std::deque<Slot>& slots = *new std::deque<Slot>;
std::deque<Context>& contexts = *new std::deque<Context>;
std::unordered_map<void*, Slot*>& by_address = *new std::unordered_map<void*, Slot*>;

std::atomic<bool> disabled{false};
std::atomic<uint64_t> placed{0};
std::atomic<uint64_t> visits{0};

thread_local Context* current = nullptr;
thread_local uint64_t visit = 0;
thread_local Log* log_of_thread = nullptr;

Slot* find(void* data) {
  const std::lock_guard lock(mutex);
  const auto found = by_address.find(data);
  return found == by_address.end() ? nullptr : found->second;
}

void release_slot(void* data) {
  if (Slot* slot = find(data)) slot->held.store(false, std::memory_order_release);
}

class Placer final : public c10::Allocator {
 public:
  explicit Placer(c10::Allocator* before) : before_(before) {}

  c10::DataPtr allocate(size_t bytes) override {
    Context* const context = current;
    if (context == nullptr || bytes == 0 || disabled.load(std::memory_order_relaxed)) {
      return before_->allocate(bytes);
    }
    if (Slot* slot = predicted(*context, bytes)) {
      placed.fetch_add(1, std::memory_order_relaxed);
      log(context, bytes, slot->address);
      return {slot->address, slot->address, &release_slot, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DataPtr result = before_->allocate(bytes);
    log(context, bytes, result.get());
    return result;
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release_any; }

  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }

  c10::Allocator* before() const { return before_; }

 private:
  static Slot* predicted(Context& context, size_t bytes) {
    const std::lock_guard lock(mutex);
    Slot* found = nullptr;
    for (Site& site : context.sites) {
      if (site.slot->bytes != bytes || ++site.seen != site.ordinal || found) continue;
      if (!site.slot->held.exchange(true, std::memory_order_acquire)) found = site.slot;
    }
    return found;
  }

  static void log(Context* context, size_t bytes, void* data) {
    if (log_of_thread == nullptr) log_of_thread = new Log;
    Log& log = *log_of_thread;
    log.entries[log.count++ % kLogged] = {visit, bytes, data, context};
  }

  static void release_any(void* data);

  c10::Allocator* const before_;
};

Placer* placer = nullptr;

// Libraries free through whichever allocator is current, also what another one allocated.
void Placer::release_any(void* data) {
  if (Slot* slot = find(data)) {
    slot->held.store(false, std::memory_order_release);
  } else if (const c10::DeleterFnPtr before = placer->before()->raw_deleter()) {
    before(data);
  }
}

void forget(const Slot& slot) {
  for (Context& context : contexts) {
    std::erase_if(context.sites, [&](const Site& site) { return site.slot == &slot; });
  }
}

// The child of a fork frees what it inherited: no other thread may hold the lock then.
void before_fork() { mutex.lock(); }

void after_fork_in_parent() { mutex.unlock(); }

void after_fork_in_child() {
  mutex.unlock();
  disabled.store(true);
  current = nullptr;
}

}  // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// Puts the allocator in place; 0 if it is there now, else it never will be: the one that is there
// has a higher priority or cannot free raw pointers.
EXPORT int tensorwire_placer_install() {
  if (placer != nullptr) return c10::GetCPUAllocator() == placer ? 0 : 1;
  c10::Allocator* before = c10::GetCPUAllocator();
  if (before->raw_deleter() == nullptr) return 2;
  placer = new Placer(before);
  c10::SetCPUAllocator(placer);
  pthread_atfork(&before_fork, &after_fork_in_parent, &after_fork_in_child);
  return c10::GetCPUAllocator() == placer ? 0 : 1;
}

// Whether torch asks this allocator: another one may have been installed later.
EXPORT int tensorwire_placer_installed() {
  return placer != nullptr && c10::GetCPUAllocator() == placer;
}

// Memory for one tensor of exactly so many bytes, 64-byte aligned. It stays valid until it is
// retired and not held. Returns its number.
EXPORT uint32_t tensorwire_placer_add_slot(void* address, uint64_t bytes) {
  const std::lock_guard lock(mutex);
  slots.emplace_back(address, bytes);
  by_address[address] = &slots.back();
  return static_cast<uint32_t>(slots.size() - 1);
}

// The slot is never handed out again. Returns whether a tensor has it still.
EXPORT int tensorwire_placer_retire(uint32_t number) {
  const std::lock_guard lock(mutex);
  forget(slots[number]);
  return slots[number].held.load();
}

EXPORT int tensorwire_placer_held(uint32_t number) {
  const std::lock_guard lock(mutex);
  return slots[number].held.load();
}

// A retired slot whose last tensor is gone: its address may be used for something else.
EXPORT void tensorwire_placer_remove(uint32_t number) {
  const std::lock_guard lock(mutex);
  const auto found = by_address.find(slots[number].address);
  if (found != by_address.end() && found->second == &slots[number]) by_address.erase(found);
}

EXPORT uint32_t tensorwire_placer_add_context() {
  const std::lock_guard lock(mutex);
  contexts.emplace_back();
  return static_cast<uint32_t>(contexts.size() - 1);
}

// The calling thread is in this context until it enters another or leaves.
EXPORT void tensorwire_placer_enter(uint32_t number) {
  const std::lock_guard lock(mutex);
  current = &contexts[number];
  visit = visits.fetch_add(1) + 1;
  for (Site& site : current->sites) site.seen = 0;
}

// The calling thread gets memory as if this were not there.
EXPORT void tensorwire_placer_leave() { current = nullptr; }

// The slot is for what this thread has last allocated at `data`: from now on also for that site.
// 0: so it is. 1: there is no such allocation among those that are remembered. 2: it was one of
// another number of bytes.
EXPORT int tensorwire_placer_learn(uint32_t number, void* data) {
  const std::lock_guard lock(mutex);
  if (log_of_thread == nullptr) return 1;
  const Log& log = *log_of_thread;
  Slot& slot = slots[number];
  const uint64_t oldest = log.count > kLogged ? log.count - kLogged : 0;
  for (uint64_t at = log.count; at-- > oldest;) {
    const Entry& entry = log.entries[at % kLogged];
    if (entry.data != data) continue;
    if (entry.bytes != slot.bytes) return 2;
    uint32_t ordinal = 1;
    for (uint64_t before = at; before-- > oldest;) {
      const Entry& other = log.entries[before % kLogged];
      if (other.visit != entry.visit) break;
      ordinal += other.bytes == entry.bytes;
    }
    for (const Site& site : entry.context->sites) {
      if (site.slot == &slot && site.ordinal == ordinal) return 0;
    }
    entry.context->sites.push_back({&slot, ordinal, 0});
    return 0;
  }
  return 1;
}

// No allocation is predicted for the slot any more.
EXPORT void tensorwire_placer_forget(uint32_t number) {
  const std::lock_guard lock(mutex);
  forget(slots[number]);
}

// Tensors that were produced in slots, in this process.
EXPORT uint64_t tensorwire_placer_placed() { return placed.load(); }
}
