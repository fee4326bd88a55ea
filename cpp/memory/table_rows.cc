#include "memory/table_rows.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "base/blocking.h"
#include "base/control_groups.h"
#include "base/error.h"
#include "base/spin.h"

namespace tensorwire {
namespace {

constexpr size_t kAhead = 12;             // rows
constexpr size_t kLineBytes = 64;         // what a fetch brings
constexpr size_t kLinesAhead = 8;         // of a row; behind them the processor finds out by itself
constexpr size_t kThreadBytes = 2 << 20;  // less is copied sooner than a thread begins
constexpr size_t kMostThreads = 4;

// Not more than half of the cores: others have work too. One where all have.
size_t most_threads() {
  if (spin_bound_ns() == 0) return 1;
  return std::clamp<size_t>(static_cast<size_t>(cores()) / 2, 1, kMostThreads);
}

void check(const TableBytes& table, std::span<const int64_t> rows, size_t packed) {
  if (table.row_bytes == 0 || table.size % table.row_bytes != 0) {
    throw Error(Code::kInvalid, "a table of " + std::to_string(table.size) +
                                    " bytes has no rows of " + std::to_string(table.row_bytes));
  }
  if (packed / table.row_bytes < rows.size()) {
    throw Error(Code::kInvalid, std::to_string(packed) + " bytes have no room for " +
                                    std::to_string(rows.size()) + " rows of " +
                                    std::to_string(table.row_bytes));
  }
  auto height = static_cast<uint64_t>(table.size / table.row_bytes);
  for (int64_t row : rows) {
    if (static_cast<uint64_t>(row) >= height) {
      throw Error(Code::kInvalid, "there is no row " + std::to_string(row) + " in a table of " +
                                      std::to_string(height));
    }
  }
}

template <bool kWrites>
void fetch(const std::byte* row, size_t lines) {
  for (size_t line = 0; line < lines; ++line) {
    __builtin_prefetch(row + line * kLineBytes, kWrites ? 1 : 0);
  }
}

// copy(place in the table, number of the row among `rows`), for all of them.
template <bool kWrites, typename Copy>
void for_each_row(const TableBytes& table, std::span<const int64_t> rows, size_t most,
                  const Copy& copy) {
  size_t size = table.row_bytes;
  size_t lines = std::min((size + kLineBytes - 1) / kLineBytes, kLinesAhead);
  auto part = [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      if (i + kAhead < end) {
        fetch<kWrites>(table.data + static_cast<size_t>(rows[i + kAhead]) * size, lines);
      }
      copy(table.data + static_cast<size_t>(rows[i]) * size, i);
    }
  };
  size_t threads = rows.size() * size / kThreadBytes;
  if (threads > 1) threads = std::min(threads, most != 0 ? most : most_threads());
  if (threads < 2) return part(0, rows.size());
  std::vector<std::thread> others;
  others.reserve(threads);
  size_t share = (rows.size() + threads - 1) / threads, begin = share;
  try {
    for (; begin < rows.size(); begin += share) {
      others.push_back(start_thread(
          [&part, begin, end = std::min(begin + share, rows.size())] { part(begin, end); }));
    }
  } catch (const std::exception&) {
    // No more threads can be started: the rest is done here.
  }
  part(0, share);
  if (begin < rows.size()) part(begin, rows.size());
  for (std::thread& other : others) other.join();
}

}  // namespace

void take_rows(const TableBytes& table, std::span<const int64_t> rows, std::span<std::byte> packed,
               size_t most) {
  check(table, rows, packed.size());
  for_each_row<false>(table, rows, most, [&](const std::byte* row, size_t i) {
    std::memcpy(packed.data() + i * table.row_bytes, row, table.row_bytes);
  });
}

void put_rows(const TableBytes& table, std::span<const int64_t> rows,
              std::span<const std::byte> packed, size_t most) {
  check(table, rows, packed.size());
  for_each_row<true>(table, rows, most, [&](std::byte* row, size_t i) {
    std::memcpy(row, packed.data() + i * table.row_bytes, table.row_bytes);
  });
}

}  // namespace tensorwire
