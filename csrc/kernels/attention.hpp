// The leaf kernels of multi-head attention, one head at a time, as chains of products.
//
//   scores      P = Z W,  S = P X^T,  C = U X^T,  then softmax and its derivative by rows
//   gradients   G_U += A (gX),  E = D (gX),  G_W += Z^T E      (gX: keys times loss derivative)
//
// Lanes are samples, query rows (scores) or features (gradients); the products are the same and
// only strides and the side that is laned differ. Layouts are in table.hpp.
#pragma once

#include "product.hpp"
#include "softmax.hpp"
#include "table.hpp"

namespace mhfast {
namespace MHFAST_ISA {
namespace {

inline constexpr int round_up(int size, int step) { return (size + step - 1) / step * step; }

/// Softmax of one unit, by rows. `reduce_gaps` turns the gaps of the rows into one for each lane's
/// sample; the result is that, where gaps are asked for.
template <class real, class Reduce>
inline Vec<real> process_rows(const ScoreArguments<real>& in, const Rows<real>& rows,
                              const Reduce& reduce_gaps) {
  switch (in.mode) {
    case RowMode::kReadout:
      readout(rows, in.row_readouts);
      return Vec<real>{};
    case RowMode::kAttention:
      attend(rows);
      return Vec<real>{};
    case RowMode::kDerivative:
      if (!in.gap) {
        differentiate<false>(rows, in.row_readouts, in.row_gaps);
        return Vec<real>{};
      }
      differentiate<true>(rows, in.row_readouts, in.row_gaps);
      return reduce_gaps();
    case RowMode::kScaled:
      break;
  }
  find_gaps(rows, in.row_gaps);
  const Vec<real> gap = reduce_gaps();
  const IntVec<real> none = gap < std::numeric_limits<real>::lowest();
  differentiate_scaled(rows, select<real>(none, Vec<real>{}, gap), in.row_readouts);
  return gap;
}

template <class real>
void scores_samples(const ScoreArguments<real>& in) {
  constexpr int L = kLanes<real>;
  const int T = in.T, q = in.q, d = in.d;
  const Index row = Index(d) * L, weights = Index(q) * L, all_rows = in.units * weights;
  const bool readouts = in.mode != RowMode::kAttention;
  // P[feature][unit, row]: W is shared by all samples.
  multiply<Left::kShared>(
      Product<real>{{d, in.units * q, d}, {in.w, d}, {in.z, L, row}, {in.p, all_rows, L}});
  for (int u = 0; u < in.units; ++u) {
    const real* x = in.x + u * T * row;
    const Rows<real> rows{T, q, weights, in.s + u * in.unit_stride,
                          (readouts ? in.c : in.s) + u * in.unit_stride};
    multiply<Left::kLaned>(Product<real>{
        {q, T, d}, {in.p + u * weights, all_rows}, {x, L, row}, {rows.s, L, weights}});
    if (readouts)
      multiply<Left::kShared>(
          Product<real>{{q, T, d}, {in.ut, q}, {x, L, row}, {rows.c, L, weights}});
    const Vec<real> gap = process_rows(in, rows, [&] {
      Vec<real> largest = load<real>(in.row_gaps);
      for (int t = 1; t < q; ++t) largest = maximum<real>(largest, load<real>(in.row_gaps + t * L));
      return largest;
    });
    if (readouts) {
      Vec<real> total = load<real>(in.row_readouts);
      for (int t = 1; t < q; ++t) total += load<real>(in.row_readouts + t * L);
      store<real>(in.readout + u * L, total);
    }
    if (in.gap) store<real>(in.gap + u * L, gap);
  }
}

template <class real>
void scores_rows(const ScoreArguments<real>& in) {
  constexpr int L = kLanes<real>;
  const int T = in.T, q = in.q, d = in.d;
  const int qL = round_up(q, L), TL = round_up(T, L), N = qL / L;
  const Index queries = Index(d) * qL, keys = Index(d) * TL;
  const bool readouts = in.mode != RowMode::kAttention;
  if (N == 1)  // several units side by side, to fill a tile
    multiply<Left::kShared>(
        Product<real>{{d, in.units, d}, {in.w, d}, {in.z, L, queries}, {in.p, L, queries}});
  else
    multiply<Left::kShared>(Product<real>{
        {d, N, d, 1, in.units}, {in.w, d}, {in.z, qL, L, 0, queries}, {in.p, qL, L, queries}});
  multiply<Left::kShared>(Product<real>{{T, N, d, 1, in.units},
                                        {in.x, TL, 0, keys},
                                        {in.p, qL, L, 0, queries},
                                        {in.s, qL, L, in.unit_stride}});
  if (readouts)
    multiply<Left::kShared>(Product<real>{{T, N, d, 1, in.units},
                                          {in.x, TL, 0, keys},
                                          {in.ut, qL, L},
                                          {in.c, qL, L, in.unit_stride}});
  for (int u = 0; u < in.units; ++u) {
    const Rows<real> rows{T, N, qL, in.s + u * in.unit_stride,
                          (readouts ? in.c : in.s) + u * in.unit_stride};
    const Vec<real> gap = process_rows(in, rows, [&] {
      real largest = in.row_gaps[0];
      for (int t = 1; t < q; ++t) largest = in.row_gaps[t] > largest ? in.row_gaps[t] : largest;
      return broadcast<real>(largest);
    });
    if (readouts) {
      real total = in.row_readouts[0];
      for (int t = 1; t < q; ++t) total += in.row_readouts[t];
      in.readout[u] = total;
    }
    if (in.gap) in.gap[u] = gap[0];
  }
}

template <class real>
void gradients_samples(const GradientArguments<real>& in) {
  constexpr int L = kLanes<real>;
  const int T = in.T, q = in.q, d = in.d;
  const Index row = Index(d) * L, key = Index(q) * L, weights = T * key;
  if (in.gu)
    multiply<Left::kLaned>(Product<real>{{q, d, T, in.units},
                                         {in.a, key, weights},
                                         {in.gx, row, L, T * row},
                                         {in.gu, row, L},
                                         in.add});
  if (!in.gw) return;
  multiply<Left::kLaned>(Product<real>{{q, d, T, 1, in.units},
                                       {in.dd, key, 0, weights},
                                       {in.gx, row, L, 0, T * row},
                                       {in.e, row, L, q * row}});
  multiply<Left::kLaned>(Product<real>{
      {d, d, q, in.units}, {in.z, row, q * row}, {in.e, row, L, q * row}, {in.gw, row, L}, in.add});
}

/// Features as lanes. Unit u, key s, row t of A and D is at u * unit + s * key + t * (1 or L).
template <class real, Left left>
inline void gradients_features(const GradientArguments<real>& in, Index key, Index unit) {
  constexpr int L = kLanes<real>;
  const int T = in.T, q = in.q, d = in.d, N = round_up(d, L) / L;
  const Index row = Index(N) * L;
  if (in.gu)
    multiply<left>(Product<real>{
        {q, N, T, in.units}, {in.a, key, unit}, {in.gx, row, L, T * row}, {in.gu, row, L}, in.add});
  if (!in.gw) return;
  multiply<left>(Product<real>{{q, N, T, 1, in.units},
                               {in.dd, key, 0, unit},
                               {in.gx, row, L, 0, T * row},
                               {in.e, row, L, q * row}});
  multiply<Left::kShared>(
      Product<real>{{d, N, in.units * q}, {in.z, d}, {in.e, row, L}, {in.gw, row, L}, in.add});
}

template <class real>
void gradients_features_of_rows(const GradientArguments<real>& in) {
  const Index qL = round_up(in.q, kLanes<real>);
  gradients_features<real, Left::kShared>(in, qL, in.T * qL);
}

template <class real>
void gradients_features_of_samples(const GradientArguments<real>& in) {
  gradients_features<real, Left::kSharedOfLane>(in, Index(in.q) * kLanes<real>, 1);
}

}  // namespace
}  // namespace MHFAST_ISA
}  // namespace mhfast
