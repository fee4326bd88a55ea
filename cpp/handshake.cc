#include "handshake.h"

#include <sys/random.h>

#include <algorithm>
#include <cstring>

#include "region.h"
#include "text.h"

namespace tensorwire {
namespace {

constexpr char kMagic[8] = {'T', 'W', 'I', 'R', 'E', 'v', '0', '1'};
constexpr size_t kMessageBytes = 112;
constexpr size_t kKindAt = 10;  // in a Hello, see encode()

template <class T>
void put(uint8_t* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

template <class T>
T get(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

}  // namespace

std::array<uint8_t, 32> random_nonce() {
  std::array<uint8_t, 32> nonce;
  while (::getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size())) {
  }
  return nonce;
}

std::array<uint8_t, kHelloBytes> Hello::encode() const {
  std::array<uint8_t, kHelloBytes> bytes{};
  uint8_t* p = bytes.data();
  std::memcpy(p, kMagic, 8);
  put<uint16_t>(p + 8, kWireVersion);
  p[10] = static_cast<uint8_t>(kind);
  p[11] = has_secret ? 1 : 0;
  put(p + 12, transports);
  put(p + 16, incarnation);
  put(p + 24, session);
  std::memcpy(p + 32, nonce.data(), 32);
  std::memcpy(p + 64, host.data(), 16);
  put(p + 80, pid);
  put(p + 84, port);
  size_t length = std::min(name.size(), kMaxNodeNameBytes);
  p[86] = static_cast<uint8_t>(length);
  std::memcpy(p + 88, name.data(), length);
  return bytes;
}

Hello Hello::decode(std::span<const uint8_t, kHelloBytes> bytes) {
  const uint8_t* p = bytes.data();
  if (std::memcmp(p, kMagic, 8) != 0) throw Error(Code::kInvalid, "not a tensorwire handshake");
  if (auto version = get<uint16_t>(p + 8); version != kWireVersion) {
    throw Error(Code::kInvalid, "the peer speaks version " + std::to_string(version) +
                                    " of the wire protocol, this Node version " +
                                    std::to_string(kWireVersion) +
                                    "; install the same tensorwire on both sides");
  }
  Hello hello;
  if (p[10] < 1 || p[10] > 3 || p[11] > 1 || p[86] > kMaxNodeNameBytes || p[87] != 0) {
    throw Error(Code::kInvalid, "malformed hello");
  }
  if (!std::all_of(p + 88 + p[86], p + kHelloBytes, [](uint8_t b) { return b == 0; })) {
    throw Error(Code::kInvalid, "malformed hello");
  }
  hello.kind = static_cast<HelloKind>(p[10]);
  hello.has_secret = p[11] == 1;
  hello.transports = get<uint32_t>(p + 12);
  hello.incarnation = get<uint64_t>(p + 16);
  hello.session = get<uint64_t>(p + 24);
  std::memcpy(hello.nonce.data(), p + 32, 32);
  std::memcpy(hello.host.data(), p + 64, 16);
  hello.pid = get<uint32_t>(p + 80);
  hello.port = get<uint16_t>(p + 84);
  hello.name.assign(reinterpret_cast<const char*>(p + 88), p[86]);
  if (hello.incarnation == 0 || !presentable(hello.name)) {
    throw Error(Code::kInvalid, "malformed hello");
  }
  return hello;
}

std::array<uint8_t, kWelcomeBytes> Welcome::encode() const {
  std::array<uint8_t, kWelcomeBytes> bytes{};
  put(bytes.data(), static_cast<uint16_t>(status.code));
  size_t length = std::min(status.message.size(), kMessageBytes);
  bytes[2] = static_cast<uint8_t>(length);
  put(bytes.data() + 8, session);
  std::memcpy(bytes.data() + 16, proof.data(), 32);
  std::memcpy(bytes.data() + 48, status.message.data(), length);
  return bytes;
}

Welcome Welcome::decode(std::span<const uint8_t, kWelcomeBytes> bytes) {
  Welcome welcome;
  auto code = get<uint16_t>(bytes.data());
  if (code > kLastCode || bytes[2] > kMessageBytes) {
    throw Error(Code::kPeerLost, "malformed answer in the handshake");
  }
  welcome.status.code = static_cast<Code>(code);
  welcome.status.message.assign(reinterpret_cast<const char*>(bytes.data() + 48), bytes[2]);
  if (!presentable(welcome.status.message)) welcome.status.message = "(unprintable)";
  welcome.session = get<uint64_t>(bytes.data() + 8);
  std::memcpy(welcome.proof.data(), bytes.data() + 16, 32);
  return welcome;
}

Keys::Keys(std::span<const uint8_t> secret, std::span<const uint8_t, kHelloBytes> client_hello,
           std::span<const uint8_t, kHelloBytes> server_hello) {
  std::vector<uint8_t> transcript(client_hello.begin(), client_hello.end());
  transcript.insert(transcript.end(), server_hello.begin(), server_hello.end());
  // HMAC fills a key up with zeros and hashes one that is longer than a block: such secrets would
  // equal others but for their length. (The keys of sessions all have the same.)
  bool of_session = client_hello[kKindAt] == static_cast<uint8_t>(HelloKind::kAttach);
  bool ends_in_zero = !secret.empty() && secret.back() == 0;
  if (!of_session && (ends_in_zero || secret.size() > kHmacBlockBytes)) {
    transcript.resize(2 * kHelloBytes + sizeof(uint64_t));
    put<uint64_t>(transcript.data() + 2 * kHelloBytes, secret.size());
  }
  client = hmac(secret, "tensorwire client proof", transcript);
  server = hmac(secret, "tensorwire server proof", transcript);
  session = hmac(secret, "tensorwire session key.", transcript);
}

ServerHandshake::ServerHandshake(Context context) : context_(std::move(context)) {}

ServerHandshake::State ServerHandshake::feed(std::span<const uint8_t> bytes,
                                             std::vector<uint8_t>& reply) {
  if (step_ == Step::kOver || bytes.size() > wanted()) {
    failure_ = {Code::kInvalid, "bytes beyond the handshake"};
    return State::kFailed;
  }
  received_.insert(received_.end(), bytes.begin(), bytes.end());
  if (wanted() > 0) return State::kMore;
  State state = State::kMore;
  switch (step_) {
    case Step::kHello:
      state = on_hello(reply);
      break;
    case Step::kProof:
      state = on_proof(reply);
      break;
    case Step::kChoice: {
      chosen_ = get<uint32_t>(received_.data());
      // shm is chosen by attaching on the unix socket.
      if ((chosen_ != kTcpBit && chosen_ != kRdmaBit) ||
          (chosen_ & context_.me.transports & client_.transports) == 0 ||
          get<uint32_t>(received_.data() + 4) != 0) {
        failure_ = {Code::kInvalid, "a transport was chosen that was not offered"};
        state = State::kFailed;
      } else {
        state = State::kDone;
      }
      step_ = Step::kOver;
      break;
    }
    case Step::kOver:
      break;
  }
  received_.clear();
  return state;
}

ServerHandshake::State ServerHandshake::refuse(Status status, std::vector<uint8_t>& reply) {
  failure_ = status;
  step_ = Step::kOver;
  Welcome welcome;
  welcome.status = std::move(status);
  auto bytes = welcome.encode();
  reply.insert(reply.end(), bytes.begin(), bytes.end());
  return State::kFailed;
}

ServerHandshake::State ServerHandshake::on_hello(std::vector<uint8_t>& reply) {
  std::copy(received_.begin(), received_.end(), client_bytes_.begin());
  try {
    client_ = Hello::decode(client_bytes_);
  } catch (const Error& error) {
    // Whoever it is does not speak our protocol: nothing is answered.
    failure_ = {error.code(), error.what()};
    step_ = Step::kOver;
    return State::kFailed;
  }
  bool attach = client_.kind == HelloKind::kAttach;
  if (client_.kind == HelloKind::kChallenge || attach != context_.attach_only) {
    failure_ = {Code::kInvalid, "this kind of stream is not accepted here"};
    step_ = Step::kOver;
    return State::kFailed;
  }
  key_ = context_.secret;
  if (attach) {
    auto session = context_.find_session(client_.session);
    // An unknown session gets a key that nobody has.
    bool known = session && session->client.incarnation == client_.incarnation;
    session_is_over_ = !session;
    auto key = known ? session->key : random_nonce();
    key_.assign(key.begin(), key.end());
    session_ = client_.session;
  } else {
    session_ = random_id();
  }
  Hello me = context_.me;
  me.kind = HelloKind::kChallenge;
  me.has_secret = !context_.secret.empty();
  me.nonce = random_nonce();
  server_bytes_ = me.encode();
  reply.insert(reply.end(), server_bytes_.begin(), server_bytes_.end());
  step_ = Step::kProof;
  wanted_ = kProofBytes;
  return State::kMore;
}

ServerHandshake::State ServerHandshake::on_proof(std::vector<uint8_t>& reply) {
  bool attach = client_.kind == HelloKind::kAttach;
  bool mine = !context_.secret.empty();
  if (!attach && mine != client_.has_secret) {
    return refuse({Code::kPermission, mine ? "this Node has a secret and the caller has none"
                                           : "this Node has no secret and the caller has one"},
                  reply);
  }
  Keys keys(key_, client_bytes_, server_bytes_);
  Digest offered;
  std::memcpy(offered.data(), received_.data(), offered.size());
  if (session_is_over_) {
    return refuse(
        {Code::kBusy,
         "the session is over; out of descriptors (ulimit -n) or handshakes, or too slow? "
         "Connect again"},
        reply);
  }
  if (!same_digest(offered, keys.client)) {
    return refuse({Code::kPermission, "wrong secret"}, reply);
  }
  if (!attach) {
    Session session{keys.session, client_};
    if (Status status = context_.open_session(session_, session); !status.ok()) {
      return refuse(std::move(status), reply);
    }
  }
  Welcome welcome;
  welcome.session = session_;
  welcome.proof = keys.server;
  auto bytes = welcome.encode();
  reply.insert(reply.end(), bytes.begin(), bytes.end());
  if (attach) {
    chosen_ = kShmBit;
    step_ = Step::kOver;
    return State::kDone;
  }
  step_ = Step::kChoice;
  wanted_ = kChoiceBytes;
  return State::kMore;
}

}  // namespace tensorwire
