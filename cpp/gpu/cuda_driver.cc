#include "gpu/cuda_driver.h"

#include <dlfcn.h>

#include <atomic>

#include <cstdlib>
#include <memory>
#include <mutex>

#include "base/fork.h"

namespace tensorwire::cuda {
namespace {

constexpr int kOldest = 12000;

template <class Function>
void bind(void* handle, const char* name, const std::string& file, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(handle, name));
  if (function == nullptr) {
    throw Error(Code::kUnavailable, file + " lacks " + name +
                                        ": memory of a GPU needs NVIDIA's driver for CUDA 12.0 or "
                                        "newer (525)");
  }
}

std::unique_ptr<Library> load() {
  const char* named = std::getenv("TENSORWIRE_CUDA_LIBRARY");
  auto made = std::make_unique<Library>();
  made->made_in = fork::epoch();
  made->file = named != nullptr && *named != '\0' ? named : "libcuda.so.1";
  void* handle = ::dlopen(made->file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = ::dlerror();
    throw Error(Code::kUnavailable,
                "memory of a GPU needs NVIDIA's driver, and " + made->file + " cannot be loaded (" +
                    (why != nullptr ? why : "unknown failure") +
                    "); install the driver, and in a container run it with --gpus");
  }
#define TENSORWIRE_BIND(name, ...) bind(handle, #name, made->file, made->name);
  TENSORWIRE_CUDA_FUNCTIONS(TENSORWIRE_BIND)
#undef TENSORWIRE_BIND
  if (Result result = made->cuInit(0); result != kSuccess) {
    throw Error(Code::kUnavailable, "NVIDIA's driver does not start: " + made->text(result));
  }
  made->check("the driver's version", made->cuDriverGetVersion(&made->version));
  if (made->version < kOldest) {
    throw Error(Code::kUnavailable,
                "memory of a GPU needs NVIDIA's driver for CUDA 12.0 or newer "
                "(525), and this one is for CUDA " +
                    std::to_string(made->version / 1000) + "." +
                    std::to_string(made->version % 1000 / 10));
  }
  return made;
}

}  // namespace

std::string Library::text(Result result) const {
  const char *name = nullptr, *words = nullptr;
  cuGetErrorName(result, &name);
  cuGetErrorString(result, &words);
  std::string shown = name != nullptr ? name : "CUDA error " + std::to_string(result);
  return words != nullptr ? words + (" (" + shown + ")") : shown;
}

Status Library::status(const std::string& what, Result result) const {
  return {result == kOutOfMemory ? Code::kNoMemory : Code::kUnavailable,
          what + ": " + text(result)};
}

const Library& library() {
  static std::mutex mutex;
  static const Library* loaded = nullptr;  // never unloaded: contexts stay as long as the process
  static std::atomic<const Library*> known{nullptr};
  const Library* found = known.load(std::memory_order_acquire);
  if (found == nullptr) {
    std::lock_guard lock(mutex);
    if (loaded == nullptr) loaded = load().release();
    known.store(loaded, std::memory_order_release);
    found = loaded;
  }
  if (found->made_in != fork::epoch()) {
    throw Error(Code::kUnavailable,
                "CUDA cannot be used in a process that was forked from one that uses it: start "
                "processes by multiprocessing's 'spawn'");
  }
  return *found;
}

}  // namespace tensorwire::cuda
