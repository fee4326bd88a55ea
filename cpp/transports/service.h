// Service: what one peer may do to this Node's memory by frames. It trusts nothing that it reads:
// a frame reaches only regions that were granted to this peer, inside their bounds, as their access
// allows. Driving thread only.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "loop/progress.h"
#include "memory/region.h"
#include "transports/gpu_service.h"
#include "wire/frame.h"
#include "wire/stream.h"

namespace tensorwire {

// Counts of one Node, for stats() and for proofs that nothing was copied.
struct Traffic {
  std::atomic<uint64_t> bytes_written{0}, bytes_read{0};     // by this Node, to and from peers
  std::atomic<uint64_t> bytes_received{0}, bytes_served{0};  // by peers, through frames
  std::atomic<uint64_t> writes{0}, reads{0}, signals{0};     // issued by this Node
};

// Access as the flags of a frame.
inline uint8_t flags_of(Access access) {
  return (access.read ? kReadable : 0) | (access.write ? kWritable : 0);
}
inline Access access_of(const Header& header) {
  return {(header.flags & kReadable) != 0, (header.flags & kWritable) != 0};
}

class Service {
 public:
  Service(RegionTable& regions, std::shared_ptr<Progress> progress,
          std::shared_ptr<Traffic> traffic, uint64_t quota_bytes, bool shareable, uint64_t peer,
          std::function<void(const std::shared_ptr<Region>&)> free_region);

  void attach(std::shared_ptr<Stream> stream, const std::shared_ptr<GpuQueue>& gpu_queue);
  // For a transport on which answers to words go another way than the stream, and on which a grant
  // is preceded by a key; expose may throw.
  void attach(std::function<void(const Header&, std::string_view)> answer,
              std::function<void(const Header&, const std::shared_ptr<Region>&)> expose) {
    answer_ = std::move(answer);
    expose_ = std::move(expose);
  }
  // For a transport on which a grant goes together with the memory itself: pass sends both. waiting
  // counts those that are not sent yet.
  void attach(std::function<void(const Header&, const std::shared_ptr<Region>&)> pass,
              std::function<size_t()> waiting) {
    pass_ = std::move(pass);
    waiting_ = std::move(waiting);
  }

  // For kWrite. False is a breach.
  bool begin_write(const Header& header, std::byte** target);
  bool end_write(const Header& header);
  // For kRead, kSignal, kFetchAdd, kAllocate, kLookup, kFree.
  bool request(const Header& header, std::string_view body);

  // There is a region with a new name, which the peer may have asked for before.
  void answer_awaited();
  // The region was freed: forget the grant, and stop placing bytes in it.
  void revoke(const Region& region);
  // The peer is gone: gives back what it leased.
  void close();

 private:
  struct OpenWrite {
    uint64_t placed = 0;
    Status status;
    GpuEventPtr landing;  // the bytes are in memory of a GPU when it has passed
  };

  bool overrun() const;
  // The granted region if the access is allowed, else null and why.
  Region* granted(const Header& header, uint64_t offset, uint64_t length, bool write,
                  Status& status);
  Region* granted_word(const Header& header, Status& status);
  void done(const Header& header, const Status& status, bool now = false, uint64_t value = 0);
  void grant(const Header& header, const std::shared_ptr<Region>& region);
  void refuse(const Header& header, const Status& status);
  bool signal(const Header& header);
  // All three throw what refuse() tells the peer.
  void allocate(const Header& header, std::string_view name);
  void lookup(const Header& header, std::string_view name);
  // False if there is no such region.
  bool grant_found(const Header& header, std::string_view name);
  bool free(const Header& header);
  bool finish(const Header& header, OpenWrite& write);
  // Goes on when the bytes are where they shall be, which is at once for memory of the host.
  void when_landed(OpenWrite write, std::function<void(const Status&)> then);
  void raise(const Header& header, Status status);

  RegionTable& regions_;
  std::shared_ptr<Progress> progress_;
  std::shared_ptr<Traffic> traffic_;
  const uint64_t quota_bytes_;  // of all regions that peers allocated on this Node
  const bool shareable_;
  const uint64_t peer_;
  std::function<void(const std::shared_ptr<Region>&)> free_region_;
  std::shared_ptr<Stream> stream_;
  std::function<void(const Header&, std::string_view)> answer_;
  std::function<void(const Header&, const std::shared_ptr<Region>&)> expose_, pass_;
  std::function<size_t()> waiting_;

  std::unordered_map<uint32_t, std::shared_ptr<Region>> grants_;
  std::unordered_map<uint64_t, OpenWrite> open_;         // transfers of several frames
  std::vector<std::pair<Header, std::string>> awaited_;  // look-ups of names that nothing has yet
  Status current_;                                       // of the payload being received
  std::shared_ptr<GpuService> gpu_;
  std::shared_ptr<std::atomic<size_t>> answering_;  // reads whose answer is not sent yet
};

}  // namespace tensorwire
