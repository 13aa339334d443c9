// The triangular factor R (d, d) of the tokens X (T, d) of a sample, R^T R = X^T X, one sample in
// each lane.
//
// Householder reflections, without Q: reflection j acts on row j of R and on a block of further
// rows of X below it, and takes column j of the block to zero,
//
//   v = (R_jj + sign(R_jj) norm, column j),   R_jk, column k -= tau v <v, (R_jk, column k)>, k > j.
//
// A column is divided by its largest entry first, so that no square leaves the range of the type.
// R is that of X + E, where each column of E is a small multiple of the type's precision times the
// same column of X: columns of very different sizes, dependent ones and zeros do no harm. A block
// of zeros leaves R as it is to the last bit. NaN or infinity in a sample makes the last column of
// its R NaN.
#pragma once

#include <limits>

#include "../simd/vec.hpp"
#include "table.hpp"

namespace mhfast {
namespace MHFAST_ISA {
namespace {

/// Reflects `columns` columns of the block and of the row of R, both one after the other.
template <int columns, class real>
inline void reflect(const TriangleArguments<real>& in, const real* v, Vec<real> head, Vec<real> tau,
                    real* row, real* column) {
  constexpr int L = kLanes<real>;
  const Index apart = Index(in.rows) * L;
  Vec<real> sum[columns];
  for (int c = 0; c < columns; ++c) sum[c] = head * load<real>(row + c * L);
  for (int t = 0; t < in.rows; ++t) {
    const Vec<real> entry = load<real>(v + t * L);
    for (int c = 0; c < columns; ++c) sum[c] += entry * load<real>(column + c * apart + t * L);
  }
  for (int c = 0; c < columns; ++c) {
    sum[c] *= tau;
    store<real>(row + c * L, load<real>(row + c * L) - head * sum[c]);
  }
  for (int t = 0; t < in.rows; ++t) {
    const Vec<real> entry = load<real>(v + t * L);
    for (int c = 0; c < columns; ++c) {
      real* const at = column + c * apart + t * L;
      store<real>(at, load<real>(at) - entry * sum[c]);
    }
  }
}

template <class real>
void triangle_samples(const TriangleArguments<real>& in) {
  constexpr int L = kLanes<real>, kTogether = 4;
  // Its inverse is in range.
  const Vec<real> least = broadcast<real>(std::numeric_limits<real>::min() * 4);
  const Vec<real> zero{}, one = broadcast<real>(1);
  for (int j = 0; j < in.d; ++j) {
    real* const v = in.block + Index(j) * in.rows * L;
    real* const row = in.triangle + Index(j) * in.d * L;
    const Vec<real> diagonal = load<real>(row + j * L);
    Vec<real> largest = maximum<real>(absolute<real>(diagonal), least);
    for (int t = 0; t < in.rows; ++t)
      largest = maximum<real>(absolute<real>(load<real>(v + t * L)), largest);
    const Vec<real> factor = one / largest, alpha = diagonal * factor;
    Vec<real> squares{};
    for (int t = 0; t < in.rows; ++t) {
      const Vec<real> entry = load<real>(v + t * L) * factor;
      store<real>(v + t * L, entry);
      squares += entry * entry;
    }
    const Vec<real> norm =
        by_lane<real>(alpha * alpha + squares, [](real x) { return real(__builtin_sqrt(x)); });
    const IntVec<real> is_zero = squares == zero;
    const Vec<real> tau =
        select<real>(is_zero, zero, one / (norm * (norm + absolute<real>(alpha))));
    const Vec<real> signed_norm = select<real>(alpha < zero, -norm, norm);
    const Vec<real> head = alpha + signed_norm;
    store<real>(row + j * L, select<real>(is_zero, diagonal, -signed_norm * largest));
    int k = j + 1;
    const auto column = [&](int at) { return in.block + Index(at) * in.rows * L; };
    for (; k + kTogether <= in.d; k += kTogether)
      reflect<kTogether>(in, v, head, tau, row + k * L, column(k));
    for (; k < in.d; ++k) reflect<1>(in, v, head, tau, row + k * L, column(k));
  }
}

}  // namespace
}  // namespace MHFAST_ISA
}  // namespace mhfast
