#include "projections.hpp"

#include "../runtime/tuning.hpp"

namespace mhfast {
namespace {

/// Whether lanes that are samples would be empty too often for products with whole tokens.
bool leaves_lanes(std::ptrdiff_t n, int lanes) {
  return double(round_up(n, lanes)) > kIdleProjections * double(n);
}

}  // namespace

template <class real>
Projections<real>::Projections(const PassState<real>& state)
    : state_(state),
      exist_(has_projections(state.data.shape) && state.plan.kind == PlanKind::kHybrid),
      by_rows_(leaves_lanes(state.data.shape.n, state.lanes.lanes)),
      whole_(state.data.shape.d % state.lanes.lanes == 0),
      dL_(int(round_up(state.data.shape.d, state.lanes.lanes))),
      columns_(projected_columns(state.data.shape)),
      workspaces_(exist_ ? state.threads : 0) {}

template <class real>
void Projections<real>::lay_out(Arena& layout, int thread, std::size_t units) {
  const Shape& s = state_.data.shape;
  const bool inputs = state_.options.wrt_inputs;
  if (thread == 0 && inputs)
    transposed_ = layout.take<real>(std::size_t(s.H) * (2 * s.rank + columns_) * dL_);
  const std::size_t L = state_.lanes.lanes, H = s.H, T = s.T, q = s.q, r = s.rank;
  const std::size_t most = std::max<std::size_t>(2 * r, columns_), rows = std::max(T, q);
  Workspace& of = workspaces_[thread];
  of.queries_head = units * q * r * L;
  of.keys_head = units * T * r * L;
  of.values_head = s.is_layer() ? units * T * s.p * L : 0;
  of.queries = layout.take<real>(H * of.queries_head);
  of.keys = layout.take<real>(H * of.keys_head);
  of.values = layout.take<real>(H * of.values_head);
  of.product = layout.take<real>(most * rows * L);
  if (!state_.options.gradient) return;
  of.laned = layout.take<real>(units * rows * most * L);
  of.numbers = layout.take<real>(units * rows * most * L);
  of.turned = layout.take<real>(inputs ? units * rows * most * L : 0);
  of.input_rows = layout.take<real>(inputs && !whole_ ? units * L * rows * dL_ : 0);
  of.x_rows = layout.take<real>(whole_ ? 0 : units * L * T * dL_);
  of.z_rows = layout.take<real>(whole_ || state_.data.self ? 0 : units * L * q * dL_);
}

template <class real>
void Projections<real>::load_parameters(const Parameters<real>& parameters, const Member& member) {
  if (!transposed_) return;
  const Shape& s = state_.data.shape;
  const Kernels<real>& kernels = state_.kernels;
  const std::ptrdiff_t r = s.rank, factor = s.d * r, readout = std::ptrdiff_t(columns_) * s.d;
  for (int h = member.index; h < s.H; h += member.count) {
    real* const to = transposed_ + h * (2 * r + columns_) * dL_;
    kernels.pack_rows(parameters.Q + h * factor, s.d, s.rank, dL_, to);
    kernels.pack_rows(parameters.right() + h * factor, s.d, s.rank, dL_, to + r * dL_);
    kernels.scale_rows(to, parameters.scale, int(2 * r), dL_, dL_, to);
    real* const by_readout = to + 2 * r * dL_;
    if (s.is_layer())
      kernels.pack_rows(parameters.V + h * readout, s.d, columns_, dL_, by_readout);
    else
      kernels.scale_rows(parameters.U + h * readout, real(1), columns_, s.d, dL_, by_readout);
  }
}

template <class real>
void Projections<real>::pack(const real* x, int samples, int rows, real* to) const {
  state_.kernels.pack_rows(x, samples * rows, state_.data.shape.d, rows * state_.lanes.lanes, to);
}

/// Packed tokens of a slab, `rows` of a sample, times `by` (d, columns), to [unit][row][column][L].
template <class real>
void Projections<real>::multiply(const real* packed, int rows, const Slab<real>& slab,
                                 const real* by, int columns, real* to,
                                 const Workspace& workspace) const {
  const std::ptrdiff_t L = state_.lanes.lanes, d = state_.data.shape.d;
  if (!by_rows_)
    return state_.kernels.product({{columns, slab.units * rows, int(d)},
                                   {by, columns},
                                   {packed, L, d * L},
                                   {to, L, columns * L}});
  for (int u = 0; u < slab.units; ++u)
    multiply_rows(packed + u * rows * L * d, rows, valid(slab, u), by, columns,
                  to + u * rows * columns * L, workspace);
}

/// The same of a unit packed by rows.
template <class real>
void Projections<real>::multiply_rows(const real* packed, int rows, int samples, const real* by,
                                      int columns, real* to, const Workspace& workspace) const {
  const int L = state_.lanes.lanes, all = int(round_up(samples * rows, L));
  state_.kernels.product({{columns, all / L, state_.data.shape.d},
                          {by, columns},
                          {packed, std::ptrdiff_t(rows) * L, L},
                          {workspace.product, all, L}});
  for (int c = 0; c < columns; ++c) {
    const real* from = workspace.product + std::ptrdiff_t(c) * all;
    real* const column = to + std::ptrdiff_t(c) * L;
    for (int i = 0; i < samples; ++i)
      for (int t = 0; t < rows; ++t) column[std::ptrdiff_t(t) * columns * L + i] = *from++;
    for (int t = 0; samples < L && t < rows; ++t)
      std::fill_n(column + std::ptrdiff_t(t) * columns * L + samples, L - samples, real(0));
  }
}

template <class real>
void Projections<real>::pad(const real* from, int rows, const Slab<real>& slab, real* to) const {
  const int d = state_.data.shape.d;
  const real* tokens = from + slab.first_sample * rows * d;
  state_.kernels.scale_rows(tokens, real(1), slab.samples * rows, d, dL_, to);
}

template <class real>
void Projections<real>::load(const Slab<real>& slab, bool gradient, int thread) {
  const Shape& s = state_.data.shape;
  const Workspace& of = workspaces_[thread];
  const LoadedModel<real>& model = state_.model;
  const int L = state_.lanes.lanes, r = s.rank;
  const bool alike = state_.data.self && model.is_tied();  // queries are keys
  for (int h = 0; h < s.H; ++h) {
    real *const queries = of.queries + h * of.queries_head, *const keys =
                                                                of.keys + h * of.keys_head;
    multiply(slab.x, s.T, slab, model.factor_k(h), r, keys, of);
    if (alike)
      std::copy_n(keys, slab.units * std::ptrdiff_t(s.T) * r * L, queries);
    else
      multiply(slab.z, s.q, slab, model.factor_q(h), r, queries, of);
    if (s.is_layer())
      multiply(slab.x, s.T, slab, model.readout(h), s.p, of.values + h * of.values_head, of);
  }
  if (!gradient || whole_) return;
  pad(state_.data.x, s.T, slab, of.x_rows);
  if (!state_.data.self) pad(state_.data.z, s.q, slab, of.z_rows);
}

template <class real>
void Projections<real>::take_factors(int head, int thread, ScoreArguments<real>& scores) const {
  const Workspace& of = workspaces_[thread];
  scores.w = nullptr;
  scores.rank = 0;
  scores.scale = state_.model.scale();
  scores.d = state_.data.shape.rank;
  scores.x = of.keys + head * of.keys_head;
  scores.z = of.queries + head * of.queries_head;
  scores.ut = nullptr;
}

template <class real>
void Projections<real>::load_readout(int head, const Slab<real>& slab, int thread, real* c) const {
  const Shape& s = state_.data.shape;
  multiply(slab.x, s.T, slab, state_.model.transposed(head), s.q, c, workspaces_[thread]);
}

/// [unit][row][column][L] of the slab's tokens, `rows` of a sample, times a factor of the entry, to
/// numbers (tokens, columns).
template <class real>
void Projections<real>::unpack(const real* laned, int columns, int rows, const real* factors,
                               const Slab<real>& slab, const Workspace& workspace) const {
  const int L = state_.lanes.lanes;
  const std::ptrdiff_t size = std::ptrdiff_t(rows) * columns;
  for (int u = 0; u < slab.units; ++u)
    state_.kernels.unpack_lanes(laned + u * L * size, factors + u * L, valid(slab, u), size, false,
                                workspace.numbers + u * L * size, size);
}

/// Adds the numbers, transposed, times the tokens: (columns, dL).
template <class real>
void Projections<real>::add_rows(int columns, int rows, const real* tokens, const Slab<real>& slab,
                                 bool add, const Workspace& workspace, real* to) const {
  state_.kernels.product({{columns, dL_ / state_.lanes.lanes, slab.samples * rows},
                          {workspace.numbers, columns},
                          {tokens, dL_, state_.lanes.lanes},
                          {to, dL_, state_.lanes.lanes},
                          add});
}

/// Writes or adds the numbers times `by` (columns, dL) to gradients by the slab's tokens.
template <class real>
void Projections<real>::add_inputs(int columns, int rows, const real* by, const Slab<real>& slab,
                                   bool add, const Workspace& workspace, real* to) const {
  const int L = state_.lanes.lanes, d = state_.data.shape.d, all = slab.samples * rows;
  const int padded = int(round_up(all, L));
  to += slab.first_sample * rows * std::ptrdiff_t(d);
  state_.kernels.pack_rows(workspace.numbers, all, columns, padded, workspace.turned);
  real* const product = whole_ ? to : workspace.input_rows;
  state_.kernels.product({{all, dL_ / L, columns},
                          {workspace.turned, padded},
                          {by, dL_, L},
                          {product, dL_, L},
                          whole_ && add});
  if (whole_) return;
  for (std::ptrdiff_t i = 0; i < all; ++i, to += d)
    for (int k = 0; k < d; ++k) to[k] = (add ? to[k] : real(0)) + product[i * dL_ + k];
}

template <class real>
void Projections<real>::add_factors(int chunk, int head, const Slab<real>& slab, int thread,
                                    const real* dd, const real* factors, bool inputs) const {
  const Shape& s = state_.data.shape;
  const Workspace& of = workspaces_[thread];
  const Kernels<real>& kernels = state_.kernels;
  const std::ptrdiff_t L = state_.lanes.lanes, r = s.rank, key = s.q * L, row = r * L;
  const std::ptrdiff_t weights = s.T * key;
  const real *const keys = of.keys + head * of.keys_head, *const queries =
                                                              of.queries + head * of.queries_head;
  const bool self = state_.data.self, tied = state_.model.is_tied();
  // Of self-attention what Q and K take is side by side or, if they are the same, one sum.
  const int columns = int(self && !tied ? 2 * r : r);
  const std::ptrdiff_t token = columns * L;
  real *const by_q = of.laned, *const by_k = of.laned + (self && !tied ? row : 0);
  real* const to = state_.options.wrt_W ? state_.gradients.weight(chunk, head) : nullptr;
  const real* const by = inputs ? transposed_ + head * (2 * r + columns_) * dL_ : nullptr;
  kernels.product_lanes({{s.q, s.rank, s.T, 1, slab.units},
                         {dd, key, 0, weights},
                         {keys, row, L, 0, s.T * row},
                         {by_q, token, L, s.q * token}});
  if (!self) {
    unpack(by_q, s.rank, s.q, factors, slab, of);
    if (to) add_rows(s.rank, s.q, queries_of(slab, of), slab, !slab.first, of, to);
    if (inputs && state_.gz) add_inputs(s.rank, s.q, by, slab, head > 0, of, state_.gz);
  }
  kernels.product_lanes({{s.rank, s.T, s.q, 1, slab.units},
                         {queries, row, 0, s.q * row},
                         {dd, L, key, 0, weights},
                         {by_k, L, token, s.T * token},
                         self && tied});
  unpack(of.laned, columns, s.T, factors, slab, of);
  if (to)
    add_rows(columns, s.T, keys_of(slab, of), slab, !slab.first || (!self && tied), of,
             self ? to : to + state_.gradients.to_k(tied));
  if (inputs && state_.gx)
    add_inputs(columns, s.T, self ? by : by + r * dL_, slab, head > 0, of, state_.gx);
}

template <class real>
void Projections<real>::add_readout(int chunk, int head, const Slab<real>& slab, int thread,
                                    const real* a, const real* g, const real* factors,
                                    bool inputs) const {
  const Shape& s = state_.data.shape;
  const Workspace& of = workspaces_[thread];
  const std::ptrdiff_t L = state_.lanes.lanes, key = s.q * L, outputs = s.p * L;
  if (s.is_layer())  // else A is what a token is multiplied with
    state_.kernels.product_lanes({{s.p, s.T, s.q, 1, slab.units},
                                  {g, outputs, 0, s.q * outputs},
                                  {a, L, key, 0, s.T * key},
                                  {of.laned, L, outputs, s.T * outputs}});
  unpack(s.is_layer() ? of.laned : a, columns_, s.T, factors, slab, of);
  if (state_.options.wrt_readout)
    add_rows(columns_, s.T, keys_of(slab, of), slab, !slab.first, of,
             state_.gradients.readout(chunk, head));
  if (!inputs || !state_.gx) return;
  const real* const by = transposed_ + (head * (2 * s.rank + columns_) + 2 * s.rank) * dL_;
  add_inputs(columns_, s.T, by, slab, true, of, state_.gx);
}

template class Projections<float>;
template class Projections<double>;

}  // namespace mhfast
