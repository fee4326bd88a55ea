// Planned faults: the n-th operation at the seam fails, vanishes, is late, or the peer is cut off.
// For tests of what stands above the seam.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "transports/transport.h"

namespace tensorwire {

class FaultPlan {
 public:
  enum class Action { kFail, kDrop, kDelay, kCut };

  // Throws kInvalid for an unknown action and for nth == 0.
  FaultPlan(uint64_t nth, const std::string& action, double delay_s);

  // Counts one operation; what shall become of it, if anything.
  std::optional<Action> next();
  uint64_t count() const { return count_; }
  bool hit() const { return hit_; }

  const double delay_s;

 private:
  const uint64_t nth_;
  Action action_;
  std::atomic<uint64_t> count_{0};
  std::atomic<bool> hit_{false};
};

// A Channel around a peer's own, which lets a plan act on each operation first. A peer that has no
// plan does not go through one.
class FaultyChannel : public Channel {
 public:
  // An owner of `channel` owns its peer as well. cut loses that peer, in the driving thread.
  FaultyChannel(std::shared_ptr<FaultPlan> plan, std::weak_ptr<Channel> channel,
                std::shared_ptr<Progress> progress, std::function<void(Status)> cut)
      : plan_(std::move(plan)),
        channel_(std::move(channel)),
        progress_(std::move(progress)),
        cut_(std::move(cut)) {}

  // Runs an operation of so many bytes, or does what the plan makes of it; also for operations that
  // do not go through the channel.
  TransferPtr run(uint64_t bytes, const std::function<TransferPtr()>& operation);

  TransferPtr write(std::span<const Piece> pieces, const SignalTo& signal, const How& how) override;
  TransferPtr read(std::span<const Piece> pieces, const How& how) override;
  TransferPtr signal(const SignalTo& signal) override;
  TransferPtr fetch_add(const RemoteRegion& region, uint64_t offset, uint64_t value) override;
  void shutdown(const Status& status) override;  // ends what was dropped, and nothing else

 private:
  const std::shared_ptr<FaultPlan> plan_;
  const std::weak_ptr<Channel> channel_;
  const std::shared_ptr<Progress> progress_;
  const std::function<void(Status)> cut_;

  std::mutex mutex_;
  std::vector<TransferPtr> dropped_;
  Status down_;  // not ok() after shutdown()
};

}  // namespace tensorwire
