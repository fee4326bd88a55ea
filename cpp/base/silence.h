// Whether a TCP connection still carries bytes both ways, by what the kernel knows of it. The
// kernel by itself would try to send data for a quarter of an hour.
#pragma once

#include <cstdint>

#include "base/clock.h"

namespace tensorwire {

// The link is lost when for all but one period of the timeout (tune_tcp sets both) nothing was
// heard and then, for half a period more, something stays unanswered: data that was sent again, a
// question for room, a keep-alive. It is lost too when for as long nothing was heard but what had
// come before: the peer does not hear us, says everything again, and has a longer timeout of its
// own. A peer that is only stopped answers all but data.
class Silence {
 public:
  explicit Silence(int socket);

  // Half a period: how often to look. 0: nobody is to look.
  double pause_s() const { return pause_s_; }
  // Looks; true if the link is lost.
  bool lost();

 private:
  const int socket_;
  double pause_s_ = 0, limit_s_ = 0;
  bool suspected_ = false;
  // As of the last look.
  Clock::time_point at_ = Clock::now();
  double unanswered_s_ = 0;
  uint64_t bytes_acked_ = 0, bytes_received_ = 0;
  uint32_t data_segments_ = 0;
};

}  // namespace tensorwire
