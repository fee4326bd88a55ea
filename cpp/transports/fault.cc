#include "transports/fault.h"

#include <map>

namespace tensorwire {
FaultPlan::FaultPlan(uint64_t nth, const std::string& action, double delay_s)
    : delay_s(delay_s), nth_(nth) {
  const std::map<std::string, Action> actions{{"fail", Action::kFail},
                                              {"drop", Action::kDrop},
                                              {"delay", Action::kDelay},
                                              {"cut", Action::kCut}};
  auto found = actions.find(action);
  if (found == actions.end()) {
    throw Error(Code::kInvalid,
                "a fault's action is 'fail', 'drop', 'delay' or 'cut', not '" + action + "'");
  }
  if (nth == 0) throw Error(Code::kInvalid, "operations are counted from 1");
  action_ = found->second;
}

std::optional<FaultPlan::Action> FaultPlan::next() {
  if (count_.fetch_add(1) + 1 != nth_) return std::nullopt;
  hit_ = true;
  return action_;
}

TransferPtr FaultyChannel::run(uint64_t bytes, const std::function<TransferPtr()>& operation) {
  auto action = plan_->next();
  if (!action) return operation();
  auto transfer = std::make_shared<Transfer>(progress_, bytes);
  switch (*action) {
    case FaultPlan::Action::kFail:
      transfer->complete({Code::kUnavailable, "an injected fault: this operation failed"});
      break;
    case FaultPlan::Action::kCut:
      progress_->post([cut = cut_] {
        cut({Code::kPeerLost, "an injected fault: the connection was cut"});
        return false;
      });
      [[fallthrough]];
    case FaultPlan::Action::kDrop: {
      std::lock_guard lock(mutex_);
      if (down_.ok()) {
        dropped_.push_back(transfer);
      } else {
        transfer->complete(down_);
      }
      break;
    }
    case FaultPlan::Action::kDelay: {
      bool taken = progress_->after(plan_->delay_s, [transfer, operation, progress = progress_] {
        auto inner = operation();
        inner->then([inner = inner.get(), transfer, progress] {
          transfer->complete(inner->status(), inner->value());
          progress->notify();
        });
      });
      if (!taken) transfer->complete({Code::kClosed, "the Node is closed"});
      break;
    }
  }
  return transfer;
}

TransferPtr FaultyChannel::write(std::span<const Piece> pieces, const SignalTo& signal,
                                 const How& how) {
  return run(total_bytes(pieces), [kept = KeptCall(pieces, signal), channel = channel_.lock(),
                                   how] { return channel->write(kept.pieces, kept.signal, how); });
}

TransferPtr FaultyChannel::read(std::span<const Piece> pieces, const How& how) {
  return run(total_bytes(pieces), [kept = KeptCall(pieces, {}), channel = channel_.lock(), how] {
    return channel->read(kept.pieces, how);
  });
}

TransferPtr FaultyChannel::signal(const SignalTo& signal) {
  return run(0, [kept = KeptCall({}, signal), channel = channel_.lock()] {
    return channel->signal(kept.signal);
  });
}

TransferPtr FaultyChannel::fetch_add(const RemoteRegion& region, uint64_t offset, uint64_t value) {
  return run(0, [kept = KeptCall({}, {&region, offset, value}), channel = channel_.lock()] {
    return channel->fetch_add(*kept.signal.region, kept.signal.offset, kept.signal.value);
  });
}

void FaultyChannel::shutdown(const Status& status) {
  std::vector<TransferPtr> dropped;
  {
    std::lock_guard lock(mutex_);
    down_ = status;
    dropped.swap(dropped_);
  }
  for (auto& transfer : dropped) transfer->complete(status);
}

}  // namespace tensorwire
