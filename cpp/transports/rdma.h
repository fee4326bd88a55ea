// The rdma transport: writes and reads are the NIC's one-sided puts and gets, through UCX. Words
// (signal, fetch_add) are frames in active messages, sent when all bytes of their call are placed,
// and carried out by the target's service, which answers: one atomicity domain with the target's
// own CPU, and no assumption about the order of bytes on the wire.
//
// Control (allocation, grants, goodbye) stays on the peer's tcp stream. A region is registered when
// it is first granted to such a peer, and stays registered after it was freed until every peer that
// knows its key has said that nothing of its own is under way: a NIC breaks the connection of
// whoever writes to memory that is not registered any more.
//
// Within what is registered, members of a job trust each other: a key is not bounds-checked per
// grant by UCX. Endpoints are accepted only while a peer that has proved the secret is expected,
// and belong to nobody until they show the token that it was given on the stream.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "transports/rdma_fabric.h"
#include "transports/service.h"
#include "transports/transport.h"

namespace tensorwire {

class RdmaChannel : public Channel,
                    public RdmaUser,
                    public std::enable_shared_from_this<RdmaChannel> {
 public:
  struct Events {  // driving thread
    std::function<void()> on_ready;
    std::function<void(Status)> on_lost;
    std::function<bool(const Header&, std::string_view)> on_frame;      // false is a breach
    std::function<void(uint32_t region, uint64_t generation)> on_idle;  // a revoked one
  };
  RdmaChannel(std::shared_ptr<RdmaFabric> fabric, std::shared_ptr<Progress> progress,
              std::shared_ptr<Traffic> traffic, std::atomic<uint64_t>& next_id, Events events);

  // The token that the peer must show. The accepting side expects an endpoint from then on.
  uint64_t offer(bool accepting);
  // The peer's token; the connecting side opens the endpoint. False if `where` is malformed.
  bool attach(uint64_t token, std::string_view where, bool accepting);
  // "rc_verbs/rxe0:1" once it is ready.
  std::string wire() const;

  // The key in a kKey frame; null if the bytes are none. One per region, however often it is
  // granted.
  std::shared_ptr<RemoteKey> unpack(const Header& header, std::string_view key);
  // The owner freed the region; on_idle follows when nothing is in flight.
  void revoke(uint32_t region, uint64_t generation);

  TransferPtr write(std::span<const Piece> pieces, const SignalTo& signal, const How& how) override;
  TransferPtr read(std::span<const Piece> pieces, const How& how) override;
  TransferPtr signal(const SignalTo& signal) override;
  TransferPtr fetch_add(const RemoteRegion& region, uint64_t offset, uint64_t value) override;
  void shutdown(const Status& status) override;

  // An answer of the peer's service; false is a breach. Driving thread only.
  bool done(const Header& header, std::string_view message);
  // Sends a frame to the peer's service or as its answer. Any thread.
  void send(const Header& header, std::string_view body = {}, bool first = false);

  void finished(const std::shared_ptr<RdmaWork>& work) override;
  void received(const RdmaMessage& message) override;
  void failed(ucx::Endpoint endpoint, const std::string& why) override;

 private:
  struct Outgoing;
  struct Word {
    Header header;
    TransferPtr transfer;
  };
  using WorkPtr = std::shared_ptr<RdmaWork>;

  static void on_done(void* request, ucx::Status status, void* work);
  static void on_sent(void* request, ucx::Status status, void* outgoing);
  TransferPtr start(std::span<const Piece> pieces, const SignalTo& signal, bool is_read);
  bool ended_by_link(const RdmaWork& work) const;  // locked
  void let_go(RdmaWork& work);
  void ask(const Header& header, TransferPtr transfer);
  void issue();                       // locked
  bool dial(std::string_view where);  // locked, and so are these two
  void dial_next();
  void unexpect();  // locked
  void end(Code code, const std::string& why);

  std::shared_ptr<RdmaFabric> fabric_;
  std::shared_ptr<Progress> progress_;
  std::shared_ptr<Traffic> traffic_;
  std::atomic<uint64_t>& next_id_;
  const Events events_;
  const uint64_t token_;

  // All under the fabric's lock.
  uint64_t peer_token_ = 0;
  RdmaLink* link_ = nullptr;
  bool expecting_ = false, ready_ = false, down_ = false, ending_ = false;
  Status down_status_, end_status_;
  std::optional<RdmaMessage> early_;
  std::deque<std::string> candidates_;
  uint16_t port_ = 0;
  std::string tried_;
  std::unordered_map<uint64_t, std::weak_ptr<RemoteKey>> keys_;  // by generation
  std::map<RdmaWork*, WorkPtr> flying_;
  std::vector<TransferPtr> broken_;  // ended by the connection's end, which will say why
  std::unordered_map<uint64_t, TransferPtr> asked_;  // words under way
  std::deque<Word> waiting_;                         // words that wait for room in the window
};

}  // namespace tensorwire
