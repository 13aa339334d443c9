// What samples of different lengths hold beyond them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace mhfast {

/// Whether `count` numbers are in least ... most.
inline bool all_within(const std::int64_t* x, std::ptrdiff_t count, std::int64_t least,
                       std::int64_t most) {
  return std::all_of(x, x + count, [=](std::int64_t i) { return least <= i && i <= most; });
}

/// Whether x (n, T, d) is 0 at and beyond `lengths` (n,), each of them in 0 ... T.
template <class real>
bool is_zero_beyond(const real* x, std::ptrdiff_t n, std::ptrdiff_t T, std::ptrdiff_t d,
                    const std::int64_t* lengths) {
  for (std::ptrdiff_t i = 0; i < n; ++i) {
    const real* const sample = x + i * T * d;
    if (!std::all_of(sample + lengths[i] * d, sample + T * d, [](real y) { return y == 0; }))
      return false;
  }
  return true;
}

}  // namespace mhfast
