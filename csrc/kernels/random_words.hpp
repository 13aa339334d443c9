// The words of many blocks of Philox (see philox.hpp): as many at a time as a wide register has
// lanes, else one by one.
#pragma once

#if MHFAST_VECTOR_BYTES == 64 && defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "../simd/vec.hpp"
#include "philox.hpp"

namespace mhfast {
namespace MHFAST_ISA {
namespace {

typedef std::uint64_t Words __attribute__((vector_size(MHFAST_VECTOR_BYTES)));

/// With registers of 64 bytes, products of 64 bits lane by lane are faster than a number's own
/// product of 128 bits; narrower ones have no instruction for them.
inline constexpr bool kHasWideWords = MHFAST_VECTOR_BYTES == 64;

/// Products of the low halves. Compilers take the instruction for products of 64 bits, which needs
/// several steps of the processor, also where the high halves are zero.
inline Words multiply_halves(Words a, Words b) {
#if MHFAST_VECTOR_BYTES == 64 && defined(__AVX512F__)
  // Without a mask GCC 12 warns of what the header leaves uninitialized.
  return (Words)_mm512_maskz_mul_epu32(0xff, (__m512i)a, (__m512i)b);
#else
  constexpr std::uint64_t kHalf = 0xffffffff;
  return (a & kHalf) * (b & kHalf);
#endif
}

/// Several registers of words, so that the steps of one are taken while those of others wait.
inline constexpr int kTogether = 4;
struct WordGroup {
  Words at[kTogether];
};
inline WordGroup operator^(WordGroup a, const WordGroup& b) {
  for (int i = 0; i < kTogether; ++i) a.at[i] ^= b.at[i];
  return a;
}
inline WordGroup operator^(WordGroup a, std::uint64_t b) {
  for (int i = 0; i < kTogether; ++i) a.at[i] ^= b;
  return a;
}

/// High and low part of products of 128 bits, from those of halves.
inline void multiply_words(std::uint64_t factor, const WordGroup& x, WordGroup& high,
                           WordGroup& low) {
  constexpr std::uint64_t kHalf = 0xffffffff;
  const Words f0 = Words{} + factor, f1 = f0 >> 32;
  const auto multiply = [&](Words of, Words& to_high, Words& to_low) {
    const Words upper = of >> 32, lowest = multiply_halves(f0, of);
    const Words middle = multiply_halves(f1, of) + (lowest >> 32);
    const Words carried = multiply_halves(f0, upper) + (middle & kHalf);
    to_high = multiply_halves(f1, upper) + (middle >> 32) + (carried >> 32);
    to_low = (carried << 32) + (lowest & kHalf);
  };
#pragma GCC unroll 4
  for (int i = 0; i < kTogether; ++i) multiply(x.at[i], high.at[i], low.at[i]);
}

inline constexpr std::ptrdiff_t kWide = kTogether * kLanes<double>;

/// As many blocks as a group of registers has lanes. Lane l of registers 2 i and 2 i + 1 is in
/// blocks 2 (L i + l) and the next, so that transposed registers are the words in their order.
inline void wide_blocks(const Philox::Key& key, const Philox::Block& counter, std::uint64_t* out) {
  constexpr int L = kLanes<double>;
  static_assert(!kHasWideWords || L == 8);
  Words numbers{};
  for (int l = 0; l < L; ++l) numbers[l] = std::uint64_t(2 * l);
  WordGroup c[4];
  for (int i = 0; i < kTogether; ++i) {
    for (int word = 0; word < 4; ++word) c[word].at[i] = Words{} + counter[word];
    c[0].at[i] += numbers + std::uint64_t(i / 2 * 2 * L + i % 2);
  }
  philox_rounds(c, key[0], key[1], multiply_words);
  for (int i = 0; i < kTogether; i += 2, out += L * L) {
    Vec<double> rows[L];
    for (int word = 0; word < 4; ++word) {
      rows[word % L] = (Vec<double>)c[word].at[i];
      rows[(4 + word) % L] = (Vec<double>)c[word].at[i + 1];
    }
    transpose<double>(rows);
    for (int r = 0; r < L; ++r) __builtin_memcpy(out + r * L, &rows[r], sizeof rows[r]);
  }
}

/// The words of blocks with the counter's first word and those after it, 4 for each.
template <class real>
void random_words(const Philox::Key& key, Philox::Block counter, std::ptrdiff_t blocks,
                  std::uint64_t* out) {
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
