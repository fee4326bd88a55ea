// The used part of CUDA's driver interface (cuda.h 12.0), declared here so that a machine without
// CUDA builds the same library; the driver is loaded at run time. NVIDIA keeps these layouts and
// numbers stable. cpp/tests/cuda_driver_test.cc compares them with CUDA's own header where there is
// one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/error.h"

namespace tensorwire::cuda {

using Result = int;
inline constexpr Result kSuccess = 0;
inline constexpr Result kInvalidValue = 1;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNotInitialized = 3;
inline constexpr Result kNoDevice = 100;
inline constexpr Result kInvalidDevice = 101;
inline constexpr Result kNotReady = 600;
inline constexpr Result kAlreadyRegistered = 712;
inline constexpr Result kNotSupported = 801;

struct ContextOpaque;
struct StreamOpaque;
struct EventOpaque;
using Device = int;
using Context = ContextOpaque*;
using Stream = StreamOpaque*;  // null: the legacy default stream
using Event = EventOpaque*;
using Address = unsigned long long;  // of memory of a device, or of the host
using Memory = unsigned long long;   // an allocation of physical memory
using HostFunction = void (*)(void*);

struct Location {
  static constexpr int kDevice = 1;
  int type = kDevice;
  int id = 0;
};

struct MemoryProperties {
  static constexpr int kPinned = 1;
  static constexpr int kDescriptor = 1;
  int type = kPinned;
  int handle_types = 0;
  Location location;
  void* win32 = nullptr;
  struct {
    unsigned char compression = 0;
    unsigned char rdma = 0;
    unsigned short usage = 0;
    unsigned char reserved[4] = {};
  } flags;
};

struct Access {
  static constexpr int kRead = 1, kReadWrite = 3;
  Location location;
  int flags = kReadWrite;
};

inline constexpr int kGranularityMinimum = 0;
inline constexpr unsigned kStreamNonBlocking = 1;
inline const Stream kLegacyStream = reinterpret_cast<Stream>(1);  // as null is
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kHostPortable = 1;
inline constexpr unsigned kRegisterPortable = 1, kRegisterReadOnly = 8;
inline constexpr int kPointerMemoryType = 2, kPointerDevice = 9;
inline constexpr int kMemoryOfHost = 1, kMemoryOfDevice = 2;
inline constexpr int kHasVirtualMemory = 102, kHasDescriptors = 103, kHasReadOnlyRegister = 113;
inline constexpr unsigned kWaitAtLeast = 0;
inline constexpr int kCaptureNone = 0, kCaptureRelaxed = 2;

// The driver's functions, by the names of their symbols: USE(name, arguments...) for each. All
// return a Result.
#define TENSORWIRE_CUDA_FUNCTIONS(USE)                                            \
  USE(cuInit, unsigned)                                                           \
  USE(cuDriverGetVersion, int*)                                                   \
  USE(cuGetErrorName, Result, const char**)                                       \
  USE(cuGetErrorString, Result, const char**)                                     \
  USE(cuDeviceGetCount, int*)                                                     \
  USE(cuDeviceGet, Device*, int)                                                  \
  USE(cuDeviceGetName, char*, int, Device)                                        \
  USE(cuDeviceGetAttribute, int*, int, Device)                                    \
  USE(cuDeviceTotalMem_v2, size_t*, Device)                                       \
  USE(cuDevicePrimaryCtxRetain, Context*, Device)                                 \
  USE(cuCtxPushCurrent_v2, Context)                                               \
  USE(cuCtxPopCurrent_v2, Context*)                                               \
  USE(cuCtxSynchronize)                                                           \
  USE(cuThreadExchangeStreamCaptureMode, int*)                                    \
  USE(cuMemGetAllocationGranularity, size_t*, const MemoryProperties*, int)       \
  USE(cuMemCreate, Memory*, size_t, const MemoryProperties*, unsigned long long)  \
  USE(cuMemRelease, Memory)                                                       \
  USE(cuMemAddressReserve, Address*, size_t, size_t, Address, unsigned long long) \
  USE(cuMemAddressFree, Address, size_t)                                          \
  USE(cuMemMap, Address, size_t, size_t, Memory, unsigned long long)              \
  USE(cuMemUnmap, Address, size_t)                                                \
  USE(cuMemSetAccess, Address, size_t, const Access*, size_t)                     \
  USE(cuMemExportToShareableHandle, void*, Memory, int, unsigned long long)       \
  USE(cuMemImportFromShareableHandle, Memory*, void*, int)                        \
  USE(cuMemGetAllocationPropertiesFromHandle, MemoryProperties*, Memory)          \
  USE(cuMemHostAlloc, void**, size_t, unsigned)                                   \
  USE(cuMemFreeHost, void*)                                                       \
  USE(cuMemHostRegister_v2, void*, size_t, unsigned)                              \
  USE(cuMemHostUnregister, void*)                                                 \
  USE(cuPointerGetAttribute, void*, int, Address)                                 \
  USE(cuMemcpyAsync, Address, Address, size_t, Stream)                            \
  USE(cuMemsetD8Async, Address, unsigned char, size_t, Stream)                    \
  USE(cuStreamCreate, Stream*, unsigned)                                          \
  USE(cuStreamSynchronize, Stream)                                                \
  USE(cuStreamQuery, Stream)                                                      \
  USE(cuStreamIsCapturing, Stream, int*)                                          \
  USE(cuStreamWaitEvent, Stream, Event, unsigned)                                 \
  USE(cuStreamWaitValue32_v2, Stream, Address, uint32_t, unsigned)                \
  USE(cuLaunchHostFunc, Stream, HostFunction, void*)                              \
  USE(cuEventCreate, Event*, unsigned)                                            \
  USE(cuEventDestroy_v2, Event)                                                   \
  USE(cuEventRecord, Event, Stream)                                               \
  USE(cuEventQuery, Event)

struct Library {
#define TENSORWIRE_DECLARE(name, ...) Result (*name)(__VA_ARGS__) = nullptr;
  TENSORWIRE_CUDA_FUNCTIONS(TENSORWIRE_DECLARE)
#undef TENSORWIRE_DECLARE

  int version = 0;   // 12080 is 12.8
  std::string file;  // that was loaded
  uint32_t made_in;  // fork::epoch()

  // "out of memory (CUDA_ERROR_OUT_OF_MEMORY)".
  std::string text(Result result) const;
  // Converts a failure into a Status: kNoMemory or kUnavailable.
  Status status(const std::string& what, Result result) const;
  // Throws that, unless it succeeded.
  void check(const std::string& what, Result result) const {
    if (result != kSuccess) throw Error(status(what, result));
  }
};

// Loads and starts the driver once per process: the file named by TENSORWIRE_CUDA_LIBRARY, else
// libcuda.so.1 from the default path. Throws kUnavailable, with what to do, if there is none, it is
// too old or finds no GPU, and in a process that was forked from one that has it.
const Library& library();

}  // namespace tensorwire::cuda
