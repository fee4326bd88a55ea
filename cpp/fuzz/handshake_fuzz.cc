// The handshake. Raw bytes go into the decoders and the server; a second client knows the secrets
// and does to an honest exchange what the input asks for: flips, swaps, replays, lies. Nobody may
// pass who does not hold the key, and whoever does everything right must.
#include <map>
#include <vector>

#include "error.h"
#include "expect.h"
#include "handshake.h"

namespace tensorwire::fuzz {
namespace {

using State = ServerHandshake::State;
using HelloBytes = std::array<uint8_t, kHelloBytes>;

const Secret kSecret = {'n', 'o', 'b', 'o', 'd', 'y', ' ', 'g', 'u', 'e', 's', 's', 'e', 's'};
constexpr uint64_t kKnownSession = 77, kClientIncarnation = 0x1122334455667788;

template <size_t N>
std::array<uint8_t, N> fill(std::span<const uint8_t> bytes) {
  std::array<uint8_t, N> result{};
  std::copy_n(bytes.begin(), std::min(N, bytes.size()), result.begin());
  return result;
}

Digest session_key() {
  Digest key;
  key.fill(0x5a);
  return key;
}

Hello client_hello(bool attach, bool has_secret) {
  Hello hello;
  hello.kind = attach ? HelloKind::kAttach : HelloKind::kSession;
  hello.session = attach ? kKnownSession : 0;
  hello.has_secret = has_secret;
  hello.transports = kShmBit | kTcpBit;
  hello.incarnation = kClientIncarnation;
  hello.name = "client";
  hello.port = 99;
  return hello;
}

void decoders(Input input) {
  auto hello = fill<kHelloBytes>(input.take(kHelloBytes));
  try {
    Hello decoded = Hello::decode(hello);
    EXPECT(decoded.encode() == hello);
    EXPECT(decoded.name.size() <= kMaxNodeNameBytes && decoded.incarnation != 0);
  } catch (const Error& error) {
    EXPECT(error.code() == Code::kInvalid);
  }
  auto welcome = fill<kWelcomeBytes>(input.take(kWelcomeBytes));
  try {
    Welcome decoded = Welcome::decode(welcome), again = Welcome::decode(decoded.encode());
    EXPECT(again.status.code == decoded.status.code);
    EXPECT(again.status.message == decoded.status.message);
    EXPECT(again.session == decoded.session && again.proof == decoded.proof);
  } catch (const Error& error) {
    EXPECT(error.code() == Code::kPeerLost);
  }
}

// A server, with what its Node would know.
class Server {
 public:
  Server(uint8_t options) : attach(options & 1), secret(options & 2 ? kSecret : Secret{}) {
    ServerHandshake::Context context;
    context.me.incarnation = 0x99;
    context.me.transports = options & 4 ? kTcpBit : kShmBit | kTcpBit;
    context.me.name = "server";
    context.secret = secret;
    context.attach_only = attach;
    context.find_session = [](uint64_t id) -> std::optional<Session> {
      if (id != kKnownSession) return std::nullopt;
      return Session{session_key(), client_hello(false, true)};
    };
    bool full = options & 8;
    context.open_session = [this, full](uint64_t id, const Session& session) -> Status {
      EXPECT(id != 0 && opened == 0);
      if (full) return {Code::kBusy, "full"};
      opened = id;
      opened_key = session.key;
      return {};
    };
    full_ = full;
    handshake.emplace(std::move(context));
  }

  // Feeds in the given cuts, never more than wanted. kMore as long as bytes are missing.
  State feed(std::span<const uint8_t> bytes, uint8_t cut, std::vector<uint8_t>& reply) {
    State state = State::kMore;
    while (!bytes.empty() && state == State::kMore) {
      size_t wanted = handshake->wanted();
      EXPECT(wanted > 0 && wanted <= kHelloBytes);
      size_t step = std::min({bytes.size(), wanted, cut + size_t{1}});
      state = handshake->feed(bytes.first(step), reply);
      bytes = bytes.subspan(step);
      EXPECT(reply.size() <= kHelloBytes + kWelcomeBytes);
    }
    if (state == State::kFailed) {
      EXPECT(!handshake->failure().ok());
      std::vector<uint8_t> more;
      EXPECT(handshake->feed(fill<1>({}), more) == State::kFailed && more.empty());
    }
    return state;
  }
  bool full() const { return full_; }

  bool attach;
  Secret secret;
  uint64_t opened = 0;
  Digest opened_key{};
  std::optional<ServerHandshake> handshake;

 private:
  bool full_ = false;
};

// Somebody who does not know any key.
void stranger(Input input) {
  uint8_t options = input.byte() | 2, cut = input.byte();
  Server server(options);
  std::vector<uint8_t> reply;
  while (!input.empty()) {
    auto bytes = input.take(server.handshake->wanted());
    State state = server.feed(bytes, cut, reply);
    EXPECT(state != State::kDone);
    if (state == State::kFailed) break;
  }
  EXPECT(server.opened == 0);
  // A challenge at the most, and a refusal: never a welcome.
  EXPECT(reply.size() <= kHelloBytes ||
         Welcome::decode(fill<kWelcomeBytes>(std::span(reply).subspan(kHelloBytes))).status.code ==
             Code::kPermission);
}

// What is done to the exchange.
enum Trick : uint8_t {
  kHonest,
  kFlipProof,
  kServerProof,     // the server's words, reflected
  kSessionKey,      // the key itself as proof
  kFlipTranscript,  // a proof over other hellos
  kWrongKey,
  kReplay,       // a proof that another server accepted
  kChangeHello,  // any byte of the hello, proved as sent
  kTricks,
};

void insider(Input input) {
  const uint8_t options = input.byte(), cut = input.byte();
  const auto trick = static_cast<Trick>(input.byte() % kTricks);
  const uint8_t where = input.byte(), how = input.byte();
  const auto choice = input.number<uint64_t>();
  Server server(options);

  HelloBytes mine = client_hello(server.attach, !server.secret.empty()).encode();
  bool changed = trick == kChangeHello && how != 0;
  if (changed) mine[where % kHelloBytes] ^= how;

  std::vector<uint8_t> reply;
  State state = server.feed(mine, cut, reply);
  if (state == State::kFailed) {
    EXPECT(changed && reply.empty());
    return;
  }
  EXPECT(state == State::kMore && reply.size() == kHelloBytes);
  HelloBytes theirs = fill<kHelloBytes>(reply);
  EXPECT(Hello::decode(theirs).kind == HelloKind::kChallenge);
  reply.clear();

  Digest attach_key = session_key();
  Secret key = server.attach ? Secret(attach_key.begin(), attach_key.end()) : server.secret;
  if (trick == kWrongKey) key.push_back(how | 1);  // HMAC does not see zeros at the end of a key
  HelloBytes proved = mine;
  if (trick == kFlipTranscript) proved[where % kHelloBytes] ^= how;
  Keys keys(key, proved, theirs);
  auto proof = fill<kProofBytes>(trick == kServerProof  ? keys.server
                                 : trick == kSessionKey ? keys.session
                                                        : keys.client);
  if (trick == kFlipProof) proof[where % 32] ^= how;
  if (trick == kReplay) {
    Server other(options);
    std::vector<uint8_t> challenge;
    other.feed(mine, 255, challenge);
    proof = fill<kProofBytes>(Keys(key, mine, fill<kHelloBytes>(challenge)).client);
  }

  bool honest = trick == kHonest || trick == kChangeHello ||
                ((trick == kFlipProof || trick == kFlipTranscript) && how == 0);
  bool known = true, secrets_agree = true;
  if (changed) {
    // The hello was accepted with a byte changed: what it says now decides.
    Hello sent = Hello::decode(mine);
    secrets_agree = server.attach || sent.has_secret == !server.secret.empty();
    known =
        !server.attach || (sent.session == kKnownSession && sent.incarnation == kClientIncarnation);
  }
  state = server.feed(proof, cut, reply);
  EXPECT(reply.size() == kWelcomeBytes);
  Welcome welcome = Welcome::decode(fill<kWelcomeBytes>(reply));
  if (!honest || !known || !secrets_agree || (server.full() && !server.attach)) {
    EXPECT(state == State::kFailed && !welcome.status.ok());
    EXPECT(welcome.proof == Digest{} && server.opened == 0);
    return;
  }
  EXPECT(welcome.status.ok() && same_digest(welcome.proof, keys.server));
  if (server.attach) {
    EXPECT(state == State::kDone && server.opened == 0 && welcome.session == kKnownSession);
    return;
  }
  EXPECT(state == State::kMore && server.opened == welcome.session);
  EXPECT(same_digest(server.opened_key, keys.session));
  state =
      server.feed(fill<kChoiceBytes>({reinterpret_cast<const uint8_t*>(&choice), 8}), cut, reply);
  bool offered = choice == kTcpBit && (Hello::decode(mine).transports & kTcpBit);
  EXPECT(state == (offered ? State::kDone : State::kFailed));
}

}  // namespace
}  // namespace tensorwire::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tensorwire::fuzz;
  Input input(data, size);
  switch (input.byte() % 3) {
    case 0:
      decoders(input);
      break;
    case 1:
      stranger(input);
      break;
    default:
      insider(input);
  }
  return 0;
}
