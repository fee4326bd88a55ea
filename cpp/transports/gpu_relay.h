// A channel around one that moves memory of the host alone (tcp): what is on a GPU here goes
// through pinned chunks, in a pipeline with the network, and transfers can start behind a stream.
// Where only the peer's memory is on a GPU it passes everything on: the peer does the same at its
// side.
#pragma once

#include <memory>

#include "transports/gpu_copy.h"
#include "transports/gpu_staging.h"
#include "transports/transport.h"

namespace tensorwire {

class GpuRelay : public Channel, public std::enable_shared_from_this<GpuRelay> {
 public:
  GpuRelay(std::shared_ptr<Progress> progress, std::shared_ptr<GpuQueue> queue,
           std::shared_ptr<GpuTraffic> traffic, std::shared_ptr<Channel> inner)
      : progress_(std::move(progress)),
        queue_(std::move(queue)),
        traffic_(std::move(traffic)),
        inner_(std::move(inner)),
        staging_(std::make_shared<GpuStaging>(queue_)) {}

  TransferPtr write(std::span<const Piece> pieces, const SignalTo& signal, const How& how) override;
  TransferPtr read(std::span<const Piece> pieces, const How& how) override;
  TransferPtr signal(const SignalTo& signal) override { return inner_->signal(signal); }
  TransferPtr fetch_add(const RemoteRegion& region, uint64_t offset, uint64_t value) override {
    return inner_->fetch_add(region, offset, value);
  }
  void refuse(const Status& status) override { inner_->refuse(status); }
  void shutdown(const Status& status) override { inner_->shutdown(status); }

 private:
  struct Call;
  TransferPtr start(std::span<const Piece> pieces, const SignalTo& signal, bool is_read,
                    const How& how);
  void run(const std::shared_ptr<Call>& call);
  void stage(const std::shared_ptr<Call>& call, Gpu& gpu, std::vector<size_t> pieces);
  void part_done(const std::shared_ptr<Call>& call, const GpuOutcome& outcome);
  static void pass_on(const TransferPtr& inner, GpuThen then);

  const std::shared_ptr<Progress> progress_;
  const std::shared_ptr<GpuQueue> queue_;
  const std::shared_ptr<GpuTraffic> traffic_;
  const std::shared_ptr<Channel> inner_;
  const std::shared_ptr<GpuStaging> staging_;
};

}  // namespace tensorwire
