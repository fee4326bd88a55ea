// Questions to one peer about its memory (allocate, look up, free), and the regions that it grants.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>

#include "transports/service.h"
#include "transports/transport.h"
#include "wire/frame.h"
#include "wire/handshake.h"
#include "wire/stream.h"

namespace tensorwire {

// A question that was asked.
struct Asked {
  struct Wants {
    bool region = true;
    bool copied = false;  // also a private mapping, where memory is shared
    bool lease = false;   // the region is ours to give back
  };

  explicit Asked(Wants wants) : wants(wants) {}

  const Wants wants;
  TransferPtr transfer;    // what the asker waits for
  RemoteRegionPtr region;  // valid when the transfer is done well

  // Only Questions touches these, under its lock.
  TransferPtr answer;  // ends with the answer; is `transfer` unless a fault came between
  bool granted = false;
  bool abandoned = false;
};
using AskedPtr = std::shared_ptr<Asked>;

// The things that a peer gave with a grant, in addition to its frame.
struct Granted {
  Status status;
  std::shared_ptr<Mapping> mapping;        // shm
  std::shared_ptr<PrivateMapping> copied;  // shm, if that was asked for
  std::shared_ptr<RemoteKey> key;          // rdma
};

// Any thread, where nothing else is said.
class Questions {
 public:
  // For the peer with this incarnation, reached by this transport. Mappings that it grants are
  // added to `mappings`.
  Questions(std::shared_ptr<Progress> progress, std::shared_ptr<Mappings> mappings,
            std::atomic<uint64_t>& next_id, uint32_t transport, uint64_t incarnation)
      : progress_(std::move(progress)),
        mappings_(std::move(mappings)),
        next_id_(next_id),
        transport_(transport),
        incarnation_(incarnation) {}

  void attach(std::shared_ptr<Stream> stream) { stream_ = std::move(stream); }

  static Header to_free(const RemoteRegion& region);
  // Sends a question; the transfer ends with the answer.
  TransferPtr send(const AskedPtr& asked, Header header, std::string_view body);
  // Nobody waits any more: a region that still comes is given back.
  void abandon(const AskedPtr& asked);

  // The question that a frame with this number answers, or null.
  AskedPtr find(uint64_t transfer) const;
  // Driving thread. The answer to such a question; false is a breach.
  bool answered(const Header& header, std::string_view body, Granted granted);
  // A look-up of what an earlier connection was granted gives the same mapping. Driving thread.
  void inherit(const Questions& earlier);
  // Ends all questions, and those that come later, with this status.
  void close(const Status& status);

 private:
  void give_back(const RemoteRegion& region);

  const std::shared_ptr<Progress> progress_;
  const std::shared_ptr<Mappings> mappings_;
  std::atomic<uint64_t>& next_id_;
  const uint32_t transport_;
  const uint64_t incarnation_;
  std::shared_ptr<Stream> stream_;
  // The mappings of regions that were granted, by generation. Driving thread only.
  struct Known {
    uint32_t id;
    uint64_t size;
    bool writable;
    std::weak_ptr<Mapping> mapping;
  };
  std::unordered_map<uint64_t, Known> known_;

  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, AskedPtr> open_;
  Status closed_;  // not ok() once it is
};

}  // namespace tensorwire
