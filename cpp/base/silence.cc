#include "base/silence.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace tensorwire {

Silence::Silence(int socket) : socket_(socket) {
  int period = 0, probes = 0;
  socklen_t size = sizeof period;
  ::getsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &period, &size);
  ::getsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &probes, &size);
  if (period <= 0 || probes <= 1) return;
  pause_s_ = 0.5 * period;
  limit_s_ = period * (probes - 1.0);
}

bool Silence::lost() {
  tcp_info info{};
  socklen_t size = sizeof info;
  ::getsockopt(socket_, IPPROTO_TCP, TCP_INFO, &info, &size);
  bool unanswered = (info.tcpi_unacked > 0 && info.tcpi_retransmits > 0) || info.tcpi_probes > 0;
  double silent_s = 1e-3 * std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv);
  bool silent = unanswered && silent_s >= limit_s_;
  bool suspected = std::exchange(suspected_, silent);

  auto now = Clock::now();
  double since_s = std::chrono::duration<double>(now - std::exchange(at_, now)).count();
  bool took = std::exchange(bytes_acked_, info.tcpi_bytes_acked) != info.tcpi_bytes_acked;
  bool news = std::exchange(bytes_received_, info.tcpi_bytes_received) != info.tcpi_bytes_received;
  bool data = std::exchange(data_segments_, info.tcpi_data_segs_in) != info.tcpi_data_segs_in;
  // An acknowledgement alone; with data it may be an old one that is said again.
  bool acknowledged = !data && 1e-3 * info.tcpi_last_ack_recv < since_s;
  bool answered = took || news || acknowledged || (!unanswered && !data);
  // While this process is stopped it hears nothing, and the link is not to blame.
  unanswered_s_ = answered ? 0 : unanswered_s_ + std::min(since_s, 2 * pause_s_);
  return (silent && suspected) || unanswered_s_ >= limit_s_ + pause_s_;
}

}  // namespace tensorwire
