// TLS 1.3 between two Nodes, by OpenSSL. Each end proves that it knows the secret (an external
// pre-shared key made of it, always with a fresh Diffie-Hellman exchange; no certificates), and
// from then on nobody between them can read or change a byte. docs/internals/wire.md has the
// parameters.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/sha256.h"

namespace tensorwire {

namespace openssl {
struct Ssl;
}

// TENSORWIRE_TLS: which connections are encrypted. kAuto: those that leave the host.
enum class TlsUse : uint8_t { kOff, kOn, kAuto };

// "off", "on", "auto". Throws kInvalid.
TlsUse tls_use(std::string_view name);

// Throws kUnavailable if OpenSSL cannot be loaded.
void require_tls();

// The key of TLS that both ends make of a secret: HKDF-SHA256 with a label of its own, so that it
// says nothing about the secret or the proofs of the handshake.
Digest tls_key(std::span<const uint8_t> secret);

// One session on a connected socket, which the caller owns and which outlives it. Nothing blocks.
// One thread at a time may send and one receive, both at once; none before handshake() is done.
class Tls {
 public:
  enum class Side : uint8_t { kClient, kServer };
  enum class Step : uint8_t { kMore, kDone, kFailed };
  static constexpr size_t kRecordBytes = 16 << 10;  // of plain bytes
  // Under one key at most 2^24.5 records of this size are safe with AES-GCM (RFC 8446, 5.5).
  static constexpr uint64_t kRecordsPerKey = uint64_t{1} << 22;

  // Throws kUnavailable, kNoMemory.
  Tls(int socket, Side side, std::span<const uint8_t> secret,
      uint64_t records_per_key = kRecordsPerKey);
  ~Tls();
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  // Goes on with the handshake as far as the socket lets it. kFailed: failure() says why, and the
  // other side is told.
  Step handshake();
  // The other side knew the secret when it began, or recorded somebody who did.
  bool answered() const { return answered_; }
  // It failed because the connection ended, without the end that TLS gives.
  bool cut() const { return cut_ || socket_error_ != 0; }

  // As recvmsg and sendmsg: the bytes that were moved, or -1 and errno; receive() returns 0 at the
  // proper end. EPROTO: failure() says what is wrong. Bytes that were taken are encrypted: their
  // memory is not looked at again, also while unsent() is true. send() without parts sends those.
  ssize_t receive(std::span<const iovec> parts);
  ssize_t send(std::span<const iovec> parts);
  bool unsent() const;
  // receive() may have more to say without new bytes at the socket.
  bool more() const { return !starved_; }
  // Tells the other side that nothing follows, if the socket has room.
  void end();

  Status failure() const;

 private:
  struct Callbacks;
  bool flush();
  bool encrypt(std::span<const std::byte> record);
  Status explain(int result);  // locked

  const int socket_;
  const bool client_;
  const uint64_t records_per_key_;
  Digest key_;

  mutable std::mutex mutex_;
  openssl::Ssl* ssl_ = nullptr;  // locked
  std::vector<uint8_t> out_;     // locked; encrypted, to be sent after sending_
  uint64_t records_ = 0;         // locked; under the present key
  Status failure_;               // locked
  bool answered_ = false;
  // Of the thread that receives, as of its last call.
  bool starved_ = false, cut_ = false;
  int socket_error_ = 0;
  // Of the thread that sends.
  std::vector<uint8_t> sending_;
  size_t sent_ = 0;
  std::vector<std::byte> record_;
};

}  // namespace tensorwire
