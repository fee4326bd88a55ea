#include "wire/openssl.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>

#include "base/error.h"

namespace tensorwire::openssl {
namespace {

std::string last_failure() {
  const char* text = ::dlerror();
  return text != nullptr ? text : "unknown failure";
}

template <class Function>
void bind(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(handle, name));
  if (function != nullptr) return;
  throw Error(Code::kUnavailable,
              "this OpenSSL lacks " + std::string(name) + ": encryption needs OpenSSL 3");
}

std::unique_ptr<Library> load() {
  const char* named = std::getenv("TENSORWIRE_OPENSSL");
  const char* file = named != nullptr && *named != '\0' ? named : "libssl.so.3";
  void* handle = ::dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    throw Error(Code::kUnavailable,
                "connections between hosts are encrypted by OpenSSL 3, and " + std::string(file) +
                    " cannot be loaded (" + last_failure() +
                    "); on Debian and Ubuntu: apt-get install libssl3; elsewhere name the file in "
                    "TENSORWIRE_OPENSSL. In a private network TENSORWIRE_TLS=off, everywhere, does "
                    "without");
  }
  auto library = std::make_unique<Library>();
#define TENSORWIRE_BIND(result, name, ...) bind(handle, #name, library->name);
  TENSORWIRE_OPENSSL_FUNCTIONS(TENSORWIRE_BIND)
#undef TENSORWIRE_BIND
  return library;
}

}  // namespace

const Library& library() {
  // Never unloaded: others of this process use it too. A lock would be held for ever in the child
  // of a process that forks while another thread encrypts.
  static std::atomic<const Library*> loaded{nullptr};
  if (const Library* found = loaded.load(std::memory_order_acquire)) return *found;
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (loaded.load(std::memory_order_relaxed) == nullptr) {
    loaded.store(load().release(), std::memory_order_release);
  }
  return *loaded.load(std::memory_order_relaxed);
}

}  // namespace tensorwire::openssl
