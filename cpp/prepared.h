// Prepared transfers: a list of pieces checked and merged once, fired many times.
#pragma once

#include <span>
#include <vector>

#include "peer.h"

namespace tensorwire {

class Prepared {
 public:
  struct Item {
    std::byte* local;
    RemoteRegionPtr remote;
    uint64_t offset;
    uint64_t length;
  };

  // Local memory and the peer must stay as long as this lives. Throws as Peer::write does.
  Prepared(PeerPtr peer, bool is_write, std::vector<Item> items);

  // All pieces, or those that the indices name, in their order; neighbours that touch on both
  // sides are merged. Throws kInvalid for an index out of range.
  TransferPtr start(const SignalTo& signal, uint64_t inline_limit) const;
  TransferPtr start(std::span<const int64_t> indices, const SignalTo& signal,
                    uint64_t inline_limit) const;

  size_t size() const { return items_.size(); }
  uint64_t bytes() const { return bytes_; }
  size_t runs() const { return merged_.size(); }
  const PeerPtr& peer() const { return peer_; }

 private:
  TransferPtr fire(std::span<const Piece> pieces, const SignalTo& signal, uint64_t limit) const;

  PeerPtr peer_;
  bool is_write_;
  std::vector<Item> items_;
  std::vector<Piece> merged_;
  uint64_t bytes_ = 0;
};

}  // namespace tensorwire
