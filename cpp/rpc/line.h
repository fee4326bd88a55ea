// Frames of calls between two processes: written into memory of the other end over and over, in
// order, and read there. docs/internals/rpc-wire.md has the tables.
//
// Each end has a ring, a region of 64 bytes and kRingBytes. Its first word counts all bytes ever
// written into it; its second counts the bytes of this end's own writes that the other end has
// read, which gives the room for further writes. Bytes up to the first word are complete and in
// order: the word of a write waits for all writes before.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/spin.h"
#include "node/node.h"

namespace tensorwire::rpc {

inline constexpr uint64_t kRingStart = 64;
inline constexpr uint64_t kRingBytes = 1 << 19;
inline constexpr uint64_t kTakenOffset = 8;

// The other end has sent, or counts, what cannot be. Nothing that follows can be understood.
class FrameError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct FrameHeader {
  uint32_t size;  // of the frame, with this header
  uint8_t kind;
  uint8_t flags;
  uint16_t zero;
  uint32_t slot;  // the call's number
  uint32_t generation;
};
static_assert(sizeof(FrameHeader) == 16);

inline constexpr uint8_t kCall = 1, kMessage = 2, kEnd = 3, kLastKind = 7;
inline constexpr uint8_t kMore = 1, kAllFlags = 31;
inline constexpr uint32_t kPieceBytes = 48 << 10;
// At most one method, two blocks of metadata and one piece.
inline constexpr uint32_t kMostFrameBytes =
    sizeof(FrameHeader) + 256 + (1 << 16) + 2 * (16 << 10) + kPieceBytes;

// The header of the frame that these bytes begin with; all of the frame is there. Throws FrameError
// if they begin with none.
FrameHeader first_frame(std::span<const char> bytes);

// The common base of the two directions of an end.
struct LineEnd {
  // memory: this end's ring. other: that of the other end. Throws kUnavailable if one of them has
  // another size.
  LineEnd(std::shared_ptr<Node> node, std::shared_ptr<Region> memory, RemoteRegionPtr other,
          PeerPtr peer);

  const std::shared_ptr<Node> node;
  const std::shared_ptr<Region> memory;
  const RemoteRegionPtr other;
  const PeerPtr peer;
};

// The receiving direction. One thread at a time, which another reader may interrupt while it waits.
class LineReader {
 public:
  // The other end is told how far this one has read.
  explicit LineReader(LineEnd end);
  ~LineReader();
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;

  // Waits until there is something to take. False if the deadline passed (or a signal came).
  // Throws as Node::wait_word.
  bool wait(Deadline deadline);
  // What the first word has to be for that.
  uint64_t awaited() const { return taken_ + 1; }
  // Copies what there is, behind what was not read yet. Throws FrameError (the other end counts
  // more than fits), kClosed, and as Peer::signal, unless something is left to read.
  void take();
  // The next frame, if there is one: its header, and its body until the next call. Throws
  // FrameError: what follows is none.
  std::optional<FrameHeader> next(std::span<const char>& body);

 private:
  void copy(uint64_t from, uint64_t size);

  const LineEnd end_;
  const bool by_socket_;
  Pace pace_;
  std::string bytes_;
  uint64_t calls_ = 0;  // that begin or end in what was taken last
  size_t at_ = 0;
  uint64_t taken_ = 0, told_ = 0;
};

// The sending direction. One thread at a time.
class LineWriter {
 public:
  // The other end's ring is written into; in this one's it tells how far it has read.
  explicit LineWriter(LineEnd end) : end_(std::move(end)) {}

  // Bytes that can be written now. Throws FrameError (the other end has read more than there was),
  // kClosed.
  uint64_t room() const;
  // Waits for room for `bytes`. False if the deadline passed (or a signal came). Throws as
  // Node::wait_word.
  bool wait_room(uint64_t bytes, Deadline deadline) const;
  // The write before, if it is still under way. It may be done with the next look.
  TransferPtr under_way();
  // Starts to write as many bytes as there is room for, after the last write. The bytes must stay
  // until the returned transfer is done. Throws as Peer::write.
  TransferPtr write(std::span<const char> bytes);
  const PeerPtr& peer() const { return end_.peer; }

 private:
  const LineEnd end_;
  uint64_t written_ = 0;
  TransferPtr under_way_;
};

}  // namespace tensorwire::rpc
