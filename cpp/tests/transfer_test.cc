// A transfer is over once, tells everybody, and lets go of what it held exactly once.
#include "loop/transfer.h"

#include <doctest/doctest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

namespace tensorwire {
namespace {

struct Fixture {
  ~Fixture() { progress->stop(); }
  TransferPtr make() { return std::make_shared<Transfer>(progress, 0); }
  std::shared_ptr<Progress> progress = std::make_shared<Progress>();
};

void count(void* counter) { ++*static_cast<std::atomic<int>*>(counter); }

TEST_CASE("transfer: what it holds is released once, at the end or with it") {
  Fixture f;
  std::atomic<int> released{0};
  auto transfer = f.make();
  CHECK(transfer->hold({&released, count}));
  CHECK(transfer->hold({&released, count}));
  CHECK(released == 0);
  transfer->complete();
  CHECK(released == 2);
  CHECK_FALSE(transfer->hold({&released, count}));  // the caller keeps it
  transfer.reset();
  CHECK(released == 2);
  auto never = f.make();
  CHECK(never->hold({&released, count}));
  never.reset();
  CHECK(released == 3);
}

TEST_CASE("transfer: what shall follow runs at the end, or at once") {
  Fixture f;
  std::vector<int> order;
  auto transfer = f.make();
  transfer->then([&] { order.push_back(1); });
  transfer->then([&] {
    CHECK(transfer->done());
    order.push_back(2);
    transfer->then([&] { order.push_back(3); });
  });
  CHECK(order.empty());
  transfer->complete();
  CHECK(order == std::vector{1, 2, 3});
  transfer->then([&] { order.push_back(4); });
  CHECK(order.size() == 4);
}

TEST_CASE("transfer: threads that hold, follow and wait while it ends") {
  Fixture f;
  for (int i = 0; i < 200; ++i) {
    std::atomic<int> released{0}, kept{0}, followed{0}, saw{0};
    auto transfer = f.make();
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&] {
        kept += !transfer->hold({&released, count});
        transfer->then([&] { ++followed; });
        saw += transfer->wait(Deadline::after(30.0)) && transfer->value() == 5;
      });
    }
    transfer->complete({}, 5);
    f.progress->notify();
    for (auto& thread : threads) thread.join();
    CHECK(released + kept == 3);
    CHECK(followed == 3);
    CHECK(saw == 3);
  }
  CHECK(f.progress->transfers().started == f.progress->transfers().completed);
}

}  // namespace
}  // namespace tensorwire
