// The handshake: mutual challenge and response before any frame. Pure: bytes in, bytes out, no
// sockets. docs/internals/wire.md has the messages as tables and design of the proof.
//
//   client                               server
//   Hello (nonce, incarnation, ...)  ->
//                                    <-  Hello (kind kChallenge, its own nonce, ...)
//   Proof (HMAC as client)           ->
//                                    <-  Welcome (status, session, HMAC as server)
//   Choice (transport)               ->
//                                    <-  Meeting, if shm was chosen: where descriptors go, or why
//                                        not, and then another Choice follows
//
// Both HMACs cover both Hellos, so roles, nonces, incarnations and offered transports cannot be
// changed, swapped or replayed.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/sha256.h"

namespace tensorwire {

enum TransportBit : uint32_t { kShmBit = 1, kTcpBit = 2, kRdmaBit = 4 };
// From a server that refuses a connection, with nothing but the kind in it. kBusy: it takes no more
// strangers just now; kEncrypts: it wants TLS; kPlain: it does not speak TLS.
enum class HelloKind : uint8_t {
  kClient = 1,
  kBusy = 2,
  kChallenge = 3,
  kEncrypts = 4,
  kPlain = 5
};

inline constexpr size_t kHelloBytes = 160;
inline constexpr size_t kProofBytes = 40;
inline constexpr size_t kWelcomeBytes = 160;
inline constexpr size_t kChoiceBytes = 16;
inline constexpr size_t kMeetingBytes = 16;
inline constexpr size_t kMaxNodeNameBytes = 63;
inline constexpr uint16_t kWireVersion = 3;

struct Hello {
  HelloKind kind = HelloKind::kClient;
  bool has_secret = false;
  uint32_t transports = 0;
  uint64_t incarnation = 0;
  std::array<uint8_t, 32> nonce{};
  std::array<uint8_t, 16> host{};  // equal on one host (a hash of its boot id)
  uint32_t pid = 0;
  uint16_t port = 0;  // where the sender listens
  std::string name;

  // That refuses a connection; it says nothing about its sender.
  static Hello refusal(HelloKind kind);
  std::array<uint8_t, kHelloBytes> encode() const;
  // Throws kInvalid on bytes that no honest sender makes.
  static Hello decode(std::span<const uint8_t, kHelloBytes> bytes);
};

struct Welcome {
  Status status;
  Digest proof{};

  std::array<uint8_t, kWelcomeBytes> encode() const;
  static Welcome decode(std::span<const uint8_t, kWelcomeBytes> bytes);
};

struct Choice {
  uint32_t transport = kTcpBit;
  uint64_t socket = 0;  // shm: the name of the client's DescriptorSocket

  std::array<uint8_t, kChoiceBytes> encode() const;
  // Throws kInvalid on bytes that no honest sender makes.
  static Choice decode(std::span<const uint8_t, kChoiceBytes> bytes);
};

struct Meeting {
  // kUnavailable: the client's socket cannot be reached; kBusy: no descriptors.
  Code code = Code::kOk;
  uint64_t socket = 0;  // the name of the server's DescriptorSocket

  std::array<uint8_t, kMeetingBytes> encode() const;
  // Throws kPeerLost on bytes that no honest sender makes.
  static Meeting decode(std::span<const uint8_t, kMeetingBytes> bytes);
};

using Secret = std::vector<uint8_t>;

// The keys that both sides derive from a secret and the two Hellos.
struct Keys {
  Digest client, server;
  Keys(std::span<const uint8_t> secret, std::span<const uint8_t, kHelloBytes> client_hello,
       std::span<const uint8_t, kHelloBytes> server_hello);
};

// Fresh random nonce.
std::array<uint8_t, 32> random_nonce();

// The server's half, fed with whatever arrives.
class ServerHandshake {
 public:
  struct Context {
    Hello me;  // kind, nonce and session are filled in here
    Secret secret;
    // Called after the proof; may refuse by returning a status that is not ok.
    std::function<Status()> admit;
    // Opens a socket for descriptors that the client's socket of this name can reach.
    std::function<Meeting(uint64_t name)> meet;
  };
  enum class State { kMore, kDone, kFailed };

  explicit ServerHandshake(Context context);
  // Bytes wanted next; never asks beyond the handshake.
  size_t wanted() const { return wanted_ - received_.size(); }
  // Takes at most wanted() bytes; appends what must be sent to `reply`.
  State feed(std::span<const uint8_t> bytes, std::vector<uint8_t>& reply);

  // Valid when done.
  const Hello& client() const { return client_; }
  uint32_t chosen() const { return chosen_; }
  // The client's Hello came; it has proved that it knows the secret, too.
  bool greeted() const { return step_ != Step::kHello; }
  bool proven() const { return proven_; }
  // Valid when failed.
  const Status& failure() const { return failure_; }

 private:
  enum class Step { kHello, kProof, kChoice, kOver };
  State fail(const std::string& why, Code code = Code::kInvalid);
  State refuse(const Status& status, std::vector<uint8_t>& reply);
  State on_hello(std::vector<uint8_t>& reply);
  State on_proof(std::vector<uint8_t>& reply);
  State on_choice(std::vector<uint8_t>& reply);

  Context context_;
  Step step_ = Step::kHello;
  size_t wanted_ = kHelloBytes;
  std::vector<uint8_t> received_;
  std::array<uint8_t, kHelloBytes> client_bytes_{}, server_bytes_{};
  Hello client_;
  bool proven_ = false;
  bool met_ = false;  // shm was tried
  uint32_t chosen_ = 0;
  Status failure_;
};

}  // namespace tensorwire
