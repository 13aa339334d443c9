// The kernels of multi-head attention, one head at a time, as chains of products.
//
//   scores      P = Z W,  S = P X^T,  C = U X^T,  then softmax and its derivative by rows
//   gradients   G_U += A (gX),  E = D (gX),  G_W += Z^T E      (gX: keys times loss derivative)
//               G_E += D (gX)  where all samples have the same queries: G_W is Z^T G_E then
//               E alone        where it is kept of all rows: G_W is one product over them then
//
// Lanes are samples, query rows (scores) or features (gradients); the products are the same and
// only strides and the side that is laned differ. Layouts are in table.hpp.
#pragma once

#include <cstring>

#include "pack.hpp"
#include "product.hpp"
#include "row_maps.hpp"
#include "softmax.hpp"
#include "table.hpp"

namespace mhfast {
namespace MHFAST_ISA {
namespace {

/// Softmax of one unit, by rows. `reduce_gaps` reduces the gaps of the rows to one per sample of
/// the lane; if gaps are requested, that is the result.
template <class real, bool kZero, class Reduce>
inline Vec<real> process_softmax(const ScoreArguments<real>& in, const Rows<real, kZero>& rows,
                                 const Reduce& reduce_gaps) {
  switch (in.mode) {
    case RowMode::kReadout:
      readout(rows, in.row_readouts);
      return Vec<real>{};
    case RowMode::kAttention:
      attend<false, real>(rows, nullptr);
      return Vec<real>{};
    case RowMode::kWeights:
      attend<true>(rows, in.gap ? in.row_gaps : nullptr);
      return in.gap ? reduce_gaps() : Vec<real>{};
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

/// The other row maps.
template <class real, class Reduce>
[[gnu::noinline]] Vec<real> process_map(const ScoreArguments<real>& in, const Rows<real>& rows,
                                        const Reduce& reduce_gaps) {
  if (in.map.name == RowMapName::kSoftmax1)
    return process_softmax(in, with_zero(rows), reduce_gaps);
  if (in.gap) std::memset(in.row_gaps, 0, rows.columns * kLanes<real> * sizeof(real));
  with_map_of_rows<real>(in.map, rows, [&](const auto& map) {
    switch (in.mode) {
      case RowMode::kReadout:
        return map.readout(in.row_readouts);
      case RowMode::kAttention:
        return map.template attend<false>();
      case RowMode::kWeights:
        return map.template attend<true>();
      case RowMode::kDerivative:
      case RowMode::kScaled:
        return map.differentiate(in.row_readouts);
    }
  });
  return Vec<real>{};
}

template <class real, class Reduce>
inline Vec<real> process_rows(const ScoreArguments<real>& in, const Rows<real>& rows,
                              const Reduce& reduce_gaps) {
  if (!in.map.is_softmax()) return process_map(in, rows, reduce_gaps);
  return process_softmax(in, rows, reduce_gaps);
}

/// P = (Z Q) K^T. `of_w`: the product for P = Z W; Z Q goes behind P, with the same strides.
template <class real>
[[gnu::noinline]] void multiply_by_factors(const Product<real>& of_w, const real* q, const real* kt,
                                           int rank, real* zq) {
  const int d = of_w.size.K1;
  Product<real> first = of_w, second = of_w;
  first.size.M = second.size.K1 = rank;
  first.a = {q, rank};
  first.c.at = zq;
  second.a = {kt, d};
  second.b = {zq, of_w.c.m, of_w.c.n, 0, of_w.c.batch};
  multiply<Left::kShared>(first);
  multiply<Left::kShared>(second);
}

inline bool has_readouts(RowMode mode) {
  return mode != RowMode::kAttention && mode != RowMode::kWeights;
}

// Keys of all units up to this size are read for S and again for C by one product each; larger ones
// unit by unit, while they are in the first-level cache.
inline constexpr Index kTogetherBytes = 16 * 1024;

/// to[k][row] = factor from[row][k], entries being vectors: P of an identity.
template <class real>
void scaled_transpose(const real* from, int rows, int d, real factor, real* to, Index to_k,
                      Index to_row) {
  constexpr int L = kLanes<real>;
  const Vec<real> f = broadcast<real>(factor);
  for (int r = 0; r < rows; ++r, to += to_row)
    for (int k = 0; k < d; ++k, from += L) store<real>(to + k * to_k, f * load<real>(from));
}

/// P[feature][unit, row, head] where lanes are samples or runs.
template <class real, Left parameters>
inline void queries_lanes(const ScoreArguments<real>& in, Index p_k) {
  constexpr int L = kLanes<real>, kEntry = parameters == Left::kLaned ? L : 1;
  const int d = in.d, rows = in.units * in.q;
  const Index row = Index(d) * L, p_row = Index(in.heads) * L;
  const Index w_head = Index(d) * (in.rank > 0 ? in.rank : d) * kEntry;
  for (int h = 0; h < in.heads; ++h) {
    real* const p = in.p + h * L;
    if (!in.w) {
      scaled_transpose(in.z, rows, d, in.scale, p, p_k, p_row);
      continue;
    }
    const real* const w = in.w + h * w_head;
    const Product<real> product{{d, rows, d}, {w, d * kEntry}, {in.z, L, row}, {p, p_k, p_row}};
    if (in.rank > 0)
      multiply_by_factors(product, w, in.kt + h * w_head, in.rank, p + d * p_k);
    else
      multiply<parameters>(product);
  }
}

/// The same of several heads whose queries all samples share, from one head's after the other.
template <class real>
inline void gather_heads(const ScoreArguments<real>& in) {
  constexpr int L = kLanes<real>;
  const real* from = in.shared_p;
  for (int h = 0; h < in.heads; ++h)
    for (int k = 0; k < in.d; ++k, from += L)
      store<real>(in.p + (Index(k) * in.heads + h) * L, load<real>(from));
}

/// Lanes are samples, which share the parameters, or runs, each with its own.
template <class real, Left parameters>
void scores_lanes(const ScoreArguments<real>& in) {
  constexpr int L = kLanes<real>;
  const int T = in.T, q = in.q * in.heads, d = in.d;
  const Index row = Index(d) * L, weights = Index(q) * L;
  const bool gathers = in.shared_p && in.heads > 1;
  const real* p = in.shared_p && !gathers ? in.shared_p : in.p;
  const Index p_k = gathers ? weights : in.shared_p ? in.shared_p_k : in.units * weights;
  const Index p_unit = in.shared_p ? 0 : weights;
  const bool readouts = has_readouts(in.mode);
  if (gathers)
    gather_heads(in);
  else if (!in.shared_p)
    queries_lanes<real, parameters>(in, p_k);
  const auto score_units = [&](int first, int count) {
    const real* x = in.x + first * T * row;
    const Index at = first * in.unit_stride;
    multiply<Left::kLaned>(Product<real>{{q, T, d, 1, count},
                                         {p + first * p_unit, p_k, 0, p_unit},
                                         {x, L, row, 0, T * row},
                                         {in.s + at, L, weights, in.unit_stride}});
    if (!readouts || !in.ut) return;
    const Product<real> product{{q, T, d, 1, count},
                                {in.ut + first * in.ut_unit, in.ut_k, 0, in.ut_unit},
                                {x, L, row, 0, T * row},
                                {in.c + at, L, weights, in.unit_stride}};
    if (in.ut_laned)
      multiply<Left::kLaned>(product);
    else
      multiply<Left::kShared>(product);
  };
  const bool together = in.units * T * row * Index(sizeof(real)) <= kTogetherBytes;
  if (together) score_units(0, in.units);
  if (q == 1 && in.mode != RowMode::kScaled) {
    // A unit is one column; several side by side overlap their chains of operations.
    for (int u = 0; u < in.units && !together; ++u) score_units(u, 1);
    ScoreArguments<real> results = in;
    results.row_readouts = in.readout;
    results.row_gaps = in.gap;
    process_rows(
        results,
        Rows<real>{T, in.units, L, in.s, readouts ? in.c : in.s, in.limits, in.unit_stride},
        [] { return Vec<real>{}; });
    return;
  }
  for (int u = 0; u < in.units; ++u) {
    if (!together) score_units(u, 1);
    const Rows<real> rows{T,
                          q,
                          weights,
                          in.s + u * in.unit_stride,
                          (readouts ? in.c : in.s) + u * in.unit_stride,
                          in.limits ? in.limits + u * weights : nullptr};
    const Vec<real> gap = process_rows(in, rows, [&] {
      Vec<real> largest = load<real>(in.row_gaps);
      for (int t = 1; t < q; ++t) largest = maximum<real>(largest, load<real>(in.row_gaps + t * L));
      return largest;
    });
    for (int h = 0; in.heads > 1 && h < in.heads; ++h) {
      const Index at = h * in.readout_head + u * L;
      if (readouts) store<real>(in.readout + at, load<real>(in.row_readouts + h * L));
      if (in.gap) store<real>(in.gap + at, load<real>(in.row_gaps + h * L));
    }
    if (in.heads > 1) continue;
    if (readouts) {
      Vec<real> total = load<real>(in.row_readouts);
      for (int t = 1; t < q; ++t) total += load<real>(in.row_readouts + t * L);
      store<real>(in.readout + u * L, total);
    }
    if (in.gap) store<real>(in.gap + u * L, gap);
  }
}

template <class real>
void scores_samples(const ScoreArguments<real>& in) {
  scores_lanes<real, Left::kShared>(in);
}

template <class real>
void scores_runs(const ScoreArguments<real>& in) {
  scores_lanes<real, Left::kLaned>(in);
}

/// Softmax and readouts of a unit whose logits, and C, of its keys are there; query rows are the
/// lanes.
template <class real>
inline void process_unit_of_rows(const ScoreArguments<real>& in, int u, int keys, bool readouts) {
  constexpr int L = kLanes<real>;
  const int q = in.q, qL = round_up(q, L), N = qL / L;
  const Rows<real> rows{keys,
                        N,
                        qL,
                        in.s + u * in.unit_stride,
                        (readouts ? in.c : in.s) + u * in.unit_stride,
                        in.limits ? in.limits + Index(u) * qL : nullptr};
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

template <class real>
void scores_rows(const ScoreArguments<real>& in) {
  constexpr int L = kLanes<real>;
  const int T = in.T, q = in.q, d = in.d;
  const int qL = round_up(q, L), N = qL / L;
  const Index TL = in.x_row > 0 ? in.x_row : round_up(T, L);
  const Index queries = Index(d) * qL, keys = Index(d) * TL;
  const real* p = in.shared_p ? in.shared_p : in.p;
  const Index p_unit = in.shared_p ? 0 : queries;
  const bool readouts = has_readouts(in.mode);
  if (in.shared_p) {
    // Nothing to do for each unit.
  } else if (!in.w) {
    const Vec<real> scale = broadcast<real>(in.scale);
    for (Index i = 0; i < in.units * queries; i += L)
      store<real>(in.p + i, scale * load<real>(in.z + i));
  } else {
    const Product<real> product =
        N == 1  // several units side by side, to fill a tile
            ? Product<real>{{d, in.units, d}, {in.w, d}, {in.z, L, queries}, {in.p, L, queries}}
            : Product<real>{{d, N, d, 1, in.units},
                            {in.w, d},
                            {in.z, qL, L, 0, queries},
                            {in.p, qL, L, queries}};
    if (in.rank > 0)
      multiply_by_factors(product, in.w, in.kt, in.rank, in.p + in.units * queries);
    else
      multiply<Left::kShared>(product);
  }
  multiply<Left::kShared>(Product<real>{{T, N, d, 1, in.units},
                                        {in.x, TL, 0, keys},
                                        {p, qL, L, 0, p_unit},
                                        {in.s, qL, L, in.unit_stride}});
  if (readouts && in.ut)
    multiply<Left::kShared>(Product<real>{{T, N, d, 1, in.units},
                                          {in.x, TL, 0, keys},
                                          {in.ut, in.ut_k, L, 0, in.ut_unit},
                                          {in.c, qL, L, in.unit_stride}});
  for (int u = 0; u < in.units; ++u) process_unit_of_rows(in, u, T, readouts);
}

/// C = U X^T and then D from the weights A that are in s, query rows as lanes.
template <class real>
void derivative_rows(const ScoreArguments<real>& in) {
  constexpr int L = kLanes<real>;
  const int T = in.T, qL = round_up(in.q, L), N = qL / L;
  const Index TL = in.x_row > 0 ? in.x_row : round_up(T, L);
  multiply<Left::kShared>(Product<real>{{T, N, in.d, 1, in.units},
                                        {in.x, TL, 0, Index(in.d) * TL},
                                        {in.ut, in.ut_k, L, 0, in.ut_unit},
                                        {in.c, qL, L, in.unit_stride}});
  for (int u = 0; u < in.units; ++u)
    differentiate_weights(
        Rows<real>{T, N, qL, in.s + u * in.unit_stride, in.c + u * in.unit_stride});
}

/// A gradient, of which C is as laid out in vectors: summed over lanes that are samples, so that it
/// has numbers in their place.
template <class real>
inline void multiply_to_gradient(const Product<real>& laned, bool sums_lanes) {
  if (!sums_lanes) return multiply<Left::kLaned>(laned);
  Product<real> summed = laned;
  summed.c.m /= kLanes<real>;
  multiply_and_sum<Left::kLaned>(summed);
}

/// The gradients by factors after D X, samples as lanes.
template <class real>
[[gnu::noinline]] void factor_gradients_samples(const GradientArguments<real>& in) {
  constexpr int L = kLanes<real>;
  const int q = in.q, d = in.d, r = in.rank;
  const Index row = Index(d) * L, short_row = Index(r) * L, e_row = in.heads * row;
  real* const projected = in.e + in.units * q * e_row;
  // Z^T (E K), then E^T (Z Q).
  const auto add = [&](const real* rows, Index rows_row, const real* other, Index other_row,
                       const real* factor, real* to, bool more) {
    multiply<Left::kShared>(Product<real>{
        {r, in.units * q, d}, {factor, r}, {other, L, other_row}, {projected, L, short_row}});
    multiply_to_gradient(Product<real>{{d, r, q, in.units},
                                       {rows, rows_row, q * rows_row},
                                       {projected, short_row, L, q * short_row},
                                       {to, short_row, L},
                                       more},
                         in.sums_lanes);
  };
  for (int h = 0; h < in.heads; ++h) {
    const real *const e = in.e + h * row, *const fq = in.fq + h * in.factor_head,
                      *const fk = in.fk + h * in.factor_head;
    real *const gq = in.gq + h * in.weight_head, *const gk = in.gk + h * in.weight_head;
    add(in.z, row, e, e_row, fk, gq, in.add);
    add(e, e_row, in.z, row, fq, gk, in.add || gk == gq);
  }
}

template <class real>
void gradients_samples(const GradientArguments<real>& in) {
  constexpr int L = kLanes<real>;
  const int T = in.T, q = in.q * in.heads, d = in.d;
  const Index row = Index(d) * L, key = Index(q) * L, weights = T * key;
  const auto by_keys = [&](const real* of_keys, real* to) {
    multiply_to_gradient(Product<real>{{q, d, T, in.units},
                                       {of_keys, key, weights},
                                       {in.gx, row, L, T * row},
                                       {to, row, L},
                                       in.add},
                         in.sums_lanes);
  };
  if (in.gu) by_keys(in.a, in.gu);
  if (in.ge) by_keys(in.dd, in.ge);
  if (!in.gw && !in.gq) return;
  multiply<Left::kLaned>(Product<real>{{q, d, T, 1, in.units},
                                       {in.dd, key, 0, weights},
                                       {in.gx, row, L, 0, T * row},
                                       {in.e, row, L, q * row}});
  if (in.gq) return factor_gradients_samples(in);
  for (int h = 0; h < in.heads; ++h)
    multiply_to_gradient(Product<real>{{d, d, in.q, in.units},
                                       {in.z, row, in.q * row},
                                       {in.e + h * row, in.heads * row, L, q * row},
                                       {in.gw + h * in.weight_head, row, L},
                                       in.add},
                         in.sums_lanes);
}

/// The gradients by factors from Z and E = D X, features as lanes.
template <class real>
struct FactorGradients {
  int rows, d, rank;
  const real *z, *e;  // rows d, and `e_row`, numbers apart
  Index e_row;
  const real *fq, *fk;  // Q and K (d, rL)
  real* scratch;
  real *gq, *gk;
  bool add;
};

template <class real>
[[gnu::noinline]] void factor_gradients(const FactorGradients<real>& in) {
  constexpr int L = kLanes<real>, kBlock = kRowsTransposed * L;
  const int d = in.d, N = round_up(in.rank, L) / L;
  const Index row = Index(N) * L;
  real* const transposed = in.scratch;
  real* const projected = transposed + Index(kBlock) * d;
  // rows^T (other factor), a block of the other rows at a time.
  const auto add = [&](const real* rows, Index rows_row, const real* other, Index other_row,
                       const real* factor, real* to, bool more) {
    for (int first = 0; first < in.rows; first += kBlock) {
      const int count = in.rows - first < kBlock ? in.rows - first : kBlock;
      for (int r = 0; r < count; r += L)
        transpose_rows<real>(other + (first + r) * other_row, other_row,
                             count - r < L ? count - r : L, d, transposed + r, kBlock);
      multiply<Left::kShared>(Product<real>{{count, N, d},
                                            {transposed, kBlock},
                                            {factor, row, L},
                                            {projected + first * row, row, L}});
    }
    multiply<Left::kShared>(
        Product<real>{{d, N, in.rows}, {rows, rows_row}, {projected, row, L}, {to, row, L}, more});
  };
  add(in.z, d, in.e, in.e_row, in.fk, in.gq, in.add);
  add(in.e, in.e_row, in.z, d, in.fq, in.gk, in.add || in.gk == in.gq);
}

/// Features as lanes. Unit u, key s, row t of A and D is at u * unit + s * key + t * (1 or L).
template <class real, Left left>
inline void gradients_features(const GradientArguments<real>& in, Index key, Index unit) {
  constexpr int L = kLanes<real>;
  const int T = in.T, q = in.q * in.heads, d = in.d, N = round_up(d, L) / L;
  const Index row = Index(N) * L;
  if (in.gu)
    multiply<left>(Product<real>{
        {q, N, T, in.units}, {in.a, key, unit}, {in.gx, row, L, T * row}, {in.gu, row, L}, in.add});
  if (in.ge)
    multiply<left>(Product<real>{{q, N, T, in.units},
                                 {in.dd, key, unit},
                                 {in.gx, row, L, T * row},
                                 {in.ge, row, L},
                                 in.add});
  if (!in.gw && !in.gq && !in.e_row) return;
  const Index e_row = in.e_row == 0 ? row : in.heads > 1 ? in.e_head : in.e_row;
  const Index e_unit = in.e_row ? in.q * in.e_row : q * row;
  multiply<left>(Product<real>{{q, N, T, 1, in.units},
                               {in.dd, key, 0, unit},
                               {in.gx, row, L, 0, T * row},
                               {in.e, e_row, L, e_unit}});
  if (in.e_row) return;
  const int count = in.units * in.q;
  for (int h = 0; h < in.heads; ++h) {
    const real* const e = in.e + h * row;
    const Index at = h * in.weight_head, factor = h * in.factor_head;
    if (in.gq)
      factor_gradients<real>({count, d, in.rank, in.z, e, in.heads * row, in.fq + factor,
                              in.fk + factor, in.e + Index(in.units) * q * row, in.gq + at,
                              in.gk + at, in.add});
    else
      multiply<Left::kShared>(Product<real>{
          {d, N, count}, {in.z, d}, {e, in.heads * row, L}, {in.gw + at, row, L}, in.add});
  }
}

template <class real>
void gradients_features_of_rows(const GradientArguments<real>& in) {
  const Index qL = round_up(in.q, kLanes<real>);
  gradients_features<real, Left::kShared>(in, qL, in.T * qL);
}

template <class real>
void gradients_features_of_samples(const GradientArguments<real>& in) {
  gradients_features<real, Left::kSharedOfLane>(in, Index(in.q) * in.heads * kLanes<real>, 1);
}

}  // namespace
}  // namespace MHFAST_ISA
}  // namespace mhfast
