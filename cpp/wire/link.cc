#include "wire/link.h"

#include <sys/socket.h>

#include <array>
#include <cerrno>

namespace tensorwire {
namespace {

// The type of the records that TLS begins with: of the handshake, or an alert.
constexpr uint8_t kHandshake = 22, kAlert = 21;

msghdr message_of(std::span<const iovec> parts) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts.data());
  message.msg_iovlen = parts.size();
  return message;
}

}  // namespace

void Link::reset() {
  tls_.reset();
  socket_.reset();
}

Link::First Link::first() const {
  uint8_t byte = 0;
  ssize_t size;
  do {
    size = ::recv(socket_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  } while (size < 0 && errno == EINTR);
  if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return First::kNothing;
  if (size <= 0) return First::kEnd;
  return byte == kHandshake || byte == kAlert ? First::kTls : First::kPlain;
}

void Link::skip() {
  std::array<std::byte, 4096> bytes;
  (void)!::recv(socket_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
}

Tls& Link::encrypt(Tls::Side side, std::span<const uint8_t> secret) {
  tls_ = std::make_unique<Tls>(socket_.get(), side, secret);
  return *tls_;
}

ssize_t Link::receive(std::span<const iovec> parts) {
  if (tls_) return tls_->receive(parts);
  msghdr message = message_of(parts);
  return ::recvmsg(socket_.get(), &message, MSG_DONTWAIT);
}

ssize_t Link::send(std::span<const iovec> parts) {
  if (tls_) return tls_->send(parts);
  msghdr message = message_of(parts);
  return ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void Link::shut_down() {
  if (tls_) tls_->end();
  ::shutdown(socket_.get(), SHUT_RDWR);
}

std::string Link::failure(const char* call, int error) const {
  if (tls_ && error == EPROTO) return tls_->failure().message;
  return system_message(call, error);
}

}  // namespace tensorwire
