// How long it pays to poll for something before sleeping until it comes.
#pragma once

#include <cstdint>

namespace tensorwire {

// What a waiter polls for, by what being woken costs there.
enum class Polls { kWords, kDevice, kGpu };

// How long a waiter polls before it sleeps: the cost of being woken, measured once per process;
// 0 on one core or when more threads want to run than there are cores. What devices do needs no
// core of ours, so there it is longer, also on one core: eight times with a patient Poller, fifty
// times while a GPU copies, since its driver's call comes later than most copies take. Any thread.
int64_t spin_bound_ns(Polls polls = Polls::kWords);

}  // namespace tensorwire
