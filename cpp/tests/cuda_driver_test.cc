#include "gpu/cuda_driver.h"

#include <doctest/doctest.h>

#include <cstdlib>

#include "base/error.h"
#include "gpu/gpu.h"
#include "layouts.h"

#if __has_include(<cuda.h>)
#include <cuda.h>

namespace ours = tensorwire::cuda;

EQUAL(ours::kSuccess, CUDA_SUCCESS);
EQUAL(ours::kInvalidValue, CUDA_ERROR_INVALID_VALUE);
EQUAL(ours::kOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY);
EQUAL(ours::kNotInitialized, CUDA_ERROR_NOT_INITIALIZED);
EQUAL(ours::kNoDevice, CUDA_ERROR_NO_DEVICE);
EQUAL(ours::kInvalidDevice, CUDA_ERROR_INVALID_DEVICE);
EQUAL(ours::kNotReady, CUDA_ERROR_NOT_READY);
EQUAL(ours::kAlreadyRegistered, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
EQUAL(ours::kNotSupported, CUDA_ERROR_NOT_SUPPORTED);
SAME(ours::Location, CUmemLocation, type, type);
SAME(ours::Location, CUmemLocation, id, id);
static_assert(sizeof(ours::Location) == sizeof(CUmemLocation));
EQUAL(ours::Location::kDevice, CU_MEM_LOCATION_TYPE_DEVICE);
SAME(ours::MemoryProperties, CUmemAllocationProp, type, type);
SAME(ours::MemoryProperties, CUmemAllocationProp, handle_types, requestedHandleTypes);
SAME(ours::MemoryProperties, CUmemAllocationProp, location, location);
SAME(ours::MemoryProperties, CUmemAllocationProp, win32, win32HandleMetaData);
SAME(ours::MemoryProperties, CUmemAllocationProp, flags, allocFlags);
static_assert(sizeof(ours::MemoryProperties) == sizeof(CUmemAllocationProp));
EQUAL(ours::MemoryProperties::kPinned, CU_MEM_ALLOCATION_TYPE_PINNED);
EQUAL(ours::MemoryProperties::kDescriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
SAME(ours::Access, CUmemAccessDesc, location, location);
SAME(ours::Access, CUmemAccessDesc, flags, flags);
static_assert(sizeof(ours::Access) == sizeof(CUmemAccessDesc));
EQUAL(ours::Access::kRead, CU_MEM_ACCESS_FLAGS_PROT_READ);
EQUAL(ours::Access::kReadWrite, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
EQUAL(ours::kGranularityMinimum, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
EQUAL(ours::kStreamNonBlocking, CU_STREAM_NON_BLOCKING);
EQUAL(ours::kEventDisableTiming, CU_EVENT_DISABLE_TIMING);
EQUAL(ours::kHostPortable, CU_MEMHOSTALLOC_PORTABLE);
EQUAL(ours::kRegisterPortable, CU_MEMHOSTREGISTER_PORTABLE);
EQUAL(ours::kRegisterReadOnly, CU_MEMHOSTREGISTER_READ_ONLY);
EQUAL(ours::kPointerMemoryType, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
EQUAL(ours::kPointerDevice, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
EQUAL(ours::kMemoryOfHost, CU_MEMORYTYPE_HOST);
EQUAL(ours::kMemoryOfDevice, CU_MEMORYTYPE_DEVICE);
EQUAL(ours::kHasVirtualMemory, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
EQUAL(ours::kHasDescriptors, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
EQUAL(ours::kHasReadOnlyRegister, CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED);
EQUAL(ours::kWaitAtLeast, CU_STREAM_WAIT_VALUE_GEQ);
EQUAL(ours::kCaptureNone, CU_STREAM_CAPTURE_STATUS_NONE);
EQUAL(ours::kCaptureRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED);
#endif

namespace tensorwire {

TEST_CASE("a driver that is not there is told with what to do") {
  ::setenv("TENSORWIRE_CUDA_LIBRARY", "/nowhere/libcuda.so.1", 1);
  try {
    Gpu::at(0);
    FAIL("a driver was found");
  } catch (const Error& error) {
    CHECK(error.code() == Code::kUnavailable);
    CHECK(std::string(error.what()).find("/nowhere/libcuda.so.1") != std::string::npos);
    CHECK(std::string(error.what()).find("install the driver") != std::string::npos);
  }
  ::unsetenv("TENSORWIRE_CUDA_LIBRARY");
}

}  // namespace tensorwire
