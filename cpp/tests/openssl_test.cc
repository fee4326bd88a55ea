#include "wire/openssl.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <type_traits>

#include "layouts.h"

#if __has_include(<openssl/ssl.h>)
#include <openssl/err.h>
#include <openssl/ssl.h>

namespace ours = tensorwire::openssl;

EQUAL(ours::kTls13, TLS1_3_VERSION);
EQUAL(ours::kSetMode, SSL_CTRL_MODE);
EQUAL(ours::kSetReadAhead, SSL_CTRL_SET_READ_AHEAD);
EQUAL(ours::kSetSessionCache, SSL_CTRL_SET_SESS_CACHE_MODE);
EQUAL(0, SSL_SESS_CACHE_OFF);
EQUAL(ours::kSetMinimum, SSL_CTRL_SET_MIN_PROTO_VERSION);
EQUAL(ours::kPartialWrite, SSL_MODE_ENABLE_PARTIAL_WRITE);
EQUAL(ours::kMovingBuffer, SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
EQUAL(ours::kNoTicket, SSL_OP_NO_TICKET);
EQUAL(ours::kVerifyPeer, SSL_VERIFY_PEER);
EQUAL(ours::kErrorSsl, SSL_ERROR_SSL);
EQUAL(ours::kWantRead, SSL_ERROR_WANT_READ);
EQUAL(ours::kZeroReturn, SSL_ERROR_ZERO_RETURN);
EQUAL(ours::kUpdateNotRequested, SSL_KEY_UPDATE_NOT_REQUESTED);
EQUAL(ours::kSourceSink, BIO_TYPE_SOURCE_SINK);
EQUAL(ours::kFlagRead, BIO_FLAGS_READ);
EQUAL(ours::kFlagRetry, BIO_FLAGS_SHOULD_RETRY);
EQUAL(ours::kControlEof, BIO_CTRL_EOF);
EQUAL(ours::kControlFlush, BIO_CTRL_FLUSH);
EQUAL(ours::kReasonMask, ERR_REASON_MASK);
EQUAL(ours::kAlertHandshakeFailure, SSL_R_SSLV3_ALERT_HANDSHAKE_FAILURE);
EQUAL(ours::kAlertIllegalParameter, SSL_R_SSLV3_ALERT_ILLEGAL_PARAMETER);
EQUAL(ours::kAlertDecryptError, SSL_R_TLSV1_ALERT_DECRYPT_ERROR);
EQUAL(ours::kCertificateVerifyFailed, SSL_R_CERTIFICATE_VERIFY_FAILED);
EQUAL(ours::kBinderDoesNotVerify, SSL_R_BINDER_DOES_NOT_VERIFY);

// As many arguments, each passed in the same way: a pointer is one, whatever it points to.
template <class Mine, class Theirs>
constexpr bool alike = std::is_pointer_v<Mine> == std::is_pointer_v<Theirs> &&
                       std::is_void_v<Mine> == std::is_void_v<Theirs> &&
                       (std::is_pointer_v<Mine> || std::is_same_v<Mine, Theirs>);
template <class Mine, class Theirs>
struct Same : std::false_type {};
template <class R, class... A, class S, class... B>
  requires(sizeof...(A) == sizeof...(B))
struct Same<R (*)(A...), S (*)(B...)>
    : std::bool_constant<alike<R, S> && (alike<A, B> && ... && true)> {};

#define TENSORWIRE_COMPARE(result, name, ...) \
  static_assert(Same<decltype(ours::Library::name), decltype(&::name)>::value, #name);
TENSORWIRE_OPENSSL_FUNCTIONS(TENSORWIRE_COMPARE)
#undef TENSORWIRE_COMPARE
#endif

TEST_CASE("openssl: a process that forks while another thread uses it has it in the child") {
  using tensorwire::openssl::library;
  library();
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) library();
  });
  int failed = 0;
  for (int i = 0; i < 50 && failed == 0; ++i) {
    pid_t child = ::fork();
    if (child == 0) {
      ::alarm(5);
      library();
      ::_exit(0);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    failed += status != 0;
  }
  stop = true;
  busy.join();
  CHECK(failed == 0);
}
