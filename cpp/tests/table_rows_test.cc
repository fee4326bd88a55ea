// Rows of tables: each of them comes out and goes in, whatever their number and length.
#include "memory/table_rows.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <tuple>
#include <vector>

#include "base/error.h"

namespace tensorwire {
namespace {

std::vector<std::byte> random_bytes(size_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> made(size);
  for (std::byte& each : made) each = static_cast<std::byte>(random());
  return made;
}

}  // namespace

TEST_CASE("rows are taken and put") {
  // The last two are enough for four threads.
  for (auto [height, length, every] : {std::tuple<size_t, size_t, size_t>{1, 1, 1},
                                       {7, 3, 2},
                                       {1000, 132, 3},
                                       {50, 4096, 1},
                                       {40'000, 256, 2},
                                       {100'003, 100, 1}}) {
    std::vector<std::byte> table = random_bytes(height * length, 1), before = table;
    std::vector<int64_t> rows;
    for (size_t row = 0; row < height; row += every) rows.push_back(static_cast<int64_t>(row));
    std::shuffle(rows.begin(), rows.end(), std::mt19937(2));
    TableBytes whole{table.data(), table.size(), length};
    std::vector<std::byte> packed(rows.size() * length);
    take_rows(whole, rows, packed, 4);
    bool same = true;
    for (size_t i = 0; i < rows.size(); ++i) {
      same = same && std::equal(packed.begin() + i * length, packed.begin() + (i + 1) * length,
                                before.begin() + rows[i] * length);
    }
    CHECK(same);
    std::vector<std::byte> fresh = random_bytes(packed.size(), 3);
    put_rows(whole, rows, fresh, 4);
    for (size_t i = 0; i < rows.size(); ++i) {
      std::copy_n(fresh.begin() + i * length, length, before.begin() + rows[i] * length);
    }
    CHECK(table == before);
  }
}

TEST_CASE("rows that are not there change nothing") {
  std::vector<std::byte> table = random_bytes(40, 1), before = table, packed(40);
  TableBytes whole{table.data(), table.size(), 8};
  for (int64_t row : {int64_t{5}, int64_t{-1}, INT64_MAX, INT64_MIN}) {
    std::vector<int64_t> rows{0, row};
    CHECK_THROWS_WITH_AS(take_rows(whole, rows, packed), doctest::Contains("there is no row"),
                         Error);
    CHECK_THROWS_AS(put_rows(whole, rows, packed), Error);
  }
  std::vector<int64_t> many{0, 1, 2, 3, 4, 0};
  CHECK_THROWS_WITH_AS(put_rows(whole, many, packed), doctest::Contains("no room"), Error);
  CHECK_THROWS_WITH_AS(take_rows({table.data(), 40, 7}, {}, packed),
                       doctest::Contains("has no rows of 7"), Error);
  CHECK_THROWS_AS(take_rows({table.data(), 40, 0}, {}, packed), Error);
  CHECK(table == before);
}

}  // namespace tensorwire
