// Outputs from rows of attended tokens, whose features lie along the lanes:
//
//   F[row][o] = sum over k of X[row][k] B[k][o]
//
// as products of vectors, whose lanes are then added in a fixed order. The gradient by B^T, G^T X,
// is an ordinary product.
#pragma once

#include "product.hpp"

namespace mhfast {
namespace MHFAST_ISA {
namespace {

/// Sums over the lanes of `count` vectors, as many at a time as there are lanes: a square of them
/// is transposed and its rows are added, in the order of lane_sum.
template <class real>
void lane_sums(const real* vectors, Index count, real* out) {
  constexpr int L = kLanes<real>;
  Index i = 0;
  for (; i + L <= count; i += L) {
    Vec<real> square[L];
#pragma GCC unroll 16
    for (int r = 0; r < L; ++r) square[r] = load<real>(vectors + (i + r) * L);
    transpose<real>(square);
    Vec<real> sum = square[0];
#pragma GCC unroll 16
    for (int r = 1; r < L; ++r) sum += square[r];
    store<real>(out + i, sum);
  }
  for (; i < count; ++i) out[i] = lane_sum<real>(load<real>(vectors + i * L));
}

template <class real>
void attended_outputs(const AttendedArguments<real>& in) {
  constexpr int L = kLanes<real>;
  const Index outputs = Index(in.p) * L, row = Index(in.vectors) * L;
  multiply<Left::kLaned>(Product<real>{
      {in.p, in.rows, in.vectors}, {in.readout, outputs}, {in.x, L, row}, {in.sums, L, outputs}});
  lane_sums<real>(in.sums, Index(in.rows) * in.p, in.f);
}

}  // namespace
}  // namespace MHFAST_ISA
}  // namespace mhfast
