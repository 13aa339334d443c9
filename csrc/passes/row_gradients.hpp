// The gradient by W of one head from D X of all rows, Z^T (D X), in pieces that threads share.
#pragma once

#include <algorithm>

#include "../kernels/table.hpp"
#include "../runtime/tuning.hpp"

namespace mhfast {

/// Whether W (d, d) is so large, and its rows are so far apart, that a product with features as
/// lanes reads it faster where it is than from a copy with an odd number of vectors in a row.
template <class real>
bool reads_in_place(int d, int lanes) {
  const std::size_t row = std::size_t(d) * sizeof(real);
  return double(d) * double(row) > kSecondLevelBytes && d % lanes == 0 && row % kSetBytes != 0;
}

/// D X of rows (count, row), of which the first d numbers of a row count and whole vectors are
/// read, and Z of the same rows (count, d).
template <class real>
struct RowGradients {
  int d, count;
  const real *z, *e;
  std::ptrdiff_t row;

  static int pieces(int d) { return (d + kGradientRows - 1) / kGradientRows; }

  /// Writes the rows of a piece of the gradient (d, d).
  void multiply(const Kernels<real>& kernels, int piece, real* gradient) const {
    const int L = kernels.lanes, whole = d / L, rest = d % L, first = piece * kGradientRows;
    const int M = std::min(kGradientRows, d - first);
    real* const out = gradient + std::ptrdiff_t(first) * d;
    if (whole > 0) kernels.product({{M, whole, count}, {z + first, d}, {e, row, L}, {out, d, L}});
    if (rest == 0) return;
    real last[kGradientRows * kMaxLanes];
    kernels.product({{M, 1, count}, {z + first, d}, {e + whole * L, row, L}, {last, L, L}});
    for (int i = 0; i < M; ++i)
      std::copy_n(last + i * L, rest, out + std::ptrdiff_t(i) * d + whole * L);
  }
};

}  // namespace mhfast
