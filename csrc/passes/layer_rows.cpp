#include "layer_rows.hpp"

#include <cmath>

#include "row_losses.hpp"

namespace mhfast {

template <class real>
LayerRowPass<real>::LayerRowPass(PassState<real>& state)
    : ChunkPass<real>(state),
      steps_(state, state.plan.tile),
      dL_(int(round_up(state.data.shape.d, state.lanes.lanes))),
      pL_(int(round_up(state.data.shape.p, state.lanes.lanes))),
      TL_(int(odd_vectors(state.data.shape.T, state.lanes.lanes))),
      values_first_(has_values_first(state.data.shape, sizeof(real), state.lanes.lanes)),
      keys_first_(has_keys_first(state.data.shape)),
      gradients_of_keys_(has_gradients_of_keys(state.data.shape, state.lanes.lanes)),
      workspaces_(state.threads, Workspace(WordLists<real>(state, state.plan.tile),
                                           FactoredKeys<real>(state.kernels, state.data.shape))) {}

/// Of tiles with the caller's own loss, see tuning.hpp.
template <class real>
void LayerRowPass<real>::choose_block() {
  if (!state_.own.takes_blocks()) return;
  const Shape& s = state_.data.shape;
  const double kept = s.H * (double(of_head_size()) + double(steps_.weights_size()));
  block_ = state_.own.slabs_of_block(double(state_.plan.units / state_.plan.chunks + 1),
                                     double(state_.plan.tile) * s.p,
                                     state_.options.gradient ? kept * sizeof(real) : 0);
}

template <class real>
void LayerRowPass<real>::lay_out(Arena& layout) {
  choose_block();
  const Shape& s = state_.data.shape;
  const PassOptions& options = state_.options;
  const std::size_t L = state_.lanes.lanes, H = s.H, d = s.d, T = s.T, rows = steps_.rows_size();
  const std::size_t block = block_;
  const bool gradient = options.gradient;
  v_rows_ = layout.take<real>(s.identity_v ? 0 : H * d * pL_);
  for (Workspace& workspace : workspaces_) {
    HeadMemory<real>& heads = workspace.heads;
    const std::size_t dense = state_.data.has_words() ? 0 : 1;
    workspace.words.lay_out(layout, 1);
    workspace.x = layout.take<real>(dense * d * TL_);
    workspace.z = layout.take<real>(dense * d * rows);
    const std::size_t of_values = has_values() ? (values_first_ ? H : 1) * TL_ * pL_ : 0;
    workspace.values = layout.take<real>(of_values);
    workspace.packed = layout.take<real>(of_values);
    workspace.x_rows = layout.take<real>(s.identity_v || gradient ? dense * T * dL_ : 0);
    if (keys_first_) workspace.factored.lay_out(layout, H, rows, gradients_of_keys_ && gradient);
    workspace.f_lanes = layout.take<real>(values_first_ ? pL_ * rows : 0);
    workspace.by_v = layout.take<real>(values_first_ && gradient ? s.p * dL_ : 0);
    workspace.by_values = layout.take<real>(values_first_ && gradient ? T * pL_ : 0);
    heads.limits = layout.take<real>(rows);
    heads.scores.p = layout.take<real>(d * rows * (s.rank > 0 ? 2 : 1));
    heads.scores.s = layout.take<real>((gradient && state_.plan.keep ? block * H : 1) * T * rows);
    heads.scores.c = layout.take<real>(gradient ? T * rows : 0);
    heads.scores.readout = layout.take<real>(L);
    heads.scores.row_readouts = layout.take<real>(rows);
    heads.scores.row_gaps = layout.take<real>(rows);
    heads.gap = layout.take<real>(options.gaps ? block * H * L : 0);
    heads.log_derivative = layout.take<double>(L);
    heads.factors = layout.take<real>(L);
    workspace.largest = layout.take<double>(L);
    workspace.ax =
        layout.take<real>(has_values() ? 0 : (gradient ? block * H : 1) * of_head_size());
    workspace.f = layout.take<real>(rows * pL_);
    workspace.own.lay_out(layout, state_.own.exists() ? block * rows * s.p : 0);
    if (!gradient) continue;
    workspace.g = layout.take<real>(rows * pL_);
    workspace.scaled_g = layout.take<real>(options.gaps ? rows * pL_ : 0);
    workspace.g_transposed = layout.take<real>(rows * pL_);
    workspace.ax_rows = layout.take<real>(rows * dL_);
    workspace.ut = layout.take<real>(d * rows);
    heads.keys = layout.take<real>(options.gaps ? T * dL_ : L);
    heads.e = layout.take<real>(steps_.scratch_size(1, int(rows)));
  }
}

template <class real>
void LayerRowPass<real>::load(const Parameters<real>& parameters, const Member& member) {
  const Shape& s = state_.data.shape;
  if (state_.data.has_words() || !parameters.V) return;  // in the tables, or an identity
  for (int h = member.index; h < s.H; h += member.count)
    state_.kernels.scale_rows(parameters.V + std::ptrdiff_t(h) * s.d * s.p, real(1), s.d, s.p, pL_,
                              v_rows_ + std::ptrdiff_t(h) * s.d * pL_);
}

template <class real>
void LayerRowPass<real>::run_units(Pass pass, int chunk, std::ptrdiff_t first, std::ptrdiff_t last,
                                   int thread) {
  const Workspace& workspace = workspaces_[thread];
  Sample sample{last};
  state_.own.run(pass, first, last, block_, workspace.own,
                 [&](Pass phase, std::ptrdiff_t begin, std::ptrdiff_t end) {
                   return run_tiles(phase, chunk, first, begin, end, sample, workspace);
                 });
  finish_sample(chunk, sample, workspace);
}

/// Units `begin` to `end` of the chunk whose first one is `first`; returns their rows.
template <class real>
std::ptrdiff_t LayerRowPass<real>::run_tiles(Pass pass, int chunk, std::ptrdiff_t first,
                                             std::ptrdiff_t begin, std::ptrdiff_t end,
                                             Sample& sample, const Workspace& workspace) const {
  const bool in_block = state_.own.takes_blocks(pass);
  std::ptrdiff_t rows = 0;
  for (std::ptrdiff_t unit = begin; unit < end; ++unit) {
    const std::ptrdiff_t index = unit / state_.plan.parts;
    if (sample.index != index && !state_.data.has_words()) {
      finish_sample(chunk, sample, workspace);
      sample = {sample.last, index, keys_of(index, sample.last), false};
      load_sample(sample, workspace);
    }
    sample.has_gradient |= gradients_of_keys_ && is_gradient(pass) && state_.options.wrt_W;
    Slab<real> tile = open_tile(unit, workspace);
    tile.first = unit == first;
    tile.place = in_block ? int(unit - begin) : 0;
    tile.row = in_block ? rows : 0;
    rows += tile.rows;
    run_tile(pass, chunk, tile, workspace);
  }
  return rows;
}

/// A thread's workspace for the tile at a place in its block.
template <class real>
typename LayerRowPass<real>::Workspace LayerRowPass<real>::at_place(
    int place, const Workspace& of_thread) const {
  Workspace workspace = of_thread;
  if (place == 0 || !state_.options.gradient) return workspace;
  const std::ptrdiff_t heads = std::ptrdiff_t(place) * state_.data.shape.H;
  if (state_.plan.keep) workspace.heads.scores.s += heads * steps_.weights_size();
  workspace.ax += heads * of_head_size();
  if (state_.options.gaps) workspace.heads.gap += heads * state_.lanes.lanes;
  return workspace;
}

/// Outputs and targets of the tile as the caller's own loss takes them.
template <class real>
void LayerRowPass<real>::load_own(const Slab<real>& slab, const Workspace& workspace,
                                  const OwnLossNumbers& own) const {
  const int p = state_.data.shape.p;
  for (int t = 0; t < slab.rows; ++t)
    std::copy_n(workspace.f + std::ptrdiff_t(t) * pL_, p, own.outputs + std::ptrdiff_t(t) * p);
  std::copy_n(slab.y, std::ptrdiff_t(slab.rows) * p, own.targets);
}

/// Keys of a sample that any of its rows sees, of those in units before `last`.
template <class real>
int LayerRowPass<real>::keys_of(std::ptrdiff_t sample, std::ptrdiff_t last) const {
  const Shape& s = state_.data.shape;
  if (!state_.data.is_limited()) return s.T;
  const std::ptrdiff_t rows = (last - sample * state_.plan.parts) * state_.plan.tile;
  double most = 1;  // of NaN all results are NaN
  for (int t = 0; t < s.q && t < rows; ++t) {
    const double limit = state_.data.limit(sample, 0, t);
    if (limit > most) most = limit;
  }
  return int(most);
}

/// Packs a sample's keys and multiplies them with what comes before the weights.
template <class real>
void LayerRowPass<real>::load_sample(const Sample& sample, const Workspace& workspace) const {
  const Shape& s = state_.data.shape;
  const bool gradient = state_.options.gradient;
  const real* x = state_.data.x + sample.index * s.T * s.d;
  state_.kernels.pack_rows(x, sample.keys, s.d, TL_, workspace.x);
  if (s.identity_v || gradient)
    state_.kernels.scale_rows(x, real(1), sample.keys, s.d, dL_, workspace.x_rows);
  for (int h = 0; h < s.H; ++h) {
    if (values_first_) multiply_values(h, sample.keys, workspace);
    if (keys_first_) workspace.factored.load(h, sample.keys, workspace.x, state_.model.factor_k(h));
  }
}

/// Adds what the sample's rows have left for the gradient by K.
template <class real>
void LayerRowPass<real>::finish_sample(int chunk, const Sample& sample,
                                       const Workspace& workspace) const {
  if (!sample.has_gradient) return;
  const Shape& s = state_.data.shape;
  for (int h = 0; h < s.H; ++h)
    workspace.factored.differentiate_k(
        h, sample.keys, state_.data.x + sample.index * s.T * s.d, true,
        state_.gradients.weight(chunk, h) + state_.gradients.to_k(state_.model.is_tied()));
}

/// The tile of query rows that is unit `unit`, its queries packed; of its sample the keys are.
template <class real>
Slab<real> LayerRowPass<real>::open_tile(std::ptrdiff_t unit, const Workspace& workspace) const {
  const Data<real>& data = state_.data;
  const Plan& plan = state_.plan;
  const Shape& s = data.shape;
  Slab<real> slab{};
  slab.first_sample = unit / plan.parts;
  slab.units = slab.samples = 1;
  slab.x = workspace.x;
  slab.z = workspace.z;
  slab.first_row = int(unit % plan.parts) * plan.tile;
  slab.rows = std::min(plan.tile, s.q - slab.first_row);
  slab.keys = s.T;
  const std::ptrdiff_t sample = slab.first_sample;
  if (data.y) slab.y = data.y + sample * data.targets + slab.first_row * (data.targets / s.q);
  const int qL = int(round_up(slab.rows, state_.lanes.lanes));
  real* limits = workspace.heads.limits;
  if (data.is_limited()) {
    data.write_limits(sample, slab.first_row, slab.rows, qL, limits);
    slab.keys = seen_keys(limits, slab.rows);
  }
  slab.words = state_.words_of(sample, slab.first_row);
  workspace.words.find(slab);
  if (data.has_words()) return slab;
  if (!s.shared_query)
    state_.kernels.pack_rows(data.z + (sample * s.q + slab.first_row) * s.d, slab.rows, s.d, qL,
                             workspace.z);
  return slab;
}

/// Arguments of a head's scores; of factors Z Q is computed for them.
template <class real>
ScoreArguments<real> LayerRowPass<real>::scores(RowMode mode, int head, const Slab<real>& slab,
                                                const Workspace& workspace, real* gap) const {
  ScoreArguments<real> in =
      steps_.scores(mode, head, slab, workspace.heads, of_head(head, workspace), gap);
  in.x_row = key_row(slab);
  if (!keys_first_) return in;
  const int qL = int(round_up(slab.rows, state_.lanes.lanes));
  in.shared_p = workspace.factored.load_queries(state_.model.w(head), slab.z, qL, qL);
  in.x = workspace.factored.transposed(head);
  in.d = state_.data.shape.rank;
  return in;
}

/// The part of the memory that one head's scores are written to.
template <class real>
ScoreMemory<real> LayerRowPass<real>::of_head(int head, const Workspace& workspace) const {
  ScoreMemory<real> to = workspace.heads.scores;
  if (state_.options.gradient && state_.plan.keep) to.s += head * steps_.weights_size();
  return to;
}

/// Writes the weights of a head of the tile to where the caller wants them.
template <class real>
void LayerRowPass<real>::write_attention(int head, const Slab<real>& slab, const real* a) const {
  const Shape& s = state_.data.shape;
  real* to = state_.attention +
             ((slab.first_sample * s.H + head) * s.q + slab.first_row) * std::ptrdiff_t(s.T);
  state_.kernels.turn_weights(a, round_up(slab.rows, state_.lanes.lanes), slab.keys, slab.rows, to,
                              s.T);
  for (int t = 0; t < slab.rows; ++t, to += s.T) std::fill(to + slab.keys, to + s.T, real(0));
}

/// Outputs of the tile, into workspace.f; (A X)^T of every head stays for the gradient.
template <class real>
void LayerRowPass<real>::run_outputs(bool gaps, const Slab<real>& slab,
                                     const Workspace& workspace) const {
  const Shape& s = state_.data.shape;
  const int L = state_.lanes.lanes, qL = int(round_up(slab.rows, L));
  const bool words = state_.data.has_words();
  const real* x = words ? nullptr : state_.data.x + slab.first_sample * s.T * s.d;
  for (int h = 0; h < s.H; ++h) {
    real* gap = gaps ? workspace.heads.gap + h * L : nullptr;
    if (gap) std::fill_n(gap, L, real(0));
    const ScoreArguments<real> in = scores(RowMode::kWeights, h, slab, workspace, gap);
    steps_.run_scores(in);
    if (state_.attention) write_attention(h, slab, in.s);
    if (values_first_) {  // F^T, rows being the lanes of A
      state_.kernels.product({{s.p, qL / L, slab.keys},
                              {values(h, workspace), pL_},
                              {in.s, qL, L},
                              {workspace.f_lanes, qL, L},
                              h > 0});
      continue;
    }
    if (words || s.identity_v) {
      if (words) load_values(h, slab, workspace);
      state_.kernels.product({{slab.rows, pL_ / L, slab.keys},
                              {in.s, qL},
                              {words ? workspace.values : workspace.x_rows, pL_, L},
                              {workspace.f, pL_, L},
                              h > 0});
      continue;
    }
    real* ax = workspace.ax + (state_.options.gradient ? h * of_head_size() : 0);
    state_.kernels.product({{s.d, qL / L, slab.keys}, {x, s.d}, {in.s, qL, L}, {ax, qL, L}, false});
    state_.kernels.product({{slab.rows, pL_ / L, s.d},
                            {ax, qL},
                            {padded_readout(h), pL_, L},
                            {workspace.f, pL_, L},
                            h > 0});
  }
  if (values_first_) state_.kernels.pack_rows(workspace.f_lanes, s.p, qL, pL_, workspace.f);
}

/// X V of a head, packed and by rows.
template <class real>
void LayerRowPass<real>::multiply_values(int head, int keys, const Workspace& workspace) const {
  const int L = state_.lanes.lanes, p = state_.data.shape.p;
  real* const packed = packed_values(head, workspace);
  state_.kernels.product({{p, int(round_up(keys, L)) / L, state_.data.shape.d},
                          {padded_readout(head), pL_},
                          {workspace.x, TL_, L},
                          {packed, TL_, L},
                          false});
  state_.kernels.pack_rows(packed, p, TL_, pL_, values(head, workspace));
}

/// Of words, the values of the tile's keys.
template <class real>
void LayerRowPass<real>::load_values(int head, const Slab<real>& slab,
                                     const Workspace& workspace) const {
  const real* table = state_.model.values_table(head);
  for (int k = 0; k < slab.keys; ++k)
    std::copy_n(table + std::ptrdiff_t(slab.words.keys[k]) * pL_, pL_,
                workspace.values + std::ptrdiff_t(k) * pL_);
}

/// Calls emit(index among the outputs, derivative) for every output of the tile, that of the
/// sample's weighted loss by it.
template <class real>
template <class Emit>
void LayerRowPass<real>::measure(LaneTotals& totals, const Slab<real>& slab, const real* f,
                                 const OwnLossNumbers& own, const Emit& emit) const {
  const std::ptrdiff_t first = slab.first_sample * state_.data.shape.q + slab.first_row;
  measure_rows(state_, totals, first, slab.rows, f, pL_, own, [&](int t, int o, double derivative) {
    emit(std::ptrdiff_t(t) * pL_ + o, derivative);
  });
}

template <class real>
void LayerRowPass<real>::run_tile(Pass pass, int chunk, const Slab<real>& slab,
                                  const Workspace& of_thread) const {
  const bool blocks = state_.own.takes_blocks();
  const bool keeps_gaps = blocks && pass == Pass::kOwnOutputs && state_.options.gaps;
  const bool known =
      blocks && (pass == Pass::kLoss || pass == Pass::kScales || pass == Pass::kGradient);
  const Workspace workspace = at_place(slab.place, of_thread);
  const Shape& s = state_.data.shape;
  const int L = state_.lanes.lanes;
  const bool gaps = state_.options.gathers_scales(pass);
  if (!known) run_outputs(gaps || keeps_gaps, slab, workspace);
  if (state_.outputs && !known)
    for (int t = 0; t < slab.rows; ++t)
      std::copy_n(workspace.f + std::ptrdiff_t(t) * pL_, s.p,
                  state_.outputs + (slab.first_sample * s.q + slab.first_row + t) * s.p);
  if (pass == Pass::kOutputs) return;
  const OwnLossNumbers own =
      state_.own.exists() ? workspace.own.from(slab.row * s.p) : OwnLossNumbers{};
  if (pass == Pass::kOwnOutputs) return load_own(slab, workspace, own);
  if (state_.own.exists() && !blocks) {
    load_own(slab, workspace, own);
    state_.own.call(slab.rows, own);
  }
  LaneTotals& totals = state_.totals[chunk];
  if (pass == Pass::kLoss)
    return measure(totals, slab, workspace.f, own, [](std::ptrdiff_t, double) {});
  std::fill_n(workspace.largest, L, 0.0);
  double& largest = workspace.largest[0];
  std::fill_n(workspace.g, round_up(slab.rows, L) * pL_, real(0));
  const double share = state_.shares.of_lane[0];
  // One compilation of all losses for what becomes of their derivatives.
  const auto measure_derivatives = [&](DerivativeUse use, LaneTotals& to) {
    measure(to, slab, workspace.f, own, [&](std::ptrdiff_t at, double derivative) {
      if (use == DerivativeUse::kRelative) {
        workspace.g[at] = largest > 0 ? real(derivative / largest) : real(0);
        return;
      }
      if (use != DerivativeUse::kLargest) workspace.g[at] = real(derivative * share);
      if (use != DerivativeUse::kGradient) largest = std::max(largest, std::fabs(derivative));
    });
  };
  if (pass == Pass::kScaledGradient) {  // derivatives relative to the tile's largest
    LaneTotals unused;
    measure_derivatives(DerivativeUse::kLargest, unused);
    measure_derivatives(DerivativeUse::kRelative, totals);
  } else {
    measure_derivatives(gaps ? DerivativeUse::kBoth : DerivativeUse::kGradient, totals);
  }
  for (int l = 0; l < L; ++l) workspace.heads.log_derivative[l] = std::log(workspace.largest[l]);
  if (gaps) steps_.gather_scales(chunk, slab, workspace.heads);
  if (pass != Pass::kScales) differentiate(pass, chunk, slab, workspace);
}

/// The gradient by V, from `g`, or of words that by E V, from A too.
template <class real>
void LayerRowPass<real>::differentiate_readout(int chunk, int head, const Slab<real>& slab,
                                               const real* g, const Workspace& workspace) const {
  const Shape& s = state_.data.shape;
  const Kernels<real>& kernels = state_.kernels;
  const int L = state_.lanes.lanes, qL = int(round_up(slab.rows, L));
  real* const to = state_.gradients.readout(chunk, head);
  if (!has_values()) {
    kernels.pack_rows(workspace.ax + head * of_head_size(), s.d, qL, dL_, workspace.ax_rows);
    kernels.product({{s.d, pL_ / L, slab.rows},
                     {workspace.ax_rows, dL_},
                     {g, pL_, L},
                     {to, pL_, L},
                     !slab.first});
    return;
  }
  const ScoreMemory<real> memory = of_head(head, workspace);
  if (!state_.plan.keep)
    steps_.run_scores(scores(RowMode::kWeights, head, slab, workspace, nullptr));
  if (values_first_) {
    real* const by_values = workspace.by_values;
    std::fill_n(by_values, std::ptrdiff_t(slab.keys) * pL_, real(0));
    kernels.values_words({slab.keys, slab.rows, pL_ / L, nullptr, memory.s, qL, g, by_values});
    kernels.product({{s.p, dL_ / L, slab.keys},
                     {by_values, pL_},
                     {workspace.x_rows, dL_, L},
                     {workspace.by_v, dL_, L},
                     false});
    for (int k = 0; k < s.d; ++k)
      for (int o = 0; o < pL_; ++o) {
        real& by_v = to[std::ptrdiff_t(k) * pL_ + o];
        by_v = (slab.first ? real(0) : by_v) +
               (o < s.p ? workspace.by_v[std::ptrdiff_t(o) * dL_ + k] : real(0));
      }
    return;
  }
  if (slab.first) std::fill_n(to, state_.gradients.readout_size(), real(0));
  kernels.values_words({slab.keys, slab.rows, pL_ / L, slab.words.keys, memory.s, qL, g, to});
}

/// The scores of a head with C = G V^T X^T in the place of that of a classifier: what it is the
/// product of, or of words, where logits are to be looked up, C itself.
template <class real>
ScoreArguments<real> LayerRowPass<real>::upstream(const ScoreArguments<real>& scores, int head,
                                                  const Slab<real>& slab, bool kept,
                                                  const Workspace& workspace) const {
  const Shape& s = state_.data.shape;
  const Kernels<real>& kernels = state_.kernels;
  const int L = state_.lanes.lanes, qL = int(round_up(slab.rows, L));
  ScoreArguments<real> in = scores;
  in.ut_k = qL;
  in.ut = workspace.g_transposed;
  const int keys = key_row(slab);
  const real* of_keys = slab.x;
  int depth = s.d;
  if (has_values()) {
    if (!values_first_) {
      load_values(head, slab, workspace);
      kernels.pack_rows(workspace.values, slab.keys, pL_, keys, workspace.packed);
    }
    of_keys = packed_values(head, workspace);
    depth = s.p;
  } else if (!s.identity_v) {
    kernels.product({{s.d, qL / L, s.p},
                     {state_.model.transposed(head), dL_},
                     {workspace.g_transposed, qL, L},
                     {workspace.ut, qL, L},
                     false});
    in.ut = workspace.ut;
  }
  if (kept) {
    in.x = of_keys;
    in.d = depth;
  } else if (has_values() || keys_first_) {  // the logits have other keys
    kernels.product({{slab.keys, qL / L, depth}, {of_keys, keys}, {in.ut, qL, L}, {in.c, qL, L}});
    in.ut = nullptr;
  }
  return in;
}

/// The gradients by Q and, in sums over the sample's rows, by K, from D times a factor.
template <class real>
void LayerRowPass<real>::differentiate_factors(int chunk, int head, const Slab<real>& slab,
                                               real factor, const ScoreArguments<real>& scores,
                                               const Workspace& workspace) const {
  const Shape& s = state_.data.shape;
  const int qL = int(round_up(slab.rows, state_.lanes.lanes));
  real* const to = state_.gradients.weight(chunk, head);
  if (slab.first) std::fill_n(to, state_.gradients.weight_size(), real(0));
  const real* queries = scores.shared_p;
  if (state_.model.scale() != real(1))  // which is left to the end
    queries = workspace.factored.load_queries(state_.model.factor_q(head), slab.z, qL, qL);
  const real* const projected =
      workspace.factored.add(head, slab.keys, slab.rows, scores.c, qL, queries, factor);
  const real* const z = state_.data.z + (slab.first_sample * s.q + slab.first_row) * s.d;
  workspace.factored.differentiate_q(slab.rows, z, projected, true, to);
}

template <class real>
void LayerRowPass<real>::differentiate(Pass pass, int chunk, const Slab<real>& slab,
                                       const Workspace& workspace) const {
  const Shape& s = state_.data.shape;
  const Kernels<real>& kernels = state_.kernels;
  const PassOptions& options = state_.options;
  const int L = state_.lanes.lanes, qL = int(round_up(slab.rows, L));
  const bool scaled = pass == Pass::kScaledGradient;
  kernels.pack_rows(workspace.g, slab.rows, pL_, qL, workspace.g_transposed);
  const real* keys = workspace.x_rows;
  if (state_.data.has_words()) {
    workspace.heads.keys[0] = real(1);  // a factor of the tile, see scale_keys
    keys = workspace.heads.keys;
  }
  const real* g = workspace.g;
  if (scaled && options.wrt_readout) {
    const real factor = steps_.scaled_factors(slab, nullptr, state_.scales.log_of_readout(),
                                              nullptr, workspace.heads)[0];
    std::transform(g, g + std::ptrdiff_t(qL) * pL_, workspace.scaled_g,
                   [factor](real x) { return factor * x; });
    g = workspace.scaled_g;
  }
  for (int h = 0; h < s.H; ++h) {
    real* gap = scaled ? workspace.heads.gap + h * L : nullptr;
    const RowMode mode = scaled ? RowMode::kScaled : RowMode::kDerivative;
    const ScoreArguments<real> again = scores(mode, h, slab, workspace, gap);
    const bool kept = state_.plan.keep && !scaled && state_.data.row_map.is_softmax();
    if (options.wrt_readout) differentiate_readout(chunk, h, slab, g, workspace);
    if (!options.wrt_W) continue;
    const ScoreArguments<real> in = upstream(again, h, slab, kept, workspace);
    if (kept)
      kernels.derivative_rows(in);
    else
      steps_.run_scores(in);  // from the logits
    const real* const factors = scaled ? steps_.scaled_factors(slab, gap, state_.scales.log_of_W(h),
                                                               nullptr, workspace.heads)
                                       : nullptr;
    if (gradients_of_keys_) {
      differentiate_factors(chunk, h, slab, scaled ? *factors : real(1), again, workspace);
      continue;
    }
    if (scaled) keys = steps_.scale_keys(slab, factors, workspace.heads);
    steps_.accumulate(chunk, h, slab, nullptr, workspace.heads.scores.c, keys, workspace.heads);
  }
}

template class LayerRowPass<float>;
template class LayerRowPass<double>;

}  // namespace mhfast
