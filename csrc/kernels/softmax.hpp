// Softmax over keys, its readout and its derivative, one query row per lane.
//
//   S[s], C[s]   logits and readout coefficients of key s (s < T), one vector for each
//   A[s] = exp(S[s] - max) / sum          weights
//   r    = sum over s of A[s] C[s]        the row's readout
//   D[s] = A[s] (C[s] - r)                derivative of r by S[s]
//
// Layout: key s of column n is the vector at s * stride + n * step. A column is a set of query
// rows, one per lane; lanes do not interact.
//
// Numeric method: D is a difference of nearly equal numbers once the attention saturates, so it is
// centred first at the row's largest logit, key m: c[s] = C[s] - C[m], p = sum A[s] c[s],
// D[s] = A[s] (c[s] - p). No digits cancel: c[m] = 0 exactly, and a weight other than the largest
// is at most 1/2. D therefore has full relative accuracy, however small it is.
//
// Limits: row i may see only the keys s < limit[i]. The others count as logits of -inf, whatever
// logit and coefficient they have; a row that sees no key has weights, readout and derivative 0,
// and a row with the limit NaN has them NaN.
//
// With kZero a row has a further logit, 0, whose value is 0 and which is not a key: the sum has 1
// more, and where 0 is the largest logit, key m is that of none and C[m] = 0.
#pragma once

#include <limits>
#include <type_traits>

#include "../simd/exp.hpp"

namespace mhfast {
namespace MHFAST_ISA {
namespace {

template <class real, bool kZero = false>
struct Rows {
  int keys, columns;
  Index stride;
  real* s;  // logits; overwritten with A where a function says so
  real* c;  // readout coefficients; overwritten with D where a function says so
  const real* limits = nullptr;  // keys that a row sees, `columns` vectors; null: all
  Index step = kLanes<real>;     // from column to column; limits and results are side by side
};

/// The largest logit of a row and the data of its key.
template <class real>
struct Peak {
  Vec<real> logit, runner_up, coefficient;
  IntVec<real> key;
};

/// W adjacent columns, worked on together so that their chains of operations overlap.
template <class real, int W, bool kLimited, bool kZero>
struct Columns {
  static constexpr int kWidth = W;
  int keys;
  Index stride, step;
  real *s, *c;  // of the first key
  int at;       // numbers before the first column in limits and results
  Vec<real> limits[W];

  Columns(const Rows<real, kZero>& rows, int column)
      : keys(rows.keys),
        stride(rows.stride),
        step(rows.step),
        s(rows.s + column * rows.step),
        c(rows.c + column * rows.step),
        at(column * kLanes<real>) {
    if constexpr (kLimited)
      for (int w = 0; w < W; ++w) limits[w] = load<real>(rows.limits + at + w * kLanes<real>);
  }

  Vec<real> logit(int w, int key, const real* s) const {
    if constexpr (kLimited)
      return select<real>(limits[w] > real(key), load<real>(s),
                          broadcast<real>(-std::numeric_limits<real>::infinity()));
    return load<real>(s);
  }

  /// C minus that of the peak, 0 for a key that is not seen: its weight of 0 would not stop a NaN.
  Vec<real> centred(int w, int key, const real* c, Vec<real> peak) const {
    if constexpr (kLimited)
      return select<real>(limits[w] > real(key), load<real>(c) - peak, Vec<real>{});
    return load<real>(c) - peak;
  }

  /// 1 / sum, 0 for a row that sees no key, NaN for a limit of NaN.
  Vec<real> inverse(int w, Vec<real> sum) const {
    if constexpr (kLimited)
      return select<real>(limits[w] > real(0), real(1) / sum, limits[w] * real(0));
    return real(1) / sum;
  }

  /// The first terms of the sums of exp(logit - peak - shift), times C - C[m], over all but keys.
  void begin_sums(const Peak<real> (&peaks)[W], Vec<real> (&sum)[W], Vec<real> (&moment)[W]) const {
    if constexpr (kZero)
      for (int w = 0; w < W; ++w) {
        sum[w] = exp_flushed<real>(-peaks[w].logit);
        moment[w] = -sum[w] * peaks[w].coefficient;
      }
  }
  void begin_others(const Peak<real> (&peaks)[W], Vec<real> shift, Vec<real> (&sum)[W],
                    Vec<real> (&moment)[W]) const {
    if constexpr (kZero)
      for (int w = 0; w < W; ++w) {
        sum[w] =
            select<real>(peaks[w].key < 0, Vec<real>{}, exp_flushed<real>(-peaks[w].logit - shift));
        moment[w] = -sum[w] * peaks[w].coefficient;
      }
  }

  /// Calls body(w, key, logit, s, c) for every column w and every key from `first`.
  template <class Body>
  void for_keys(const Body& body, int first = 0) const {
    real *s_at = s + first * stride, *c_at = c + first * stride;
    const Index to_key = stride, to_column = step;
    for (int key = first, end = keys; key < end; ++key, s_at += to_key, c_at += to_key) {
#pragma GCC unroll 2
      for (int w = 0; w < W; ++w) {
        real* s_w = s_at + w * to_column;
        body(w, key, logit(w, key, s_w), s_w, c_at + w * to_column);
      }
    }
  }

  void find_peaks(Peak<real> (&peaks)[W]) const {
    for (int w = 0; w < W; ++w) {
      const Vec<real> none = broadcast<real>(-std::numeric_limits<real>::infinity());
      if constexpr (kZero)
        peaks[w] = {Vec<real>{}, none, Vec<real>{}, IntVec<real>{} - 1};
      else
        peaks[w] = {logit(w, 0, s + w * step), none, load<real>(c + w * step), IntVec<real>{}};
    }
    for_keys(
        [&](int w, int key, Vec<real> logit, const real*, const real* c) {
          const Vec<real> coefficient = load<real>(c);
          Peak<real>& peak = peaks[w];
          const IntVec<real> higher = logit > peak.logit;
          peak.runner_up = select<real>(higher, peak.logit, maximum<real>(peak.runner_up, logit));
          peak.logit = select<real>(higher, logit, peak.logit);
          peak.coefficient = select<real>(higher, coefficient, peak.coefficient);
          peak.key = higher ? IntVec<real>{} + typename Lane<real>::Int(key) : peak.key;
        },
        kZero ? 0 : 1);
    if constexpr (kLimited)
      for (int w = 0; w < W; ++w) {
        const IntVec<real> sees = limits[w] > real(0);
        peaks[w].logit = select<real>(sees, peaks[w].logit, Vec<real>{});
        peaks[w].coefficient = select<real>(sees, peaks[w].coefficient, Vec<real>{});
      }
  }
};

template <bool kLimited, class real, bool kZero, class Body>
inline void for_columns_of(const Rows<real, kZero>& rows, const Body& body) {
  int n = 0;
  for (; n + 2 <= rows.columns; n += 2) {
    const Columns<real, 2, kLimited, kZero> columns(rows, n);
    Peak<real> peaks[2];
    columns.find_peaks(peaks);
    body(columns, peaks);
  }
  if (n == rows.columns) return;
  const Columns<real, 1, kLimited, kZero> column(rows, n);
  Peak<real> peaks[1];
  column.find_peaks(peaks);
  body(column, peaks);
}

/// Applies body(columns, peaks) to all columns, two at a time and then the last.
template <class real, bool kZero, class Body>
inline void for_columns(const Rows<real, kZero>& rows, const Body& body) {
  if (rows.limits) return for_columns_of<true>(rows, body);
  for_columns_of<false>(rows, body);
}

/// log of the second largest weight over the largest; -inf if there is no second.
template <class Columns, class Peaks, class real>
inline void store_gap(const Columns& columns, const Peaks& peaks, int w, real* gaps) {
  store<real>(gaps + columns.at + w * kLanes<real>, peaks[w].runner_up - peaks[w].logit);
}

/// Writes the readout of each row to `readouts` (columns vectors); S and C are not changed.
template <class real, bool kZero>
inline void readout(const Rows<real, kZero>& rows, real* readouts) {
  for_columns(rows, [readouts](const auto& columns, const auto& peaks) {
    constexpr int W = std::decay_t<decltype(columns)>::kWidth;
    Vec<real> sum[W] = {}, moment[W] = {};
    columns.begin_sums(peaks, sum, moment);
    columns.for_keys([&](int w, int key, Vec<real> logit, const real*, const real* c) {
      const Vec<real> e = exp_flushed<real>(logit - peaks[w].logit);
      sum[w] += e;
      moment[w] += e * columns.centred(w, key, c, peaks[w].coefficient);
    });
    for (int w = 0; w < W; ++w) {
      const Vec<real> p = rounded<real>(moment[w] * columns.inverse(w, sum[w]));
      store<real>(readouts + columns.at + w * kLanes<real>, peaks[w].coefficient + p);
    }
  });
}

/// S becomes A; denormal weights are kept or flushed to zero. C is not used. `gaps` as for
/// `differentiate`, or null.
template <bool kFlush, class real, bool kZero>
inline void attend(const Rows<real, kZero>& rows, real* gaps) {
  for_columns(rows, [gaps](const auto& columns, const auto& peaks) {
    constexpr int W = std::decay_t<decltype(columns)>::kWidth;
    Vec<real> sum[W] = {}, inverse[W];
    if constexpr (kZero)
      for (int w = 0; w < W; ++w) sum[w] = exp_flushed<real>(-peaks[w].logit);
    columns.for_keys([&](int w, int, Vec<real> logit, real* s, const real*) {
      const Vec<real> x = logit - peaks[w].logit;
      const Vec<real> e = kFlush ? exp_flushed<real>(x) : exp<real>(x);
      store<real>(s, e);
      sum[w] += e;
    });
    for (int w = 0; w < W; ++w) {
      inverse[w] = columns.inverse(w, sum[w]);
      if (gaps) store_gap(columns, peaks, w, gaps);
    }
    columns.for_keys([&](int w, int, Vec<real>, real* s, const real*) {
      store<real>(s, load<real>(s) * inverse[w]);
    });
  });
}

/// S becomes A and C becomes D; writes the readouts. With kGaps, `gaps` (columns vectors) receives
/// log(largest weight of a key other than m / weight of m), -inf for a single key.
template <bool kGaps, class real, bool kZero>
inline void differentiate(const Rows<real, kZero>& rows, real* readouts, real* gaps) {
  for_columns(rows, [=](const auto& columns, const auto& peaks) {
    constexpr int W = std::decay_t<decltype(columns)>::kWidth;
    Vec<real> sum[W] = {}, moment[W] = {}, inverse[W], p[W];
    columns.begin_sums(peaks, sum, moment);
    columns.for_keys([&](int w, int key, Vec<real> logit, real* s, real* c) {
      const Vec<real> e = exp_flushed<real>(logit - peaks[w].logit);
      const Vec<real> centred = columns.centred(w, key, c, peaks[w].coefficient);
      store<real>(s, e);
      store<real>(c, centred);
      sum[w] += e;
      moment[w] += e * centred;
    });
    for (int w = 0; w < W; ++w) {
      const int at = columns.at + w * kLanes<real>;
      inverse[w] = columns.inverse(w, sum[w]);
      p[w] = rounded<real>(moment[w] * inverse[w]);  // readouts are those of `readout`
      store<real>(readouts + at, peaks[w].coefficient + p[w]);
      if constexpr (kGaps) store_gap(columns, peaks, w, gaps);
    }
    columns.for_keys([&](int w, int, Vec<real>, real* s, real* c) {
      const Vec<real> a = load<real>(s) * inverse[w];
      store<real>(s, a);
      store<real>(c, a * (load<real>(c) - p[w]));
    });
  });
}

/// Only the gaps of `differentiate`.
template <class real, bool kZero>
inline void find_gaps(const Rows<real, kZero>& rows, real* gaps) {
  for_columns(rows, [gaps](const auto& columns, const auto& peaks) {
    constexpr int W = std::decay_t<decltype(columns)>::kWidth;
    for (int w = 0; w < W; ++w) store_gap(columns, peaks, w, gaps);
  });
}

/// As `differentiate`, but C becomes D exp(-shift), accurate even if every entry of D underflows.
/// `shift`, at most 0, must be at least the gap of each row it serves.
template <class real, bool kZero>
inline void differentiate_scaled(const Rows<real, kZero>& rows, Vec<real> shift, real* readouts) {
  using Int = typename Lane<real>::Int;
  const Vec<real> scale = exp<real>(shift);
  for_columns(rows, [=](const auto& columns, const auto& peaks) {
    constexpr int W = std::decay_t<decltype(columns)>::kWidth;
    Vec<real> others[W] = {}, moment[W] = {}, inverse[W], p[W];  // sums divided by exp(shift)
    columns.begin_others(peaks, shift, others, moment);
    columns.for_keys([&](int w, int key, Vec<real> logit, real* s, real* c) {
      const Vec<real> e = select<real>(peaks[w].key == Int(key), Vec<real>{},
                                       exp_flushed<real>(logit - peaks[w].logit - shift));
      const Vec<real> centred = columns.centred(w, key, c, peaks[w].coefficient);
      store<real>(s, e);
      store<real>(c, centred);
      others[w] += e;
      moment[w] += e * centred;
    });
    for (int w = 0; w < W; ++w) {
      inverse[w] = columns.inverse(w, real(1) + others[w] * scale);
      p[w] = moment[w] * inverse[w];
      store<real>(readouts + columns.at + w * kLanes<real>, peaks[w].coefficient + p[w] * scale);
    }
    columns.for_keys([&](int w, int key, Vec<real>, real* s, real* c) {
      const IntVec<real> is_peak = peaks[w].key == Int(key);
      const Vec<real> a = load<real>(s) * inverse[w];
      const Vec<real> centred = load<real>(c);
      store<real>(s, select<real>(is_peak, inverse[w], a * scale));
      store<real>(c, select<real>(is_peak, -p[w] * inverse[w], a * (centred - p[w] * scale)));
    });
  });
}

/// C becomes D, given the weights A in S; where A is 0 so is D, whatever C is.
template <class real>
inline void differentiate_weights(const Rows<real>& rows) {
  for_columns_of<false>(rows, [](const auto& columns, const auto& peaks) {
    constexpr int W = std::decay_t<decltype(columns)>::kWidth;
    Vec<real> p[W] = {};
    columns.for_keys([&](int w, int, Vec<real> a, const real*, real* c) {
      const Vec<real> centred =
          select<real>(a == Vec<real>{}, a, load<real>(c) - peaks[w].coefficient);
      store<real>(c, centred);
      p[w] += a * centred;
    });
    columns.for_keys([&](int w, int, Vec<real> a, const real*, real* c) {
      store<real>(c, a * (load<real>(c) - p[w]));
    });
  });
}

}  // namespace
}  // namespace MHFAST_ISA
}  // namespace mhfast
