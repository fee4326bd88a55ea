#include "node/prepared.h"

namespace tensorwire {
namespace {

void append(std::vector<Piece>& pieces, const Prepared::Item& item) {
  if (!pieces.empty()) {
    Piece& last = pieces.back();
    if (last.remote == item.remote.get() && last.local + last.length == item.local &&
        last.offset + last.length == item.offset && last.gpu == item.gpu &&
        last.mapping == item.mapping) {
      last.length += item.length;
      return;
    }
  }
  pieces.push_back(
      {item.local, item.remote.get(), item.offset, item.length, item.gpu, item.mapping});
}

}  // namespace

Prepared::Prepared(PeerPtr peer, bool is_write, std::vector<Item> items)
    : peer_(std::move(peer)), is_write_(is_write), items_(std::move(items)) {
  for (const Item& item : items_) {
    append(merged_, item);
    bytes_ += item.length;
  }
  peer_->check(merged_, is_write_);
}

TransferPtr Prepared::fire(std::span<const Piece> pieces, const SignalTo& signal,
                           const How& how) const {
  return is_write_ ? peer_->write(pieces, signal, how) : peer_->read(pieces, how);
}

TransferPtr Prepared::start(const SignalTo& signal, const How& how) const {
  return fire(merged_, signal, how);
}

TransferPtr Prepared::start(std::span<const int64_t> indices, const SignalTo& signal,
                            const How& how) const {
  std::vector<Piece> pieces;
  pieces.reserve(indices.size());
  for (int64_t index : indices) {
    if (index < 0 || static_cast<size_t>(index) >= items_.size()) {
      throw Error(Code::kInvalid, "index " + std::to_string(index) + " is outside the " +
                                      std::to_string(items_.size()) + " prepared pieces");
    }
    append(pieces, items_[static_cast<size_t>(index)]);
  }
  return fire(pieces, signal, how);
}

}  // namespace tensorwire
