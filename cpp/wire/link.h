// A Link: one connected tcp socket, plain or encrypted by TLS, with the calls of a socket that
// never blocks. Its user need not know which it is.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "base/fork.h"
#include "wire/tls.h"

namespace tensorwire {

class Link {
 public:
  Link() = default;
  Link(Descriptor socket) : socket_(std::move(socket)) {}  // NOLINT: a plain one

  int get() const { return socket_.get(); }
  explicit operator bool() const { return static_cast<bool>(socket_); }
  void reset();

  // What the other side begins with, or that it has not, or has hung up. The bytes stay.
  enum class First : uint8_t { kNothing, kEnd, kTls, kPlain };
  First first() const;
  // Throws away what has come, so that an answer and the end reach the other side.
  void skip();
  // All bytes are encrypted from here on; handshake() of the session comes before others. Throws
  // as Tls.
  Tls& encrypt(Tls::Side side, std::span<const uint8_t> secret);
  // Ends that, for the words of an other side that does not encrypt.
  void give_up_tls() { tls_.reset(); }
  bool encrypted() const { return tls_ != nullptr; }
  Tls* tls() const { return tls_.get(); }

  // As those of Tls, also where there is none.
  ssize_t receive(std::span<const iovec> parts);
  ssize_t send(std::span<const iovec> parts);
  bool unsent() const { return tls_ && tls_->unsent(); }
  bool more() const { return tls_ && tls_->more(); }
  // How many bytes of those that the socket gave may not have been passed on for lack of others.
  size_t held_bytes() const { return tls_ ? Tls::kRecordBytes + 512 : 0; }
  // Both directions end, after the end that TLS gives.
  void shut_down();
  // Why a call failed with this errno.
  std::string failure(const char* call, int error) const;

 private:
  Descriptor socket_;
  std::unique_ptr<Tls> tls_;
};

}  // namespace tensorwire
