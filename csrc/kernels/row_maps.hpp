// Row maps other than softmax, one query row per lane, in the layout and with the limits of
// softmax.hpp:
//
//   entries    A[s] = f(S[s]) / N, D[s] = f'(S[s]) C[s] / N; N: the keys that the row sees, or 1
//   softmax1   the softmax of Rows<real, true>
//   hardmax    A[s] = 1 / the number of largest logits, of each of them; D = 0
//
// The readout is the sum of A[s] C[s]. Maps of entries have no dominant weight: the gap of such a
// row is 0, and nothing is taken out of its derivative.
//
// The functions are not inlined, so that they do not change the code generated for softmax.
#pragma once

#include <limits>

#include "softmax.hpp"
#include "table.hpp"

namespace mhfast {
namespace MHFAST_ISA {
namespace {

template <class real, bool kFlush>
struct RowMath {
  using Number = Vec<real>;
  static Number exp(Number x) { return kFlush ? exp_flushed<real>(x) : MHFAST_ISA::exp<real>(x); }
  static Number absolute(Number x) { return MHFAST_ISA::absolute<real>(x); }
  static Number select(IntVec<real> mask, Number yes, Number no) {
    return MHFAST_ISA::select<real>(mask, yes, no);
  }
};

/// Calls body(at, factor, sees) for every column: its numbers before it, 1 / N, and whether its row
/// sees a key.
template <bool kLimited, class real, class Body>
inline void for_rows(const Rows<real>& rows, bool by_tokens, const Body& body) {
  const Vec<real> all = broadcast<real>(by_tokens ? real(1) / real(rows.keys) : real(1));
  for (int n = 0; n < rows.columns; ++n) {
    const Index at = n * rows.step;
    if constexpr (kLimited) {
      const Vec<real> limit = load<real>(rows.limits + n * kLanes<real>), zero{};
      const Vec<real> one = broadcast<real>(1);
      // A row that sees nothing has weights 0, and with a limit of NaN all of them are.
      const Vec<real> factor =
          select<real>(limit > zero, by_tokens ? one / limit : one, limit * real(0));
      body(n, at, factor, [limit](int key) { return limit > real(key); });
    } else {
      body(n, at, all, [](int) { return ~IntVec<real>{}; });
    }
  }
}

/// `readouts` may be null; kDerivative false: D is not computed.
template <class Map, bool kFlush, bool kWeights, bool kDerivative, bool kLimited, class real>
inline void map_entries_of(const Rows<real>& rows, bool by_tokens, real* readouts) {
  using Math = RowMath<real, kFlush>;
  for_rows<kLimited>(rows, by_tokens, [&](int n, Index at, Vec<real> factor, const auto& sees) {
    real *s = rows.s + at, *c = rows.c + at;
    Vec<real> sum{};
    for (int key = 0; key < rows.keys; ++key, s += rows.stride, c += rows.stride) {
      const Vec<real> logit = load<real>(s), zero{};
      const IntVec<real> seen = sees(key);
      const auto of_seen = [&](Vec<real> x) { return kLimited ? select<real>(seen, x, zero) : x; };
      const Vec<real> value = of_seen(Map().template value<Math>(logit));
      if (readouts) {
        const Vec<real> coefficient = of_seen(load<real>(c));
        sum += value * coefficient;
        if constexpr (kDerivative)
          store<real>(c, of_seen(Map().template derivative<Math>(logit)) * coefficient * factor);
      }
      if constexpr (kWeights) store<real>(s, value * factor);
    }
    if (readouts) store<real>(readouts + n * kLanes<real>, sum * factor);
  });
}

template <class Map, bool kFlush, bool kWeights, bool kDerivative, class real>
[[gnu::noinline]] void map_entries(const Rows<real>& rows, bool by_tokens, real* readouts) {
  if (rows.limits)
    return map_entries_of<Map, kFlush, kWeights, kDerivative, true>(rows, by_tokens, readouts);
  map_entries_of<Map, kFlush, kWeights, kDerivative, false>(rows, by_tokens, readouts);
}

template <bool kWeights, bool kDerivative, bool kLimited, class real>
inline void map_largest_of(const Rows<real>& rows, real* readouts) {
  for_rows<kLimited>(rows, false, [&](int n, Index at, Vec<real> factor, const auto& sees) {
    const Vec<real> least = broadcast<real>(-std::numeric_limits<real>::infinity()), zero{};
    Vec<real> largest = least, poison{};
    const auto logit_of = [&](int key) {
      const Vec<real> logit = load<real>(rows.s + at + key * rows.stride);
      return kLimited ? select<real>(sees(key), logit, least) : logit;
    };
    for (int key = 0; key < rows.keys; ++key) {
      const Vec<real> logit = logit_of(key);
      largest = select<real>(logit > largest, logit, largest);
      poison = select<real>(logit == logit, poison, logit);  // NaN shows, whatever is largest
    }
    Vec<real> count{}, sum{};
    const auto has_weight = [&](int key) {
      const IntVec<real> is_largest = logit_of(key) == largest;
      return kLimited ? is_largest & sees(key) : is_largest;
    };
    const Vec<real> one = broadcast<real>(1);
    for (int key = 0; key < rows.keys; ++key) count += select<real>(has_weight(key), one, zero);
    const Vec<real> weight = select<real>(count > zero, factor / count, factor) + poison;
    for (int key = 0; key < rows.keys; ++key) {
      const Index place = at + key * rows.stride;
      const Vec<real> a = select<real>(has_weight(key), weight, zero * weight);
      if (readouts) sum += select<real>(a == zero, zero, a * load<real>(rows.c + place));
      if constexpr (kDerivative) store<real>(rows.c + place, zero * a);
      if constexpr (kWeights) store<real>(rows.s + place, a);
    }
    if (readouts) store<real>(readouts + n * kLanes<real>, sum);
  });
}

template <bool kWeights, bool kDerivative, class real>
[[gnu::noinline]] void map_largest(const Rows<real>& rows, real* readouts) {
  if (rows.limits) return map_largest_of<kWeights, kDerivative, true>(rows, readouts);
  map_largest_of<kWeights, kDerivative, false>(rows, readouts);
}

/// A map's functions, as softmax.hpp has them; gaps are 0.
template <class Map, class real>
struct MapOfRows {
  const Rows<real>& rows;
  bool by_tokens;

  static constexpr bool kIsOfEntries = Map::kKind == RowKind::kEntries;

  void readout(real* readouts) const {
    if constexpr (kIsOfEntries)
      map_entries<Map, true, false, false>(rows, by_tokens, readouts);
    else
      map_largest<false, false>(rows, readouts);
  }
  template <bool kFlush>
  void attend() const {
    real* none = nullptr;
    if constexpr (kIsOfEntries)
      map_entries<Map, kFlush, true, false>(rows, by_tokens, none);
    else
      map_largest<true, false>(rows, none);
  }
  void differentiate(real* readouts) const {
    if constexpr (kIsOfEntries)
      map_entries<Map, true, true, true>(rows, by_tokens, readouts);
    else
      map_largest<true, true>(rows, readouts);
  }
};

/// Calls body(functions of the map) for a map that is neither softmax nor softmax1.
template <class real, class Body>
inline void with_map_of_rows(RowMap map, const Rows<real>& rows, const Body& body) {
  switch (map.name) {
#define MHFAST_CASE(Type, name)                                          \
  case RowMapName::k##Type:                                              \
    if constexpr (row_maps::Type::kKind == RowKind::kEntries ||          \
                  row_maps::Type::kKind == RowKind::kLargest)            \
      return body(MapOfRows<row_maps::Type, real>{rows, map.by_tokens}); \
    break;
    MHFAST_ROW_MAPS(MHFAST_CASE)
#undef MHFAST_CASE
  }
  __builtin_unreachable();
}

/// The same rows with the further logit of softmax1.
template <class real>
inline Rows<real, true> with_zero(const Rows<real>& rows) {
  return {rows.keys, rows.columns, rows.stride, rows.s, rows.c, rows.limits, rows.step};
}

}  // namespace
}  // namespace MHFAST_ISA
}  // namespace mhfast
