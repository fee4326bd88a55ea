// Frames of calls: their headers, and what a ring of them does at its end and with a hostile peer.
#include "rpc/line.h"

#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <vector>

#include "base/word.h"
#include "pair.h"

namespace tensorwire::rpc {
namespace {

std::string frame(uint32_t body, uint8_t kind = 1, uint8_t flags = 2, uint16_t zero = 0) {
  FrameHeader header{static_cast<uint32_t>(sizeof header + body), kind, flags, zero, 7, 9};
  std::string bytes(sizeof header, '\0');
  std::memcpy(bytes.data(), &header, sizeof header);
  for (uint32_t i = 0; i < body; ++i) bytes.push_back(static_cast<char>(i * 31 + body));
  return bytes;
}

// A ring of each end, and as the other end sees it.
struct Rings {
  explicit Rings(Pair& pair)
      : near(pair.near->allocate(kBytes, "near", {true, true})),
        far(pair.far->allocate(kBytes, "far", {true, true})),
        at_far(grant(*pair.to_far, *far)),
        at_near(grant(*pair.to_near, *near)) {}

  static constexpr uint64_t kBytes = kRingStart + kRingBytes;
  std::shared_ptr<Region> near, far;
  RemoteRegionPtr at_far, at_near;
};

std::span<const char> span_of(const std::string& bytes) { return {bytes.data(), bytes.size()}; }

}  // namespace

TEST_CASE("a header says what its frame is, or there is none") {
  auto header = first_frame(span_of(frame(5) + "behind"));
  CHECK(header.size == 21);
  CHECK(header.slot == 7);
  CHECK(header.generation == 9);
  std::string cut = frame(5);
  cut.pop_back();
  CHECK_THROWS_AS(first_frame(span_of(cut)), FrameError);
  CHECK_THROWS_AS(first_frame(span_of(cut.substr(0, 15))), FrameError);
  CHECK_THROWS_AS(first_frame({}), FrameError);
  for (uint8_t kind : {0, 11, 255}) {
    CHECK_THROWS_AS(first_frame(span_of(frame(5, kind))), FrameError);
  }
  CHECK_THROWS_AS(first_frame(span_of(frame(5, 1, 32))), FrameError);
  CHECK_THROWS_AS(first_frame(span_of(frame(5, 1, 2, 1))), FrameError);
  CHECK_THROWS_AS(first_frame(span_of(frame(5, kMessage, kMore))), FrameError);
  CHECK_NOTHROW(first_frame(span_of(frame(kPieceBytes, kMessage, kMore))));
  CHECK_NOTHROW(first_frame(span_of(frame(kMostFrameBytes - 16))));
  CHECK_THROWS_AS(first_frame(span_of(frame(kMostFrameBytes - 15))), FrameError);
  std::string tiny = frame(0);
  tiny[0] = 15;
  CHECK_THROWS_AS(first_frame(span_of(tiny + frame(0))), FrameError);
}

TEST_CASE("frames go round a ring, in order, as far as there is room") {
  for (const char* transport : kTransports) {
    Pair pair(transport);
    Rings rings(pair);
    LineWriter writer({pair.near, rings.near, rings.at_far, pair.to_far});
    LineReader reader({pair.far, rings.far, rings.at_near, pair.to_near});
    CHECK(writer.room() == kRingBytes);
    const std::vector<std::string> sent{frame(40'000), frame(3), frame(90'001), frame(0)};
    std::span<const char> body;
    for (int round = 0; round < 40; ++round) {
      std::string joined;
      for (const auto& each : sent) joined += each;
      CHECK(writer.wait_room(joined.size(), soon()));
      TransferPtr placed = writer.write(span_of(joined));
      CHECK(placed->wait(soon()));
      CHECK(reader.wait(soon()));
      reader.take();
      for (const auto& each : sent) {
        auto header = reader.next(body);
        REQUIRE(header);
        CHECK(std::string(body.data(), body.size()) == each.substr(16));
      }
      CHECK(!reader.next(body));
    }
    reader.take();
    CHECK(!reader.next(body));
  }
}

TEST_CASE("an end that counts what cannot be is found out") {
  Pair pair("shm");
  Rings rings(pair);
  LineWriter writer({pair.near, rings.near, rings.at_far, pair.to_far});
  LineReader reader({pair.far, rings.far, rings.at_near, pair.to_near});
  std::string whole = frame(8);
  writer.write(span_of(whole));
  reader.take();
  store_max(rings.far->data(), whole.size() + kRingBytes + 1);
  std::span<const char> body;
  reader.take();  // what was taken before comes first
  CHECK(reader.next(body));
  CHECK_THROWS_AS(reader.take(), FrameError);
  store_max(rings.near->data() + kTakenOffset, whole.size() + 1);
  CHECK_THROWS_AS(writer.room(), FrameError);
  auto small = pair.near->allocate(64, "small", {true, true});
  CHECK_THROWS_AS(LineEnd(pair.near, small, rings.at_far, pair.to_far), Error);
}

}  // namespace tensorwire::rpc
