// The words of many blocks of Philox (see philox.hpp): as many at a time as a wide register has
// lanes, else one by one.
#pragma once

#include "../simd/vec.hpp"
#include "philox.hpp"

namespace mhfast {
namespace MHFAST_ISA {
namespace {

typedef std::uint64_t Words __attribute__((vector_size(MHFAST_VECTOR_BYTES)));

/// With registers of 64 bytes, products of 64 bits lane by lane are faster than a number's own
/// product of 128 bits; narrower ones have no instruction for them.
inline constexpr bool kHasWideWords = MHFAST_VECTOR_BYTES == 64;

/// High and low part of products of 128 bits, from those of halves.
inline void multiply_words(std::uint64_t factor, Words x, Words& high, Words& low) {
  constexpr std::uint64_t kHalf = 0xffffffff;
  const std::uint64_t f0 = factor & kHalf, f1 = factor >> 32;
  const Words x0 = x & kHalf, x1 = x >> 32;
  const Words middle = f1 * x0 + (f0 * x0 >> 32);
  const Words carried = f0 * x1 + (middle & kHalf);
  high = f1 * x1 + (middle >> 32) + (carried >> 32);
  low = factor * x;
}

/// As many blocks as 8 registers hold. Lane l of `even` and `odd` is in blocks 2 l and 2 l + 1, so
/// that the transposed registers are the words in their order.
inline void wide_blocks(const Philox::Key& key, const Philox::Block& counter, std::uint64_t* out) {
  constexpr int L = kLanes<double>;
  static_assert(!kHasWideWords || L == 8);
  Words even[4], odd[4];
  for (int i = 0; i < 4; ++i) even[i] = odd[i] = Words{} + counter[i];
  for (int l = 0; l < L; ++l) {
    even[0][l] += std::uint64_t(2 * l);
    odd[0][l] += std::uint64_t(2 * l + 1);
  }
  philox_rounds(even, key[0], key[1], multiply_words);
  philox_rounds(odd, key[0], key[1], multiply_words);
  Vec<double> rows[L];
  for (int i = 0; i < 4; ++i) {
    rows[i % L] = (Vec<double>)even[i];
    rows[(4 + i) % L] = (Vec<double>)odd[i];
  }
  transpose<double>(rows);
  for (int r = 0; r < L; ++r) __builtin_memcpy(out + r * L, &rows[r], sizeof rows[r]);
}

/// The words of blocks with the counter's first word and those after it, 4 for each.
template <class real>
void random_words(const Philox::Key& key, Philox::Block counter, std::ptrdiff_t blocks,
                  std::uint64_t* out) {
  constexpr std::ptrdiff_t kWide = 2 * kLanes<double>;
  for (; kHasWideWords && blocks > 0; blocks -= kWide, counter[0] += kWide, out += 4 * kWide) {
    if (blocks >= kWide) {
      wide_blocks(key, counter, out);
      continue;
    }
    std::uint64_t last[4 * kWide];
    wide_blocks(key, counter, last);
    __builtin_memcpy(out, last, blocks * sizeof(Philox::Block));
  }
  for (; blocks > 0; --blocks, ++counter[0], out += 4) {
    const Philox::Block words = Philox::block(counter, key);
    __builtin_memcpy(out, &words, sizeof words);
  }
}

}  // namespace
}  // namespace MHFAST_ISA
}  // namespace mhfast
