// A planned fault: the n-th operation at the seam fails, vanishes, is late, or the peer is cut off.
// For tests of what stands above the seam; costs one relaxed load per operation when unused.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "error.h"

namespace tensorwire {

class FaultPlan {
 public:
  enum class Action { kNone, kFail, kDrop, kDelay, kCut };

  FaultPlan(uint64_t nth, const std::string& action, double delay_s) : delay_s(delay_s), nth_(nth) {
    if (action == "fail") {
      action_ = Action::kFail;
    } else if (action == "drop") {
      action_ = Action::kDrop;
    } else if (action == "delay") {
      action_ = Action::kDelay;
    } else if (action == "cut") {
      action_ = Action::kCut;
    } else {
      throw Error(Code::kInvalid,
                  "a fault's action is 'fail', 'drop', 'delay' or 'cut', not '" + action + "'");
    }
    if (nth == 0) throw Error(Code::kInvalid, "operations are counted from 1");
  }

  // Counts one operation; what shall become of it.
  Action next() {
    if (count_.fetch_add(1) + 1 != nth_) return Action::kNone;
    hit_ = true;
    return action_;
  }
  uint64_t count() const { return count_; }
  bool hit() const { return hit_; }

  const double delay_s;

 private:
  const uint64_t nth_;
  Action action_ = Action::kNone;
  std::atomic<uint64_t> count_{0};
  std::atomic<bool> hit_{false};
};

}  // namespace tensorwire
