// Gradients by inputs of long samples, a head at a time: a tile of query rows is the lanes of
// scores, and products of all keys, with V or with a factor of W, are computed once for a head.
#include <cmath>

#include "../problem/plan.hpp"
#include "input_gradients.hpp"
#include "scores.hpp"

namespace mhfast {

template <class real>
void InputGradients<real>::take_long_arrays(Arena& layout, LongWorkspace& workspace) const {
  const Shape& s = data_.shape;
  const std::size_t T = s.T, p = values_first_ ? s.p : 0, pL = round_up(p, L_);
  const std::size_t rL = keys_first_ ? round_up(s.rank, L_) : 0, rows = round_up(rows_, L_);
  if (keys_first_) {
    workspace.factored = FactoredKeys<real>(kernels_, s);
    workspace.factored.lay_out(layout, 1, rows, true);
  }
  workspace.values = layout.take<real>(p * TL_);
  workspace.by_values = layout.take<real>(T * pL);
  workspace.g_rows = layout.take<real>(rows * pL);
  workspace.turned = layout.take<real>(std::max(rL, pL) * TL_);
  workspace.gz_rows = layout.take<real>(wants_z_ ? std::size_t(s.q) * dL_ : 0);
}

/// Keys that a row of the sample sees.
template <class real>
int InputGradients<real>::keys_of(std::ptrdiff_t sample) const {
  const Shape& s = data_.shape;
  if (!data_.is_limited()) return s.T;
  double most = 1;
  for (int t = 0; t < s.q; ++t) {
    const double limit = data_.limit(sample, 0, t);
    if (std::isnan(limit)) return s.T;
    most = std::max(most, limit);
  }
  return int(most);
}

/// The limits of a tile's rows; returns how many keys one of them sees.
template <class real>
int InputGradients<real>::find_limits(const Batch& batch, const LongWorkspace& workspace) const {
  if (!data_.is_limited()) return data_.shape.T;
  real* const limits = workspace.limits;
  data_.write_limits(batch.sample, batch.first, batch.rows, int(round_up(batch.rows, L_)), limits);
  const bool known =
      std::none_of(limits, limits + batch.rows, [](real x) { return std::isnan(x); });
  return known ? seen_keys(limits, batch.rows) : data_.shape.T;
}

/// X K and X V of a head.
template <class real>
void InputGradients<real>::load_keys(int head, int keys, const LongWorkspace& workspace) const {
  const Shape& s = data_.shape;
  if (keys_first_)
    workspace.factored.load(0, keys, workspace.xt,
                            parameters_.right() + std::ptrdiff_t(head) * s.d * s.rank);
  if (!values_first_) return;
  kernels_.product({{s.p, int(round_up(keys, L_)) / L_, s.d},
                    {parameters_.V + std::ptrdiff_t(head) * s.d * s.p, s.p},
                    {workspace.xt, TL_, L_},
                    {workspace.values, TL_, L_}});
  std::fill_n(workspace.by_values, keys * round_up(s.p, L_), real(0));
}

/// Z Q, or P = Z W, of a tile, and the arguments of its scores.
template <class real>
ScoreArguments<real> InputGradients<real>::load_tile_queries(const Batch& batch, int keys,
                                                             const LongWorkspace& workspace) const {
  const Shape& s = data_.shape;
  const int RL = int(round_up(batch.rows, L_));
  const std::ptrdiff_t d = s.d;
  kernels_.pack_rows(data_.z + (batch.sample * s.q + batch.first) * d, batch.rows, s.d, RL,
                     workspace.zt);
  const ScoreMemory<real> memory{
      nullptr, workspace.s, workspace.c, workspace.readout, workspace.row_readouts, nullptr};
  ScoreOperands<real> operands{};
  operands.x = keys_first_ ? workspace.factored.transposed(0) : workspace.xt;
  operands.limits = data_.is_limited() ? workspace.limits : nullptr;
  operands.map = data_.row_map;
  ScoreArguments<real> in = score_arguments(RowMode::kDerivative, keys_first_ ? s.rank : s.d,
                                            {keys, batch.rows, 1}, operands, memory, 0);
  in.x_row = TL_;
  if (keys_first_) {
    in.shared_p =
        workspace.factored.load_queries(w_ + batch.head * d * s.rank, workspace.zt, RL, RL);
    return in;
  }
  if (w_)
    kernels_.product({{s.d, RL / L_, s.d},
                      {w_ + batch.head * d * wL_, wL_},
                      {workspace.zt, RL, L_},
                      {workspace.p_lanes, RL, L_}});
  else
    kernels_.scale_rows(workspace.zt, parameters_.scale, s.d, RL, RL, workspace.p_lanes);
  if (gx_) kernels_.pack_rows(workspace.p_lanes, s.d, RL, dL_, workspace.p);
  in.shared_p = workspace.p_lanes;
  return in;
}

/// C of a tile.
template <class real>
void InputGradients<real>::load_tile_readout(const Batch& batch, int keys,
                                             LongWorkspace& workspace) const {
  const Shape& s = data_.shape;
  const int R = batch.rows, RL = int(round_up(R, L_));
  if (values_first_) {
    const real* g = workspace.g + std::ptrdiff_t(batch.first) * s.p;
    kernels_.scale_rows(g, real(1), R, s.p, int(round_up(s.p, L_)), workspace.g_rows);
    kernels_.pack_rows(g, R, s.p, RL, workspace.gt);
  } else {
    load_readout(batch, workspace);
    kernels_.pack_rows(workspace.u, R, dL_, RL, workspace.u_lanes);
  }
  kernels_.product({{keys, RL / L_, values_first_ ? s.p : s.d},
                    {values_first_ ? workspace.values : workspace.xt, TL_},
                    {values_first_ ? workspace.gt : workspace.u_lanes, RL, L_},
                    {workspace.c, RL, L_}});
}

/// A^T G, or A^T U, and without factors D^T P of a tile.
template <class real>
void InputGradients<real>::add_tile_keys(const Batch& batch, int keys,
                                         const LongWorkspace& workspace) const {
  const int R = batch.rows, RL = int(round_up(R, L_));
  const auto add = [&](const real* weights, const real* rows) {
    kernels_.pack_rows(weights, keys, RL, TL_, workspace.transposed);
    kernels_.product({{keys, dL_ / L_, R},
                      {workspace.transposed, TL_},
                      {rows, dL_, L_},
                      {workspace.gx, dL_, L_},
                      true});
  };
  if (values_first_)
    kernels_.values_words({keys, R, int(round_up(data_.shape.p, L_)) / L_, nullptr, workspace.s, RL,
                           workspace.g_rows, workspace.by_values});
  else
    add(workspace.s, workspace.u);
  if (!keys_first_) add(workspace.c, workspace.p);
}

/// The gradient by the tile's query rows: D X W^T or, with D (X K) in `projected`, that by Q^T.
template <class real>
void InputGradients<real>::add_tile_queries(const Batch& batch, int keys, const real* projected,
                                            const LongWorkspace& workspace) const {
  const Shape& s = data_.shape;
  const int R = batch.rows, RL = int(round_up(R, L_)), N = dL_ / L_;
  real* const gz = workspace.gz_rows + std::ptrdiff_t(batch.first) * dL_;
  const bool more = batch.head > 0;
  if (projected) {
    kernels_.pack_rows(projected, R, int(round_up(s.rank, L_)), RL, workspace.et);
    const std::ptrdiff_t head = std::ptrdiff_t(s.rank) * dL_;
    kernels_.product({{R, N, s.rank},
                      {workspace.et, RL},
                      {wt_ + batch.head * head, dL_, L_},
                      {gz, dL_, L_},
                      more});
    return;
  }
  kernels_.product({{R, N, keys},
                    {workspace.c, RL},
                    {workspace.x_rows, dL_, L_},
                    {w_ ? workspace.e : gz, dL_, L_},
                    !w_ && more});
  if (!w_) return;
  kernels_.pack_rows(workspace.e, R, dL_, RL, workspace.et);
  kernels_.product({{R, N, s.d},
                    {workspace.et, RL},
                    {wt_ + batch.head * std::ptrdiff_t(s.d) * wL_, wL_, L_},
                    {gz, dL_, L_},
                    more});
}

template <class real>
void InputGradients<real>::add_tile(const Batch& batch, LongWorkspace& workspace) const {
  const int keys = find_limits(batch, workspace), RL = int(round_up(batch.rows, L_));
  const ScoreArguments<real> in = load_tile_queries(batch, keys, workspace);
  load_tile_readout(batch, keys, workspace);
  kernels_.scores_rows(in);
  *workspace.found += double(*workspace.readout);
  if (gx_) add_tile_keys(batch, keys, workspace);
  const real* const projected =
      keys_first_ ? workspace.factored.add(0, keys, batch.rows, workspace.c, RL, in.shared_p)
                  : nullptr;
  if (wants_z_) add_tile_queries(batch, keys, projected, workspace);
}

/// What the sums over a head's rows add to the gradient by X.
template <class real>
void InputGradients<real>::add_sums(int head, int keys, const LongWorkspace& workspace) const {
  const Shape& s = data_.shape;
  const auto add = [&](const real* sums, int columns, const real* by) {
    kernels_.pack_rows(sums, keys, int(round_up(columns, L_)), TL_, workspace.turned);
    kernels_.product({{keys, dL_ / L_, columns},
                      {workspace.turned, TL_},
                      {by, dL_, L_},
                      {workspace.gx, dL_, L_},
                      true});
  };
  if (values_first_) add(workspace.by_values, s.p, transposed_values(head));
  if (keys_first_)
    add(workspace.factored.sums(0), s.rank, kt_ + head * (std::ptrdiff_t(s.rank) * dL_));
}

template <class real>
void InputGradients<real>::add_long_head(std::ptrdiff_t sample, int head, int keys,
                                         LongWorkspace& workspace) const {
  const Shape& s = data_.shape;
  load_keys(head, keys, workspace);
  for (int row = 0; row < s.q; row += rows_)
    add_tile({sample, 1, row, std::min(rows_, s.q - row), head, 1}, workspace);
  if (gx_) add_sums(head, keys, workspace);
}

#define MHFAST_INSTANTIATE(real)                                                      \
  template void InputGradients<real>::take_long_arrays(Arena&, LongWorkspace&) const; \
  template int InputGradients<real>::keys_of(std::ptrdiff_t) const;                   \
  template void InputGradients<real>::add_long_head(std::ptrdiff_t, int, int, LongWorkspace&) const;
MHFAST_INSTANTIATE(float)
MHFAST_INSTANTIATE(double)
#undef MHFAST_INSTANTIATE

}  // namespace mhfast
