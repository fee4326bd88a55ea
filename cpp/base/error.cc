#include "base/error.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace tensorwire {

std::string system_message(const std::string& what, int error_number) {
  std::string text = what + ": " + std::generic_category().message(error_number);
  rlimit most{};
  if (error_number == EMFILE && ::getrlimit(RLIMIT_NOFILE, &most) == 0) {
    // A peer may get to read it.
    text += " (process " + std::to_string(::getpid()) + " has all of the " +
            std::to_string(most.rlim_cur) + " descriptors open that it may have; raise ulimit -n)";
  }
  return text;
}

}  // namespace tensorwire
