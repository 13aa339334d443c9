// Outputs from rows of attended tokens, whose features lie along the lanes:
//
//   F[row][o] = sum over k of X[row][k] B[k][o]
//
// as products of vectors, whose lanes are then added in a fixed order. The gradient by B^T, G^T X, is
// an ordinary product.
#pragma once

#include "product.hpp"

namespace mhfast {
namespace MHFAST_ISA {
namespace {

template <class real>
void attended_outputs(const AttendedArguments<real>& in) {
  constexpr int L = kLanes<real>;
  const Index outputs = Index(in.p) * L, row = Index(in.vectors) * L;
  multiply<Left::kLaned>(Product<real>{{in.p, in.rows, in.vectors},
                                       {in.readout, outputs},
                                       {in.x, L, row},
                                       {in.sums, L, outputs}});
  const Index count = Index(in.rows) * in.p;
  for (Index i = 0; i < count; ++i) in.f[i] = lane_sum<real>(load<real>(in.sums + i * L));
}

}  // namespace
}  // namespace MHFAST_ISA
}  // namespace mhfast
