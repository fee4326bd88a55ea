#include "wire/handshake.h"

#include <sys/random.h>

#include <algorithm>
#include <cstring>

#include "base/text.h"

namespace tensorwire {
namespace {

constexpr char kMagic[8] = {'T', 'W', 'I', 'R', 'E', 'v', '0', '1'};
constexpr size_t kMessageBytes = 112;

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

Hello Hello::refusal(HelloKind kind) {
  Hello hello;
  hello.kind = kind;
  hello.incarnation = 1;  // never 0
  return hello;
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
  if (p[10] < 1 || p[10] > 5 || p[11] > 1 || p[86] > kMaxNodeNameBytes || p[87] != 0 ||
      get<uint64_t>(p + 24) != 0) {
    throw Error(Code::kInvalid, "malformed hello");
  }
  if (!std::all_of(p + 88 + p[86], p + kHelloBytes, [](uint8_t b) { return b == 0; })) {
    throw Error(Code::kInvalid, "malformed hello");
  }
  hello.kind = static_cast<HelloKind>(p[10]);
  hello.has_secret = p[11] == 1;
  hello.transports = get<uint32_t>(p + 12);
  hello.incarnation = get<uint64_t>(p + 16);
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
  welcome.status.message = presented({reinterpret_cast<const char*>(bytes.data() + 48), bytes[2]});
  std::memcpy(welcome.proof.data(), bytes.data() + 16, 32);
  return welcome;
}

std::array<uint8_t, kChoiceBytes> Choice::encode() const {
  std::array<uint8_t, kChoiceBytes> bytes{};
  put(bytes.data(), transport);
  put(bytes.data() + 8, socket);
  return bytes;
}

Choice Choice::decode(std::span<const uint8_t, kChoiceBytes> bytes) {
  Choice choice{get<uint32_t>(bytes.data()), get<uint64_t>(bytes.data() + 8)};
  if (get<uint32_t>(bytes.data() + 4) != 0 ||
      (choice.socket != 0) != (choice.transport == kShmBit)) {
    throw Error(Code::kInvalid, "malformed choice of a transport");
  }
  return choice;
}

std::array<uint8_t, kMeetingBytes> Meeting::encode() const {
  std::array<uint8_t, kMeetingBytes> bytes{};
  put(bytes.data(), static_cast<uint16_t>(code));
  put(bytes.data() + 8, socket);
  return bytes;
}

Meeting Meeting::decode(std::span<const uint8_t, kMeetingBytes> bytes) {
  auto code = get<uint16_t>(bytes.data());
  Meeting meeting{static_cast<Code>(code), get<uint64_t>(bytes.data() + 8)};
  bool ok = code == 0;
  if (code > kLastCode || ok != (meeting.socket != 0)) {
    throw Error(Code::kPeerLost, "malformed answer in the handshake");
  }
  return meeting;
}

Keys::Keys(std::span<const uint8_t> secret, std::span<const uint8_t, kHelloBytes> client_hello,
           std::span<const uint8_t, kHelloBytes> server_hello) {
  std::vector<uint8_t> transcript(client_hello.begin(), client_hello.end());
  transcript.insert(transcript.end(), server_hello.begin(), server_hello.end());
  // HMAC fills a key up with zeros and hashes one that is longer than a block: such secrets would
  // equal others but for their length.
  bool ends_in_zero = !secret.empty() && secret.back() == 0;
  if ((ends_in_zero || secret.size() > kHmacBlockBytes)) {
    transcript.resize(2 * kHelloBytes + sizeof(uint64_t));
    put<uint64_t>(transcript.data() + 2 * kHelloBytes, secret.size());
  }
  client = hmac(secret, "tensorwire client proof", transcript);
  server = hmac(secret, "tensorwire server proof", transcript);
}

ServerHandshake::ServerHandshake(Context context) : context_(std::move(context)) {}

ServerHandshake::State ServerHandshake::feed(std::span<const uint8_t> bytes,
                                             std::vector<uint8_t>& reply) {
  if (step_ == Step::kOver || bytes.size() > wanted()) return fail("bytes beyond the handshake");
  received_.insert(received_.end(), bytes.begin(), bytes.end());
  if (wanted() > 0) return State::kMore;
  State state = step_ == Step::kHello   ? on_hello(reply)
                : step_ == Step::kProof ? on_proof(reply)
                                        : on_choice(reply);
  received_.clear();
  return state;
}

ServerHandshake::State ServerHandshake::fail(const std::string& why, Code code) {
  failure_ = {code, why};
  step_ = Step::kOver;
  return State::kFailed;
}

ServerHandshake::State ServerHandshake::refuse(const Status& status, std::vector<uint8_t>& reply) {
  auto bytes = Welcome{.status = status}.encode();
  reply.insert(reply.end(), bytes.begin(), bytes.end());
  return fail(status.message, status.code);
}

ServerHandshake::State ServerHandshake::on_hello(std::vector<uint8_t>& reply) {
  std::copy(received_.begin(), received_.end(), client_bytes_.begin());
  try {
    client_ = Hello::decode(client_bytes_);
  } catch (const Error& error) {
    // Whoever it is does not speak our protocol: nothing is answered.
    return fail(error.what(), error.code());
  }
  if (client_.kind != HelloKind::kClient) return fail("only a client may begin");
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
  bool mine = !context_.secret.empty();
  if (mine != client_.has_secret) {
    return refuse({Code::kPermission, mine ? "this Node has a secret and the caller has none"
                                           : "this Node has no secret and the caller has one"},
                  reply);
  }
  Keys keys(context_.secret, client_bytes_, server_bytes_);
  Digest offered;
  std::memcpy(offered.data(), received_.data(), offered.size());
  if (!same_digest(offered, keys.client)) {
    return refuse({Code::kPermission, "wrong secret"}, reply);
  }
  if (Status status = context_.admit(); !status.ok()) return refuse(status, reply);
  proven_ = true;
  auto bytes = Welcome{.status = {}, .proof = keys.server}.encode();
  reply.insert(reply.end(), bytes.begin(), bytes.end());
  step_ = Step::kChoice;
  wanted_ = kChoiceBytes;
  return State::kMore;
}

ServerHandshake::State ServerHandshake::on_choice(std::vector<uint8_t>& reply) {
  Choice choice;
  try {
    choice = Choice::decode(std::span(received_).first<kChoiceBytes>());
  } catch (const Error& error) {
    return fail(error.what());
  }
  chosen_ = choice.transport;
  bool one = chosen_ == kShmBit || chosen_ == kTcpBit || chosen_ == kRdmaBit;
  if (!one || (chosen_ & context_.me.transports & client_.transports) == 0) {
    return fail("a transport was chosen that was not offered");
  }
  if (chosen_ == kShmBit) {
    if (met_) return fail("shm was chosen twice");
    met_ = true;
    Meeting meeting = context_.meet(choice.socket);
    auto bytes = meeting.encode();
    reply.insert(reply.end(), bytes.begin(), bytes.end());
    if (meeting.code != Code::kOk) return State::kMore;  // the client chooses another one
  }
  step_ = Step::kOver;
  return State::kDone;
}

}  // namespace tensorwire
