// The tcp transport, initiator's side: reads and writes as frames on the peer's stream. The
// receiving side is the peer's Service; its driver thread plays the part of the NIC.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "transports/service.h"
#include "transports/transport.h"
#include "wire/stream.h"

namespace tensorwire {

class TcpChannel : public Channel {
 public:
  TcpChannel(std::shared_ptr<Progress> progress, std::shared_ptr<Traffic> traffic,
             std::shared_ptr<Stream> stream, std::atomic<uint64_t>& next_id);

  TransferPtr write(std::span<const Piece> pieces, const SignalTo& signal, const How& how) override;
  TransferPtr read(std::span<const Piece> pieces, const How& how) override;
  TransferPtr signal(const SignalTo& signal) override;
  TransferPtr fetch_add(const RemoteRegion& region, uint64_t offset, uint64_t value) override;
  void shutdown(const Status& status) override;

  // Answers from the peer; false is a breach. Driving thread only.
  bool begin_data(const Header& header, std::byte** target);
  bool end_data(const Header& header);
  bool done(const Header& header, std::string_view message);

 private:
  struct Request;
  using RequestPtr = std::shared_ptr<Request>;

  RequestPtr make(std::span<const Piece> pieces, const SignalTo& signal, bool is_read);
  TransferPtr start(RequestPtr request);
  std::deque<RequestPtr>* next();                  // whose turn it is; null: nobody's
  void issue(std::unique_lock<std::mutex>& lock);  // as much as the window allows
  void answered(std::unique_lock<std::mutex>& lock);
  RequestPtr find(uint64_t id);

  std::shared_ptr<Progress> progress_;
  std::shared_ptr<Traffic> traffic_;
  std::shared_ptr<Stream> stream_;
  std::atomic<uint64_t>& next_id_;

  std::mutex mutex_;
  std::unordered_map<uint64_t, RequestPtr> pending_;
  std::deque<RequestPtr> waiting_;  // large ones that wait for the window
  std::deque<RequestPtr> small_;    // small ones that wait for the window; they go first
  size_t open_ = 0;                 // frames that the peer will answer
  bool issuing_ = false;
  bool down_ = false;
  Status down_status_;
};

}  // namespace tensorwire
