#include "wire/frame.h"

#include <algorithm>

#include "base/error.h"

namespace tensorwire {

size_t FrameParser::spans(std::array<std::span<std::byte>, 2>& result) {
  size_t count = 0;
  if (in_payload_ && begin_ == end_ && target_ != nullptr) {
    result[count++] = {target_, static_cast<size_t>(payload_left_)};
  }
  if (begin_ == end_) begin_ = end_ = 0;
  // What is unread is less than one frame without payload, so there is always room.
  if (begin_ > 0 && buffer_.size() - end_ < sizeof(Header) + kMaxBodyBytes) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  size_t room = buffer_.size() - end_;
  // After a large payload another one is likely: what lands in the buffer must be copied again.
  if (count == 0 && end_ == 0 && last_was_large_) room = kShortReadBytes;
  result[count++] = {buffer_.data() + end_, room};
  return count;
}

bool FrameParser::commit(size_t received) {
  if (in_payload_ && begin_ == end_ && target_ != nullptr) {
    size_t placed = std::min<uint64_t>(received, payload_left_);
    target_ += placed;
    payload_left_ -= placed;
    received -= placed;
    if (payload_left_ == 0) {
      in_payload_ = false;
      if (!sink_.end_payload(header_)) return fail("payload refused");
    }
  }
  end_ += received;
  return consume();
}

namespace {

// What the owner of memory can answer. The other codes tell what happened on the asker's own side:
// it closed, lost the peer, waited for too long, or passed an argument of the wrong type.
bool is_answer(uint16_t status) {
  switch (static_cast<Code>(status)) {
    case Code::kOk:
    case Code::kStaleHandle:
    case Code::kBusy:
    case Code::kUnavailable:
    case Code::kInvalid:
    case Code::kPermission:
    case Code::kNotFound:
    case Code::kNoMemory:
      return true;
    default:
      return false;
  }
}

}  // namespace

bool FrameParser::check_header() {
  const auto type = static_cast<uint8_t>(header_.type);
  if (header_.magic != kFrameMagic) return fail("not a frame");
  if (type == 0 || type > kLastFrameType) return fail("unknown frame type");
  if ((header_.flags & ~kAllFlags) != 0 || header_.reserved != 0 || header_.reserved2 != 0 ||
      header_.reserved3 != 0) {
    return fail("reserved bits are set");
  }
  if (!is_answer(header_.status)) return fail("a status that is no answer");
  if (carries_payload(header_.type)) {
    if (header_.length > kMaxChunkBytes) return fail("payload longer than a chunk");
  } else if (header_.type != FrameType::kRead && header_.length > kMaxBodyBytes) {
    return fail("body too long");
  }
  return true;
}

bool FrameParser::consume() {
  for (;;) {
    if (in_payload_) {
      size_t take = std::min<uint64_t>(end_ - begin_, payload_left_);
      if (take > 0 && target_ != nullptr) {
        std::memcpy(target_, buffer_.data() + begin_, take);
        target_ += take;
      }
      begin_ += take;
      payload_left_ -= take;
      if (payload_left_ > 0) return true;
      in_payload_ = false;
      if (!sink_.end_payload(header_)) return fail("payload refused");
    }
    if (end_ - begin_ < sizeof(Header)) return true;
    std::memcpy(&header_, buffer_.data() + begin_, sizeof(Header));
    if (!check_header()) return false;
    if (carries_payload(header_.type)) {
      begin_ += sizeof(Header);
      target_ = nullptr;
      if (!sink_.begin_payload(header_, &target_)) return fail("payload refused");
      payload_left_ = header_.length;
      last_was_large_ = header_.length >= kBufferBytes;
      in_payload_ = true;
      continue;
    }
    size_t body = header_.type == FrameType::kRead ? 0 : static_cast<size_t>(header_.length);
    if (end_ - begin_ < sizeof(Header) + body) return true;
    const char* text = reinterpret_cast<const char*>(buffer_.data() + begin_ + sizeof(Header));
    begin_ += sizeof(Header) + body;
    if (!sink_.control(header_, {text, body})) return fail("frame refused");
  }
}

}  // namespace tensorwire
