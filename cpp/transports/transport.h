// The seam: what a transport must do, and what it may rely on. One suite (tensorwire.testing.
// check_transport) proves it for every backend.
//
// Semantics, the same on every transport:
//  - Completion means: placed in the target's memory. It never means that the target is alive,
//    awake or has consumed the data.
//  - Every transfer completes exactly once: also when the peer is lost or the Node is closed.
//  - A signal given to write() is stored after all bytes of that call are placed: a thread that
//    sees word >= value through wait sees the bytes. Nothing follows about other calls. The word is
//    stored as a maximum, so it never falls.
//  - The source of a write may be reused, and the destination of a read be looked at, when the
//    transfer is done, not before.
//  - Nothing is thrown on the data path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "loop/transfer.h"
#include "memory/mapping.h"
#include "memory/private_mapping.h"
#include "memory/region.h"

namespace tensorwire {

struct RemoteKey;  // rdma_fabric.h

// A region of a peer, as this Node may use it.
struct RemoteRegion : RegionFacts, std::enable_shared_from_this<RemoteRegion> {
  uint64_t incarnation = 0;                // the peer's
  std::shared_ptr<PrivateMapping> copied;  // this memory copy-on-write, if that was asked for
  std::shared_ptr<RemoteKey> key;          // on rdma: what reaches it
};
using RemoteRegionPtr = std::shared_ptr<const RemoteRegion>;

// One contiguous part of a write or read. Checked by the caller: inside the region, access given.
struct Piece {
  std::byte* local = nullptr;
  const RemoteRegion* remote = nullptr;
  uint64_t offset = 0;
  uint64_t length = 0;
  Gpu* gpu = nullptr;                  // whose memory `local` is; null: the host's
  std::shared_ptr<Mapping> mapping{};  // of the region that `local` is in, if it is in one
};

// How a write or read is to be carried out.
struct How {
  How(uint64_t limit = 0) : inline_limit(limit) {}  // NOLINT: a number alone is the limit

  uint64_t inline_limit;   // bytes that may be copied by the calling thread; 0 = any number
  GpuEventPtr after;       // nothing of local or remote memory is touched before; null: at once
  bool on_stream = false;  // a stream of a GPU was named, which may have nothing to do now
};

struct SignalTo {
  const RemoteRegion* region = nullptr;  // null = no signal
  uint64_t offset = 0;                   // of the word, a multiple of 8
  uint64_t value = 0;
};

// The arguments of an operation that goes on after its caller has returned.
struct KeptCall {
  KeptCall(std::span<const Piece> all, const SignalTo& to)
      : pieces(all.begin(), all.end()), signal(to) {
    for (const Piece& piece : pieces) regions.push_back(piece.remote->shared_from_this());
    if (to.region != nullptr) regions.push_back(to.region->shared_from_this());
  }

  std::vector<Piece> pieces;
  SignalTo signal;
  std::vector<RemoteRegionPtr> regions;  // keeps what the others point to
};

inline uint64_t total_bytes(std::span<const Piece> pieces) {
  uint64_t total = 0;
  for (const Piece& piece : pieces) total += piece.length;
  return total;
}

// Whether it is more than copies by a CPU.
inline bool needs_gpu(std::span<const Piece> pieces, const How& how) {
  if (how.after) return true;
  for (const Piece& piece : pieces) {
    if (piece.gpu != nullptr || piece.remote->on_gpu) return true;
  }
  return false;
}

// The data path to one peer. Any thread may call, several at a time. Arguments are only valid
// during the call; local memory must stay until the transfer is done.
class Channel {
 public:
  virtual ~Channel() = default;

  virtual TransferPtr write(std::span<const Piece> pieces, const SignalTo& signal,
                            const How& how) = 0;
  virtual TransferPtr read(std::span<const Piece> pieces, const How& how) = 0;
  virtual TransferPtr signal(const SignalTo& signal) = 0;
  virtual TransferPtr fetch_add(const RemoteRegion& region, uint64_t offset, uint64_t value) = 0;

  // Before the peer is seen to be lost: what a caller would do at once is refused. What needs an
  // answer fails by itself, since none comes.
  virtual void refuse(const Status&) {}

  // Completes whatever is in flight with this status and refuses what comes later. Called once,
  // by the driving thread.
  virtual void shutdown(const Status& status) = 0;
};

}  // namespace tensorwire
