// Detects a TCP connection that no longer carries bytes both ways, from the kernel's figures. The
// kernel itself would try to send data for a quarter of an hour.
#pragma once

#include <cstdint>

#include "base/clock.h"

namespace tensorwire {

// The link is lost when nothing was received for all but one period of the timeout (tune_tcp sets
// both) and then, for half a period more, a retransmission, a window probe or a keep-alive stays
// unanswered. It is lost too when for as long only repetitions were received: then the peer does
// not receive our bytes, sends everything again, and has a longer timeout of its own. The kernel of
// a stopped peer still answers all but data.
class Silence {
 public:
  explicit Silence(int socket);

  // Half a period: the time between two looks. 0: do not look.
  double pause_s() const { return pause_s_; }
  // Looks; true if the link is lost.
  bool lost();

 private:
  const int socket_;
  double pause_s_ = 0, limit_s_ = 0;
  bool suspected_ = false;
  // The figures of the last look.
  Clock::time_point at_ = Clock::now();
  double unanswered_s_ = 0;
  uint64_t bytes_acked_ = 0, bytes_received_ = 0;
  uint32_t data_segments_ = 0;
};

}  // namespace tensorwire
