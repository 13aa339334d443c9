// One head of a layer, F = A X V summed over heads, as chains of products; samples or runs are
// lanes.
//
//   outputs      Y = A X,  F (+)= Y V
//   upstream     U = G V^T                     (G: derivative of the loss by F)
//   derivative   C = U X^T,  D = A (C - rowsum(A C))
//   gradient     G_V (+)= Y^T G;               that by W is as for a readout: E = D X, G_W = Z^T E
//
// A U per sample takes the place of the shared U of a classifier. Where V is an identity, F (+)= Y
// and U = G. Of one query row all heads can go together; F is then their sum in the same order.
// Layouts are in table.hpp.
#pragma once

#include "attention.hpp"

namespace mhfast {
namespace MHFAST_ISA {
namespace {

/// F (+)= Y of one head after the other, where V is an identity.
template <class real>
void sum_heads(const LayerArguments<real>& in) {
  constexpr int L = kLanes<real>;
  const Index row = Index(in.d) * L;
  const real* y = in.y;
  real* f = in.f;
  for (int u = 0; u < in.units; ++u, f += row)
    for (int h = 0; h < in.heads; ++h, y += row)
      for (Index i = 0; i < row; i += L)
        store<real>(f + i,
                    in.add || h > 0 ? load<real>(f + i) + load<real>(y + i) : load<real>(y + i));
}

template <class real, Left parameters>
void layer_outputs(const LayerArguments<real>& in) {
  constexpr int L = kLanes<real>, kEntry = parameters == Left::kLaned ? L : 1;
  const int rows = in.q * in.heads;
  const Index row = Index(in.d) * L, outputs = Index(in.p) * L, key = Index(rows) * L;
  const bool to_y = in.v || in.heads > 1;
  multiply<Left::kLaned>(Product<real>{{rows, in.d, in.T, 1, in.units},
                                       {in.a, key, 0, in.unit_stride},
                                       {in.x, row, L, 0, in.T * row},
                                       {to_y ? in.y : in.f, row, L, rows * row},
                                       !to_y && in.add});
  if (!to_y) return;
  if (!in.v) return sum_heads(in);
  for (int h = 0; h < in.heads; ++h)
    multiply<parameters>(Product<real>{{in.p, in.units * in.q, in.d},
                                       {in.v + h * (Index(in.d) * in.p * kEntry), in.p * kEntry},
                                       {in.y + h * row, L, in.heads * row},
                                       {in.f, L, outputs},
                                       in.add || h > 0});
}

template <class real>
void layer_outputs_samples(const LayerArguments<real>& in) {
  layer_outputs<real, Left::kShared>(in);
}

template <class real>
void layer_outputs_runs(const LayerArguments<real>& in) {
  layer_outputs<real, Left::kLaned>(in);
}

template <class real, Left parameters>
void layer_upstream(const LayerArguments<real>& in) {
  constexpr int L = kLanes<real>, kEntry = parameters == Left::kLaned ? L : 1;
  const Index outputs = Index(in.p) * L, row = Index(in.heads) * L;
  const Index all_rows = Index(in.units) * in.q * row;
  for (int h = 0; h < in.heads; ++h) {
    real* const ut = in.ut + h * L;
    if (!in.vt)
      scaled_transpose(in.g, in.units * in.q, in.d, real(1), ut, all_rows, row);
    else
      multiply<parameters>(Product<real>{{in.d, in.units * in.q, in.p},
                                         {in.vt + h * (Index(in.d) * in.p * kEntry), in.d * kEntry},
                                         {in.g, L, outputs},
                                         {ut, all_rows, row}});
  }
}

template <class real>
void layer_upstream_samples(const LayerArguments<real>& in) {
  layer_upstream<real, Left::kShared>(in);
}

template <class real>
void layer_upstream_runs(const LayerArguments<real>& in) {
  layer_upstream<real, Left::kLaned>(in);
}

template <class real>
void layer_derivative(const LayerArguments<real>& in) {
  constexpr int L = kLanes<real>;
  const int rows = in.q * in.heads;
  const Index row = Index(in.d) * L, weights = Index(rows) * L, all_rows = in.units * weights;
  // The weights are only read, but Rows is also used by functions that write them.
  real* a = const_cast<real*>(in.a);
  for (int u = 0; u < in.units; ++u) {
    real* c = in.c + u * in.unit_stride;
    multiply<Left::kLaned>(Product<real>{{rows, in.T, in.d},
                                         {in.ut + u * weights, all_rows},
                                         {in.x + u * in.T * row, L, row},
                                         {c, L, weights}});
    if (in.slope != real(0)) {
      for (Index i = 0; in.slope != real(1) && i < in.T * weights; i += L)
        store<real>(c + i, load<real>(c + i) * in.slope);
      continue;
    }
    if (rows > 1) differentiate_weights(Rows<real>{in.T, rows, weights, a + u * in.unit_stride, c});
  }
  if (rows == 1 && in.slope == real(0))  // a unit is one column, see scores_lanes
    differentiate_weights(Rows<real>{in.T, in.units, L, a, in.c, nullptr, in.unit_stride});
}

template <class real>
void layer_gradient(const LayerArguments<real>& in) {
  constexpr int L = kLanes<real>;
  const Index row = Index(in.heads) * in.d * L, outputs = Index(in.p) * L;
  multiply_to_gradient(Product<real>{{in.heads * in.d, in.p, in.q, in.units},
                                     {in.y, row, in.q * row},
                                     {in.g, outputs, L, in.q * outputs},
                                     {in.gv, outputs, L},
                                     in.add},
                       in.sums_lanes);
}

/// Residuals of a row; their squares are summed in double.
template <class real>
void layer_residuals(const ResidualArguments<real>& in) {
  constexpr int L = kLanes<real>;
  using Wide = typename DoubleRegister<real>::Type;
  const IntVec<real> counts = load<real>(in.counts) != Vec<real>{};
  const Vec<real> factor = load<real>(in.factor);
  constexpr int kSums = 4;  // side by side: a sum waits for the one before
  Wide squares[kSums] = {};
  Vec<real> largest[kSums] = {};
  const auto add = [&](int o, int to) {
    const Vec<real> r =
        select<real>(counts, load<real>(in.f + o * L) - load<real>(in.y + o * L), Vec<real>{});
    const Wide wide = __builtin_convertvector(r, Wide);
    squares[to] += wide * wide;
    largest[to] = maximum<real>(absolute<real>(r), largest[to]);
    if (in.g) store<real>(in.g + o * L, factor * r);
  };
  int o = 0;
  for (; o + kSums <= in.p; o += kSums)
#pragma GCC unroll 4
    for (int i = 0; i < kSums; ++i) add(o + i, i);
  for (; o < in.p; ++o) add(o, 0);
  const Wide sum = (squares[0] + squares[1]) + (squares[2] + squares[3]);
  for (int l = 0; l < L; ++l) in.squares[l] = sum[l];
  store<real>(in.largest, maximum<real>(maximum<real>(largest[0], largest[1]),
                                        maximum<real>(largest[2], largest[3])));
  if (!in.margin) return;
  const Vec<real> zero{}, one = broadcast<real>(1);
  Vec<real> correct{}, least = broadcast<real>(std::numeric_limits<real>::infinity());
  for (int o = 0; o < in.p; ++o) {
    const Vec<real> f = load<real>(in.f + o * L), y = load<real>(in.y + o * L);
    // Compare signs, because the product may underflow.
    correct += select<real>(((f > zero) & (y > zero)) | ((f < zero) & (y < zero)), one, zero);
    least = f * y < least ? f * y : least;
  }
  for (int l = 0; l < L; ++l) {
    in.correct[l] = double(correct[l]);
    in.margin[l] = double(least[l]);
  }
}

}  // namespace
}  // namespace MHFAST_ISA
}  // namespace mhfast
