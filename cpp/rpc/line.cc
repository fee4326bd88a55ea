#include "rpc/line.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/word.h"

namespace tensorwire::rpc {
namespace {

constexpr uint64_t kTellBytes = kRingBytes / 4;
// So many calls that come together keep the cores busy: to be woken costs each of them little, and
// to look at a socket meanwhile costs more.
constexpr uint64_t kCrowd = 3;

void check_usable(const Region& memory) {
  if (!memory.mapping->usable()) {
    throw Error(Code::kClosed,
                "the line of calls belongs to the process that this one was forked from");
  }
}

// The value of a word that the other end raises.
uint64_t word_of(const Region& memory, uint64_t offset) {
  check_usable(memory);
  uint64_t value = word_at(memory.data() + offset).load(std::memory_order_acquire);
  if (memory.mapping->gone()) throw Error(Code::kClosed, "the line of calls is closed");
  return value;
}

void check_size(const Region& memory, const RemoteRegion& other) {
  if (memory.size != kRingStart + kRingBytes || other.size != kRingStart + kRingBytes) {
    throw Error(Code::kUnavailable, "a ring has " + std::to_string(kRingStart + kRingBytes) +
                                        " bytes, and these have " + std::to_string(memory.size) +
                                        " and " + std::to_string(other.size));
  }
}

}  // namespace

FrameHeader first_frame(std::span<const char> bytes) {
  FrameHeader header;
  if (bytes.size() < sizeof header) {
    throw FrameError(std::to_string(bytes.size()) + " bytes are no frame");
  }
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.size < sizeof header || header.size > bytes.size() || header.size > kMostFrameBytes) {
    throw FrameError("a frame of " + std::to_string(header.size) + " bytes in " +
                     std::to_string(bytes.size()));
  }
  if (header.kind == 0 || header.kind > kLastKind || header.zero != 0 ||
      (header.flags & ~kAllFlags) != 0) {
    throw FrameError("a frame of kind " + std::to_string(header.kind) + " with flags " +
                     std::to_string(header.flags) + ", " + std::to_string(header.zero));
  }
  bool piece = header.kind == kMessage;
  if (piece && (header.flags & kMore) != 0 && header.size != sizeof header + kPieceBytes) {
    // Any number of small ones would cost far more than the bytes that are counted.
    throw FrameError("a piece of " + std::to_string(header.size - sizeof header) +
                     " bytes, and more of the message");
  }
  return header;
}

LineEnd::LineEnd(std::shared_ptr<Node> node, std::shared_ptr<Region> memory, RemoteRegionPtr other,
                 PeerPtr peer)
    : node(std::move(node)),
      memory(std::move(memory)),
      other(std::move(other)),
      peer(std::move(peer)) {
  check_size(*this->memory, *this->other);
}

LineReader::LineReader(LineEnd end)
    : end_(std::move(end)), by_socket_(end_.peer->transport() == "tcp") {
  if (!end_.memory->mapping->add_view(true)) {
    throw Error(Code::kClosed, "the Node is closed and its memory given back");
  }
}

LineReader::~LineReader() { end_.memory->mapping->drop_view(); }

bool LineReader::wait(Deadline deadline) {
  Pace* pace = by_socket_ && calls_ >= kCrowd ? nullptr : &pace_;
  return end_.node->wait_word(*end_.memory, 0, awaited(), deadline, end_.peer, pace);
}

void LineReader::copy(uint64_t from, uint64_t size) {
  const char* ring = reinterpret_cast<const char*>(end_.memory->data() + kRingStart);
  uint64_t at = from % kRingBytes, first = std::min(size, kRingBytes - at);
  bytes_.append(ring + at, first);
  bytes_.append(ring, size - first);
}

void LineReader::take() {
  if (at_ == bytes_.size()) {
    bytes_.clear();
    at_ = 0;
  }
  try {
    uint64_t end = word_of(*end_.memory, 0), size = end - taken_;
    if (size == 0) return;
    if (size > kRingBytes) {
      throw FrameError(std::to_string(size) + " bytes are in a ring of " +
                       std::to_string(kRingBytes));
    }
    copy(taken_, size);
    taken_ = end;
    calls_ = 0;
    if (end - told_ >= kTellBytes) {
      told_ = end;
      end_.peer->signal({end_.other.get(), kTakenOffset, end}, {});
    }
  } catch (...) {
    if (at_ == bytes_.size()) throw;  // else what is left comes first
  }
}

std::optional<FrameHeader> LineReader::next(std::span<const char>& body) {
  std::span<const char> left(bytes_.data() + at_, bytes_.size() - at_);
  if (left.empty()) return std::nullopt;
  FrameHeader header = first_frame(left);
  body = left.subspan(sizeof header, header.size - sizeof header);
  at_ += header.size;
  if (header.kind == kCall || header.kind == kEnd) ++calls_;
  return header;
}

uint64_t LineWriter::room() const {
  uint64_t taken = word_of(*end_.memory, kTakenOffset), used = written_ - taken;
  if (taken > written_ || used > kRingBytes) {
    throw FrameError(std::to_string(taken - written_) + " bytes were read that nobody wrote");
  }
  return kRingBytes - used;
}

bool LineWriter::wait_room(uint64_t bytes, Deadline deadline) const {
  check_usable(*end_.memory);
  uint64_t end = written_ + bytes, least = end > kRingBytes ? end - kRingBytes : 0;
  return end_.node->wait_word(*end_.memory, kTakenOffset, least, deadline, end_.peer);
}

TransferPtr LineWriter::under_way() {
  if (under_way_ && under_way_->done()) under_way_.reset();
  return under_way_;
}

TransferPtr LineWriter::write(std::span<const char> bytes) {
  check_usable(*end_.memory);
  uint64_t at = written_ % kRingBytes, first = std::min<uint64_t>(bytes.size(), kRingBytes - at);
  auto* data = reinterpret_cast<std::byte*>(const_cast<char*>(bytes.data()));  // only read
  std::array<Piece, 2> pieces{
      Piece{data, end_.other.get(), kRingStart + at, first},
      Piece{data + first, end_.other.get(), kRingStart, bytes.size() - first}};
  std::span<const Piece> used(pieces.data(), first < bytes.size() ? 2 : 1);
  written_ += bytes.size();
  SignalTo signal{end_.other.get(), 0, written_};
  TransferPtr before = under_way(), placed;
  if (before) {  // nothing orders two transfers by themselves
    placed = end_.peer->write(used, {}, How());
    under_way_ = end_.peer->signal(signal, std::array{before, placed});
  } else {
    placed = under_way_ = end_.peer->write(used, signal, How());
  }
  return placed;
}

}  // namespace tensorwire::rpc
