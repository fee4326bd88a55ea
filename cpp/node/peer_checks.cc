// What a Peer refuses before anything is started.
#include "node/peer.h"

namespace tensorwire {

void Peer::check_region(const RemoteRegion& region) const {
  if (region.incarnation != remote_.incarnation) {
    throw Error(Code::kStaleHandle, "the region belongs to another process than " + describe() +
                                        "; ask this peer for its own");
  }
}

void Peer::check(std::span<const Piece> pieces, bool write) const {
  for (const Piece& piece : pieces) {
    check_region(*piece.remote);
    if (!piece.remote->contains(piece.offset, piece.length)) {
      throw Error(Code::kInvalid, std::to_string(piece.length) + " bytes at offset " +
                                      std::to_string(piece.offset) + " do not fit the region of " +
                                      std::to_string(piece.remote->size) + " bytes");
    }
    if (write && !piece.remote->access.write) refuse(*piece.remote, "read-only");
    if (!write && !piece.remote->access.read) refuse(*piece.remote, "without read access");
  }
}

void Peer::refuse(const RemoteRegion& region, const char* how, const char* why) const {
  throw Error(Code::kPermission, std::string(why) + "the region '" + region.name + "' of " +
                                     describe() + " was granted " + how);
}

void Peer::check_word(const RemoteRegion& region, uint64_t offset) const {
  check_region(region);
  tensorwire::check_word(region, offset);
  if (!region.access.write) refuse(region, "read-only");
}

void Peer::check_gpu(std::span<const Piece> pieces, const How& how) const {
  if (!rdma_ || !(how.on_stream || needs_gpu(pieces, how))) return;
  throw Error(Code::kUnavailable,
              describe() + " is reached by " + transport() +
                  ", by which memory of a GPU cannot be moved: copy it to memory of the host "
                  "first, or connect by tcp (require='tcp')");
}

}  // namespace tensorwire
