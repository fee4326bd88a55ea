// How long it pays to poll for something before sleeping until it comes.
#pragma once

#include <cstdint>

namespace tensorwire {

// How long a waiter polls before it sleeps: the cost of being woken, measured once per process;
// 0 on one core or when more threads want to run than there are cores. With a Poller eight times
// as long, also on one core. Any thread.
int64_t spin_bound_ns(bool polled = false);

}  // namespace tensorwire
