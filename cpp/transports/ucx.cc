#include "transports/ucx.h"

#include <dlfcn.h>

#include <cstdlib>
#include <memory>
#include <mutex>

#include "base/error.h"

namespace tensorwire::ucx {
namespace {

constexpr unsigned kMajor = 1, kMinor = 13;

std::string last_failure() {
  const char* text = ::dlerror();
  return text != nullptr ? text : "unknown failure";
}

template <class Function>
void bind(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(handle, name));
  if (function == nullptr) {
    throw Error(Code::kUnavailable, "this UCX lacks " + std::string(name) +
                                        ": rdma needs UCX 1.13 or newer (Debian: libucx0)");
  }
}

std::unique_ptr<Library> load() {
  // UCX writes its warnings to the standard output unless told otherwise.
  ::setenv("UCX_LOG_FILE", "stderr", 0);
  ::setenv("UCX_WARN_UNUSED_ENV_VARS", "n", 0);
  const char* named = std::getenv("TENSORWIRE_UCX");
  const char* file = named != nullptr && *named != '\0' ? named : "libucp.so.0";
  void* handle = ::dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    throw Error(Code::kUnavailable,
                "rdma needs UCX 1.13 or newer, and " + std::string(file) + " cannot be loaded (" +
                    last_failure() +
                    "); on Debian and Ubuntu: apt-get install libucx0; elsewhere name the file in "
                    "TENSORWIRE_UCX");
  }
  auto library = std::make_unique<Library>();
  bind(handle, "ucp_get_version", library->ucp_get_version);
  unsigned major = 0, minor = 0, release = 0;
  library->ucp_get_version(&major, &minor, &release);
  library->version =
      std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(release);
  if (major != kMajor || minor < kMinor) {
    throw Error(Code::kUnavailable, "rdma needs UCX 1.13 or newer (below 2), and " +
                                        std::string(file) + " is " + library->version);
  }
#define TENSORWIRE_BIND(result, name, ...) bind(handle, #name, library->name);
  TENSORWIRE_UCX_FUNCTIONS(TENSORWIRE_BIND)
#undef TENSORWIRE_BIND
  return library;
}

}  // namespace

const Library& library() {
  static std::mutex mutex;
  static const Library* loaded = nullptr;  // never unloaded: UCX leaves hooks behind
  std::lock_guard lock(mutex);
  if (loaded == nullptr) loaded = load().release();
  return *loaded;
}

}  // namespace tensorwire::ucx
