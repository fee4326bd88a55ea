// The handshake: mutual challenge and response before any frame. Pure: bytes in, bytes out, no
// sockets. docs/wire.md has the messages as tables and design of the proof.
//
//   client                               server
//   Hello (nonce, incarnation, ...)  ->
//                                    <-  Hello (kind kChallenge, its own nonce, ...)
//   Proof (HMAC as client)           ->
//                                    <-  Welcome (status, session, HMAC as server)
//   Choice (transport of this stream) ->     a session stream only
//
// Both HMACs cover both Hellos, so roles, nonces, incarnations and offered transports cannot be
// changed, swapped or replayed. A further stream of a session (kind kAttach) does the same with
// the session's key instead of the job's secret.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "error.h"
#include "sha256.h"

namespace tensorwire {

enum TransportBit : uint32_t { kShmBit = 1, kTcpBit = 2, kRdmaBit = 4 };
enum class HelloKind : uint8_t { kSession = 1, kAttach = 2, kChallenge = 3 };

inline constexpr size_t kHelloBytes = 160;
inline constexpr size_t kProofBytes = 40;
inline constexpr size_t kWelcomeBytes = 160;
inline constexpr size_t kChoiceBytes = 8;
inline constexpr size_t kMaxNodeNameBytes = 63;
inline constexpr uint16_t kWireVersion = 1;

struct Hello {
  HelloKind kind = HelloKind::kSession;
  bool has_secret = false;
  uint32_t transports = 0;
  uint64_t incarnation = 0;
  uint64_t session = 0;  // kAttach only
  std::array<uint8_t, 32> nonce{};
  std::array<uint8_t, 16> host{};  // equal on one host (a hash of its boot id)
  uint32_t pid = 0;
  uint16_t port = 0;  // where the sender listens
  std::string name;

  std::array<uint8_t, kHelloBytes> encode() const;
  // Throws kInvalid on bytes that no honest sender makes.
  static Hello decode(std::span<const uint8_t, kHelloBytes> bytes);
};

struct Welcome {
  Status status;
  uint64_t session = 0;
  Digest proof{};

  std::array<uint8_t, kWelcomeBytes> encode() const;
  static Welcome decode(std::span<const uint8_t, kWelcomeBytes> bytes);
};

using Secret = std::vector<uint8_t>;

// What both sides derive from a secret and the two Hellos.
struct Keys {
  Digest client, server, session;
  Keys(std::span<const uint8_t> secret, std::span<const uint8_t, kHelloBytes> client_hello,
       std::span<const uint8_t, kHelloBytes> server_hello);
};

// Fresh random nonce.
std::array<uint8_t, 32> random_nonce();

// A session that was opened on one stream and may be attached to by another.
struct Session {
  Digest key{};
  Hello client;
};

// The server's half, fed with whatever arrives.
class ServerHandshake {
 public:
  struct Context {
    Hello me;  // kind, nonce and session are filled in here
    Secret secret;
    bool attach_only = false;  // a unix socket takes only further streams of known sessions
    std::function<std::optional<Session>(uint64_t id)> find_session;
    // May refuse by returning a status that is not ok. Called after the proof, for new sessions.
    std::function<Status(uint64_t id, const Session&)> open_session;
  };
  enum class State { kMore, kDone, kFailed };

  explicit ServerHandshake(Context context);
  // Bytes wanted next; never asks beyond the handshake.
  size_t wanted() const { return wanted_ - received_.size(); }
  // Takes at most wanted() bytes; appends what must be sent to `reply`.
  State feed(std::span<const uint8_t> bytes, std::vector<uint8_t>& reply);

  // Valid when done.
  const Hello& client() const { return client_; }
  uint64_t session() const { return session_; }
  uint32_t chosen() const { return chosen_; }
  // Valid when failed.
  const Status& failure() const { return failure_; }

 private:
  enum class Step { kHello, kProof, kChoice, kOver };
  State refuse(Status status, std::vector<uint8_t>& reply);
  State on_hello(std::vector<uint8_t>& reply);
  State on_proof(std::vector<uint8_t>& reply);

  Context context_;
  Step step_ = Step::kHello;
  size_t wanted_ = kHelloBytes;
  std::vector<uint8_t> received_;
  std::array<uint8_t, kHelloBytes> client_bytes_{}, server_bytes_{};
  Hello client_;
  Secret key_;
  uint64_t session_ = 0;
  bool session_is_over_ = false;
  uint32_t chosen_ = 0;
  Status failure_;
};

}  // namespace tensorwire
