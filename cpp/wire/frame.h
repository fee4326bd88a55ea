// Frames: what travels on a stream after the handshake. Pure: no sockets, no regions.
// docs/internals/wire.md has the layout and the exchange as tables.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tensorwire {

enum class FrameType : uint8_t {
  kWrite = 1,     // payload for a region of the receiver
  kRead = 2,      // asks for bytes of a region of the receiver
  kData = 3,      // payload that answers a kRead
  kSignal = 4,    // raises a word in a region of the receiver
  kFetchAdd = 5,  // adds to a word in a region of the receiver
  kDone = 6,      // answers kWrite (last), kRead (failed), kSignal, kFetchAdd, kFree
  kAllocate = 7,  // asks for a new region
  kLookup = 8,    // asks for a grant by name (body) or by id and generation (no body)
  kFree = 9,      // gives a region back
  kGrant = 10,    // answers kAllocate and kLookup; on shm the memory comes in a message beside it
  kAttach = 11,   // on shm: the page and doorbell of the sender, in a message beside it;
                  // of an rdma peer: its token (value) and where it listens (body)
  kGoodbye = 12,  // the sender closes; the body says why
  kKey = 13,      // rdma: address (value) and key (body) of the region of the kGrant that follows
  kRevoke = 14,   // rdma: a region was freed; with kLast: nothing is under way to it any more
};
inline constexpr uint8_t kLastFrameType = 14;

// Flags.
inline constexpr uint8_t kLast = 1;      // ends the transfer (kWrite, kSignal) or answer (kData)
inline constexpr uint8_t kAwait = 1;     // kLookup by name: the answer waits for such a region
inline constexpr uint8_t kReadable = 2;  // kGrant: peers may read
inline constexpr uint8_t kWritable = 4;  // kGrant, kAllocate: peers may write
inline constexpr uint8_t kOnGpu = 8;     // kGrant: the memory is that of a GPU
inline constexpr uint8_t kAllFlags = 15;

inline constexpr uint8_t kFrameMagic = 0x54;
inline constexpr size_t kMaxBodyBytes = 1024;         // of every frame but kWrite and kData
inline constexpr uint64_t kMaxChunkBytes = 1u << 20;  // payload of one kWrite or kData frame

// Exactly 64 bytes on the wire, little-endian, as it lies in memory.
struct Header {
  uint8_t magic = kFrameMagic;
  FrameType type = FrameType::kGoodbye;
  uint8_t flags = 0;
  uint8_t reserved = 0;
  uint16_t status = 0;  // a Code, in answers
  uint16_t reserved2 = 0;
  uint32_t reserved3 = 0;
  uint32_t region = 0;
  uint64_t generation = 0;
  uint64_t offset = 0;    // in the region; kData: in the byte stream of the transfer
  uint64_t length = 0;    // bytes that follow; kRead: bytes asked for
  uint64_t transfer = 0;  // chosen by whoever asks
  uint64_t total = 0;     // kWrite: all bytes of the transfer; kRead: where its answer goes in the
                          // transfer's byte stream; kAllocate, kGrant: bytes of the region
  uint64_t value = 0;     // kSignal, kFetchAdd: operand; kDone: old value
};
static_assert(sizeof(Header) == 64);

inline bool carries_payload(FrameType type) {
  return type == FrameType::kWrite || type == FrameType::kData;
}

// What a receiver does with the frames of one stream. A false return is a breach of the protocol:
// the stream must be closed, and breach() of the parser says why.
class FrameSink {
 public:
  virtual ~FrameSink() = default;
  // Where the payload goes: header.length bytes, or null to throw them away. The memory must stay
  // until end_payload or until the parser is told to discard.
  virtual bool begin_payload(const Header& header, std::byte** target) = 0;
  virtual bool end_payload(const Header& header) = 0;
  virtual bool control(const Header& header, std::string_view body) = 0;
};

// Cuts a byte stream into frames. Payload goes straight to its place when it is not buffered yet.
// Use: ask spans() where the next bytes may be received, receive, tell commit() how many came.
class FrameParser {
 public:
  explicit FrameParser(FrameSink& sink) : sink_(sink), buffer_(kBufferBytes) {}

  // At most two spans: the rest of the current payload, then the buffer. Never empty in total.
  size_t spans(std::array<std::span<std::byte>, 2>& result);
  // False on a breach; the parser is then unusable.
  bool commit(size_t received);
  // The target of the current payload must not be touched any more.
  void discard_target() { target_ = nullptr; }
  const std::byte* target() const { return in_payload_ ? target_ : nullptr; }
  FrameType type() const { return header_.type; }
  uint64_t payload_left() const { return in_payload_ && target_ != nullptr ? payload_left_ : 0; }
  uint64_t payload_bytes() const { return header_.length; }  // of the frame of payload_left()
  const char* breach() const { return breach_; }

  static constexpr size_t kBufferBytes = 32 << 10;
  static constexpr size_t kShortReadBytes = 2 << 10;

 private:
  bool fail(const char* why) {
    breach_ = why;
    return false;
  }
  bool consume();
  bool check_header();

  FrameSink& sink_;
  std::vector<std::byte> buffer_;
  size_t begin_ = 0, end_ = 0;  // unread bytes of buffer_
  Header header_;
  bool in_payload_ = false;
  bool last_was_large_ = false;
  std::byte* target_ = nullptr;  // next byte to place; null = discard
  uint64_t payload_left_ = 0;
  const char* breach_ = "";
};

}  // namespace tensorwire
