// Lengths of samples, and tokens beyond them as zeros, whatever they hold.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace mhfast {

/// Whether `count` numbers are in least ... most.
inline bool all_within(const std::int64_t* x, std::ptrdiff_t count, std::int64_t least,
                       std::int64_t most) {
  return std::all_of(x, x + count, [=](std::int64_t i) { return least <= i && i <= most; });
}

/// Tokens (n, T, row), rows counted in bytes, and the length of each sample, at most T.
struct PaddedTokens {
  const unsigned char* at;
  std::ptrdiff_t n, T, row;
  const std::int64_t* lengths;

  /// Whether every byte beyond the lengths is zero.
  bool are_zero() const {
    for (std::ptrdiff_t i = 0; i < n; ++i) {
      const unsigned char *first = beyond(i), *last = at + (i + 1) * T * row;
      if (std::any_of(first, last, [](unsigned char byte) { return byte != 0; })) return false;
    }
    return true;
  }
  /// Writes (n, T, row) bytes to `to`.
  void copy(unsigned char* to) const {
    for (std::ptrdiff_t i = 0; i < n; ++i, to += T * row) {
      const std::ptrdiff_t seen = lengths[i] * row;
      std::memcpy(to, at + i * T * row, seen);
      std::memset(to + seen, 0, T * row - seen);
    }
  }

 private:
  const unsigned char* beyond(std::ptrdiff_t i) const { return at + (i * T + lengths[i]) * row; }
};

}  // namespace mhfast
