// The handshake. Raw bytes go into the decoders and the server; a second client knows the secrets
// and does to an honest exchange what the input asks for: flips, swaps, replays, lies. Nobody may
// pass who does not hold the key, and whoever does everything right must.
#include <optional>
#include <vector>

#include "base/error.h"
#include "expect.h"
#include "wire/handshake.h"

namespace tensorwire::fuzz {
namespace {

using State = ServerHandshake::State;
using HelloBytes = std::array<uint8_t, kHelloBytes>;

const Secret kSecret = {'n', 'o', 'b', 'o', 'd', 'y', ' ', 'g', 'u', 'e', 's', 's', 'e', 's'};
constexpr uint64_t kClientIncarnation = 0x1122334455667788;

template <size_t N>
std::array<uint8_t, N> fill(std::span<const uint8_t> bytes) {
  std::array<uint8_t, N> result{};
  std::copy_n(bytes.begin(), std::min(N, bytes.size()), result.begin());
  return result;
}

Hello client_hello(bool has_secret) {
  Hello hello;
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
    EXPECT(again.proof == decoded.proof);
  } catch (const Error& error) {
    EXPECT(error.code() == Code::kPeerLost);
  }
  auto choice = fill<kChoiceBytes>(input.take(kChoiceBytes));
  try {
    EXPECT(Choice::decode(choice).encode() == choice);
  } catch (const Error& error) {
    EXPECT(error.code() == Code::kInvalid);
  }
  auto meeting = fill<kMeetingBytes>(input.take(kMeetingBytes));
  try {
    Meeting decoded = Meeting::decode(meeting);
    EXPECT((decoded.code == Code::kOk) == (decoded.socket != 0));
  } catch (const Error& error) {
    EXPECT(error.code() == Code::kPeerLost);
  }
}

// A server, with what its Node would know.
struct Server {
  explicit Server(uint8_t options) : secret(options & 2 ? kSecret : Secret{}), full(options & 8) {
    ServerHandshake::Context context;
    context.me.incarnation = 0x99;
    context.me.transports = options & 4 ? kTcpBit : kShmBit | kTcpBit;
    context.me.name = "server";
    context.secret = secret;
    bool apart = options & 1;
    context.admit = [this]() -> Status {
      EXPECT(!admitted);
      if (full) return {Code::kBusy, "full"};
      admitted = true;
      return {};
    };
    context.meet = [this, apart](uint64_t name) -> Meeting {
      EXPECT(admitted && met == 0 && name != 0);
      met = name;
      return apart ? Meeting{Code::kUnavailable, 0} : Meeting{Code::kOk, 5};
    };
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
      EXPECT(reply.size() <= kHelloBytes + kWelcomeBytes + kMeetingBytes);
    }
    if (state == State::kFailed) {
      EXPECT(!handshake->failure().ok());
      std::vector<uint8_t> more;
      EXPECT(handshake->feed(fill<1>({}), more) == State::kFailed && more.empty());
    }
    return state;
  }

  const Secret secret;
  const bool full;  // the Node has no room
  bool admitted = false;
  uint64_t met = 0;
  std::optional<ServerHandshake> handshake;
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
  EXPECT(!server.admitted);
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
  auto choices = input;
  Server server(options);

  HelloBytes mine = client_hello(!server.secret.empty()).encode();
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

  Secret key = server.secret;
  if (trick == kWrongKey) key.push_back(how | 1);  // HMAC does not see zeros at the end of a key
  HelloBytes proved = mine;
  if (trick == kFlipTranscript) proved[where % kHelloBytes] ^= how;
  Keys keys(key, proved, theirs);
  auto proof = fill<kProofBytes>(trick == kServerProof ? keys.server : keys.client);
  if (trick == kFlipProof) proof[where % 32] ^= how;
  if (trick == kReplay) {
    Server other(options);
    std::vector<uint8_t> challenge;
    other.feed(mine, 255, challenge);
    proof = fill<kProofBytes>(Keys(key, mine, fill<kHelloBytes>(challenge)).client);
  }

  bool honest = trick == kHonest || trick == kChangeHello ||
                ((trick == kFlipProof || trick == kFlipTranscript) && how == 0);
  // A hello that was accepted with a byte changed: what it says now decides.
  Hello sent = Hello::decode(mine);
  bool secrets_agree = sent.has_secret == !server.secret.empty();
  state = server.feed(proof, cut, reply);
  EXPECT(reply.size() == kWelcomeBytes);
  Welcome welcome = Welcome::decode(fill<kWelcomeBytes>(reply));
  if (!honest || !secrets_agree || server.full) {
    EXPECT(state == State::kFailed && !welcome.status.ok());
    EXPECT(welcome.proof == Digest{} && !server.admitted);
    return;
  }
  EXPECT(welcome.status.ok() && same_digest(welcome.proof, keys.server));
  EXPECT(state == State::kMore && server.admitted);
  // Choices: often good ones; shm may be tried once.
  const uint32_t offered = sent.transports & (options & 4 ? kTcpBit : kShmBit | kTcpBit);
  for (bool tried = false; state == State::kMore;) {
    Choice choice{1u << choices.byte() % 3, 0};
    if (choice.transport == kShmBit) choice.socket = choices.number<uint64_t>() | 1;
    auto bytes = choice.encode();
    size_t at = choices.byte();
    uint8_t flip = choices.byte();
    bool flipped = at < kChoiceBytes && flip != 0;
    if (flipped) bytes[at] ^= flip;
    reply.clear();
    state = server.feed(bytes, cut, reply);
    if (flipped) return;
    bool good = (choice.transport & offered) && !(choice.transport == kShmBit && tried);
    bool apart = choice.transport == kShmBit && options & 1;
    EXPECT(state == (!good ? State::kFailed : apart ? State::kMore : State::kDone));
    if (!good) return;
    EXPECT(reply.size() == (choice.transport == kShmBit ? kMeetingBytes : 0));
    EXPECT(choice.transport != kShmBit || server.met == choice.socket);
    tried = tried || choice.transport == kShmBit;
  }
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
