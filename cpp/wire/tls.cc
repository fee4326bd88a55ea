#include "wire/tls.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/fork.h"
#include "wire/openssl.h"

namespace tensorwire {
namespace {

using openssl::Bio;
using openssl::library;
using openssl::Session;
using openssl::Ssl;

constexpr unsigned char kIdentity[] = {'t', 'e', 'n', 's', 'o', 'r', 'w', 'i', 'r', 'e'};
constexpr char kSuite[] = "TLS_AES_128_GCM_SHA256";
constexpr unsigned char kSuiteNumber[] = {0x13, 0x01};
constexpr size_t kReadBytes = 64 << 10;    // received in one system call
constexpr size_t kBatchBytes = 128 << 10;  // encrypted before one system call sends it

// OpenSSL keeps a queue of errors for each thread, which may also run the TLS of others, such as
// Python's: an error that is left in it fails their next call. Only calls that fail leave one.
struct NoErrorLeft {
  ~NoErrorLeft() { library().ERR_clear_error(); }
};

std::string reason_of(unsigned long error) {
  const char* text = error != 0 ? library().ERR_reason_error_string(error) : nullptr;
  return text != nullptr ? text : "unknown reason";
}

}  // namespace

TlsUse tls_use(std::string_view name) {
  if (name == "off") return TlsUse::kOff;
  if (name == "on") return TlsUse::kOn;
  if (name == "auto") return TlsUse::kAuto;
  throw Error(Code::kInvalid, "TENSORWIRE_TLS is off, on or auto, not '" + std::string(name) + "'");
}

void require_tls() { library(); }

Digest tls_key(std::span<const uint8_t> secret) {
  Digest extracted = hmac({}, "", secret);
  constexpr uint8_t kFirstBlock[] = {1};
  return hmac(extracted, "tensorwire tls 1.3 psk", kFirstBlock);
}

// What OpenSSL calls. All of them are called by a method of Tls that holds the lock.
struct Tls::Callbacks {
  static Tls& of(const Ssl* ssl) { return *static_cast<Tls*>(library().SSL_get_ex_data(ssl, 0)); }
  static Tls& of(Bio* bio) { return *static_cast<Tls*>(library().BIO_get_data(bio)); }

  static Session* session(Ssl* ssl) {
    const auto& lib = library();
    const Digest& key = of(ssl).key_;
    Session* made = lib.SSL_SESSION_new();
    if (made == nullptr) return nullptr;
    bool ok = lib.SSL_SESSION_set1_master_key(made, key.data(), key.size()) == 1 &&
              lib.SSL_SESSION_set_cipher(made, lib.SSL_CIPHER_find(ssl, kSuiteNumber)) == 1 &&
              lib.SSL_SESSION_set_protocol_version(made, openssl::kTls13) == 1;
    if (ok) return made;
    lib.SSL_SESSION_free(made);
    return nullptr;
  }

  static int use(Ssl* ssl, const openssl::Digest*, openssl::Bytes* identity, size_t* size,
                 Session** found) {
    *identity = kIdentity;
    *size = sizeof kIdentity;
    *found = session(ssl);
    return *found != nullptr;
  }

  static int find(Ssl* ssl, openssl::Bytes identity, size_t size, Session** found) {
    bool ours = size == sizeof kIdentity && std::memcmp(identity, kIdentity, size) == 0;
    *found = ours ? session(ssl) : nullptr;
    return 1;
  }

  static int write(Bio* bio, const char* data, int size) {
    auto* bytes = reinterpret_cast<const uint8_t*>(data);
    auto& out = of(bio).out_;
    out.insert(out.end(), bytes, bytes + size);
    return size;
  }

  static int read(Bio* bio, char* data, int size) {
    const auto& lib = library();
    Tls& tls = of(bio);
    lib.BIO_clear_flags(bio, openssl::kFlagRead | openssl::kFlagRetry);
    ssize_t got;
    do {
      got = ::recv(tls.socket_, data, static_cast<size_t>(size), MSG_DONTWAIT);
    } while (got < 0 && errno == EINTR);
    if (got > 0) return static_cast<int>(got);
    if (got == 0) {
      tls.cut_ = true;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      tls.starved_ = true;
      lib.BIO_set_flags(bio, openssl::kFlagRead | openssl::kFlagRetry);
    } else {
      tls.socket_error_ = errno;
    }
    return got == 0 ? 0 : -1;
  }

  static long control(Bio* bio, int what, long, void*) {
    if (what == openssl::kControlEof) return of(bio).cut_;
    return what == openssl::kControlFlush;
  }

  // What all sessions of a process share. A forked child makes its own: locks in its copy of the
  // parent's may be held for ever.
  struct Shared {
    Shared() {
      const auto& lib = library();
      context = lib.SSL_CTX_new(lib.TLS_method());
      method = lib.BIO_meth_new(openssl::kSourceSink, "tensorwire");
      if (context == nullptr || method == nullptr) {
        throw Error(Code::kNoMemory, "no memory is left for OpenSSL");
      }
      lib.SSL_CTX_ctrl(context, openssl::kSetMinimum, openssl::kTls13, nullptr);
      lib.SSL_CTX_ctrl(context, openssl::kSetMode, openssl::kPartialWrite | openssl::kMovingBuffer,
                       nullptr);
      lib.SSL_CTX_ctrl(context, openssl::kSetReadAhead, 1, nullptr);
      lib.SSL_CTX_set_default_read_buffer_len(context, kReadBytes);
      // Nothing is resumed: each connection proves the secret anew.
      lib.SSL_CTX_ctrl(context, openssl::kSetSessionCache, 0, nullptr);
      lib.SSL_CTX_set_options(context, openssl::kNoTicket);
      lib.SSL_CTX_set_num_tickets(context, 0);
      lib.SSL_CTX_set_psk_use_session_callback(context, use);
      lib.SSL_CTX_set_psk_find_session_callback(context, find);
      bool ok = lib.SSL_CTX_set_ciphersuites(context, kSuite) == 1 &&
                lib.BIO_meth_set_write(method, write) == 1 &&
                lib.BIO_meth_set_read(method, read) == 1 &&
                lib.BIO_meth_set_ctrl(method, control) == 1;
      if (!ok) throw Error(Code::kUnavailable, "this OpenSSL has no " + std::string(kSuite));
    }
    openssl::Context* context;
    openssl::BioMethod* method;
  };
};

Tls::Tls(int socket, Side side, std::span<const uint8_t> secret, uint64_t records_per_key)
    : socket_(socket),
      client_(side == Side::kClient),
      records_per_key_(records_per_key),
      key_(tls_key(secret)) {
  const auto& lib = library();
  auto& shared = fork::of_this_process<Callbacks::Shared>();
  ssl_ = lib.SSL_new(shared.context);
  Bio* bio = ssl_ != nullptr ? lib.BIO_new(shared.method) : nullptr;
  if (bio == nullptr || lib.SSL_set_ex_data(ssl_, 0, this) != 1) {
    lib.SSL_free(ssl_);
    throw Error(Code::kNoMemory, "no memory is left for an encrypted connection");
  }
  lib.BIO_set_data(bio, this);
  lib.BIO_set_init(bio, 1);
  lib.SSL_set_bio(ssl_, bio, bio);
  if (client_) {
    lib.SSL_set_connect_state(ssl_);
    // A server could show a certificate in place of the proof: none is trusted.
    lib.SSL_set_verify(ssl_, openssl::kVerifyPeer, nullptr);
  } else {
    lib.SSL_set_accept_state(ssl_);
  }
}

Tls::~Tls() { library().SSL_free(ssl_); }

Status Tls::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

// Why a call failed that cannot go on.
Status Tls::explain(int result) {
  const auto& lib = library();
  NoErrorLeft at_the_end;
  if (socket_error_ != 0) return {Code::kPeerLost, system_message("TLS", socket_error_)};
  if (cut_) {
    return {Code::kPeerLost,
            "the connection was closed by the other side, or cut: it lacks the end that TLS gives"};
  }
  if (lib.SSL_get_error(ssl_, result) != openssl::kErrorSsl) return {Code::kPeerLost, "TLS failed"};
  unsigned long error = lib.ERR_get_error();
  int reason = static_cast<int>(error & openssl::kReasonMask);
  if (!answered_) {
    bool wrong = reason == openssl::kAlertHandshakeFailure ||
                 reason == openssl::kAlertIllegalParameter ||
                 reason == openssl::kAlertDecryptError || reason == openssl::kBinderDoesNotVerify;
    if (wrong) return {Code::kPermission, "wrong secret"};
    if (reason == openssl::kCertificateVerifyFailed) {
      return {Code::kPermission, "it showed a certificate and did not prove the secret"};
    }
  }
  return {Code::kPeerLost,
          "its bytes were changed on their way, or are no TLS of ours (" + reason_of(error) + ")"};
}

Tls::Step Tls::handshake() {
  const auto& lib = library();
  Step step = Step::kMore;
  starved_ = false;
  {
    std::lock_guard lock(mutex_);
    NoErrorLeft at_the_end;
    lib.ERR_clear_error();
    int result = lib.SSL_do_handshake(ssl_);
    if (result == 1) {
      step = lib.SSL_session_reused(ssl_) == 1 ? Step::kDone : Step::kFailed;
      if (step == Step::kFailed) failure_ = {Code::kPermission, "it did not prove the secret"};
      answered_ = true;
    } else if (lib.SSL_get_error(ssl_, result) != openssl::kWantRead) {
      step = Step::kFailed;
      failure_ = explain(result);
    } else if (!client_ && !out_.empty()) {
      answered_ = true;
    }
  }
  flush();
  return step;
}

ssize_t Tls::receive(std::span<const iovec> parts) {
  const auto& lib = library();
  starved_ = false;
  size_t total = 0;
  for (const iovec& part : parts) {
    auto* at = static_cast<std::byte*>(part.iov_base);
    for (size_t left = part.iov_len; left > 0;) {
      std::lock_guard lock(mutex_);
      size_t got = 0;
      if (failure_.ok()) {
        lib.ERR_clear_error();
        int result = lib.SSL_read_ex(ssl_, at, left, &got);
        if (result != 1) {
          int error = lib.SSL_get_error(ssl_, result);
          bool fine = error == openssl::kWantRead || error == openssl::kZeroReturn;
          if (!fine) failure_ = explain(result);
          if (total > 0) return static_cast<ssize_t>(total);  // the rest is told next time
          if (error == openssl::kZeroReturn) return 0;
          if (error == openssl::kWantRead) errno = EAGAIN;
        }
      }
      if (!failure_.ok()) errno = EPROTO;
      if (got == 0) return total > 0 ? static_cast<ssize_t>(total) : -1;
      at += got;
      left -= got;
      total += got;
    }
  }
  return static_cast<ssize_t>(total);
}

// Makes one record of these bytes.
bool Tls::encrypt(std::span<const std::byte> record) {
  const auto& lib = library();
  std::lock_guard lock(mutex_);
  lib.ERR_clear_error();
  size_t written = 0;
  int result = 1;
  if (++records_ > records_per_key_) {
    result = lib.SSL_key_update(ssl_, openssl::kUpdateNotRequested);
    records_ = 1;
  }
  if (result == 1) result = lib.SSL_write_ex(ssl_, record.data(), record.size(), &written);
  if (result == 1 && written == record.size()) return true;
  NoErrorLeft at_the_end;
  if (failure_.ok()) failure_ = explain(result);
  return false;
}

// Hands encrypted bytes to the kernel. False, and errno, if some are left.
bool Tls::flush() {
  for (;;) {
    if (sent_ == sending_.size()) {
      sending_.clear();
      sent_ = 0;
      std::lock_guard lock(mutex_);
      if (out_.empty()) return true;
      sending_.swap(out_);
    }
    ssize_t sent = ::send(socket_, sending_.data() + sent_, sending_.size() - sent_,
                          MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return false;
    sent_ += static_cast<size_t>(sent);
  }
}

bool Tls::unsent() const {
  if (sent_ < sending_.size()) return true;
  std::lock_guard lock(mutex_);
  return !out_.empty();
}

ssize_t Tls::send(std::span<const iovec> parts) {
  if (!flush()) return -1;
  size_t taken = 0, part = 0, offset = 0;
  auto rest = [&] {
    const iovec& now = parts[part];
    return std::span(static_cast<const std::byte*>(now.iov_base) + offset, now.iov_len - offset);
  };
  auto skip = [&](size_t size) {
    offset += size;
    while (part < parts.size() && offset == parts[part].iov_len) ++part, offset = 0;
  };
  skip(0);
  while (part < parts.size() && taken < kBatchBytes) {
    std::span<const std::byte> next = rest();
    if (next.size() < kRecordBytes && part + 1 < parts.size()) {
      // Small parts share a record.
      record_.clear();
      while (part < parts.size() && record_.size() < kRecordBytes) {
        next = rest().first(std::min(rest().size(), kRecordBytes - record_.size()));
        record_.insert(record_.end(), next.begin(), next.end());
        skip(next.size());
      }
      next = record_;
    } else {
      next = next.first(std::min(next.size(), kRecordBytes));
      skip(next.size());
    }
    if (!encrypt(next)) {
      errno = EPROTO;
      return -1;
    }
    taken += next.size();
  }
  if (!flush() && errno != EAGAIN && errno != EWOULDBLOCK) return -1;
  return static_cast<ssize_t>(taken);
}

void Tls::end() {
  {
    std::lock_guard lock(mutex_);
    NoErrorLeft at_the_end;
    library().ERR_clear_error();
    if (failure_.ok()) library().SSL_shutdown(ssl_);
  }
  flush();
}

}  // namespace tensorwire
