// Long sequences: one head, one sample, a tile of query rows against all keys.
//
//   [S | C] = X [P | U]^T   for the tile's rows, then softmax by rows,   [A X ; D X] = [A | D]^T X
//
// or with W of low rank S = (X K) (Z Q)^T apart. Query rows are lanes for the scores, features
// afterwards. S and C are stored side by side, so
// that one product reads the keys once for both; so are A and D. Memory is linear in T: a tile
// holds 2 T rows numbers, nothing of size T x T exists. Layouts are in table.hpp.
#pragma once

#include "attention.hpp"

namespace mhfast {
namespace MHFAST_ISA {
namespace {

template <class real, bool kZero, class Reduce>
inline void tile_softmax(const TileArguments<real>& in, const Rows<real, kZero>& rows,
                         const Reduce& largest_gap) {
  switch (in.mode) {
    case TileMode::kReadout:
      return readout(rows, in.readouts);
    case TileMode::kWeights:
      return attend<true, real>(rows, nullptr);
    case TileMode::kDerivative:
      if (!in.gap) return differentiate<false>(rows, in.readouts, in.row_gaps);
      differentiate<true>(rows, in.readouts, in.row_gaps);
      *in.gap = largest_gap();
      return;
    case TileMode::kGap:
      find_gaps(rows, in.row_gaps);
      *in.gap = largest_gap();
      return;
    case TileMode::kScaled:
      return differentiate_scaled(rows, broadcast<real>(*in.gap), in.readouts);
  }
}

/// The other row maps.
template <class real, class Reduce>
[[gnu::noinline]] void tile_map(const TileArguments<real>& in, const Rows<real>& rows,
                                const Reduce& largest_gap) {
  if (in.map.name == RowMapName::kSoftmax1) return tile_softmax(in, with_zero(rows), largest_gap);
  if (in.gap) *in.gap = 0;
  with_map_of_rows<real>(in.map, rows, [&](const auto& map) {
    if (in.mode == TileMode::kReadout)
      map.readout(in.readouts);
    else if (in.mode != TileMode::kGap)
      map.differentiate(in.readouts);
  });
}

/// [S | C] = X [P | U]^T, or S alone.
template <class real>
void tile_products(const TileArguments<real>& in) {
  constexpr int L = kLanes<real>;
  const int qL = round_up(in.rows, L), N = qL / L;
  const Index width = 2 * Index(qL);
  if (in.kx) {
    multiply<Left::kShared>(
        Product<real>{{in.T, N, in.rank}, {in.kx, in.x_row}, {in.zq, qL, L}, {in.sc, width, L}});
    if (in.mode == TileMode::kWeights) return;
    return multiply<Left::kShared>(Product<real>{
        {in.T, N, in.d}, {in.xt, in.x_row}, {in.ut, in.u_row, L}, {in.sc + qL, width, L}});
  }
  const Vec<real> scale = broadcast<real>(in.scale);
  const Product<real> of_w{{in.d, N, in.d}, {in.w, in.d}, {in.zt, in.z_row, L}, {in.pu, width, L}};
  if (in.rank > 0)
    multiply_by_factors(of_w, in.w, in.kt, in.rank, in.pu + in.d * width);
  else if (in.w)
    multiply<Left::kShared>(of_w);
  for (int k = 0; !in.w && k < in.d; ++k)
    for (int v = 0; v < qL; v += L)
      store<real>(in.pu + k * width + v, scale * load<real>(in.zt + k * in.z_row + v));
  const bool both = in.mode != TileMode::kWeights;
  for (int k = 0; both && k < in.d; ++k)
    for (int v = 0; v < qL; v += L)
      store<real>(in.pu + k * width + qL + v, load<real>(in.ut + k * in.u_row + v));
  multiply<Left::kShared>(Product<real>{
      {in.T, both ? 2 * N : N, in.d}, {in.xt, in.x_row}, {in.pu, width, L}, {in.sc, width, L}});
}

template <class real>
void tile_scores(const TileArguments<real>& in) {
  constexpr int L = kLanes<real>;
  const int qL = round_up(in.rows, L), N = qL / L;
  const Index width = 2 * Index(qL);
  tile_products(in);
  const Rows<real> rows{in.T, N, width, in.sc, in.sc + qL, in.limits};
  const auto largest_gap = [&] {
    real largest = in.row_gaps[0];
    for (int t = 1; t < in.rows; ++t) largest = in.row_gaps[t] > largest ? in.row_gaps[t] : largest;
    return largest;
  };
  if (!in.map.is_softmax()) return tile_map(in, rows, largest_gap);
  tile_softmax(in, rows, largest_gap);
}

/// <U, A X> of the tile's rows, which are the lanes of squares of A X.
template <class real>
void tile_readouts(const TileArguments<real>& in) {
  constexpr int L = kLanes<real>;
  const int qL = round_up(in.rows, L), dL = round_up(in.d, L);
  for (int v = 0; v < qL; v += L) {
    Vec<real> sum{};
    for (int k = 0; k < in.d; k += L) {
      Vec<real> square[L];
#pragma GCC unroll 16
      for (int r = 0; r < L; ++r) square[r] = load<real>(in.axdx + Index(v + r) * dL + k);
      transpose<real>(square);
      for (int l = 0; l < L && k + l < in.d; ++l)
        sum += square[l] * load<real>(in.ut + (k + l) * in.u_row + v);
    }
    store<real>(in.readouts + v, sum);
  }
}

template <class real>
void tile_gradients(const TileArguments<real>& in) {
  constexpr int L = kLanes<real>;
  const int qL = round_up(in.rows, L), dL = round_up(in.d, L), N = dL / L;
  const Index width = 2 * Index(qL);
  const bool by_w = in.gw || in.gq;
  const int rows = by_w ? 2 * qL : qL;
  multiply<Left::kShared>(
      Product<real>{{rows, N, in.T}, {in.sc, width}, {in.x, dL, L}, {in.axdx, dL, L}});
  for (Index i = 0; i < Index(in.rows) * dL; i += L)
    store<real>(in.gu + i, load<real>(in.axdx + i));
  if (in.mode == TileMode::kWeights) tile_readouts(in);
  if (!by_w) return;
  if (in.gq)
    return factor_gradients<real>({in.rows, in.d, in.rank, in.z, in.axdx + Index(qL) * dL, dL,
                                   in.fq, in.fk, in.axdx + 2 * Index(qL) * dL, in.gq, in.gk,
                                   in.add});
  multiply<Left::kShared>(Product<real>{
      {in.d, N, in.rows}, {in.z, in.d}, {in.axdx + Index(qL) * dL, dL, L}, {in.gw, dL, L}, in.add});
}

}  // namespace
}  // namespace MHFAST_ISA
}  // namespace mhfast
