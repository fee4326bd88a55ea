// The frame parser, fed in cuts that the input chooses. A second, obvious reading of the same bytes
// says what the sink must be told, in which order, and when nothing more can be told yet.
//
// Input: how many cuts, the cuts (each 0 also takes the target of the payload away), the stream.
#include <memory>
#include <string_view>

#include "base/error.h"
#include "expect.h"
#include "wire/frame.h"

namespace tensorwire::fuzz {
namespace {

// What must not come out of check_header, read off docs/internals/wire.md once more.
bool well_formed(const Header& header) {
  const auto type = static_cast<uint8_t>(header.type);
  bool payload = type == 1 || type == 3, asks = type == 2;
  uint64_t limit = payload ? kMaxChunkBytes : asks ? UINT64_MAX : kMaxBodyBytes;
  auto s = header.status;
  bool answers = s == 0 || s == 3 || s == 4 || (s >= 6 && s <= 10);
  return header.magic == 0x54 && type >= 1 && type <= 14 && header.flags < 16 &&
         header.reserved == 0 && header.reserved2 == 0 && header.reserved3 == 0 && answers &&
         header.length <= limit;
}

class Checker : public FrameSink {
 public:
  explicit Checker(std::span<const uint8_t> stream) : stream_(stream) {}

  bool begin_payload(const Header& header, std::byte** target) override {
    expect_header(header);
    EXPECT(carries_payload(header.type));
    payload_ = header.length;
    discarded_ = header.region % 4 == 3;
    if (!discarded_ && payload_ > 0) {
      // Exactly as long as it must be, so that the sanitizer sees a byte too many.
      memory_ = std::make_unique_for_overwrite<std::byte[]>(payload_);
      *target = memory_.get();
    }
    in_payload_ = true;
    return !(refused_ = header.generation == kRefused);
  }

  bool end_payload(const Header& header) override {
    EXPECT(in_payload_ && header.length == payload_);
    EXPECT(at_ + payload_ <= fed_);
    if (!discarded_ && payload_ > 0) {
      EXPECT(std::memcmp(memory_.get(), stream_.data() + at_, payload_) == 0);
    }
    memory_.reset();
    at_ += payload_;
    in_payload_ = false;
    return !(refused_ = header.offset == kRefused);
  }

  bool control(const Header& header, std::string_view body) override {
    expect_header(header);
    EXPECT(!carries_payload(header.type));
    EXPECT(body.size() <= kMaxBodyBytes);
    EXPECT(body.size() == (header.type == FrameType::kRead ? 0 : header.length));
    EXPECT(at_ + body.size() <= fed_);
    if (!body.empty()) EXPECT(std::memcmp(body.data(), stream_.data() + at_, body.size()) == 0);
    at_ += body.size();
    return !(refused_ = header.generation == kRefused);
  }

  void feed(size_t size) { fed_ += size; }
  size_t at() const { return at_; }
  // Where the parser may put the rest of a payload right now; null if nowhere.
  const std::byte* memory() const { return discarded_ ? nullptr : memory_.get(); }
  void discard() {
    discarded_ = true;
    memory_.reset();  // a later write to it is seen
  }

  // Whatever has arrived whole was told, and nothing else.
  void expect_caught_up(const FrameParser& parser) const {
    size_t left = fed_ - at_;
    if (in_payload_) {
      EXPECT(left < payload_);
      EXPECT(parser.target() == (memory() ? memory() + left : nullptr));
      return;
    }
    EXPECT(parser.target() == nullptr);
    if (left < sizeof(Header)) return;
    Header header;
    std::memcpy(&header, stream_.data() + at_, sizeof header);
    EXPECT(well_formed(header) && !carries_payload(header.type));
    EXPECT(header.type != FrameType::kRead && left < sizeof(Header) + header.length);
  }
  // The parser says no: to what is malformed, or because the sink said so.
  void expect_breach() const {
    if (refused_) return;
    EXPECT(!in_payload_ && fed_ - at_ >= sizeof(Header));
    Header header;
    std::memcpy(&header, stream_.data() + at_, sizeof header);
    EXPECT(!well_formed(header));
  }

 private:
  static constexpr uint64_t kRefused = 0xfefefefefefefefe;

  void expect_header(const Header& header) {
    EXPECT(!in_payload_);
    EXPECT(at_ + sizeof header <= fed_);
    EXPECT(std::memcmp(&header, stream_.data() + at_, sizeof header) == 0);
    EXPECT(well_formed(header));
    at_ += sizeof header;
  }

  std::span<const uint8_t> stream_;
  size_t fed_ = 0, at_ = 0;
  bool in_payload_ = false, discarded_ = false, refused_ = false;
  uint64_t payload_ = 0;
  std::unique_ptr<std::byte[]> memory_;
};

void run(Input input) {
  auto cuts = input.take(input.byte() % 32);
  auto stream = input.take(input.size());
  Checker sink(stream);
  FrameParser parser(sink);
  for (size_t turn = 0; !stream.empty(); ++turn) {
    uint8_t cut = cuts.empty() ? 255 : cuts[turn % cuts.size()];
    if (cut == 0 && parser.target() != nullptr) {
      parser.discard_target();
      sink.discard();
    }
    std::array<std::span<std::byte>, 2> spans;
    size_t count = parser.spans(spans), fed = 0;
    size_t wanted = cut == 255 ? stream.size() : cut + 1u;
    EXPECT(count >= 1 && count <= 2);
    for (size_t i = 0; i < count && fed < wanted; ++i) {
      size_t step = std::min({wanted - fed, spans[i].size(), stream.size()});
      std::memcpy(spans[i].data(), stream.data(), step);
      stream = stream.subspan(step);
      fed += step;
    }
    EXPECT(fed > 0);
    sink.feed(fed);
    if (!parser.commit(fed)) {
      EXPECT(*parser.breach() != 0);
      return sink.expect_breach();
    }
    EXPECT(*parser.breach() == 0);
    sink.expect_caught_up(parser);
  }
}

}  // namespace
}  // namespace tensorwire::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  tensorwire::fuzz::run({data, size});
  return 0;
}
