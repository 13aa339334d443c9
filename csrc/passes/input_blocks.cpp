// Gradients by inputs with samples as lanes, a block of them at a time: all rows (t, h) are the
// rows of one product each with the keys, so that a few rows use every lane.
#include "../problem/plan.hpp"
#include "../runtime/tuning.hpp"
#include "input_gradients.hpp"
#include "scores.hpp"

namespace mhfast {

/// Heads whose A, D and rows of features fit the cache with the block's tokens; 0 if none does, or
/// if rows are the lanes: samples are where clearly fewer lanes are empty then, or if there are
/// many samples with few rows, no more.
template <class real>
int InputGradients<real>::count_block_heads() const {
  const Shape& s = data_.shape;
  const auto forced = forced_plan();
  if (forced && *forced != PlanKind::kSamples) return 0;
  const double vector = L_ * sizeof(real), T = s.T, d = s.d, q = s.q, lanes = L_;
  const double tokens = 2 * T * d * vector,
               of_head = q * (2 * T + (s.is_layer() ? 5 : 3) * d) * vector;
  const double fitting = std::floor((kBlockBytes - tokens) / of_head);
  if (forced) return balanced_heads(std::max(fitting, 1.0));
  const double rows = q * s.H, n = double(s.n);
  const double idle_rows = std::ceil(rows / lanes) * lanes / rows;
  const double idle_samples = std::ceil(n / lanes) * lanes / n;
  const bool many = n >= kInputBlocks * lanes && q <= kInputBlockRows;
  double cost = many ? 1 : kBlockCost;
  // Features, which are the lanes of the other products with rows, may leave some empty as well.
  const bool found = s.is_layer() && s.d >= kFoundFeatures;
  if (n >= kFewInputBlocks * lanes && q <= kFewInputBlockRows && !found)
    cost = std::min(cost, (s.is_layer() ? kLayerBlockCost : 1) * d / dL_);
  if (fitting < 1 || idle_samples * cost > idle_rows) return 0;
  return balanced_heads(fitting);
}

/// Heads of groups of nearly equal size, of at most `most`. A row for each key of so many bytes
/// that all keys would meet the same sets of the first-level cache is avoided.
template <class real>
int InputGradients<real>::balanced_heads(double most) const {
  const Shape& s = data_.shape;
  const auto heads_of = [&](int groups) { return (s.H + groups - 1) / groups; };
  const int groups = int(std::ceil(s.H / std::min(most, double(s.H)))), heads = heads_of(groups);
  const std::size_t row = std::size_t(s.q) * heads * L_ * sizeof(real);
  return row % kSetBytes == 0 && heads > 1 ? heads_of(groups + 1) : heads;
}

template <class real>
typename InputGradients<real>::BlockWorkspace InputGradients<real>::take_block_workspace(
    Arena& layout) const {
  const Shape& s = data_.shape;
  const std::size_t L = L_, d = s.d, T = s.T, q = s.q, rows = q * block_heads_;
  BlockWorkspace workspace{};
  workspace.x = layout.take<real>(T * d * L);
  workspace.z = data_.self ? workspace.x : layout.take<real>(q * d * L);
  workspace.p = layout.take<real>(rows * d * L);
  workspace.p_transposed = layout.take<real>(rows * d * L);
  workspace.s = layout.take<real>(T * rows * L);
  workspace.c = layout.take<real>(T * rows * L);
  workspace.limits = layout.take<real>(data_.is_limited() ? rows * L : 0);
  workspace.row_limits = layout.take<real>(data_.is_limited() ? q * L : 0);
  workspace.row_readouts = layout.take<real>(rows * L);
  workspace.readout = layout.take<real>(L);
  workspace.found = layout.take<double>(L);
  workspace.e = layout.take<real>(wants_z_ ? rows * d * L : 0);
  workspace.projected = layout.take<real>(q * s.rank * L);
  workspace.gx = layout.take<real>(gx_ ? T * d * L : 0);
  workspace.gz = layout.take<real>(wants_z_ ? q * d * L : 0);
  take_block_readout(layout, workspace);
  return workspace;
}

template <class real>
void InputGradients<real>::load_block_samples(std::ptrdiff_t first, int count,
                                              const BlockWorkspace& workspace) const {
  const Shape& s = data_.shape;
  const std::ptrdiff_t keys = std::ptrdiff_t(s.T) * s.d, queries = std::ptrdiff_t(s.q) * s.d;
  kernels_.pack_lanes(data_.x + first * keys, keys, count, keys, workspace.x);
  if (s.shared_query)
    kernels_.pack_lanes(parameters_.prompt, 0, L_, queries, workspace.z);
  else if (!data_.self)
    kernels_.pack_lanes(data_.z + first * queries, queries, count, queries, workspace.z);
  if (!data_.is_limited()) return;
  for (int t = 0; t < s.q; ++t)
    for (int l = 0; l < L_; ++l)
      workspace.row_limits[t * L_ + l] = real(l < count ? data_.limit(first + l, 0, t) : s.T);
}

/// P = Z W of a group's rows, both ways round.
template <class real>
void InputGradients<real>::load_block_queries(const HeadGroup& group,
                                              const BlockWorkspace& workspace) const {
  const Shape& s = data_.shape;
  const std::ptrdiff_t d = s.d, r = s.rank, L = L_, row = d * L, next = group.heads * row;
  for (int h = 0; h < group.heads; ++h) {
    const int head = group.head + h;
    real* const p = workspace.p + h * row;
    if (!w_) {
      for (int t = 0; t < s.q; ++t)
        std::transform(workspace.z + t * row, workspace.z + (t + 1) * row, p + t * next,
                       [this](real entry) { return parameters_.scale * entry; });
    } else if (r > 0) {
      kernels_.product({{s.rank, s.q, s.d},
                        {w_ + head * d * r, r},
                        {workspace.z, L, row},
                        {workspace.projected, L, r * L}});
      kernels_.product({{s.d, s.q, s.rank},
                        {kt_ + head * r * dL_, dL_},
                        {workspace.projected, L, r * L},
                        {p, L, next}});
    } else {
      kernels_.product(
          {{s.d, s.q, s.d}, {w_ + head * d * wL_, wL_}, {workspace.z, L, row}, {p, L, next}});
    }
  }
  kernels_.transpose_lanes(workspace.p, s.q * group.heads, s.d, workspace.p_transposed);
}

/// A and D of a block and a group.
template <class real>
void InputGradients<real>::score_block(const HeadGroup& group, const BlockReadout& readout,
                                       const BlockWorkspace& workspace) const {
  const Shape& s = data_.shape;
  const int R = s.q * group.heads;
  const std::ptrdiff_t row = std::ptrdiff_t(R) * L_;
  for (int r = 0; data_.is_limited() && r < R; ++r)
    std::copy_n(workspace.row_limits + r / group.heads * L_, L_, workspace.limits + r * L_);
  const ScoreOperands<real> operands{nullptr,
                                     workspace.x,
                                     nullptr,
                                     data_.is_limited() ? workspace.limits : nullptr,
                                     readout.transposed,
                                     readout.laned ? row : R,
                                     readout.laned,
                                     data_.row_map};
  const ScoreMemory<real> memory{
      nullptr, workspace.s, workspace.c, workspace.readout, workspace.row_readouts, nullptr};
  auto scores =
      score_arguments(RowMode::kDerivative, s.d, {s.T, R, 1}, operands, memory, s.T * row);
  scores.shared_p = workspace.p_transposed;
  scores.shared_p_k = row;
  kernels_.scores_samples(scores);
  const real* const rows = R == 1 ? workspace.readout : workspace.row_readouts;  // see the kernel
  for (int h = 0; h < group.heads; ++h) {
    real of_head[kMaxLanes] = {};
    for (int r = h; r < R; r += group.heads)
      for (int l = 0; l < L_; ++l) of_head[l] += rows[r * L_ + l];
    for (int l = 0; l < L_; ++l) workspace.found[l] += double(of_head[l]);
  }
}

/// The gradient by X of the key side, A^T U + D^T P.
template <class real>
void InputGradients<real>::add_block_keys(const HeadGroup& group, const BlockReadout& readout,
                                          const BlockWorkspace& workspace) const {
  const Shape& s = data_.shape;
  const int R = s.q * group.heads;
  const std::ptrdiff_t L = L_, row = s.d * L, weights = R * L;
  const auto multiply = [&](void (*product)(const Product<real>&), const real* rows,
                            std::ptrdiff_t rows_row, const real* by_keys, bool add) {
    product({{s.d, s.T, R}, {rows, rows_row}, {by_keys, L, weights}, {workspace.gx, L, row}, add});
  };
  if (readout.laned)
    multiply(kernels_.product_lanes, readout.rows, row, workspace.s, group.head > 0);
  else
    multiply(kernels_.product, readout.rows, s.d, workspace.s, group.head > 0);
  multiply(kernels_.product_lanes, workspace.p, row, workspace.c, true);
}

/// The gradient by Z, D X W^T. That of an identity lacks the scale.
template <class real>
void InputGradients<real>::add_block_queries(const HeadGroup& group,
                                             const BlockWorkspace& workspace) const {
  const Shape& s = data_.shape;
  const int R = s.q * group.heads;
  const std::ptrdiff_t d = s.d, r = s.rank, L = L_, row = d * L, next = group.heads * row;
  kernels_.product_lanes(
      {{R, s.d, s.T}, {workspace.c, R * L}, {workspace.x, row, L}, {workspace.e, row, L}});
  if (w_ && r == 0)
    return kernels_.product({{s.d, s.q, s.d, group.heads},
                             {wt_ + group.head * d * wL_, wL_, d * wL_},
                             {workspace.e, L, next, row},
                             {workspace.gz, L, row},
                             group.head > 0});
  for (int h = 0; h < group.heads; ++h) {
    const int head = group.head + h;
    const real* const e = workspace.e + h * row;
    for (int t = 0; t < s.q && !w_; ++t) {
      const real* const from = e + t * next;
      real* const to = workspace.gz + t * row;
      for (std::ptrdiff_t k = 0; k < row; ++k) to[k] = (head > 0 ? to[k] : real(0)) + from[k];
    }
    if (!w_) continue;
    kernels_.product({{s.rank, s.q, s.d},
                      {parameters_.right() + head * d * r, r},
                      {e, L, next},
                      {workspace.projected, L, r * L}});
    kernels_.product({{s.d, s.q, s.rank},
                      {wt_ + head * r * dL_, dL_},
                      {workspace.projected, L, r * L},
                      {workspace.gz, L, row},
                      head > 0});
  }
}

/// Rows of a block times factors of its samples, to those of each; zeros, or nothing added, where
/// all derivatives of a sample are 0.
template <class real>
void InputGradients<real>::store_block(const real* from, int rows, int count, real factor, bool add,
                                       const real* g, real* to) const {
  const std::ptrdiff_t size = std::ptrdiff_t(rows) * data_.shape.d;
  real factors[kMaxLanes] = {};
  bool matter[kMaxLanes] = {};
  for (int l = 0; l < count; ++l, g += derivatives()) {
    matter[l] = matters(g);
    factors[l] = factor * this->factor(g);
  }
  kernels_.unpack_lanes(from, factors, count, size, add, to, size);
  for (int l = 0; l < count; ++l)
    if (!matter[l]) std::fill_n(to + l * size, size, real(0));
}

template <class real>
void InputGradients<real>::differentiate_block(std::ptrdiff_t first, int count,
                                               const BlockWorkspace& workspace) const {
  const Shape& s = data_.shape;
  const std::ptrdiff_t keys = std::ptrdiff_t(s.T) * s.d, queries = std::ptrdiff_t(s.q) * s.d;
  load_block_samples(first, count, workspace);
  load_block_targets(workspace, count);
  for (int head = 0; head < s.H; head += block_heads_) {
    const HeadGroup group{head, std::min(block_heads_, s.H - head)};
    load_block_queries(group, workspace);
    const BlockReadout readout = load_block_readout(group, workspace);
    score_block(group, readout, workspace);
    if (gx_) add_block_keys(group, readout, workspace);
    if (wants_z_) add_block_queries(group, workspace);
  }
  if (gx_) store_block(workspace.gx, s.T, count, real(1), false, workspace.g, gx_ + first * keys);
  const real of_z = w_ ? real(1) : parameters_.scale;
  if (wants_z_)
    store_block(workspace.gz, s.q, count, of_z, !gz_, workspace.g,
                (gz_ ? gz_ : gx_) + first * queries);
}

template class InputGradients<float>;
template class InputGradients<double>;

}  // namespace mhfast
