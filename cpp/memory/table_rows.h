// Copies rows of a table in memory out of it, or into it. The rows lie far from each other, so that
// fetching them takes longer than copying them: the next rows are fetched ahead, by several threads
// if there are many.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tensorwire {

// Rows of `row_bytes` each, one after the other, in `size` bytes.
struct TableBytes {
  std::byte* data;
  size_t size;
  size_t row_bytes;
};

// `packed` := the rows with these numbers, one after the other. It has room for all of them, and
// does not overlap the table. Several threads copy many rows, at most `most`; 0: half as many as
// cores, or one if all cores are busy. Throws kInvalid, before anything is copied, if a number is
// outside the table, or sizes do not fit.
void take_rows(const TableBytes& table, std::span<const int64_t> rows, std::span<std::byte> packed,
               size_t most = 0);

// The other way round. No number may be there twice.
void put_rows(const TableBytes& table, std::span<const int64_t> rows,
              std::span<const std::byte> packed, size_t most = 0);

}  // namespace tensorwire
