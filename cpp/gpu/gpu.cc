#include "gpu/gpu.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>

namespace tensorwire {
namespace {

constexpr size_t kMostStreams = 32;
constexpr size_t kGatesPerPage = 1024;

struct Gpus {
  std::mutex mutex;
  std::map<int, Gpu*> known;
};

Gpus& gpus() { return fork::of_this_process<Gpus>(); }

cuda::Address address_of(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

// Whether it is a kind of file that can be looked at without waiting for anybody: a device's, as
// the driver's are, or a memfd. Looking with AT_STATX_DONT_SYNC asks no file system's server.
bool is_harmless(int descriptor) {
  struct statx found{};
  if (::statx(descriptor, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE, &found) == 0 &&
      S_ISCHR(found.stx_mode)) {
    return true;
  }
  return ::fcntl(descriptor, F_GET_SEALS) >= 0;
}

}  // namespace

// ---- one GPU

int Gpu::count() {
  const cuda::Library& driver = cuda::library();
  int found = 0;
  driver.check("cannot count GPUs", driver.cuDeviceGetCount(&found));
  return found;
}

std::vector<std::string> Gpu::names() {
  const cuda::Library& driver = cuda::library();
  std::vector<std::string> found;
  for (int i = 0, there = count(); i < there; ++i) {
    cuda::Device device = 0;
    char text[256] = {};
    driver.check("a GPU", driver.cuDeviceGet(&device, i));
    driver.check("a GPU", driver.cuDeviceGetName(text, sizeof text - 1, device));
    found.emplace_back(text);
  }
  return found;
}

Gpu& Gpu::at(int ordinal) {
  const cuda::Library& driver = cuda::library();
  std::lock_guard lock(gpus().mutex);
  Gpu*& gpu = gpus().known[ordinal];
  if (gpu == nullptr) {
    try {
      gpu = new Gpu(driver, ordinal);
    } catch (const Error&) {
      gpus().known.erase(ordinal);
      throw;
    }
  }
  return *gpu;
}

Gpu& Gpu::holding(const void* address) {
  // Any GPU's context tells; one that is in use already costs nothing.
  int first = 0;
  {
    std::lock_guard lock(gpus().mutex);
    if (!gpus().known.empty()) first = gpus().known.begin()->first;
  }
  const Gpu& any = at(first);
  int type = 0, ordinal = 0;
  GpuScope scope(any);
  cuda::Address where = address_of(address);
  if (any.driver_.cuPointerGetAttribute(&type, cuda::kPointerMemoryType, where) != cuda::kSuccess ||
      type != cuda::kMemoryOfDevice ||
      any.driver_.cuPointerGetAttribute(&ordinal, cuda::kPointerDevice, where) != cuda::kSuccess) {
    throw Error(Code::kInvalid, "what was given as memory of a GPU is none");
  }
  return at(ordinal);
}

Gpu::Gpu(const cuda::Library& driver, int ordinal) : driver_(driver), ordinal_(ordinal) {
  int there = count();
  if (ordinal < 0 || ordinal >= there) {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    throw Error(Code::kInvalid,
                "there is no cuda:" + std::to_string(ordinal) + ": this process sees " +
                    std::to_string(there) + (there == 1 ? " GPU" : " GPUs") +
                    (visible != nullptr ? " (CUDA_VISIBLE_DEVICES=" + std::string(visible) + ")"
                                        : std::string()));
  }
  std::string which = "cuda:" + std::to_string(ordinal);
  cuda::Device device = 0;
  driver.check(which, driver.cuDeviceGet(&device, ordinal));
  char text[256] = {};
  driver.check(which, driver.cuDeviceGetName(text, sizeof text - 1, device));
  name_ = text;
  int memory = 0, descriptors = 0, read_only = 0;
  driver.check(which, driver.cuDeviceGetAttribute(&memory, cuda::kHasVirtualMemory, device));
  driver.check(which, driver.cuDeviceGetAttribute(&descriptors, cuda::kHasDescriptors, device));
  driver.check(which, driver.cuDeviceGetAttribute(&read_only, cuda::kHasReadOnlyRegister, device));
  if (memory == 0 || descriptors == 0) {
    throw Error(Code::kUnavailable,
                label() + " has no virtual memory that processes can share by descriptors");
  }
  registers_read_only_ = read_only != 0;
  driver.check("cannot use " + label(), driver.cuDevicePrimaryCtxRetain(&context_, device));
  cuda::MemoryProperties properties;
  properties.handle_types = cuda::MemoryProperties::kDescriptor;
  properties.location.id = ordinal;
  driver.check(label(), driver.cuMemGetAllocationGranularity(&granularity_, &properties,
                                                             cuda::kGranularityMinimum));
}

std::string Gpu::label() const { return "cuda:" + std::to_string(ordinal_) + " (" + name_ + ")"; }

size_t Gpu::whole(size_t size) const {
  if (size > SIZE_MAX - granularity_) throw Error(Code::kNoMemory, "no GPU has so much memory");
  return (size + granularity_ - 1) / granularity_ * granularity_;
}

cuda::Stream Gpu::take_stream() {
  std::lock_guard lock(mutex_);
  if (!idle_.empty()) {
    cuda::Stream stream = idle_.back();
    idle_.pop_back();
    return stream;
  }
  if (streams_ == kMostStreams) return nullptr;
  GpuScope scope(*this);
  cuda::Stream made = nullptr;
  driver_.check("a stream of " + label(), driver_.cuStreamCreate(&made, cuda::kStreamNonBlocking));
  ++streams_;
  return made;
}

void Gpu::give_back(cuda::Stream stream) {
  std::lock_guard lock(mutex_);
  if (stream != shared_) idle_.push_back(stream);
}

cuda::Stream Gpu::shared_stream() {
  std::lock_guard lock(mutex_);
  if (shared_ == nullptr) {
    GpuScope scope(*this);
    driver_.check("a stream of " + label(),
                  driver_.cuStreamCreate(&shared_, cuda::kStreamNonBlocking));
  }
  return shared_;
}

Gpu::Kind Gpu::kind_of(const void* address, size_t size) const {
  GpuScope scope(*this);
  auto kind = [&](cuda::Address at) {
    int type = 0;
    if (driver_.cuPointerGetAttribute(&type, cuda::kPointerMemoryType, at) != cuda::kSuccess) {
      return Kind::kOther;
    }
    return type == cuda::kMemoryOfHost     ? Kind::kPinned
           : type == cuda::kMemoryOfDevice ? Kind::kGpu
                                           : Kind::kOther;
  };
  Kind first = kind(address_of(address));
  if (first == Kind::kOther || size < 2) return first;
  return kind(address_of(address) + size - 1) == first ? first : Kind::kOther;
}

namespace {
thread_local const Gpu* entered = nullptr;
}

GpuScope::GpuScope(const Gpu& gpu) : gpu_(gpu), before_(entered) {
  if (before_ == &gpu) return;
  gpu.driver_.cuCtxPushCurrent_v2(gpu.context_);
  gpu.driver_.cuThreadExchangeStreamCaptureMode(&mode_);
  entered = &gpu;
}

GpuScope::~GpuScope() {
  if (before_ == &gpu_) return;
  entered = before_;
  gpu_.driver_.cuThreadExchangeStreamCaptureMode(&mode_);
  cuda::Context mine = nullptr;
  gpu_.driver_.cuCtxPopCurrent_v2(&mine);
}

// ---- moments on streams

cuda::Event Gpu::take_event() {
  {
    std::lock_guard lock(mutex_);
    if (!events_.empty()) {
      cuda::Event event = events_.back();
      events_.pop_back();
      return event;
    }
  }
  cuda::Event made = nullptr;
  driver_.check("an event of " + label(), driver_.cuEventCreate(&made, cuda::kEventDisableTiming));
  return made;
}

void GpuEvent::check_stream(Gpu& gpu, cuda::Stream stream) {
  GpuScope scope(gpu);
  int capturing = cuda::kCaptureNone;
  gpu.driver_.check("the stream", gpu.driver_.cuStreamIsCapturing(stream, &capturing));
  if (capturing != cuda::kCaptureNone) {
    throw Error(Code::kInvalid,
                "the stream is being captured into a CUDA graph, and a transfer cannot be part of "
                "one: start it outside of the capture");
  }
}

GpuEventPtr GpuEvent::record(Gpu& gpu, cuda::Stream stream) {
  GpuScope scope(gpu);
  GpuEventPtr made(new GpuEvent(gpu));
  made->event_ = gpu.take_event();
  gpu.driver_.check("the stream", gpu.driver_.cuEventRecord(made->event_, stream));
  return made;
}

GpuEventPtr GpuEvent::record_unless_idle(Gpu& gpu, cuda::Stream stream) {
  GpuScope scope(gpu);
  // With it the driver looks at the blocking streams, which it waits for. Whether it does so the
  // other way round is not said, so that of others there is always an event.
  bool legacy = stream == nullptr || stream == cuda::kLegacyStream;
  if (legacy && gpu.driver().cuStreamQuery(stream) == cuda::kSuccess) return nullptr;
  return record(gpu, stream);
}

GpuEvent::~GpuEvent() {
  if (event_ == nullptr || epoch_ != fork::epoch()) return;
  std::lock_guard lock(gpu_.mutex_);
  gpu_.events_.push_back(event_);
}

cuda::Result GpuEvent::query() const {
  GpuScope scope(gpu_);
  return gpu_.driver_.cuEventQuery(event_);
}

void GpuEvent::hold(Gpu& gpu, cuda::Stream stream) const {
  GpuScope scope(gpu);
  gpu.driver_.check("the stream", gpu.driver_.cuStreamWaitEvent(stream, event_, 0));
}

// A word only rises, so that one who still waits for an earlier value is let through.
GpuGate::GpuGate(Gpu& gpu, cuda::Stream stream) : gpu_(gpu), epoch_(fork::epoch()) {
  const cuda::Library& driver = gpu.driver_;
  GpuEvent::check_stream(gpu, stream);
  GpuScope scope(gpu);
  std::lock_guard lock(gpu.mutex_);
  if (gpu.gates_.empty()) {
    void* page = nullptr;
    size_t size = kGatesPerPage * sizeof(uint32_t);
    driver.check("pinned memory", driver.cuMemHostAlloc(&page, size, cuda::kHostPortable));
    std::memset(page, 0, size);
    auto* words = static_cast<uint32_t*>(page);
    for (size_t i = 0; i < kGatesPerPage; ++i) gpu.gates_.push_back({words + i, 0});
  }
  gate_ = gpu.gates_.back();
  ++gate_.value;
  driver.check("holding up the stream",
               driver.cuStreamWaitValue32_v2(stream, address_of(gate_.word), gate_.value,
                                             cuda::kWaitAtLeast));
  gpu.gates_.pop_back();
}

void GpuGate::open() {
  if (open_.exchange(true) || epoch_ != fork::epoch()) return;
  std::atomic_ref(*gate_.word).store(gate_.value, std::memory_order_release);
  std::lock_guard lock(gpu_.mutex_);
  gpu_.gates_.push_back(gate_);
}

// ---- memory

std::unique_ptr<GpuMemory> GpuMemory::create(Gpu& gpu, size_t size, bool shareable) {
  const cuda::Library& driver = gpu.driver();
  std::unique_ptr<GpuMemory> made(new GpuMemory);
  made->gpu_ = &gpu;
  cuda::MemoryProperties properties;
  properties.handle_types = shareable ? cuda::MemoryProperties::kDescriptor : 0;
  properties.location.id = gpu.ordinal();
  std::string what = "cannot allocate " + std::to_string(size) + " bytes on " + gpu.label();
  GpuScope scope(gpu);
  cuda::Memory memory = 0;
  driver.check(what, driver.cuMemCreate(&memory, gpu.whole(size), &properties, 0));
  try {
    if (shareable) {
      int descriptor = -1;
      driver.check(what, driver.cuMemExportToShareableHandle(
                             &descriptor, memory, cuda::MemoryProperties::kDescriptor, 0));
      ::fcntl(descriptor, F_SETFD, FD_CLOEXEC);
      made->descriptor_ = Descriptor(descriptor);
    }
    made->map(memory, size, true);
    cuda::Stream stream = gpu.shared_stream();
    driver.check(what, driver.cuMemsetD8Async(made->address_, 0, made->reserved_, stream));
    driver.check(what, driver.cuStreamSynchronize(stream));
  } catch (const Error&) {
    driver.cuMemRelease(memory);
    throw;
  }
  driver.cuMemRelease(memory);  // the mapping keeps it
  return made;
}

std::unique_ptr<GpuMemory> GpuMemory::import(int descriptor, size_t size, bool writable) {
  if (!is_harmless(descriptor)) {
    throw Error(Code::kInvalid, "a peer offered memory of a GPU that is none");
  }
  const cuda::Library& driver = cuda::library();
  cuda::Memory memory = 0;
  auto* handle = reinterpret_cast<void*>(static_cast<intptr_t>(descriptor));
  driver.check(
      "a peer's memory on a GPU, which this process may not see (CUDA_VISIBLE_DEVICES),",
      driver.cuMemImportFromShareableHandle(&memory, handle, cuda::MemoryProperties::kDescriptor));
  std::unique_ptr<GpuMemory> made(new GpuMemory);
  try {
    cuda::MemoryProperties properties;
    driver.check("a peer's memory",
                 driver.cuMemGetAllocationPropertiesFromHandle(&properties, memory));
    if (properties.location.type != cuda::Location::kDevice) {
      throw Error(Code::kInvalid, "a peer offered memory of a GPU that lies elsewhere");
    }
    made->gpu_ = &Gpu::at(properties.location.id);
    GpuScope scope(*made->gpu_);
    made->map(memory, size, writable);
  } catch (const Error&) {
    driver.cuMemRelease(memory);
    throw;
  }
  driver.cuMemRelease(memory);
  return made;
}

void GpuMemory::map(cuda::Memory memory, size_t size, bool writable) {
  const cuda::Library& driver = gpu_->driver();
  epoch_ = fork::epoch();
  size_t whole = gpu_->whole(size);
  std::string what = "cannot map " + std::to_string(size) + " bytes of " + gpu_->label();
  driver.check(what, driver.cuMemAddressReserve(&address_, whole, 0, 0, 0));
  reserved_ = whole;
  cuda::Result result = driver.cuMemMap(address_, whole, 0, memory, 0);
  if (result == cuda::kInvalidValue) {
    throw Error(Code::kInvalid, "a peer offered memory of a GPU that is smaller than it claims");
  }
  driver.check(what, result);
  mapped_ = true;
  cuda::Access access;
  access.location.id = gpu_->ordinal();
  access.flags = writable ? cuda::Access::kReadWrite : cuda::Access::kRead;
  driver.check(what, driver.cuMemSetAccess(address_, whole, &access, 1));
}

bool GpuMemory::settle() const {
  GpuScope scope(*gpu_);
  return gpu_->driver().cuCtxSynchronize() == cuda::kSuccess;
}

GpuMemory::~GpuMemory() {
  if (address_ == 0 || epoch_ != fork::epoch()) return;
  GpuScope scope(*gpu_);
  if (mapped_) gpu_->driver().cuMemUnmap(address_, reserved_);
  gpu_->driver().cuMemAddressFree(address_, reserved_);
}

std::unique_ptr<GpuPin> GpuPin::pin(Gpu& gpu, void* address, size_t size, bool writable) {
  if (!writable && !gpu.registers_read_only()) return nullptr;
  GpuScope scope(gpu);
  unsigned flags = cuda::kRegisterPortable | (writable ? 0 : cuda::kRegisterReadOnly);
  cuda::Result result = gpu.driver().cuMemHostRegister_v2(address, size, flags);
  if (result == cuda::kSuccess) return std::unique_ptr<GpuPin>(new GpuPin(gpu, address));
  bool by_others =
      result == cuda::kAlreadyRegistered && gpu.kind_of(address, size) == Gpu::Kind::kPinned;
  return by_others ? std::unique_ptr<GpuPin>(new GpuPin(gpu, nullptr)) : nullptr;
}

GpuPin::~GpuPin() {
  if (address_ == nullptr || epoch_ != fork::epoch()) return;
  GpuScope scope(gpu_);
  gpu_.driver().cuMemHostUnregister(address_);
}

GpuChunk::GpuChunk(Gpu& gpu) : gpu_(gpu), epoch_(fork::epoch()) {
  GpuScope scope(gpu);
  gpu.driver().check("pinned memory",
                     gpu.driver().cuMemHostAlloc(&data_, kBytes, cuda::kHostPortable));
}

GpuChunk::~GpuChunk() {
  if (data_ == nullptr || epoch_ != fork::epoch()) return;
  GpuScope scope(gpu_);
  gpu_.driver().cuMemFreeHost(data_);
}

cuda::Result gpu_copy(const Gpu& gpu, void* target, const void* source, size_t size,
                      cuda::Stream stream) {
  GpuScope scope(gpu);
  return gpu.driver().cuMemcpyAsync(address_of(target), address_of(source), size, stream);
}

}  // namespace tensorwire
