// Threads of a test.
#pragma once

#include <functional>
#include <thread>
#include <vector>

namespace tensorwire {

// Runs `run` in `count` threads at the same time, each with its number, until all are done.
inline void run_threads(int count, const std::function<void(int)>& run) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back(run, i);
  for (auto& thread : threads) thread.join();
}

}  // namespace tensorwire
