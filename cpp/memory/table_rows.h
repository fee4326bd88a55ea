// Rows of a table that lies in memory: some of them are copied out of it, or into it. They lie far
// from each other, so that fetching them takes longer than copying them: what comes next is
// fetched ahead, by several threads where there is much of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tensorwire {

// Rows of `row_bytes` each, one behind the other, in `size` bytes.
struct TableBytes {
  std::byte* data;
  size_t size;
  size_t row_bytes;
};

// `packed` := the rows with these numbers, one behind the other. It has room for all of them, and
// is no part of the table. Much of it is copied by several threads, `most` at most; 0: as many as
// half of the cores, or one where all cores have work. Throws kInvalid, before anything is copied,
// if a number is no row's, or sizes do not fit.
void take_rows(const TableBytes& table, std::span<const int64_t> rows, std::span<std::byte> packed,
               size_t most = 0);

// The other way round. No number may be there twice.
void put_rows(const TableBytes& table, std::span<const int64_t> rows,
              std::span<const std::byte> packed, size_t most = 0);

}  // namespace tensorwire
