// Work that may block for as long as somebody else likes: it runs on threads of its own, so that it
// holds up neither the driving thread nor other work of this kind.
#pragma once

#include <cstddef>
#include <functional>
#include <thread>

namespace tensorwire {

// Starts a thread that takes no signals: they belong to the user's threads. Throws as std::thread.
std::thread start_thread(std::function<void()> run);

// Runs the job on a thread that does nothing else meanwhile. Threads are started as they are
// needed, one per job that blocks, and end soon after the last job. Nobody waits for them, also at
// the end of the process, so a job owns all that it uses. A forked child runs none of the jobs of
// its parent. Any thread. Throws kBusy if no thread can be started.
void spawn_blocking(std::function<void()> job);

// How many jobs have been running for more than a second.
size_t stuck_jobs();

}  // namespace tensorwire
