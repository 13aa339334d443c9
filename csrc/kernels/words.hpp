// Scores and gradients of samples whose tokens are words of a dictionary E, one head at a time.
//
//   tables      S = (E W) E^T of all pairs of words,  C = E U^T  (layers: E V)      once for a step
//   scores      s = S[key word][query word],  c = C[key word][row], then softmax as elsewhere
//   gradients   of S += D by pairs,  of C += A by key words,  of E V += A^T G by key words
//
// Query rows are the lanes. A table's entries are the sums that kernels/attention.hpp would compute
// for two tokens, in the same order, so that the outputs of a classifier have the same bits.
//
// Where the instruction set has permutations of two registers, rows of few words are looked up by
// these, and D is added to them by the inverse permutations: a word that several query rows have
// takes its numbers in as many rounds.
#pragma once

#include <type_traits>

#include "attention.hpp"

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

/// Entry `at` of `count` registers from `from` on, for each lane.
template <class real, int count>
inline Vec<real> look_up(const real* from, IntVec<real> at) {
  constexpr int L = kLanes<real>;
  const auto pair = [&](int i) {
    const Vec<real> low = load<real>(from + i * L);
    return permute<real>(low, i + 1 < count ? load<real>(from + (i + 1) * L) : low, at);
  };
  Vec<real> found = pair(0);
  if constexpr (count > 2) {
    const IntVec<real> which = at >> log2_of_two<real>();
#pragma GCC unroll 4
    for (int i = 2; i < count; i += 2) found = select<real>(which == i / 2, pair(i), found);
  }
  return found;
}

/// Calls body(std::integral_constant) with `count`, from 1 to `most`.
template <int most, class Body>
inline void with_count(int count, const Body& body) {
  if constexpr (most > 1)
    if (count < most) return with_count<most - 1>(count, body);
  body(std::integral_constant<int, most>{});
}

/// The words of the query rows of a unit, as lanes.
template <class real>
struct QueryWords {
  typename Lane<real>::Int at[kMostQueryVectors * kLanes<real>];

  QueryWords(const std::int32_t* words, int rows) {
    for (int t = 0; t < round_up(rows, kLanes<real>); ++t) at[t] = t < rows ? words[t] : 0;
  }
  IntVec<real> vector(int j) const { return load_lanes<real>(at + j * kLanes<real>); }
};

/// For each word the query rows that have it, a register of words at a time: in round r the r-th.
template <class real>
class RowsOfWords {
 public:
  RowsOfWords(const std::int32_t* words, int rows, int vectors) {
    constexpr int L = kLanes<real>;
    int seen[kMostWordVectors * L] = {}, rounds[kMostWordVectors] = {};
    for (int t = 0; t < rows; ++t) {
      int& most = rounds[unsigned(words[t]) / L];
      const int round = ++seen[words[t]];
      most = round > most ? round : most;
    }
    for (int j = 0; j < vectors; ++j) begin_[j + 1] = begin_[j] + rounds[j];
    std::memset(rows_, 0xff, std::size_t(begin_[vectors]) * L * sizeof(rows_[0]));
    for (int t = 0; t < rows; ++t) {
      const unsigned word = unsigned(words[t]);
      rows_[(begin_[word / L] + --seen[word]) * L + word % L] = t;
    }
  }

  /// Rounds of register j of words are first(j) to first(j + 1); rows are -1 where there is none.
  int first(int j) const { return begin_[j]; }
  IntVec<real> rows(int round) const { return load_lanes<real>(rows_ + round * kLanes<real>); }

 private:
  int begin_[kMostWordVectors + 1] = {};
  // No more rounds than rows.
  typename Lane<real>::Int rows_[kMostQueryVectors * kLanes<real> * kLanes<real>];
};

/// Copies `count` vectors.
template <class real>
inline void copy_row(const real* from, int count, real* to) {
  constexpr int L = kLanes<real>;
  for (int j = 0; j < count; ++j) store<real>(to + j * L, load<real>(from + j * L));
}

/// Logits of one unit from the table: (T, qL), zeros in the lanes beyond the rows.
template <class real>
inline void look_up_scores(const ScoreArguments<real>& in, const std::int32_t* keys,
                           const std::int32_t* queries, real* s) {
  constexpr int L = kLanes<real>;
  const int q = in.q, qL = round_up(q, L), N = qL / L;
  if (!queries) {
    for (int k = 0; k < in.T; ++k, s += qL) copy_row(in.w + keys[k] * in.words.row, N, s);
    return;
  }
  const int pairs = int(in.words.row) / (2 * L);
  if (kPermutesTwo && 2 * pairs <= kMostWordVectors && N <= kMostQueryVectors) {
    const QueryWords<real> words(queries, q);
    with_count<kMostWordVectors / 2>(pairs, [&](auto count) {
      for (int k = 0; k < in.T; ++k) {
        const real* row = in.w + keys[k] * in.words.row;
        for (int j = 0; j < N; ++j)
          store<real>(s + (Index(k) * N + j) * L, look_up<real, 2 * count>(row, words.vector(j)));
      }
    });
    return;
  }
  for (int k = 0; k < in.T; ++k, s += qL) {
    const real* row = in.w + keys[k] * in.words.row;
    for (int t = 0; t < q; ++t) s[t] = row[queries[t]];
    for (int t = q; t < qL; ++t) s[t] = 0;
  }
}

template <class real>
void scores_words(const ScoreArguments<real>& in) {
  constexpr int L = kLanes<real>;
  const int qL = round_up(in.q, L), N = qL / L;
  const bool readouts = has_readouts(in.mode);
  for (int u = 0; u < in.units; ++u) {
    const std::int32_t* keys = in.words.keys + u * in.words.keys_unit;
    const std::int32_t* queries =
        in.words.queries ? in.words.queries + u * in.words.queries_unit : nullptr;
    look_up_scores(in, keys, queries, in.s + u * in.unit_stride);
    if (!readouts || !in.ut) continue;  // or C is there
    real* c = in.c + u * in.unit_stride;
    for (int k = 0; k < in.T; ++k, c += qL) copy_row(in.ut + keys[k] * in.ut_k, N, c);
  }
  process_units_of_rows(in, readouts);
}

/// to += factor from, `count` vectors.
template <class real>
inline void add_row(const real* from, real factor, int count, real* to) {
  constexpr int L = kLanes<real>;
  const Vec<real> factors = broadcast<real>(factor);
  for (int j = 0; j < count; ++j)
    store<real>(to + j * L, load<real>(to + j * L) + factors * load<real>(from + j * L));
}

// Keys whose rows of D are added together, while the permutations are in registers.
inline constexpr int kKeysTogether = 4;

/// Adds D of `keys` keys, times a factor, to the rows of their words.
template <class real, int query_vectors>
inline void add_rows_of_words(const RowsOfWords<real>& rows, int vectors, const std::int32_t* words,
                              int keys, const real* dd, real factor, Index row, real* gw) {
  constexpr int L = kLanes<real>;
  const Vec<real> factors = broadcast<real>(factor);
  for (int j = 0; j < vectors; ++j) {
    if (rows.first(j) == rows.first(j + 1)) continue;
    Vec<real> sums[kKeysTogether] = {};
    for (int i = rows.first(j); i < rows.first(j + 1); ++i) {
      const IntVec<real> at = rows.rows(i), none = at < 0;
#pragma GCC unroll 4
      for (int k = 0; k < kKeysTogether; ++k) {
        const real* of_key = dd + Index(k < keys ? k : 0) * query_vectors * L;
        sums[k] += select<real>(none, Vec<real>{}, look_up<real, query_vectors>(of_key, at));
      }
    }
    for (int k = 0; k < keys; ++k) {
      real* to = gw + words[k] * row + j * L;
      store<real>(to, load<real>(to) + factors * sums[k]);
    }
  }
}

/// D of one unit, (T, qL), times a factor, to the pairs of its words.
template <class real>
inline void add_pairs(const WordGradientArguments<real>& in, const std::int32_t* keys,
                      const std::int32_t* queries, const real* dd, real factor) {
  constexpr int L = kLanes<real>;
  const int q = in.q, qL = round_up(q, L), N = qL / L, vectors = int(in.words.row) / L;
  if (kPermutesTwo && vectors <= kMostWordVectors && N <= kMostQueryVectors) {
    const RowsOfWords<real> rows(queries, q, vectors);
    with_count<kMostQueryVectors>(N, [&](auto count) {
      for (int k = 0; k < in.T; k += kKeysTogether)
        add_rows_of_words<real, count>(rows, vectors, keys + k,
                                       in.T - k < kKeysTogether ? in.T - k : kKeysTogether,
                                       dd + Index(k) * qL, factor, in.words.row, in.gw);
    });
    return;
  }
  for (int k = 0; k < in.T; ++k, dd += qL) {
    real* row = in.gw + keys[k] * in.words.row;
    for (int t = 0; t < q; ++t) row[queries[t]] += factor * dd[t];  // a word may occur twice
  }
}

template <class real>
void gradients_words(const WordGradientArguments<real>& in) {
  const int qL = round_up(in.q, kLanes<real>), N = qL / kLanes<real>;
  for (int u = 0; u < in.units; ++u) {
    const std::int32_t* keys = in.words.keys + u * in.words.keys_unit;
    const Index first = u * in.unit_stride;
    for (int k = 0; in.gu && k < in.T; ++k)
      add_row(in.a + first + Index(k) * qL, in.factors[u], N, in.gu + Index(keys[k]) * qL);
    if (!in.gw) continue;
    if (in.words.queries) {
      add_pairs(in, keys, in.words.queries + u * in.words.queries_unit, in.dd + first,
                in.factors[u]);
      continue;
    }
    for (int k = 0; k < in.T; ++k)
      add_row(in.dd + first + Index(k) * qL, in.factors[u], N, in.gw + keys[k] * in.words.row);
  }
}

template <class real>
void values_words(const WordValuesArguments<real>& in) {
  constexpr int L = kLanes<real>;
  const int q = in.q, qL = round_up(q, L);
  const Index pL = Index(in.vectors) * L;
  for (int k = 0; k < in.T; ++k) {
    const real* a = in.a + Index(k) * qL;
    real* to = in.gv + in.keys[k] * pL;
    for (int j = 0; j < in.vectors; ++j) {
      Vec<real> sum{};
      for (int t = 0; t < q; ++t) sum += broadcast<real>(a[t]) * load<real>(in.g + t * pL + j * L);
      store<real>(to + j * L, load<real>(to + j * L) + sum);
    }
  }
}

}  // namespace
}  // namespace MHFAST_ISA
}  // namespace mhfast
