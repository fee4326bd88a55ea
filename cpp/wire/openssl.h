// The used part of OpenSSL 3 (openssl.org), declared here so that a machine without it builds the
// same library; the system's libssl is loaded at run time, so a wheel carries no copy of it and its
// security updates are the system's. The interface and these numbers are stable for all of 3.x.
// cpp/tests/openssl_test.cc compares them with OpenSSL's own headers where there are any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tensorwire::openssl {

struct Method;
struct Context;
struct Ssl;
struct Session;
struct Cipher;
struct Digest;
struct Store;
struct Bio;
struct BioMethod;

inline constexpr int kTls13 = 0x0304;
// SSL_CTX_ctrl
inline constexpr int kSetMode = 33, kSetReadAhead = 41, kSetSessionCache = 44, kSetMinimum = 123;
inline constexpr long kPartialWrite = 1, kMovingBuffer = 2;
inline constexpr uint64_t kNoTicket = 1 << 14;
inline constexpr int kVerifyPeer = 1;
// SSL_get_error
inline constexpr int kErrorSsl = 1, kWantRead = 2, kZeroReturn = 6;
inline constexpr int kUpdateNotRequested = 0;
// BIO
inline constexpr int kSourceSink = 0x0400, kFlagRead = 1, kFlagRetry = 8;
inline constexpr int kControlEof = 2, kControlFlush = 11;
// Reasons of errors: alerts of the other side, and what is seen here.
inline constexpr int kReasonMask = 0x7FFFFF, kLibraryShift = 23, kLibrarySsl = 20;
inline constexpr int kAlertHandshakeFailure = 1040, kAlertIllegalParameter = 1047,
                     kAlertDecryptError = 1051, kCertificateVerifyFailed = 134,
                     kBinderDoesNotVerify = 253;

using Bytes = const unsigned char*;
using UsePsk = int (*)(Ssl*, const Digest*, Bytes* identity, size_t* size, Session**);
using FindPsk = int (*)(Ssl*, Bytes identity, size_t size, Session**);
using Verify = int (*)(int, Store*);
using BioWrite = int (*)(Bio*, const char*, int);
using BioRead = int (*)(Bio*, char*, int);
using BioControl = long (*)(Bio*, int, long, void*);

// OpenSSL's functions, by their own names: USE(result, name, arguments...) for each.
#define TENSORWIRE_OPENSSL_FUNCTIONS(USE)                             \
  USE(const Method*, TLS_method)                                      \
  USE(Context*, SSL_CTX_new, const Method*)                           \
  USE(long, SSL_CTX_ctrl, Context*, int, long, void*)                 \
  USE(uint64_t, SSL_CTX_set_options, Context*, uint64_t)              \
  USE(int, SSL_CTX_set_ciphersuites, Context*, const char*)           \
  USE(int, SSL_CTX_set_num_tickets, Context*, size_t)                 \
  USE(void, SSL_CTX_set_default_read_buffer_len, Context*, size_t)    \
  USE(void, SSL_CTX_set_psk_use_session_callback, Context*, UsePsk)   \
  USE(void, SSL_CTX_set_psk_find_session_callback, Context*, FindPsk) \
  USE(Ssl*, SSL_new, Context*)                                        \
  USE(void, SSL_free, Ssl*)                                           \
  USE(void, SSL_set_verify, Ssl*, int, Verify)                        \
  USE(void, SSL_set_bio, Ssl*, Bio*, Bio*)                            \
  USE(void, SSL_set_accept_state, Ssl*)                               \
  USE(void, SSL_set_connect_state, Ssl*)                              \
  USE(int, SSL_do_handshake, Ssl*)                                    \
  USE(int, SSL_get_error, const Ssl*, int)                            \
  USE(int, SSL_read_ex, Ssl*, void*, size_t, size_t*)                 \
  USE(int, SSL_write_ex, Ssl*, const void*, size_t, size_t*)          \
  USE(int, SSL_shutdown, Ssl*)                                        \
  USE(int, SSL_key_update, Ssl*, int)                                 \
  USE(int, SSL_session_reused, const Ssl*)                            \
  USE(int, SSL_set_ex_data, Ssl*, int, void*)                         \
  USE(void*, SSL_get_ex_data, const Ssl*, int)                        \
  USE(const Cipher*, SSL_CIPHER_find, Ssl*, Bytes)                    \
  USE(Session*, SSL_SESSION_new)                                      \
  USE(void, SSL_SESSION_free, Session*)                               \
  USE(int, SSL_SESSION_set1_master_key, Session*, Bytes, size_t)      \
  USE(int, SSL_SESSION_set_cipher, Session*, const Cipher*)           \
  USE(int, SSL_SESSION_set_protocol_version, Session*, int)           \
  USE(BioMethod*, BIO_meth_new, int, const char*)                     \
  USE(int, BIO_meth_set_write, BioMethod*, BioWrite)                  \
  USE(int, BIO_meth_set_read, BioMethod*, BioRead)                    \
  USE(int, BIO_meth_set_ctrl, BioMethod*, BioControl)                 \
  USE(Bio*, BIO_new, const BioMethod*)                                \
  USE(void, BIO_set_init, Bio*, int)                                  \
  USE(void, BIO_set_data, Bio*, void*)                                \
  USE(void*, BIO_get_data, Bio*)                                      \
  USE(void, BIO_set_flags, Bio*, int)                                 \
  USE(void, BIO_clear_flags, Bio*, int)                               \
  USE(unsigned long, ERR_get_error)                                   \
  USE(void, ERR_clear_error)                                          \
  USE(const char*, ERR_reason_error_string, unsigned long)

struct Library {
#define TENSORWIRE_DECLARE(result, name, ...) result (*name)(__VA_ARGS__);
  TENSORWIRE_OPENSSL_FUNCTIONS(TENSORWIRE_DECLARE)
#undef TENSORWIRE_DECLARE
};

// Loads OpenSSL once per process: the file named by TENSORWIRE_OPENSSL, else libssl.so.3 from the
// default path, which is the copy of this process if it has one. Any thread. Throws kUnavailable,
// with the package to install.
const Library& library();

}  // namespace tensorwire::openssl
