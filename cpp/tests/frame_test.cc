// The frame parser: every cut of a stream gives the same frames, payload lands in its place, and
// whatever breaks the format ends the stream.
#include "frame.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "error.h"

namespace tensorwire {
namespace {

struct Event {
  enum Kind { kControl, kBegin, kEnd } kind;
  Header header;
  std::string bytes;
  bool operator==(const Event& other) const {
    return kind == other.kind && bytes == other.bytes &&
           std::memcmp(&header, &other.header, sizeof header) == 0;
  }
};

class Recorder : public FrameSink {
 public:
  bool begin_payload(const Header& header, std::byte** target) override {
    events.push_back({Event::kBegin, header, {}});
    payload.assign(header.length, std::byte{0});
    *target = header.transfer == kUnwanted ? nullptr : payload.data();
    return header.transfer != kRefused;
  }
  bool end_payload(const Header& header) override {
    std::string bytes(reinterpret_cast<const char*>(payload.data()), payload.size());
    events.push_back({Event::kEnd, header, std::move(bytes)});
    return header.value != kRefused;
  }
  bool control(const Header& header, std::string_view body) override {
    events.push_back({Event::kControl, header, std::string(body)});
    return header.transfer != kRefused;
  }

  static constexpr uint64_t kUnwanted = 1000, kRefused = 1001;
  std::vector<Event> events;
  std::vector<std::byte> payload;
};

std::string bytes_of(const Header& header, const std::string& rest = {}) {
  return std::string(reinterpret_cast<const char*>(&header), sizeof header) + rest;
}

std::string pattern(size_t size) {
  std::string text(size, '\0');
  for (size_t i = 0; i < size; ++i) text[i] = static_cast<char>(i * 31 + (i >> 8));
  return text;
}

Header header_of(FrameType type, uint64_t length, uint64_t transfer = 7) {
  Header header;
  header.type = type;
  header.length = length;
  header.transfer = transfer;
  header.region = 3;
  header.generation = 0x1122334455667788;
  return header;
}

// Feeds pieces of at most the given sizes, in turn. False on a breach.
bool feed(FrameParser& parser, std::string_view stream, const std::vector<size_t>& cuts) {
  for (size_t turn = 0; !stream.empty(); ++turn) {
    std::array<std::span<std::byte>, 2> spans;
    size_t count = parser.spans(spans);
    size_t left = std::min(cuts[turn % cuts.size()], stream.size()), fed = 0;
    for (size_t i = 0; i < count && left > 0; ++i) {
      size_t step = std::min(left, spans[i].size());
      std::memcpy(spans[i].data(), stream.data(), step);
      stream.remove_prefix(step);
      left -= step;
      fed += step;
    }
    REQUIRE(fed > 0);
    if (!parser.commit(fed)) return false;
  }
  return true;
}

std::vector<Event> parse(const std::string& stream, const std::vector<size_t>& cuts) {
  Recorder sink;
  FrameParser parser(sink);
  REQUIRE(feed(parser, stream, cuts));
  return sink.events;
}

std::string one_of_each() {
  std::string stream;
  stream += bytes_of(header_of(FrameType::kLookup, 4), "name");
  stream += bytes_of(header_of(FrameType::kWrite, 300), pattern(300));
  stream += bytes_of(header_of(FrameType::kRead, 1u << 30));  // asks; nothing follows
  stream += bytes_of(header_of(FrameType::kData, 0));
  stream += bytes_of(header_of(FrameType::kWrite, 70, Recorder::kUnwanted), pattern(70));
  stream += bytes_of(header_of(FrameType::kSignal, 0));
  stream += bytes_of(header_of(FrameType::kDone, kMaxBodyBytes), pattern(kMaxBodyBytes));
  stream += bytes_of(header_of(FrameType::kGoodbye, 3), "bye");
  return stream;
}

TEST_CASE("frame: the layout is 64 little-endian bytes") {
  Header header;
  header.type = FrameType::kWrite;
  header.flags = kLast;
  header.status = 0x0201;
  header.region = 0x04030201;
  header.generation = 0x0807060504030201;
  header.offset = 1;
  header.length = 2;
  header.transfer = 3;
  header.total = 4;
  header.value = 0xff00000000000005;
  const std::string bytes = bytes_of(header);
  CHECK(bytes.size() == 64);
  CHECK(bytes.substr(0, 16) ==
        std::string("\x54\x01\x01\0\x01\x02\0\0\0\0\0\0\x01\x02\x03\x04", 16));
  CHECK(bytes.substr(16, 8) == "\x01\x02\x03\x04\x05\x06\x07\x08");
  for (int field = 0; field < 5; ++field) CHECK(bytes[24 + 8 * field] == field + 1);
  CHECK(bytes[63] == '\xff');
}

TEST_CASE("frame: whatever the cuts, the frames are the same") {
  const std::string stream = one_of_each();
  const auto expected = parse(stream, {stream.size()});
  REQUIRE(expected.size() == 11);
  CHECK(expected[0].bytes == "name");
  CHECK(expected[2].bytes == pattern(300));
  CHECK(expected[3].kind == Event::kControl);
  CHECK(expected[7].bytes == std::string(70, '\0'));  // thrown away
  CHECK(expected[9].bytes == pattern(kMaxBodyBytes));
  CHECK(expected[10].bytes == "bye");
  for (size_t step = 1; step < 200; ++step) CHECK(parse(stream, {step}) == expected);
  for (size_t cut = 1; cut < stream.size(); ++cut) {
    CHECK(parse(stream, {cut, stream.size() - cut}) == expected);
  }
  CHECK(parse(stream, {1, 64, 3, 1000, 65, 63}) == expected);
}

TEST_CASE("frame: the buffer never runs out of room") {
  std::string stream;
  for (int i = 0; i < 200; ++i) {
    stream +=
        bytes_of(header_of(FrameType::kLookup, kMaxBodyBytes - i), pattern(kMaxBodyBytes - i));
  }
  const auto expected = parse(stream, {stream.size()});
  CHECK(expected.size() == 200);
  for (size_t step :
       {size_t{1000}, size_t{1087}, FrameParser::kBufferBytes - 1, FrameParser::kBufferBytes}) {
    CHECK(parse(stream, {step}) == expected);
  }
}

TEST_CASE("frame: payload is received in its place") {
  Recorder sink;
  FrameParser parser(sink);
  const std::string payload = pattern(kMaxChunkBytes);
  REQUIRE(feed(parser, bytes_of(header_of(FrameType::kWrite, payload.size())), {64}));
  std::array<std::span<std::byte>, 2> spans;
  REQUIRE(parser.spans(spans) == 2);
  CHECK(spans[0].data() == sink.payload.data());
  CHECK(spans[0].size() == payload.size());
  CHECK(parser.target() == sink.payload.data());
  std::memcpy(spans[0].data(), payload.data(), 1000);
  REQUIRE(parser.commit(1000));
  REQUIRE(parser.spans(spans) == 2);
  CHECK(spans[0].data() == sink.payload.data() + 1000);
  CHECK(spans[0].size() == payload.size() - 1000);
  // One read may bring the rest and the next frames.
  std::memcpy(spans[0].data(), payload.data() + 1000, spans[0].size());
  const std::string next = bytes_of(header_of(FrameType::kSignal, 0));
  std::memcpy(spans[1].data(), next.data(), next.size());
  REQUIRE(parser.commit(spans[0].size() + next.size()));
  REQUIRE(sink.events.size() == 3);
  CHECK(sink.events[1].bytes == payload);
  CHECK(sink.events[2].kind == Event::kControl);
  CHECK(parser.target() == nullptr);
}

TEST_CASE("frame: after discard_target the memory is not touched") {
  Recorder sink;
  FrameParser parser(sink);
  REQUIRE(feed(parser, bytes_of(header_of(FrameType::kWrite, 100), pattern(40)), {200}));
  REQUIRE(parser.target() == sink.payload.data() + 40);
  parser.discard_target();
  CHECK(parser.target() == nullptr);
  std::array<std::span<std::byte>, 2> spans;
  CHECK(parser.spans(spans) == 1);
  std::string rest = pattern(60) + bytes_of(header_of(FrameType::kSignal, 0));
  REQUIRE(feed(parser, rest, {7}));
  REQUIRE(sink.events.size() == 3);
  CHECK(sink.events[1].bytes == pattern(40) + std::string(60, '\0'));
}

// What the parser says of a frame that differs from a good one by one change.
std::string breach(FrameType type, uint64_t length, const std::function<void(Header&)>& change) {
  Recorder sink;
  FrameParser parser(sink);
  Header header = header_of(type, length);
  change(header);
  bool ok = feed(parser, bytes_of(header), {64});
  CHECK(ok == (std::string(parser.breach()).empty()));
  if (!ok) CHECK(sink.events.empty());
  return parser.breach();
}

TEST_CASE("frame: what is not a frame is refused before anybody sees it") {
  auto none = [](Header&) {};
  CHECK(breach(FrameType::kSignal, 0, none).empty());
  CHECK(breach(FrameType::kSignal, 0, [](Header& h) { h.magic ^= 1; }) == "not a frame");
  for (int type : {0, int{kLastFrameType} + 1, 255}) {
    CHECK(breach(static_cast<FrameType>(type), 0, none) == "unknown frame type");
  }
  for (int bit = 3; bit < 8; ++bit) {
    auto set = [bit](Header& h) { h.flags = static_cast<uint8_t>(1u << bit); };
    CHECK(breach(FrameType::kSignal, 0, set) == "reserved bits are set");
  }
  CHECK(breach(FrameType::kSignal, 0, [](Header& h) { h.reserved = 1; }) ==
        "reserved bits are set");
  CHECK(breach(FrameType::kSignal, 0, [](Header& h) { h.reserved2 = 1; }) ==
        "reserved bits are set");
  CHECK(breach(FrameType::kSignal, 0, [](Header& h) { h.reserved3 = 1u << 31; }) ==
        "reserved bits are set");
  // An owner does not say of the asker that it closed, lost its peer, waited or passed a wrong
  // type.
  for (uint16_t status = 0; status <= kLastCode + 1; ++status) {
    auto code = static_cast<Code>(status);
    bool ours = code == Code::kClosed || code == Code::kPeerLost || code == Code::kTimeout ||
                code == Code::kType || status > kLastCode;
    CHECK(breach(FrameType::kDone, 0, [status](Header& h) { h.status = status; }) ==
          (ours ? "a status that is no answer" : ""));
  }
}

TEST_CASE("frame: lengths are limited") {
  auto none = [](Header&) {};
  for (FrameType type : {FrameType::kWrite, FrameType::kData}) {
    CHECK(breach(type, kMaxChunkBytes, none).empty());
    CHECK(breach(type, kMaxChunkBytes + 1, none) == "payload longer than a chunk");
    CHECK(breach(type, ~uint64_t{0}, none) == "payload longer than a chunk");
  }
  for (uint8_t type = 1; type <= kLastFrameType; ++type) {
    auto each = static_cast<FrameType>(type);
    if (carries_payload(each) || each == FrameType::kRead) continue;
    CHECK(breach(each, kMaxBodyBytes, none).empty());
    CHECK(breach(each, kMaxBodyBytes + 1, none) == "body too long");
    CHECK(breach(each, ~uint64_t{0}, none) == "body too long");
  }
  CHECK(breach(FrameType::kRead, ~uint64_t{0}, none).empty());
}

TEST_CASE("frame: what the sink refuses ends the stream") {
  auto refused = [](const Header& header, const std::string& rest) {
    Recorder sink;
    FrameParser parser(sink);
    CHECK_FALSE(feed(parser, bytes_of(header, rest), {4096}));
    return std::string(parser.breach());
  };
  CHECK(refused(header_of(FrameType::kSignal, 0, Recorder::kRefused), {}) == "frame refused");
  CHECK(refused(header_of(FrameType::kWrite, 4, Recorder::kRefused), {}) == "payload refused");
  Header late = header_of(FrameType::kWrite, 4);
  late.value = Recorder::kRefused;
  CHECK(refused(late, "1234") == "payload refused");
}

}  // namespace
}  // namespace tensorwire
