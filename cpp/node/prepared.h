// Prepared transfers: a list of pieces checked and merged once, fired many times.
#pragma once

#include <span>
#include <vector>

#include "node/peer.h"

namespace tensorwire {

class Prepared {
 public:
  struct Item {
    std::byte* local;
    RemoteRegionPtr remote;
    uint64_t offset;
    uint64_t length;
    Gpu* gpu = nullptr;
    std::shared_ptr<Mapping> mapping;
  };

  // Local memory and the peer must stay as long as this lives. Throws as Peer::write does.
  Prepared(PeerPtr peer, bool is_write, std::vector<Item> items);

  // All pieces, or those that the indices name, in their order; neighbours that touch on both
  // sides are merged. Throws kInvalid for an index out of range.
  TransferPtr start(const SignalTo& signal, const How& how) const;
  TransferPtr start(std::span<const int64_t> indices, const SignalTo& signal, const How& how) const;

  size_t size() const { return items_.size(); }
  uint64_t bytes() const { return bytes_; }
  size_t runs() const { return merged_.size(); }
  const PeerPtr& peer() const { return peer_; }
  bool by_gpu() const { return needs_gpu(merged_, {}); }

 private:
  TransferPtr fire(std::span<const Piece> pieces, const SignalTo& signal, const How& how) const;

  PeerPtr peer_;
  bool is_write_;
  std::vector<Item> items_;
  std::vector<Piece> merged_;
  uint64_t bytes_ = 0;
};

}  // namespace tensorwire
