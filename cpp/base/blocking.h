// Work that may block without limit: it runs on threads of its own, so that it delays neither the
// driving thread nor other work of this kind.
#pragma once

#include <cstddef>
#include <functional>
#include <thread>

namespace tensorwire {

// Starts a thread that takes no signals: they belong to the user's threads. Throws as std::thread.
std::thread start_thread(std::function<void()> run);

// Runs the job on a thread that does nothing else meanwhile. Threads are started when needed, one
// per job that blocks, and end soon after the last job. The end of the process does not wait for
// them, so a job owns all that it uses. A forked child runs no job of its parent. Any thread.
// Throws kBusy if no thread can be started.
void spawn_blocking(std::function<void()> job);

// How many jobs have been running for more than a second.
size_t stuck_jobs();

}  // namespace tensorwire
