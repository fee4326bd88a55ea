// An allocator for torch's CPU tensors that produces chosen ones in memory that was planned for
// them; the rest comes from the allocator that was there before.
//
// Not part of the core: it is compiled against the headers of the torch that it is loaded into
// (src/tensorwire/torch/allocator/library.py), and is called through ctypes. It knows bytes and no
// plan. It links no library of torch, so that a wheel with it is portable: what it calls there is
// looked up in the process, and what it inherits from there is defined here.
//
// The idea is tracing: a step of training allocates as the step before it did. While a thread is
// in a *context* (between one mark and the next: after forward, after the gradient of a certain
// parameter was accumulated), its allocations are logged. Once the caller has seen at which address
// a gradient arrived, `learn` looks up which allocation that was: the n-th of so many bytes in that
// context. That is a *site*. From then on the site's allocation is the gradient's slot.
//
// Sites cannot tell apart what is allocated alike: the gradients of two heads of which each step
// uses one, or anything in the first step, when there are none. Then the graph is asked: for whose
// gradient is the operator that runs now? That takes longer than to count.
//
// A wrong prediction is harmless: some other tensor lies in the slot for a while, the gradient lies
// elsewhere, and whoever looks at its address sees it.
//
// While a slot is *missed* (its gradient was not predicted, or came elsewhere), allocations of its
// size for which neither a site nor the graph knows a slot come from a *pool*: blocks of the sizes
// of gradients, in memory that is as good as the slots'. So a gradient whose slot is in use needs
// no copy either. When nothing is missed any more the pool's pages go back to the system.
//
// Invariants
//   A slot or block is handed out only while no tensor has it: `held` is set by the allocation,
//   cleared by the deleter, and nothing else touches it.
//   Installed once and for ever: tensors may outlive everything, so nothing here is destroyed, and
//   the caller keeps the memory of a slot mapped while it is held.
//   Whatever is not allocated by a backward pass, by a thread with a context, gets memory as if
//   this were not there; so does a forked child.

#define AT_PER_OPERATOR_HEADERS  // without the declarations of all operators
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/PyInterpreterHooks.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <typeinfo>
#include <unordered_map>
#include <vector>

namespace torch::autograd {
// Of the backward pass that the calling thread runs; -1: none (torch/csrc/autograd/graph_task.h).
int get_current_graph_task_id();
}  // namespace torch::autograd

// The base class, as torch defines it: where these are defined is its table of functions.
namespace c10 {
bool Allocator::is_simple_data_ptr(const DataPtr& pointer) const {
  return pointer.get() == pointer.get_context();
}

void Allocator::default_copy_data(void* target, const void* source, size_t bytes) const {
  std::memcpy(target, source, bytes);
}
}  // namespace c10

namespace {

// Functions of torch, with the types that its headers give them; null before `look_up_torch`.
struct Torch {
  decltype(&c10::GetCPUAllocator) get_cpu_allocator;
  decltype(&c10::SetCPUAllocator) set_cpu_allocator;
  decltype(&torch::autograd::get_current_node) get_current_node;
  decltype(&torch::autograd::get_current_graph_task_id) get_current_graph_task_id;
  decltype(&c10::impl::getGlobalPyInterpreter) get_global_py_interpreter;
} in_torch;

// Finds a function in a library that the process has loaded. Returns whether it is there.
template <typename Function>
bool look_up(Function& function, const char* library, const char* name) {
  void* const loaded = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
  function = loaded == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(loaded, name));
  return function != nullptr;
}

bool look_up_torch() {
  const char* const c10 = "libc10.so";
  const char* const cpu = "libtorch_cpu.so";
  return look_up(in_torch.get_cpu_allocator, c10, "_ZN3c1015GetCPUAllocatorEv") &&
         look_up(in_torch.set_cpu_allocator, c10, "_ZN3c1015SetCPUAllocatorEPNS_9AllocatorEh") &&
         look_up(in_torch.get_current_node, cpu, "_ZN5torch8autograd16get_current_nodeEv") &&
         look_up(in_torch.get_current_graph_task_id, cpu,
                 "_ZN5torch8autograd25get_current_graph_task_idEv") &&
         look_up(in_torch.get_global_py_interpreter, c10, "_ZN3c104impl22getGlobalPyInterpreterEv");
}

}  // namespace

// What lets go of an operator in torch's headers calls it.
c10::impl::PyInterpreter* c10::impl::getGlobalPyInterpreter() {
  return in_torch.get_global_py_interpreter();
}

namespace {

// By its name, as no library of torch is linked that has the type itself.
bool is_accumulate_grad(const torch::autograd::Node& node) {
  return std::strcmp(typeid(node).name(), "N5torch8autograd14AccumulateGradE") == 0;
}

struct Context;
struct Pool;

struct Slot {
  Slot(void* address, uint64_t bytes, Pool* pool, const void* parameter)
      : address(address), bytes(bytes), pool(pool), parameter(parameter) {}
  void* const address;
  const uint64_t bytes;
  Pool* const pool;
  const void* const parameter;  // its TensorImpl, only to be compared; of a block null
  std::atomic<bool> held{false};
  std::vector<Context*> learned;  // where there is a site
  bool predicted = false;         // the last one was handed out because of a site
  bool missed = false;            // its gradient may be elsewhere
  bool touched = false;           // of a block: it has pages
};

struct Class {
  std::vector<Slot*> blocks;
  uint32_t missed = 0;  // slots of these bytes
  bool touched = false;
};

struct Pool {
  std::unordered_map<uint64_t, Class> classes;   // by bytes
  std::unordered_map<const void*, Slot*> slots;  // by parameter
  uint32_t missed = 0;
  uint32_t touched = 0;  // classes
};

struct Site {
  Slot* slot;
  uint32_t ordinal;  // among the allocations of its bytes in the context, from 1
  uint32_t seen;     // of these since the context was entered
};

struct Context {
  explicit Context(Pool* pool) : pool(pool) {}
  Pool* const pool;
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
std::deque<Pool>& pools = *new std::deque<Pool>;
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

// Calls `use` with the parameters whose gradients the operator of backward that this thread runs
// computes, or some view or conversion of them that one or two more operators make.
template <typename Use>
void each_parameter(Use use) {
  constexpr int kSteps = 3;
  const auto running = in_torch.get_current_node();
  if (!running) return;
  for (const torch::autograd::Edge& edge : running->next_edges()) {
    const torch::autograd::Node* node = edge.function.get();
    for (int step = 0; step < kSteps && node != nullptr; ++step) {
      if (is_accumulate_grad(*node)) {
        const auto* end = static_cast<const torch::autograd::AccumulateGrad*>(node);
        use(end->variable.unsafeGetTensorImpl());
        break;
      }
      node = node->num_outputs() == 1 ? node->next_edge(0).function.get() : nullptr;
    }
  }
}

class SlotAllocator final : public c10::Allocator {
 public:
  explicit SlotAllocator(c10::Allocator* before) : before_(before) {}

  c10::DataPtr allocate(size_t bytes) override {
    Context* const context = current;
    if (context == nullptr || bytes == 0 || disabled.load(std::memory_order_relaxed) ||
        in_torch.get_current_graph_task_id() == -1) {
      return before_->allocate(bytes);
    }
    if (Slot* slot = choose(*context, bytes)) {
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
  static Slot* choose(Context& context, size_t bytes) {
    const std::lock_guard lock(mutex);
    Slot* const predicted = by_site(context, bytes);
    Slot* found = predicted;
    Class* const missing = context.pool->missed == 0 ? nullptr : class_of(*context.pool, bytes);
    if (missing != nullptr && missing->missed != 0) {
      Slot* const meant = by_graph(*context.pool, bytes);
      if (meant != nullptr && (found == nullptr || is_for(*meant, *found))) found = meant;
      if (found == nullptr) return pooled(*context.pool, *missing);
    }
    if (found == nullptr) return nullptr;
    found->predicted = found == predicted;
    found->held.store(true, std::memory_order_relaxed);
    return found;
  }

  static Slot* by_site(Context& context, size_t bytes) {
    Slot* found = nullptr;
    for (Site& site : context.sites) {
      if (site.slot->bytes != bytes || ++site.seen != site.ordinal || !is_free(*site.slot))
        continue;
      if (found == nullptr || is_for(*site.slot, *found)) found = site.slot;
    }
    return found;
  }

  // A missed slot that has no site yet, as far as the graph can tell. Once there is one it knows
  // better: not all that an operator allocates is the gradient that it computes.
  static Slot* by_graph(const Pool& pool, size_t bytes) {
    Slot* found = nullptr;
    each_parameter([&](const void* parameter) {
      const auto there = pool.slots.find(parameter);
      if (found != nullptr || there == pool.slots.end()) return;
      Slot* const slot = there->second;
      if (slot->bytes == bytes && slot->missed && slot->learned.empty() && is_free(*slot)) {
        found = slot;
      }
    });
    return found;
  }

  // Whether the graph says that what is allocated now is for one slot, and not for the other.
  static bool is_for(const Slot& one, const Slot& other) {
    bool for_one = false;
    bool for_other = false;
    each_parameter([&](const void* parameter) {
      for_one = for_one || parameter == one.parameter;
      for_other = for_other || parameter == other.parameter;
    });
    return for_one && !for_other;
  }

  static bool is_free(const Slot& slot) { return !slot.held.load(std::memory_order_acquire); }

  static Class* class_of(Pool& pool, size_t bytes) {
    const auto found = pool.classes.find(bytes);
    return found == pool.classes.end() ? nullptr : &found->second;
  }

  static Slot* pooled(Pool& pool, Class& missing) {
    for (Slot* block : missing.blocks) {
      if (!is_free(*block)) continue;
      block->held.store(true, std::memory_order_relaxed);
      block->touched = true;
      if (!missing.touched) {
        missing.touched = true;
        ++pool.touched;
      }
      return block;
    }
    return nullptr;
  }

  static void log(Context* context, size_t bytes, void* data) {
    if (log_of_thread == nullptr) log_of_thread = new Log;
    Log& log = *log_of_thread;
    log.entries[log.count++ % kLogged] = {visit, bytes, data, context};
  }

  static void release_any(void* data);

  c10::Allocator* const before_;
};

SlotAllocator* allocator = nullptr;

// Libraries free through whichever allocator is current, also what another one allocated.
void SlotAllocator::release_any(void* data) {
  if (Slot* slot = find(data)) {
    slot->held.store(false, std::memory_order_release);
  } else if (const c10::DeleterFnPtr before = allocator->before()->raw_deleter()) {
    before(data);
  }
}

void forget(Slot& slot) {
  for (Context* context : slot.learned) {
    std::erase_if(context->sites, [&](const Site& site) { return site.slot == &slot; });
  }
  slot.learned.clear();
}

void set_missed(Slot& slot, bool missed) {
  if (slot.missed == missed) return;
  slot.missed = missed;
  const uint32_t change = missed ? 1 : -1U;
  slot.pool->classes[slot.bytes].missed += change;
  slot.pool->missed += change;
}

// Gives back the pages of blocks that no tensor has, of sizes in which nothing is missed. What is
// shared has to be removed; of private memory the pages are dropped.
void trim(Pool& pool) {
  if (pool.touched == 0 || disabled.load()) return;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  for (auto& [bytes, each] : pool.classes) {
    if (!each.touched || each.missed != 0) continue;
    each.touched = false;
    for (Slot* block : each.blocks) {
      if (!block->touched) continue;
      if (block->held.load(std::memory_order_acquire)) {
        each.touched = true;
        continue;
      }
      block->touched = false;
      const auto start = reinterpret_cast<uintptr_t>(block->address);
      const uintptr_t first = (start + page - 1) / page * page;
      const uintptr_t last = (start + bytes) / page * page;
      if (first >= last) continue;
      void* const pages = reinterpret_cast<void*>(first);
      if (madvise(pages, last - first, MADV_REMOVE) != 0) {
        madvise(pages, last - first, MADV_DONTNEED);
      }
    }
    if (!each.touched) --pool.touched;
  }
}

void enter(uint32_t number) {
  current = &contexts[number];
  visit = visits.fetch_add(1) + 1;
  for (Site& site : current->sites) site.seen = 0;
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

// Puts the allocator in place; 0 if it is there now, else it never will be. 1, 2: the one that is
// there has a higher priority or cannot free raw pointers. 3: this torch lacks a function.
EXPORT int tensorwire_allocator_install() {
  if (allocator != nullptr) return in_torch.get_cpu_allocator() == allocator ? 0 : 1;
  if (!look_up_torch()) return 3;
  c10::Allocator* before = in_torch.get_cpu_allocator();
  if (before->raw_deleter() == nullptr) return 2;
  allocator = new SlotAllocator(before);
  in_torch.set_cpu_allocator(allocator, 0);
  pthread_atfork(&before_fork, &after_fork_in_parent, &after_fork_in_child);
  return in_torch.get_cpu_allocator() == allocator ? 0 : 1;
}

// Whether torch asks this allocator: another one may have been installed later.
EXPORT int tensorwire_allocator_installed() {
  return allocator != nullptr && in_torch.get_cpu_allocator() == allocator;
}

EXPORT uint32_t tensorwire_allocator_add_pool() {
  const std::lock_guard lock(mutex);
  pools.emplace_back();
  return static_cast<uint32_t>(pools.size() - 1);
}

// Memory for one tensor of exactly so many bytes, 64-byte aligned: for the gradient of a parameter,
// of which the address of the TensorImpl is given, or null. It stays valid until it is retired and
// not held. Returns its number.
EXPORT uint32_t tensorwire_allocator_add_slot(uint32_t pool, void* address, uint64_t bytes,
                                              void* parameter) {
  const std::lock_guard lock(mutex);
  slots.emplace_back(address, bytes, &pools[pool], parameter);
  by_address[address] = &slots.back();
  if (parameter != nullptr) pools[pool].slots[parameter] = &slots.back();
  return static_cast<uint32_t>(slots.size() - 1);
}

// The same, for any tensor of these bytes while a slot of these bytes is missed.
EXPORT uint32_t tensorwire_allocator_add_block(uint32_t pool, void* address, uint64_t bytes) {
  const uint32_t number = tensorwire_allocator_add_slot(pool, address, bytes, nullptr);
  const std::lock_guard lock(mutex);
  pools[pool].classes[bytes].blocks.push_back(&slots[number]);
  return number;
}

// Whether the gradient of this slot may come elsewhere, and is better in the pool than anywhere.
EXPORT void tensorwire_allocator_miss(uint32_t number, int missed) {
  const std::lock_guard lock(mutex);
  set_missed(slots[number], missed != 0);
}

// The slot or block is never handed out again. Returns whether a tensor has it still.
EXPORT int tensorwire_allocator_retire(uint32_t number) {
  const std::lock_guard lock(mutex);
  Slot& slot = slots[number];
  forget(slot);
  set_missed(slot, false);
  std::erase(slot.pool->classes[slot.bytes].blocks, &slot);
  if (slot.parameter != nullptr) slot.pool->slots.erase(slot.parameter);
  return slot.held.load();
}

EXPORT int tensorwire_allocator_held(uint32_t number) {
  const std::lock_guard lock(mutex);
  return slots[number].held.load();
}

// Whether the slot was last handed out because of a site, and not because of the graph.
EXPORT int tensorwire_allocator_predicted(uint32_t number) {
  const std::lock_guard lock(mutex);
  return slots[number].predicted;
}

// A retired slot whose last tensor is gone: its address may be used for something else.
EXPORT void tensorwire_allocator_remove(uint32_t number) {
  const std::lock_guard lock(mutex);
  const auto found = by_address.find(slots[number].address);
  if (found != by_address.end() && found->second == &slots[number]) by_address.erase(found);
}

EXPORT uint32_t tensorwire_allocator_add_context(uint32_t pool) {
  const std::lock_guard lock(mutex);
  contexts.emplace_back(&pools[pool]);
  return static_cast<uint32_t>(contexts.size() - 1);
}

// The calling thread is in this context until it enters another or leaves.
EXPORT void tensorwire_allocator_enter(uint32_t number) {
  const std::lock_guard lock(mutex);
  enter(number);
}

// The same at the begin of a step, when nobody reads gradients of the step before.
EXPORT void tensorwire_allocator_begin(uint32_t number) {
  const std::lock_guard lock(mutex);
  enter(number);
  trim(*current->pool);
}

// The calling thread gets memory as if this were not there.
EXPORT void tensorwire_allocator_leave() { current = nullptr; }

// The slot is for what this thread has last allocated at `data`: from now on also for that site.
// 0: so it is. 1: there is no such allocation among those that are remembered. 2: it was one of
// another number of bytes.
EXPORT int tensorwire_allocator_learn(uint32_t number, void* data) {
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
    slot.learned.push_back(entry.context);
    return 0;
  }
  return 1;
}

// No allocation is predicted for the slot any more.
EXPORT void tensorwire_allocator_forget(uint32_t number) {
  const std::lock_guard lock(mutex);
  forget(slots[number]);
}

// The pages of blocks that nobody needs go back to the system.
EXPORT void tensorwire_allocator_trim(uint32_t pool) {
  const std::lock_guard lock(mutex);
  trim(pools[pool]);
}

// Tensors that were produced in slots and blocks, in this process.
EXPORT uint64_t tensorwire_allocator_placed() { return placed.load(); }
}
