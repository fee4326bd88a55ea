// The table of regions: ids, generations, names, leases and limits.
#include "memory/region.h"

#include <doctest/doctest.h>
#include <fcntl.h>

#include <atomic>
#include <set>
#include <string>
#include <vector>

#include "threads.h"

namespace tensorwire {
namespace {

struct Fixture {
  std::unique_ptr<NodePage> page = std::make_unique<NodePage>();
  std::shared_ptr<Mappings> mappings = std::make_shared<Mappings>();
  RegionTable table{page.get(), mappings, [] {}};
  std::shared_ptr<Region> allocate(uint64_t size, const std::string& name = {},
                                   uint64_t lessee = 0) {
    return table.allocate(size, name, {true, true}, false, lessee);
  }
};

TEST_CASE("region: found by name and by handle, until it is freed") {
  Fixture f;
  auto region = f.allocate(100, "weights");
  CHECK(region->size == 100);
  CHECK(region->generation != 0);
  CHECK(f.table.find("weights") == region);
  CHECK(f.table.find(region->id, region->generation) == region);
  CHECK(f.table.find(region->id, region->generation + 1) == nullptr);
  CHECK(f.table.find(region->id + 1, region->generation) == nullptr);
  CHECK(f.table.find(~0u, region->generation) == nullptr);
  CHECK(f.table.find("weight") == nullptr);
  CHECK(f.page->generations[region->id] == region->generation);

  f.table.free(*region);
  CHECK(region->freed);
  CHECK(f.table.find("weights") == nullptr);
  CHECK(f.table.find(region->id, region->generation) == nullptr);
  CHECK(f.page->generations[region->id] == 0);
  region->data()[99] = std::byte{1};  // whoever holds it may still use the memory
  f.table.free(*region);              // twice is fine
}

TEST_CASE("region: a slot is used again, a generation never") {
  Fixture f;
  std::set<uint64_t> generations;
  uint32_t id = 0;
  for (int i = 0; i < 100; ++i) {
    auto region = f.allocate(1, "same");
    if (i > 0) CHECK(region->id == id);
    id = region->id;
    CHECK(generations.insert(region->generation).second);
    f.table.free(*region);
  }
}

TEST_CASE("region: an earlier region is not mistaken for the one in its slot") {
  Fixture f;
  auto old = f.allocate(8, "a");
  f.table.free(*old);
  auto fresh = f.allocate(8, "a", 5);
  REQUIRE(fresh->id == old->id);
  f.table.free(*old);
  CHECK(f.table.find("a") == fresh);
  CHECK(f.table.leased().bytes == 8);
}

TEST_CASE("region: contains does not overflow") {
  Fixture f;
  auto region = f.allocate(100);
  CHECK(region->contains(0, 100));
  CHECK(region->contains(100, 0));
  CHECK(region->contains(99, 1));
  CHECK_FALSE(region->contains(99, 2));
  CHECK_FALSE(region->contains(101, 0));
  CHECK_FALSE(region->contains(~uint64_t{0}, 1));
  CHECK_FALSE(region->contains(1, ~uint64_t{0}));
  CHECK_FALSE(region->contains(~uint64_t{0}, ~uint64_t{0}));
  CHECK_FALSE(region->contains(50, ~uint64_t{0} - 49));
}

TEST_CASE("region: leases are counted, listed and given back") {
  Fixture f;
  auto mine = f.allocate(1000);
  auto a = f.allocate(10, "", 1);
  auto b = f.allocate(20, "", 2);
  auto c = f.allocate(30, "", 1);
  CHECK(f.table.leased().bytes == 60);
  CHECK(f.table.leased().regions == 3);
  CHECK(f.table.leased_to(1).size() == 2);
  CHECK(f.table.leased_to(2).size() == 1);
  CHECK(f.table.leased_to(3).empty());
  f.table.free(*a);
  f.table.free(*a);
  CHECK(f.table.leased().bytes == 60);  // as long as somebody holds the memory
  a.reset();
  CHECK(f.table.leased().bytes == 50);
  f.table.free(*b);
  f.table.free(*c);
  f.table.free(*mine);
  b.reset();
  c.reset();
  CHECK(f.table.leased().bytes == 0);
  CHECK(f.table.leased().regions == 0);
}

TEST_CASE("region: what can be shared is sealed against any change of size") {
  Fixture f;
  for (bool write : {true, false}) {
    auto region = f.table.allocate(10, "", {true, write}, true, 0);
    int seals = ::fcntl(region->mapping->descriptor(), F_GET_SEALS);
    CHECK((seals & F_SEAL_SHRINK) != 0);
    CHECK((seals & F_SEAL_GROW) != 0);
    CHECK((seals & F_SEAL_SEAL) != 0);
    CHECK(((seals & F_SEAL_FUTURE_WRITE) != 0) == !write);
    region->data()[0] = std::byte{1};  // this process may write in any case
  }
}

TEST_CASE("region: threads that allocate and free do not disturb each other") {
  Fixture f;
  std::atomic<int> wrong{0};
  run_threads(4, [&](int t) {
    std::string name = "name " + std::to_string(t);
    for (int i = 0; i < 300; ++i) {
      auto region = f.allocate(64 + i, name, static_cast<uint64_t>(t));
      if (f.table.find(name) != region) ++wrong;
      if (f.table.find(region->id, region->generation) != region) ++wrong;
      f.table.free(*region);
      if (f.table.find(name)) ++wrong;
    }
  });
  CHECK(wrong == 0);
  CHECK(f.table.leased().regions == 0);
}

}  // namespace
}  // namespace tensorwire
