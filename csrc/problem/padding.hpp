// Tokens beyond the length of their sample as zeros, whatever they hold.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace mhfast {

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
