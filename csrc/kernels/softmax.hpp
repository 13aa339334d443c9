// Softmax over keys, its readout and its derivative, one query row per lane.
//
//   S[s], C[s]   logits and readout coefficients of key s (s < T), one vector for each
//   A[s] = exp(S[s] - max) / sum          weights
//   r    = sum over s of A[s] C[s]        the row's readout
//   D[s] = A[s] (C[s] - r)                derivative of r by S[s]
//
// Layout: key s of column n is the vector at s * stride + n * lanes. A column is a set of query
// rows, one a lane; nothing crosses lanes.
//
// Numeric method: D is a difference of nearly equal numbers once the attention saturates, so it is
// centred first at the row's largest logit, key m: c[s] = C[s] - C[m], p = sum A[s] c[s],
// D[s] = A[s] (c[s] - p). No digits cancel: c[m] = 0 exactly, and a weight other than the largest
// is at most 1/2. So D has full relative accuracy however small it is.
#pragma once

#include <limits>

#include "../simd/exp.hpp"

namespace mhfast {
namespace MHFAST_ISA {
namespace {

template <class real>
struct Rows {
  int keys, columns;
  Index stride;
  real* s;  // logits; overwritten with A where a function says so
  real* c;  // readout coefficients; overwritten with D where a function says so
};

/// The largest logit of a row and what belongs to it.
template <class real>
struct Peak {
  Vec<real> logit, runner_up, coefficient;
  IntVec<real> key;
};

/// Scans the keys of W adjacent columns at once, so that the chains of comparisons overlap.
template <class real, int W>
inline void find_peaks(const Rows<real>& rows, int column, Peak<real> (&peaks)[W]) {
  constexpr real kInfinity = std::numeric_limits<real>::infinity();
  const Index offset = Index(column) * kLanes<real>;
#pragma GCC unroll 2
  for (int w = 0; w < W; ++w)
    peaks[w] = {load<real>(rows.s + offset + w * kLanes<real>), broadcast<real>(-kInfinity),
                load<real>(rows.c + offset + w * kLanes<real>), IntVec<real>{}};
  for (int s = 1; s < rows.keys; ++s) {
#pragma GCC unroll 2
    for (int w = 0; w < W; ++w) {
      const Index at = s * rows.stride + offset + w * kLanes<real>;
      const Vec<real> logit = load<real>(rows.s + at), coefficient = load<real>(rows.c + at);
      Peak<real>& peak = peaks[w];
      const IntVec<real> higher = logit > peak.logit;
      peak.runner_up = select<real>(higher, peak.logit, maximum<real>(peak.runner_up, logit));
      peak.logit = select<real>(higher, logit, peak.logit);
      peak.coefficient = select<real>(higher, coefficient, peak.coefficient);
      peak.key = higher ? IntVec<real>{} + typename Lane<real>::Int(s) : peak.key;
    }
  }
}

/// Applies `body(column, peaks)` to all columns, two at a time and then the last.
template <class real, class Body>
inline void for_columns(const Rows<real>& rows, const Body& body) {
  int n = 0;
  for (; n + 2 <= rows.columns; n += 2) {
    Peak<real> peaks[2];
    find_peaks<real, 2>(rows, n, peaks);
    body(n, peaks[0]);
    body(n + 1, peaks[1]);
  }
  for (; n < rows.columns; ++n) {
    Peak<real> peaks[1];
    find_peaks<real, 1>(rows, n, peaks);
    body(n, peaks[0]);
  }
}

/// Writes the readout of each row to `readouts` (columns vectors); S and C are left as they are.
template <class real>
inline void readout(const Rows<real>& rows, real* readouts) {
  for_columns(rows, [&](int column, const Peak<real>& peak) {
    Vec<real> sum{}, moment{};
    for (int s = 0; s < rows.keys; ++s) {
      const Index at = s * rows.stride + Index(column) * kLanes<real>;
      const Vec<real> e = exp<real>(load<real>(rows.s + at) - peak.logit);
      sum += e;
      moment += e * (load<real>(rows.c + at) - peak.coefficient);
    }
    const Vec<real> inverse = real(1) / sum;
    const Vec<real> p = moment * inverse;
    store<real>(readouts + Index(column) * kLanes<real>, peak.coefficient + p);
  });
}

/// S becomes A. C is read but not used.
template <class real>
inline void attend(const Rows<real>& rows) {
  for_columns(rows, [&](int column, const Peak<real>& peak) {
    Vec<real> sum{};
    for (int s = 0; s < rows.keys; ++s) {
      real* at = rows.s + s * rows.stride + Index(column) * kLanes<real>;
      const Vec<real> e = exp<real>(load<real>(at) - peak.logit);
      store<real>(at, e);
      sum += e;
    }
    const Vec<real> inverse = real(1) / sum;
    for (int s = 0; s < rows.keys; ++s) {
      real* at = rows.s + s * rows.stride + Index(column) * kLanes<real>;
      store<real>(at, load<real>(at) * inverse);
    }
  });
}

/// S becomes A and C becomes D; writes the readouts. `gap` (columns vectors, or null) receives
/// log(largest weight of a key other than m / weight of m), -inf for a single key.
template <class real>
inline void differentiate(const Rows<real>& rows, real* readouts, real* gap) {
  for_columns(rows, [&](int column, const Peak<real>& peak) {
    const Index offset = Index(column) * kLanes<real>;
    Vec<real> sum{}, moment{};
    for (int s = 0; s < rows.keys; ++s) {
      const Index at = s * rows.stride + offset;
      const Vec<real> e = exp<real>(load<real>(rows.s + at) - peak.logit);
      const Vec<real> c = load<real>(rows.c + at) - peak.coefficient;
      store<real>(rows.s + at, e);
      store<real>(rows.c + at, c);
      sum += e;
      moment += e * c;
    }
    const Vec<real> inverse = real(1) / sum;
    const Vec<real> p = moment * inverse;
    for (int s = 0; s < rows.keys; ++s) {
      const Index at = s * rows.stride + offset;
      const Vec<real> a = load<real>(rows.s + at) * inverse;
      store<real>(rows.s + at, a);
      store<real>(rows.c + at, a * (load<real>(rows.c + at) - p));
    }
    store<real>(readouts + offset, peak.coefficient + p);
    if (gap) store<real>(gap + offset, peak.runner_up - peak.logit);
  });
}

/// Only the gaps of `differentiate`.
template <class real>
inline void find_gaps(const Rows<real>& rows, real* gap) {
  for_columns(rows, [&](int column, const Peak<real>& peak) {
    store<real>(gap + Index(column) * kLanes<real>, peak.runner_up - peak.logit);
  });
}

/// As `differentiate`, but C becomes D exp(-shift), right even where every entry of D underflows.
/// `shift`, at most 0, must be at least the gap of each row it serves.
template <class real>
inline void differentiate_scaled(const Rows<real>& rows, Vec<real> shift, real* readouts) {
  const Vec<real> scale = exp<real>(shift);
  for_columns(rows, [&](int column, const Peak<real>& peak) {
    const Index offset = Index(column) * kLanes<real>;
    Vec<real> others{}, moment{};  // sums over s != m, both divided by exp(shift)
    for (int s = 0; s < rows.keys; ++s) {
      const Index at = s * rows.stride + offset;
      const Vec<real> e = select<real>(peak.key == typename Lane<real>::Int(s), Vec<real>{},
                                       exp<real>(load<real>(rows.s + at) - peak.logit - shift));
      const Vec<real> c = load<real>(rows.c + at) - peak.coefficient;
      store<real>(rows.s + at, e);
      store<real>(rows.c + at, c);
      others += e;
      moment += e * c;
    }
    const Vec<real> inverse = real(1) / (real(1) + others * scale);
    const Vec<real> p = moment * inverse;
    for (int s = 0; s < rows.keys; ++s) {
      const Index at = s * rows.stride + offset;
      const IntVec<real> is_peak = peak.key == typename Lane<real>::Int(s);
      const Vec<real> a = load<real>(rows.s + at) * inverse;
      const Vec<real> c = load<real>(rows.c + at);
      store<real>(rows.s + at, select<real>(is_peak, inverse, a * scale));
      store<real>(rows.c + at, select<real>(is_peak, -p * inverse, a * (c - p * scale)));
    }
    store<real>(readouts + offset, peak.coefficient + p * scale);
  });
}

}  // namespace
}  // namespace MHFAST_ISA
}  // namespace mhfast
