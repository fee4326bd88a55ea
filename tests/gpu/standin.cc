// A stand-in for NVIDIA's driver, for machines without a GPU: it has the functions that tensorwire
// uses, with the same names. TENSORWIRE_CUDA_LIBRARY names it. It shows that tensorwire asks the
// driver for the right things in the right order; it shows nothing about a GPU.
//
//  - Memory of the "GPU" is a memfd. The addresses that it hands out are inaccessible, so that a
//  CPU
//    that goes there is ended; copies go through a second mapping. Writes to what was mapped for
//    reading alone fail.
//  - What is on streams is done by a thread, some time after the call has returned: now of one
//    stream and now of another, with pauses of up to STANDIN_DELAY_US microseconds, so that a wait
//    that is missing is found.
//  - STANDIN_GPUS is how many there are, STANDIN_BYTES how much memory each has, STANDIN_FAIL names
//  a
//    function that fails, STANDIN_NO_PIN makes host memory that cannot be pinned, and with
//    STANDIN_FORGETS_WAITS no stream waits for an event.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gpu/cuda_driver.h"

using namespace tensorwire::cuda;

namespace {

constexpr size_t kGranularity = 2 << 20;
constexpr Result kUnknown = 999, kIllegalAddress = 700, kInvalidContext = 201;

uint64_t setting(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::strtoull(text, nullptr, 10) : otherwise;
}

bool fails(const char* function) {
  const char* name = std::getenv("STANDIN_FAIL");
  return name != nullptr && std::strcmp(name, function) == 0;
}

#define MAY_FAIL(name, result) \
  if (fails(name)) return result

// ---- memory

struct Allocation {
  int fd;
  size_t size;
  int device;
  int shareable;
  std::byte* bytes;  // mapped here, for copies
  ~Allocation() {
    if (bytes != nullptr) ::munmap(bytes, size);
    ::close(fd);
  }
};

struct Range {
  size_t size;
  std::shared_ptr<Allocation> memory;  // null: reserved only
  int access = 0;
};

struct World {
  std::mutex mutex;
  std::map<uintptr_t, Range> ranges;
  std::map<Memory, std::shared_ptr<Allocation>> handles;
  std::map<uintptr_t, size_t> pinned;
  Memory next_handle = 1;
};

World& world() {
  static auto* made = new World;
  return *made;
}

struct Found {
  std::byte* bytes = nullptr;
  bool device = false;
  bool host = false;
  bool writable = false;
  int ordinal = 0;
};

// Where a copy may go for these bytes.
Found find(Address address, size_t size) {
  World& w = world();
  std::lock_guard lock(w.mutex);
  auto after = w.ranges.upper_bound(address);
  if (after != w.ranges.begin()) {
    auto [start, range] = *std::prev(after);
    if (address >= start && address < start + range.size) {
      bool fits = range.memory && range.access != 0 && size <= start + range.size - address;
      if (!fits) return {};
      return {range.memory->bytes + (address - start), true, false,
              range.access == Access::kReadWrite, range.memory->device};
    }
  }
  auto behind = w.pinned.upper_bound(address);
  if (behind != w.pinned.begin()) {
    auto [start, length] = *std::prev(behind);
    if (address >= start && address + size <= start + length) {
      return {reinterpret_cast<std::byte*>(address), false, true, true, 0};
    }
  }
  return {};
}

// ---- streams

struct Moment {
  std::atomic<bool> passed{false};
};

struct Work {
  std::function<bool()> ready;  // null: always
  std::function<Result()> run;
};

struct Queue {
  std::deque<Work> work;
  bool busy = false;
  bool capturing = false;
};

std::atomic<Result> broken{kSuccess};  // what every call tells after a copy went wrong

// One thread does the work of all streams: of one after the other, drawn by chance.
class Engine {
 public:
  Engine() {
    std::thread([this] { run(); }).detach();
  }
  Queue* make() {
    std::lock_guard lock(mutex_);
    all_.push_back(new Queue);
    return all_.back();
  }
  Queue* legacy() {
    std::lock_guard lock(mutex_);
    if (legacy_ == nullptr) all_.push_back(legacy_ = new Queue);
    return legacy_;
  }
  void put(Queue* queue, Work one) {
    std::lock_guard lock(mutex_);
    queue->work.push_back(std::move(one));
    changed_.notify_all();
  }
  bool is_idle(Queue* queue) {
    std::lock_guard lock(mutex_);
    return !queue->busy && queue->work.empty();
  }
  void drain(Queue* only) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] {
      for (Queue* each : all_) {
        if ((only == nullptr || only == each) && (each->busy || !each->work.empty())) return false;
      }
      return true;
    });
  }

 private:
  void run() {
    std::minstd_rand random(7);
    uint64_t delay = setting("STANDIN_DELAY_US", 100);
    std::unique_lock lock(mutex_);
    for (;;) {
      std::vector<Queue*> ready;
      for (Queue* each : all_) {
        if (!each->work.empty() && (!each->work.front().ready || each->work.front().ready())) {
          ready.push_back(each);
        }
      }
      if (ready.empty()) {
        changed_.wait_for(lock, std::chrono::microseconds(idle() ? 100000 : 50));
        continue;
      }
      Queue* queue = ready[random() % ready.size()];
      Work one = std::move(queue->work.front());
      queue->work.pop_front();
      queue->busy = true;
      lock.unlock();
      if (delay > 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % (delay + 1)));
      if (Result result = one.run(); result != kSuccess) broken = result;
      one = {};
      lock.lock();
      queue->busy = false;
      changed_.notify_all();
    }
  }
  bool idle() {
    for (Queue* each : all_) {
      if (!each->work.empty()) return false;
    }
    return true;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Queue*> all_;
  Queue* legacy_ = nullptr;
};

Engine& engine() {
  static auto* made = new Engine;
  return *made;
}

Queue* queue_of(Stream stream) {
  return stream != nullptr ? reinterpret_cast<Queue*>(stream) : engine().legacy();
}

struct EventState {
  std::mutex mutex;
  std::shared_ptr<Moment> moment = passed();

  static std::shared_ptr<Moment> passed() {
    auto made = std::make_shared<Moment>();
    made->passed = true;
    return made;
  }
};

thread_local std::vector<Context> contexts;
std::atomic<bool> started{false};
pid_t owner = 0;

Result usable() {
  if (!started || owner != ::getpid()) return kNotInitialized;
  if (contexts.empty()) return kInvalidContext;
  return broken;
}

#define CHECK_USABLE() \
  if (Result wrong = usable(); wrong != kSuccess) return wrong

int gpus() { return static_cast<int>(setting("STANDIN_GPUS", 1)); }

Result copy(Address target, Address source, size_t size) {
  Found to = find(target, size), from = find(source, size);
  if (to.bytes == nullptr || from.bytes == nullptr || !to.writable) return kIllegalAddress;
  std::memmove(to.bytes, from.bytes, size);
  return kSuccess;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default"))) Result

EXPORT cuInit(unsigned) {
  MAY_FAIL("cuInit", kNoDevice);
  if (started && owner != ::getpid()) return kNotInitialized;
  started = true;
  owner = ::getpid();
  return kSuccess;
}

EXPORT cuDriverGetVersion(int* version) {
  *version = static_cast<int>(setting("STANDIN_VERSION", 12080));
  return kSuccess;
}

EXPORT cuGetErrorName(Result result, const char** name) {
  static const std::map<Result, const char*> names{{kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
                                                   {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
                                                   {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED"},
                                                   {kNoDevice, "CUDA_ERROR_NO_DEVICE"},
                                                   {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
                                                   {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
                                                   {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
                                                   {kUnknown, "CUDA_ERROR_UNKNOWN"}};
  auto found = names.find(result);
  if (found == names.end()) return kInvalidValue;
  *name = found->second;
  return kSuccess;
}

EXPORT cuGetErrorString(Result, const char** words) {
  *words = "the stand-in says so";
  return kSuccess;
}

EXPORT cuDeviceGetCount(int* count) {
  *count = gpus();
  return kSuccess;
}

EXPORT cuDeviceGet(Device* device, int ordinal) {
  if (ordinal < 0 || ordinal >= gpus()) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

EXPORT cuDeviceGetName(char* text, int size, Device) {
  std::strncpy(text, "stand-in", static_cast<size_t>(size));
  return kSuccess;
}

EXPORT cuDeviceGetAttribute(int* value, int, Device) {
  *value = 1;
  return kSuccess;
}

EXPORT cuDeviceTotalMem_v2(size_t* bytes, Device) {
  *bytes = setting("STANDIN_BYTES", uint64_t{8} << 30);
  return kSuccess;
}

EXPORT cuDevicePrimaryCtxRetain(Context* context, Device device) {
  MAY_FAIL("cuDevicePrimaryCtxRetain", kOutOfMemory);
  if (!started || owner != ::getpid()) return kNotInitialized;
  *context = reinterpret_cast<Context>(static_cast<intptr_t>(device + 1));
  return kSuccess;
}

EXPORT cuCtxPushCurrent_v2(Context context) {
  contexts.push_back(context);
  return kSuccess;
}

EXPORT cuCtxPopCurrent_v2(Context* context) {
  if (contexts.empty()) return kInvalidContext;
  *context = contexts.back();
  contexts.pop_back();
  return kSuccess;
}

EXPORT cuCtxSynchronize() {
  CHECK_USABLE();
  engine().drain(nullptr);
  return broken;
}

EXPORT cuThreadExchangeStreamCaptureMode(int* mode) {
  thread_local int mine = 0;
  std::swap(mine, *mode);
  return kSuccess;
}

EXPORT cuMemGetAllocationGranularity(size_t* bytes, const MemoryProperties*, int) {
  *bytes = kGranularity;
  return kSuccess;
}

namespace {

std::shared_ptr<Allocation> adopt(int fd, size_t size, int device, int shareable) {
  void* bytes = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (bytes == MAP_FAILED) return nullptr;
  return std::shared_ptr<Allocation>(
      new Allocation{fd, size, device, shareable, static_cast<std::byte*>(bytes)});
}

}  // namespace

EXPORT cuMemCreate(Memory* handle, size_t size, const MemoryProperties* wanted,
                   unsigned long long) {
  MAY_FAIL("cuMemCreate", kOutOfMemory);
  if (size % kGranularity != 0) return kInvalidValue;
  if (size > setting("STANDIN_BYTES", uint64_t{8} << 30)) return kOutOfMemory;
  std::string name = "standin-gpu-" + std::to_string(wanted->location.id);
  int fd = ::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(size)) != 0) return kOutOfMemory;
  auto made = adopt(fd, size, wanted->location.id, wanted->handle_types);
  if (!made) return kOutOfMemory;
  std::memset(made->bytes, 0xA5, size);  // new memory is not zero
  std::lock_guard lock(world().mutex);
  *handle = world().next_handle++;
  world().handles[*handle] = std::move(made);
  return kSuccess;
}

EXPORT cuMemRelease(Memory handle) {
  std::lock_guard lock(world().mutex);
  return world().handles.erase(handle) == 1 ? kSuccess : kInvalidValue;
}

EXPORT cuMemAddressReserve(Address* address, size_t size, size_t, Address, unsigned long long) {
  MAY_FAIL("cuMemAddressReserve", kOutOfMemory);
  void* place =
      ::mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (place == MAP_FAILED) return kOutOfMemory;
  *address = reinterpret_cast<uintptr_t>(place);
  std::lock_guard lock(world().mutex);
  world().ranges[*address] = {size, nullptr};
  return kSuccess;
}

EXPORT cuMemAddressFree(Address address, size_t size) {
  std::lock_guard lock(world().mutex);
  auto found = world().ranges.find(address);
  if (found == world().ranges.end() || found->second.memory || found->second.size != size) {
    return kInvalidValue;
  }
  ::munmap(reinterpret_cast<void*>(address), size);
  world().ranges.erase(found);
  return kSuccess;
}

EXPORT cuMemMap(Address address, size_t size, size_t, Memory handle, unsigned long long) {
  MAY_FAIL("cuMemMap", kOutOfMemory);
  std::lock_guard lock(world().mutex);
  auto found = world().handles.find(handle);
  if (found == world().handles.end() || size > found->second->size) return kInvalidValue;
  world().ranges.at(address).memory = found->second;
  return kSuccess;
}

EXPORT cuMemUnmap(Address address, size_t) {
  std::shared_ptr<Allocation> gone;
  std::lock_guard lock(world().mutex);
  auto found = world().ranges.find(address);
  if (found == world().ranges.end() || !found->second.memory) return kInvalidValue;
  gone.swap(found->second.memory);
  return kSuccess;
}

EXPORT cuMemSetAccess(Address address, size_t, const Access* access, size_t) {
  std::lock_guard lock(world().mutex);
  world().ranges.at(address).access = access->flags;
  return kSuccess;
}

EXPORT cuMemExportToShareableHandle(void* out, Memory handle, int, unsigned long long) {
  MAY_FAIL("cuMemExportToShareableHandle", kNotSupported);
  std::lock_guard lock(world().mutex);
  auto found = world().handles.find(handle);
  if (found == world().handles.end() || found->second->shareable == 0) return kInvalidValue;
  *static_cast<int*>(out) = ::fcntl(found->second->fd, F_DUPFD, 0);
  return kSuccess;
}

EXPORT cuMemImportFromShareableHandle(Memory* handle, void* given, int) {
  MAY_FAIL("cuMemImportFromShareableHandle", kInvalidDevice);
  if (!started) return kNotInitialized;
  int fd = static_cast<int>(reinterpret_cast<intptr_t>(given));
  char path[48], name[64] = {};
  std::snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  int device = 0;
  struct stat info;
  if (::readlink(path, name, sizeof name - 1) < 0 ||
      std::sscanf(name, "/memfd:standin-gpu-%d", &device) != 1 || ::fstat(fd, &info) != 0) {
    return kUnknown;
  }
  if (device >= gpus()) return kInvalidDevice;
  auto made = adopt(::fcntl(fd, F_DUPFD_CLOEXEC, 0), static_cast<size_t>(info.st_size), device, 1);
  if (!made) return kOutOfMemory;
  std::lock_guard lock(world().mutex);
  *handle = world().next_handle++;
  world().handles[*handle] = std::move(made);
  return kSuccess;
}

EXPORT cuMemGetAllocationPropertiesFromHandle(MemoryProperties* properties, Memory handle) {
  std::lock_guard lock(world().mutex);
  auto found = world().handles.find(handle);
  if (found == world().handles.end()) return kInvalidValue;
  *properties = {};
  properties->location.id = found->second->device;
  return kSuccess;
}

EXPORT cuMemHostAlloc(void** address, size_t size, unsigned) {
  CHECK_USABLE();
  MAY_FAIL("cuMemHostAlloc", kOutOfMemory);
  void* place = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (place == MAP_FAILED) return kOutOfMemory;
  *address = place;
  std::lock_guard lock(world().mutex);
  world().pinned[reinterpret_cast<uintptr_t>(place)] = size;
  return kSuccess;
}

EXPORT cuMemFreeHost(void* address) {
  CHECK_USABLE();
  std::lock_guard lock(world().mutex);
  auto found = world().pinned.find(reinterpret_cast<uintptr_t>(address));
  if (found == world().pinned.end()) return kInvalidValue;
  ::munmap(address, found->second);
  world().pinned.erase(found);
  return kSuccess;
}

EXPORT cuMemHostRegister_v2(void* address, size_t size, unsigned) {
  CHECK_USABLE();
  if (setting("STANDIN_NO_PIN", 0) != 0) return kNotSupported;
  std::lock_guard lock(world().mutex);
  auto [found, fresh] = world().pinned.try_emplace(reinterpret_cast<uintptr_t>(address), size);
  return fresh ? kSuccess : kAlreadyRegistered;
}

EXPORT cuMemHostUnregister(void* address) {
  CHECK_USABLE();
  std::lock_guard lock(world().mutex);
  return world().pinned.erase(reinterpret_cast<uintptr_t>(address)) == 1 ? kSuccess : kInvalidValue;
}

EXPORT cuPointerGetAttribute(void* value, int attribute, Address address) {
  CHECK_USABLE();
  Found found = find(address, 1);
  if (found.bytes == nullptr) return kInvalidValue;
  *static_cast<int*>(value) = attribute == kPointerMemoryType
                                  ? (found.device ? kMemoryOfDevice : kMemoryOfHost)
                                  : found.ordinal;
  return kSuccess;
}

EXPORT cuMemcpyAsync(Address target, Address source, size_t size, Stream stream) {
  CHECK_USABLE();
  MAY_FAIL("cuMemcpyAsync", kUnknown);
  // Pageable memory would be copied while the caller waits; tensorwire hands over none.
  if (find(target, size).bytes == nullptr || find(source, size).bytes == nullptr) {
    return kInvalidValue;
  }
  engine().put(queue_of(stream), {nullptr, [=] { return copy(target, source, size); }});
  return kSuccess;
}

EXPORT cuMemsetD8Async(Address target, unsigned char value, size_t size, Stream stream) {
  CHECK_USABLE();
  engine().put(queue_of(stream), {nullptr, [=] {
                                    Found to = find(target, size);
                                    if (to.bytes == nullptr || !to.writable) return kIllegalAddress;
                                    std::memset(to.bytes, value, size);
                                    return kSuccess;
                                  }});
  return kSuccess;
}

EXPORT cuStreamCreate(Stream* stream, unsigned) {
  CHECK_USABLE();
  MAY_FAIL("cuStreamCreate", kOutOfMemory);
  *stream = reinterpret_cast<Stream>(engine().make());
  return kSuccess;
}

EXPORT cuStreamSynchronize(Stream stream) {
  CHECK_USABLE();
  engine().drain(queue_of(stream));
  return broken;
}

EXPORT cuStreamIsCapturing(Stream stream, int* status) {
  *status = queue_of(stream)->capturing ? 1 : kCaptureNone;
  return kSuccess;
}

EXPORT cuStreamQuery(Stream stream) {
  CHECK_USABLE();
  return engine().is_idle(queue_of(stream)) ? kSuccess : kNotReady;
}

EXPORT cuStreamWaitEvent(Stream stream, Event event, unsigned) {
  CHECK_USABLE();
  auto* state = reinterpret_cast<EventState*>(event);
  std::shared_ptr<Moment> moment;
  {
    std::lock_guard lock(state->mutex);
    moment = state->moment;
  }
  if (setting("STANDIN_FORGETS_WAITS", 0) != 0) return kSuccess;
  engine().put(queue_of(stream),
               {[moment] { return moment->passed.load(); }, [moment] { return kSuccess; }});
  return kSuccess;
}

EXPORT cuStreamWaitValue32_v2(Stream stream, Address address, uint32_t value, unsigned) {
  CHECK_USABLE();
  auto* word = reinterpret_cast<uint32_t*>(address);
  engine().put(queue_of(stream),
               {[=] { return static_cast<int32_t>(std::atomic_ref(*word).load() - value) >= 0; },
                [] { return kSuccess; }});
  return kSuccess;
}

EXPORT cuLaunchHostFunc(Stream stream, HostFunction function, void* argument) {
  CHECK_USABLE();
  MAY_FAIL("cuLaunchHostFunc", kUnknown);
  engine().put(queue_of(stream), {nullptr, [=] {
                                    function(argument);
                                    return kSuccess;
                                  }});
  return kSuccess;
}

EXPORT cuEventCreate(Event* event, unsigned) {
  CHECK_USABLE();
  MAY_FAIL("cuEventCreate", kOutOfMemory);
  *event = reinterpret_cast<Event>(new EventState);
  return kSuccess;
}

EXPORT cuEventDestroy_v2(Event event) {
  delete reinterpret_cast<EventState*>(event);
  return kSuccess;
}

EXPORT cuEventRecord(Event event, Stream stream) {
  CHECK_USABLE();
  MAY_FAIL("cuEventRecord", kUnknown);
  auto* state = reinterpret_cast<EventState*>(event);
  auto moment = std::make_shared<Moment>();
  {
    std::lock_guard lock(state->mutex);
    state->moment = moment;
  }
  engine().put(queue_of(stream), {nullptr, [moment] {
                                    moment->passed = true;
                                    return kSuccess;
                                  }});
  return kSuccess;
}

EXPORT cuEventQuery(Event event) {
  CHECK_USABLE();
  auto* state = reinterpret_cast<EventState*>(event);
  std::shared_ptr<Moment> moment;
  {
    std::lock_guard lock(state->mutex);
    moment = state->moment;
  }
  return moment->passed ? kSuccess : kNotReady;
}

// ---- what only tests call

EXPORT cuCtxSetCurrent(Context context) {
  contexts.assign(1, context);
  return kSuccess;
}

EXPORT cuMemAlloc_v2(Address* address, size_t size) {
  CHECK_USABLE();
  MemoryProperties properties;
  size_t whole = (size + kGranularity - 1) / kGranularity * kGranularity;
  Memory memory;
  Access access;
  if (Result result = cuMemCreate(&memory, whole, &properties, 0); result != kSuccess)
    return result;
  cuMemAddressReserve(address, whole, 0, 0, 0);
  cuMemMap(*address, whole, 0, memory, 0);
  cuMemSetAccess(*address, whole, &access, 1);
  return cuMemRelease(memory);
}

EXPORT cuMemFree_v2(Address address) {
  cuCtxSynchronize();
  size_t size = 0;
  {
    std::lock_guard lock(world().mutex);
    auto found = world().ranges.find(address);
    if (found == world().ranges.end()) return kInvalidValue;
    size = found->second.size;
  }
  cuMemUnmap(address, size);
  return cuMemAddressFree(address, size);
}

EXPORT cuMemcpyDtoH_v2(void* target, Address source, size_t size) {
  CHECK_USABLE();
  Found from = find(source, size);
  if (from.bytes == nullptr) return kInvalidValue;
  std::memcpy(target, from.bytes, size);
  return kSuccess;
}

EXPORT cuMemcpyHtoD_v2(Address target, const void* source, size_t size) {
  CHECK_USABLE();
  Found to = find(target, size);
  if (to.bytes == nullptr) return kInvalidValue;
  std::memcpy(to.bytes, source, size);
  return kSuccess;
}

EXPORT cuStreamBeginCapture_v2(Stream stream, int) {
  queue_of(stream)->capturing = true;
  return kSuccess;
}

EXPORT cuStreamEndCapture(Stream stream, void**) {
  queue_of(stream)->capturing = false;
  return kSuccess;
}

EXPORT cuStreamDestroy_v2(Stream stream) {
  engine().drain(queue_of(stream));
  return kSuccess;
}
