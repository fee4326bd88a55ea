// Comparing what is declared here of another library with that library's own header.
#pragma once

#include <cstddef>
#include <cstdint>

#define EQUAL(mine, theirs) \
  static_assert(static_cast<int64_t>(mine) == static_cast<int64_t>(theirs))
#define SAME(mine, theirs, my_field, their_field)                            \
  static_assert(offsetof(mine, my_field) == offsetof(theirs, their_field) && \
                sizeof(mine::my_field) == sizeof(theirs::their_field))
