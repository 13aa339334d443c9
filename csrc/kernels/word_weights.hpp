// Softmax of words by looking up the exponentials of their logits.
//
// With m tokens of a sample being word k,
//
//   w[k] = m exps[k][query word],   A[k] = w[k] / sum of w,   D[k] = A[k] (C[k] - r)
//
// over the distinct words, centred at the word of the largest w as in softmax.hpp. Query rows are
// the lanes.
//
// Numeric method: exps has an error of 1.25 ULP whatever the logits are, so that A has no larger
// error than from logits. What exps cannot hold is found by the two largest w of each row: where
// the first is not within [kLeast, kMost], or the second is below kLeast, the whole unit (a sample
// and head) needs softmax of its logits. That depends on the sample alone.
#pragma once

#include "../simd/log1p.hpp"
#include "attention.hpp"
#include "word_lookup.hpp"

namespace mhfast {
namespace MHFAST_ISA {
namespace {

template <class real>
struct WeightRange;
template <>
struct WeightRange<float> {
  static constexpr float kLeast = 0x1p-100f, kMost = 0x1p100f;
};
template <>
struct WeightRange<double> {
  static constexpr double kLeast = 0x1p-900, kMost = 0x1p900;
};

/// A column of query rows, while its softmax is looked up.
template <class real>
struct WordColumn {
  Vec<real> limits, largest, second, centre;  // w and C of the word with the largest
};

/// Looks up w of W columns from `first` on, into s, and finds what their rows are centred at.
/// `exps_of(row of exps, w)` are those of a column's query words.
template <bool kLimited, int W, class real, class ExpsOf>
inline void look_up_weights(const ScoreArguments<real>& in, const UnitWords& words, int first,
                            const ExpsOf& exps_of, real* s, WordColumn<real> (&columns)[W]) {
  constexpr int L = kLanes<real>;
  const Index qL = round_up(in.q, L);
  s += first * L;
  for (int k = 0; k < words.count; ++k, s += qL) {
    const real* row = in.exps + words.keys[k] * in.words.row;
    const real* c = in.ut + words.keys[k] * in.ut_k + first * L;
    const Vec<real> times = broadcast<real>(real(words.times ? words.times[k] : 1));
#pragma GCC unroll 2
    for (int w = 0; w < W; ++w) {
      WordColumn<real>& column = columns[w];
      Vec<real> weight = times * exps_of(row, w);
      if constexpr (kLimited) weight = select<real>(column.limits > real(k), weight, Vec<real>{});
      const IntVec<real> higher = weight > column.largest;
      column.second = select<real>(higher, column.largest, maximum<real>(weight, column.second));
      column.centre = select<real>(higher, load<real>(c + w * L), column.centre);
      column.largest = select<real>(higher, weight, column.largest);
      store<real>(s + w * L, weight);
    }
  }
}

/// Readouts of W columns whose w are in s; with kDerivative s becomes A and c D.
template <bool kDerivative, bool kLimited, int W, class real>
inline void finish_weights(const ScoreArguments<real>& in, const UnitWords& words, int first,
                           real* s, real* c, const WordColumn<real> (&columns)[W],
                           Vec<real> (&readouts)[W]) {
  constexpr int L = kLanes<real>;
  const Index qL = round_up(in.q, L);
  s += first * L;
  c += first * L;
  const auto centred = [&](int k, int w) {
    const Vec<real> from = load<real>(in.ut + words.keys[k] * in.ut_k + (first + w) * L);
    if constexpr (kLimited)  // a weight of 0 would not stop a NaN
      return select<real>(columns[w].limits > real(k), from - columns[w].centre, Vec<real>{});
    else
      return from - columns[w].centre;
  };
  Vec<real> sum[W] = {}, moment[W] = {}, inverse[W], p[W];
  for (int k = 0; k < words.count; ++k)
#pragma GCC unroll 2
    for (int w = 0; w < W; ++w) {
      const Vec<real> weight = load<real>(s + k * qL + w * L);
      sum[w] += weight;
      moment[w] += weight * centred(k, w);
    }
  for (int w = 0; w < W; ++w) {
    inverse[w] = real(1) / sum[w];
    if constexpr (kLimited)
      inverse[w] = select<real>(columns[w].limits > real(0), inverse[w], Vec<real>{});
    p[w] = rounded<real>(moment[w] * inverse[w]);  // the same with kDerivative and without
    readouts[w] = columns[w].centre + p[w];
  }
  if constexpr (!kDerivative) return;
  for (int k = 0; k < words.count; ++k)
#pragma GCC unroll 2
    for (int w = 0; w < W; ++w) {
      const Vec<real> a = load<real>(s + k * qL + w * L) * inverse[w];
      store<real>(s + k * qL + w * L, a);
      store<real>(c + k * qL + w * L, a * (centred(k, w) - p[w]));
    }
}

/// Whether a bit of the register is set.
template <class real>
inline bool any(IntVec<real> x) {
  std::uint64_t parts[sizeof(x) / sizeof(std::uint64_t)], all = 0;
  std::memcpy(parts, &x, sizeof x);
  for (std::uint64_t part : parts) all |= part;
  return all != 0;
}

/// What the columns of a unit add up to, by lane.
template <class real>
struct UnitSums {
  Vec<real> readout, ratio;  // sums; the largest of second over largest
};

/// Softmax of W columns from `first` on by looking it up; false if its range does not suffice.
template <bool kLimited, int W, class real, class ExpsOf>
inline bool weigh_columns(const ScoreArguments<real>& in, const UnitWords& words, int u, int first,
                          const ExpsOf& exps_of, UnitSums<real>& sums) {
  using Int = typename Lane<real>::Int;
  using Range = WeightRange<real>;
  constexpr int L = kLanes<real>;
  const int qL = round_up(in.q, L);
  real *const s = in.s + u * in.unit_stride, *const c = in.c + u * in.unit_stride;
  WordColumn<real> columns[W] = {};
  for (int w = 0; w < W && kLimited; ++w)
    columns[w].limits = load<real>(in.limits + Index(u) * qL + (first + w) * L);
  look_up_weights<kLimited>(in, words, first, exps_of, s, columns);

  IntVec<real> lane{}, used[W], outside{};
  for (int l = 0; l < L; ++l) lane[l] = Int(l);
  for (int w = 0; w < W; ++w) {
    const WordColumn<real>& of = columns[w];
    used[w] = lane < Int(in.q - (first + w) * L);
    IntVec<real> has_second = used[w];
    if constexpr (kLimited) {
      used[w] &= of.limits > real(0);
      has_second &= of.limits > real(1);
    }
    if (words.count == 1) has_second = IntVec<real>{};
    outside |= used[w] & ~((of.largest >= Range::kLeast) & (of.largest <= Range::kMost));
    outside |= has_second & ~(of.second >= Range::kLeast);
  }
  if (any<real>(outside)) return false;

  Vec<real> readouts[W];
  if (in.mode == RowMode::kDerivative)
    finish_weights<true, kLimited>(in, words, first, s, c, columns, readouts);
  else
    finish_weights<false, kLimited>(in, words, first, s, c, columns, readouts);
  for (int w = 0; w < W; ++w) {
    sums.readout += select<real>(used[w], readouts[w], Vec<real>{});
    if (in.gap)
      sums.ratio = maximum<real>(
          sums.ratio, select<real>(used[w], columns[w].second / columns[w].largest, Vec<real>{}));
  }
  return true;
}

/// The sum over lanes, by halves.
template <class real>
inline real sum_by_halves(Vec<real> x) {
  real part[kLanes<real>];
  store<real>(part, x);
  for (int half = kLanes<real> / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) part[l] += part[l + half];
  return part[0];
}

/// log x for x up to 1, -inf for 0: 2^-k (1 + t) has -k log 2 + log(1 + t).
inline double log_of_ratio(double x) {
  if (x == 0) return -std::numeric_limits<double>::infinity();
  std::int64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const std::int64_t exponent = (bits >> 52) - 1023;
  bits -= exponent * (std::int64_t(1) << 52);
  std::memcpy(&x, &bits, sizeof bits);
  return double(exponent) * 0.6931471805599453 + log1p_of_unit(broadcast<double>(x - 1))[0];
}

/// Softmax of a unit by looking it up; false if that does not suffice, whatever has been written.
template <bool kLimited, class real, class ExpsOf>
inline bool weigh_unit(const ScoreArguments<real>& in, const UnitWords& words, int u,
                       const ExpsOf& exps_of) {
  constexpr int L = kLanes<real>;
  const int N = round_up(in.q, L) / L;
  UnitSums<real> sums{};
  int n = 0;
  for (; n + 2 <= N; n += 2)
    if (!weigh_columns<kLimited, 2>(in, words, u, n, exps_of(n), sums)) return false;
  if (n < N && !weigh_columns<kLimited, 1>(in, words, u, n, exps_of(n), sums)) return false;
  in.readout[u] = sum_by_halves<real>(sums.readout);
  if (!in.gap) return true;
  real ratio = sums.ratio[0];
  for (int l = 1; l < L; ++l) ratio = sums.ratio[l] > ratio ? sums.ratio[l] : ratio;
  in.gap[u] = real(log_of_ratio(double(ratio)));
  return true;
}

template <bool kLimited, class real>
inline bool weigh_unit(const ScoreArguments<real>& in, const UnitWords& words, int u) {
  constexpr int L = kLanes<real>;
  const int q = in.q, N = round_up(q, L) / L, pairs = int(in.words.row) / (2 * L);
  if (kPermutesTwo && 2 * pairs <= kMostWordVectors && N <= kMostQueryVectors) {
    const QueryWords<real> rows(words.queries, q);
    bool done = false;
    with_count<kMostWordVectors / 2>(pairs, [&](auto count_of_pairs) {
      constexpr int count = 2 * decltype(count_of_pairs)::value;
      done = weigh_unit<kLimited>(in, words, u, [&](int first) {
        const IntVec<real> at[2] = {rows.vector(first), rows.vector(first + 1 < N ? first + 1 : 0)};
        return [at](const real* row, int w) { return look_up<real, count>(row, at[w]); };
      });
    });
    return done;
  }
  return weigh_unit<kLimited>(in, words, u, [&](int first) {
    return [=](const real* row, int w) {
      const int begin = (first + w) * L, rows = q - begin < L ? q - begin : L;
      real exps[L] = {};
      for (int l = 0; l < rows; ++l) exps[l] = row[words.queries[begin + l]];
      return load<real>(exps);
    };
  });
}

}  // namespace
}  // namespace MHFAST_ISA
}  // namespace mhfast
