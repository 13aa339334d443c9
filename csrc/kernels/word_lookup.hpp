// Rows of tables of words, looked up for many query rows at a time.
//
// Where the instruction set has permutations of two registers, rows of few words are looked up by
// these; else number by number.
#pragma once

#include <cstring>
#include <type_traits>

#include "../simd/vec.hpp"
#include "table.hpp"

namespace mhfast {
namespace MHFAST_ISA {
namespace {

#if MHFAST_VECTOR_BYTES == 64 && !defined(__clang__)
inline constexpr bool kPermutesTwo = true;
#else
inline constexpr bool kPermutesTwo = false;
#endif

// Registers of a row of words, and of query rows, that permutations are used for.
inline constexpr int kMostWordVectors = 8, kMostQueryVectors = 4;

template <class real>
inline IntVec<real> load_lanes(const typename Lane<real>::Int* from) {
  IntVec<real> lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

/// Entry `at` of two registers, for each lane; the bits of `at` above those of 2 L do not matter.
template <class real>
inline Vec<real> permute(Vec<real> low, Vec<real> high, IntVec<real> at) {
#if defined(__clang__)
  (void)at;
  return low + high;  // never called
#else
  return __builtin_shuffle(low, high, at);
#endif
}

template <class real>
constexpr int log2_of_two() {
  int log = 1;
  while (1 << log < 2 * kLanes<real>) ++log;
  return log;
}

/// Entry `at` of `count` registers, for each lane; `part(i)` is the i-th.
template <class real, int count, class Part>
inline Vec<real> look_up(IntVec<real> at, const Part& part) {
  const auto pair = [&](int i) {
    const Vec<real> low = part(i);
    return permute<real>(low, i + 1 < count ? part(i + 1) : low, at);
  };
  Vec<real> found = pair(0);
  if constexpr (count > 2) {
    const IntVec<real> which = at >> log2_of_two<real>();
#pragma GCC unroll 4
    for (int i = 2; i < count; i += 2) found = select<real>(which == i / 2, pair(i), found);
  }
  return found;
}

/// The same of the registers from `from` on.
template <class real, int count>
inline Vec<real> look_up(const real* from, IntVec<real> at) {
  return look_up<real, count>(at, [from](int i) { return load<real>(from + i * kLanes<real>); });
}

/// Calls body(std::integral_constant) with `count`, from 1 to `most`.
template <int most, class Body>
inline void with_count(int count, const Body& body) {
  if constexpr (most > 1)
    if (count < most) return with_count<most - 1>(count, body);
  body(std::integral_constant<int, most>{});
}

/// The words of one unit, see WordsOfUnits.
struct UnitWords {
  const std::int32_t *keys, *times, *queries, *first_rows;  // times: null if each key is one token
  int count, rounds;                                        // of keys; 0: rows are not listed

  UnitWords(const WordsOfUnits& of, int T, int u)
      : keys(of.keys + u * of.keys_unit),
        times(of.times ? of.times + u * of.keys_unit : nullptr),
        queries(of.queries ? of.queries + u * of.queries_unit : nullptr),
        first_rows(of.first_rows + u * of.rows_unit),
        count(of.counts ? of.counts[u] : T),
        rounds(of.rounds ? of.rounds[u] : 0) {}
};

/// The words of the query rows of a unit, as lanes.
template <class real>
struct QueryWords {
  typename Lane<real>::Int at[kMostQueryVectors * kLanes<real>];

  QueryWords(const std::int32_t* words, int rows) {
    for (int t = 0; t < round_up(rows, kLanes<real>); ++t) at[t] = t < rows ? words[t] : 0;
  }
  IntVec<real> vector(int j) const { return load_lanes<real>(at + j * kLanes<real>); }
};

}  // namespace
}  // namespace MHFAST_ISA
}  // namespace mhfast
