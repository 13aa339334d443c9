// Copies of a data set in the layouts that the kernels read, and copies multiplied by the loss
// derivative. `x` is (rows, d) row by row; lanes that have no sample or no row are zero.
#pragma once

#include "../simd/vec.hpp"

namespace mhfast {
namespace MHFAST_ISA {
namespace {

/// Samples or runs as lanes: out[i][lane] = x[lane * stride + i], i < size, zero from lane `valid`.
template <class real>
void pack_lanes(const real* x, Index stride, int valid, Index size, real* out) {
  constexpr int L = kLanes<real>;
  if (valid == L) {
    for (Index i = 0; i < size; ++i, out += L) {
      Vec<real> lanes;
#pragma GCC unroll 16
      for (int l = 0; l < L; ++l) lanes[l] = x[l * stride + i];
      store<real>(out, lanes);
    }
    return;
  }
  for (int l = 0; l < L; ++l)
    for (Index i = 0; i < size; ++i) out[i * L + l] = l < valid ? x[l * stride + i] : real(0);
}

/// Entries of vectors: out[k][row] = x[row][k].
template <class real>
void transpose_lanes(const real* x, int rows, int d, real* out) {
  constexpr int L = kLanes<real>;
  for (int r = 0; r < rows; ++r)
    for (int k = 0; k < d; ++k, x += L) store<real>(out + (Index(k) * rows + r) * L, load<real>(x));
}

/// Rows as lanes: out[k][row] = x[row][k], zero up to the `padded` row.
template <class real>
void pack_rows(const real* x, int rows, int d, int padded, real* out) {
  for (int k = 0; k < d; ++k, out += padded) {
    for (int r = 0; r < rows; ++r) out[r] = x[Index(r) * d + k];
    for (int r = rows; r < padded; ++r) out[r] = real(0);
  }
}

/// Features as lanes: out[row][k] = factor x[row][k], zero up to the `padded` feature.
template <class real>
void scale_rows(const real* x, real factor, int rows, int d, int padded, real* out) {
  constexpr int L = kLanes<real>;
  const int whole = d / L * L;
  for (int r = 0; r < rows; ++r, x += d, out += padded) {
    for (int k = 0; k < whole; k += L) store<real>(out + k, factor * load<real>(x + k));
    for (int k = whole; k < padded; ++k) out[k] = k < d ? factor * x[k] : real(0);
  }
}

/// Samples as lanes: out[i][lane] = factor[lane] x[i][lane], i < size.
template <class real>
void scale_samples(const real* x, const real* factor, Index size, real* out) {
  constexpr int L = kLanes<real>;
  const Vec<real> f = load<real>(factor);
  for (Index i = 0; i < size; ++i) store<real>(out + i * L, f * load<real>(x + i * L));
}

}  // namespace
}  // namespace MHFAST_ISA
}  // namespace mhfast
