// The shm transport: the peer's regions are mapped here, a write is one memcpy by the caller.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "base/event.h"
#include "base/page.h"
#include "transports/gpu_copy.h"
#include "transports/service.h"
#include "transports/transport.h"

namespace tensorwire {

class ShmChannel : public Channel, public std::enable_shared_from_this<ShmChannel> {
 public:
  ShmChannel(std::shared_ptr<Progress> progress, std::shared_ptr<Traffic> traffic,
             std::shared_ptr<GpuQueue> gpu_queue, std::shared_ptr<GpuTraffic> gpu_traffic)
      : progress_(std::move(progress)),
        traffic_(std::move(traffic)),
        gpu_queue_(std::move(gpu_queue)),
        gpu_traffic_(std::move(gpu_traffic)),
        gpu_staging_(std::make_shared<GpuStaging>(gpu_queue_)) {}

  // The peer's page and doorbell, when they arrived. Before that no region is known, so nothing
  // can be written. Throws kInvalid if the page is not what it should be.
  void attach(std::shared_ptr<Mapping> page, Descriptor doorbell, uint64_t incarnation);

  TransferPtr write(std::span<const Piece> pieces, const SignalTo& signal, const How& how) override;
  TransferPtr read(std::span<const Piece> pieces, const How& how) override;
  TransferPtr signal(const SignalTo& signal) override;
  TransferPtr fetch_add(const RemoteRegion& region, uint64_t offset, uint64_t value) override;
  void refuse(const Status& status) override;
  void shutdown(const Status& status) override;

 private:
  struct CopyJob;

  bool live(const RemoteRegion& region) const;
  Status check(std::span<const Piece> pieces, const SignalTo& signal) const;
  Status down() const;
  Status ended() const;
  void raise(const SignalTo& signal);
  void ring();
  TransferPtr copy(std::span<const Piece> pieces, const SignalTo& signal, const How& how,
                   bool is_read);
  // Copies in turns, and then calls the function. False if the Node is closed.
  bool copy_later(std::shared_ptr<CopyJob> job);
  void copy_by_gpu(std::span<const Piece> pieces, const SignalTo& signal, const How& how,
                   bool is_read, const TransferPtr& transfer);

  std::shared_ptr<Progress> progress_;
  std::shared_ptr<Traffic> traffic_;
  const std::shared_ptr<GpuQueue> gpu_queue_;
  const std::shared_ptr<GpuTraffic> gpu_traffic_;
  const std::shared_ptr<GpuStaging> gpu_staging_;
  std::shared_ptr<Mapping> page_mapping_;
  const NodePage* page_ = nullptr;
  std::atomic<bool> down_{false};
  mutable std::mutex mutex_;
  Descriptor doorbell_;
  std::shared_ptr<EventRaiser> raiser_;  // with doorbell_
  Status down_status_;
};

}  // namespace tensorwire
