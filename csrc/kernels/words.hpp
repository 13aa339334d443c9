// Scores and gradients of samples whose tokens are words of a dictionary E, one head at a time.
//
//   tables      S = (E W) E^T of all pairs of words,  C = E U^T  (layers: E V)      once for a step
//   scores      s = S[key word][query word],  c = C[key word][row], then softmax as elsewhere, or
//               by word_weights.hpp; of words that are m tokens s has log m added
//   gradients   of S += D by pairs,  of C += A by key words,  of E V += A^T G by key words
//
// Query rows are the lanes. A table's entries are the sums that kernels/attention.hpp would compute
// for two tokens, in the same order, so that outputs of a classifier have the same bits where
// softmax gets the logits of all keys.
//
// Where rows of few words are looked up by permutations of registers, D is added to them by the
// inverse permutations, after rows of the same word have been added to the first of them.
#pragma once

#include "word_weights.hpp"

namespace mhfast {
namespace MHFAST_ISA {
namespace {

/// Copies `count` vectors.
template <class real>
inline void copy_row(const real* from, int count, real* to) {
  constexpr int L = kLanes<real>;
  for (int j = 0; j < count; ++j) store<real>(to + j * L, load<real>(from + j * L));
}

/// Logits of one unit from the table: (T, qL), zeros in the lanes beyond the rows.
template <class real>
inline void look_up_scores(const ScoreArguments<real>& in, const UnitWords& unit, real* s) {
  constexpr int L = kLanes<real>;
  const int q = in.q, qL = round_up(q, L), N = qL / L;
  if (!unit.queries) {
    for (int k = 0; k < unit.count; ++k, s += qL)
      copy_row(in.w + unit.keys[k] * in.words.row, N, s);
    return;
  }
  const int pairs = int(in.words.row) / (2 * L);
  if (kPermutesTwo && 2 * pairs <= kMostWordVectors && N <= kMostQueryVectors) {
    const QueryWords<real> words(unit.queries, q);
    with_count<kMostWordVectors / 2>(pairs, [&](auto count) {
      for (int k = 0; k < unit.count; ++k) {
        const real* row = in.w + unit.keys[k] * in.words.row;
        for (int j = 0; j < N; ++j)
          store<real>(s + (Index(k) * N + j) * L, look_up<real, 2 * count>(row, words.vector(j)));
      }
    });
    return;
  }
  for (int k = 0; k < unit.count; ++k, s += qL) {
    const real* row = in.w + unit.keys[k] * in.words.row;
    for (int t = 0; t < q; ++t) s[t] = row[unit.queries[t]];
    for (int t = q; t < qL; ++t) s[t] = 0;
  }
}

/// Softmax of a unit from the logits of its keys.
template <class real>
inline void score_unit(const ScoreArguments<real>& in, const UnitWords& words, int u) {
  constexpr int L = kLanes<real>;
  const int qL = round_up(in.q, L), N = qL / L;
  const bool readouts = has_readouts(in.mode);
  real* s = in.s + u * in.unit_stride;
  look_up_scores(in, words, s);
  for (int k = 0; words.times && k < words.count; ++k, s += qL) {
    if (words.times[k] == 1) continue;
    const Vec<real> log_times = broadcast<real>(real(in.words.log_times[words.times[k]]));
    for (int j = 0; j < N; ++j) store<real>(s + j * L, load<real>(s + j * L) + log_times);
  }
  if (readouts && in.ut) {  // else C is there
    real* c = in.c + u * in.unit_stride;
    for (int k = 0; k < words.count; ++k, c += qL) copy_row(in.ut + words.keys[k] * in.ut_k, N, c);
  }
  process_unit_of_rows(in, u, words.count, readouts);
}

template <class real>
void scores_words(const ScoreArguments<real>& in) {
  const bool weighs = in.exps && has_readouts(in.mode) && in.mode != RowMode::kScaled;
  for (int u = 0; u < in.units; ++u) {
    const UnitWords words(in.words, in.T, u);
    if (weighs && (in.limits ? weigh_unit<true>(in, words, u) : weigh_unit<false>(in, words, u)))
      continue;
    score_unit(in, words, u);
  }
}

/// Rows from a list, one for each lane.
template <class real>
inline IntVec<real> load_rows(const std::int32_t* from) {
  typedef std::int32_t Rows __attribute__((vector_size(kLanes<real> * sizeof(std::int32_t))));
  Rows rows;
  std::memcpy(&rows, from, sizeof rows);
  return __builtin_convertvector(rows, IntVec<real>);
}

/// to += factor from, `count` vectors.
template <class real>
inline void add_row(const real* from, real factor, int count, real* to) {
  constexpr int L = kLanes<real>;
  const Vec<real> factors = broadcast<real>(factor);
  for (int j = 0; j < count; ++j)
    store<real>(to + j * L, load<real>(to + j * L) + factors * load<real>(from + j * L));
}

// Keys whose rows of D are added together, so that each permutation is read once for all.
inline constexpr int kKeysTogether = 4;

/// Adds D of some keys from `first` on, times a factor, to the rows of their words.
template <class real, int columns>
inline void add_rows_of_words(const UnitWords& unit, int first, const real* dd, real factor,
                              Index row, real* gw) {
  constexpr int L = kLanes<real>;
  const int keys = unit.count - first;
  const std::int32_t* others = unit.first_rows + row;
  const Vec<real> factors = broadcast<real>(factor);
  Vec<real> d[kKeysTogether][columns];
#pragma GCC unroll 4
  for (int k = 0; k < kKeysTogether; ++k)
#pragma GCC unroll 4
    for (int j = 0; j < columns; ++j)
      d[k][j] = factors * load<real>(dd + ((first + (k < keys ? k : 0)) * columns + j) * L);
  const auto taken = [&](int k, IntVec<real> at) {
    return select<real>(at < 0, Vec<real>{},
                        look_up<real, columns>(at, [&](int j) { return d[k][j]; }));
  };
  // Rows that are not the first of their word are only read.
  for (int round = 1; round < unit.rounds; ++round)
#pragma GCC unroll 4
    for (int j = 0; j < columns; ++j) {
      const IntVec<real> at = load_rows<real>(others + (round * columns + j) * L);
#pragma GCC unroll 4
      for (int k = 0; k < kKeysTogether; ++k) d[k][j] += taken(k, at);
    }
  for (Index j = 0; j < row; j += L) {
    const IntVec<real> at = load_rows<real>(unit.first_rows + j);
#pragma GCC unroll 4
    for (int k = 0; k < kKeysTogether; ++k) {
      if (k >= keys) break;
      real* to = gw + unit.keys[first + k] * row + j;
      store<real>(to, load<real>(to) + taken(k, at));
    }
  }
}

/// D of one unit, (T, qL), times a factor, to the pairs of its words.
template <class real>
inline void add_pairs(const WordGradientArguments<real>& in, const UnitWords& unit, const real* dd,
                      real factor) {
  constexpr int L = kLanes<real>;
  const int q = in.q, qL = round_up(q, L), N = qL / L;
  if (kPermutesTwo && unit.rounds > 0) {
    with_count<kMostQueryVectors>(N, [&](auto columns) {
      for (int k = 0; k < unit.count; k += kKeysTogether)
        add_rows_of_words<real, columns>(unit, k, dd, factor, in.words.row, in.gw);
    });
    return;
  }
  for (int k = 0; k < unit.count; ++k, dd += qL) {
    real* row = in.gw + unit.keys[k] * in.words.row;
    for (int t = 0; t < q; ++t) row[unit.queries[t]] += factor * dd[t];  // a word may occur twice
  }
}

template <class real>
void gradients_words(const WordGradientArguments<real>& in) {
  const int qL = round_up(in.q, kLanes<real>), N = qL / kLanes<real>;
  for (int u = 0; u < in.units; ++u) {
    const UnitWords words(in.words, in.T, u);
    const Index first = u * in.unit_stride;
    for (int k = 0; in.gu && k < words.count; ++k)
      add_row(in.a + first + Index(k) * qL, in.factors[u], N, in.gu + Index(words.keys[k]) * qL);
    if (!in.gw) continue;
    if (words.queries) {
      add_pairs(in, words, in.dd + first, in.factors[u]);
      continue;
    }
    for (int k = 0; k < words.count; ++k)
      add_row(in.dd + first + Index(k) * qL, in.factors[u], N,
              in.gw + words.keys[k] * in.words.row);
  }
}

template <class real>
void values_words(const WordValuesArguments<real>& in) {
  constexpr int L = kLanes<real>;
  const int q = in.q;
  const Index pL = Index(in.vectors) * L;
  constexpr int kTogether = 4;  // keys, whose sums do not wait for each other
  const auto add = [&](int first, int count) {
    const real* a[kTogether];
    for (int k = 0; k < kTogether; ++k) a[k] = in.a + Index(first + (k < count ? k : 0)) * in.a_row;
    for (int j = 0; j < in.vectors; ++j) {
      Vec<real> sums[kTogether] = {};
      for (int t = 0; t < q; ++t) {
        const Vec<real> g = load<real>(in.g + t * pL + j * L);
#pragma GCC unroll 4
        for (int k = 0; k < kTogether; ++k) sums[k] += broadcast<real>(a[k][t]) * g;
      }
      for (int k = 0; k < count; ++k) {
        real* to = in.gv + (in.keys ? in.keys[first + k] : first + k) * pL + j * L;
        store<real>(to, load<real>(to) + sums[k]);
      }
    }
  };
  for (int k = 0; k < in.T; k += kTogether) add(k, in.T - k < kTogether ? in.T - k : kTogether);
}

}  // namespace
}  // namespace MHFAST_ISA
}  // namespace mhfast
