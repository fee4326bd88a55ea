// The frame parser: every cut of a stream gives the same frames, and payload lands in its place.
// What breaks the format is in tests/peers/test_lying_members.py and in fuzz/frame_fuzz.cc.
#include "wire/frame.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"

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
    return true;
  }
  bool end_payload(const Header& header) override {
    std::string bytes(reinterpret_cast<const char*>(payload.data()), payload.size());
    events.push_back({Event::kEnd, header, std::move(bytes)});
    return true;
  }
  bool control(const Header& header, std::string_view body) override {
    events.push_back({Event::kControl, header, std::string(body)});
    return true;
  }

  static constexpr uint64_t kUnwanted = 1000;
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

}  // namespace
}  // namespace tensorwire
