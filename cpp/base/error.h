// The error vocabulary of the core: a code that callers act on and a message that people read.
// Set-up throws Error; on the data path a completion carries a Status and nothing is thrown.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace tensorwire {

// The values are part of the wire protocol (docs/internals/wire.md) and of tensorwire.errors:
// append only.
enum class Code : uint16_t {
  kOk = 0,
  kClosed = 1,       // you closed it
  kPeerLost = 2,     // the other side or the link is gone
  kStaleHandle = 3,  // the region or process that the handle names no longer exists
  kBusy = 4,         // a limit or quota is reached; try later or raise it
  kTimeout = 5,      // only the waiting stopped
  kUnavailable = 6,  // a backend or device is missing
  kInvalid = 7,      // a bad argument
  kPermission = 8,   // the grant does not allow it
  kNotFound = 9,     // no region of that name
  kNoMemory = 10,    // the system has no memory left
  kType = 11,        // an argument of the wrong type
};
inline constexpr uint16_t kLastCode = 11;

struct Status {
  Code code = Code::kOk;
  std::string message;
  bool ok() const { return code == Code::kOk; }
};

class Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& message) : std::runtime_error(message), code_(code) {}
  explicit Error(const Status& status) : Error(status.code, status.message) {}
  Code code() const { return code_; }
  Status status() const { return {code_, what()}; }

 private:
  Code code_;
};

// "what: strerror(errno)", for the message of a failed system call.
std::string system_message(const std::string& what, int error_number);

}  // namespace tensorwire
