#include "layer_rows.hpp"

#include <cmath>
#include <numeric>

#include "../runtime/tuning.hpp"
#include "row_losses.hpp"

namespace mhfast {

template <class real>
LayerRowPass<real>::LayerRowPass(PassState<real>& state)
    : ChunkPass<real>(state),
      steps_(state, state.plan.tile),
      dL_(int(round_up(state.data.shape.d, state.lanes.lanes))),
      pL_(int(round_up(state.data.shape.p, state.lanes.lanes))),
      values_first_(has_values_first(state.data.shape, sizeof(real), state.lanes.lanes)),
      all_keys_(values_first_ ? state.data.shape.T : 0),
      workspaces_(state.threads, Workspace(WordLists<real>(state, state.plan.tile))) {
  std::iota(all_keys_.begin(), all_keys_.end(), 0);
}

/// Of tiles with the caller's own loss, see tuning.hpp.
template <class real>
void LayerRowPass<real>::choose_block() {
  if (!state_.own.takes_blocks()) return;
  const Shape& s = state_.data.shape;
  double units = double(kOwnLossOutputs) / (double(state_.plan.tile) * s.p);
  const double kept = s.H * (double(of_head_size()) + double(steps_.weights_size()));
  if (state_.options.gradient) units = std::min(units, kOwnLossBytes / (kept * sizeof(real)));
  const double of_chunk = double(state_.plan.units / state_.plan.chunks + 1);
  block_ = int(std::min(of_chunk, std::max(1.0, units)));
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
    workspace.x = layout.take<real>(dense * d * round_up(s.T, L));
    workspace.z = layout.take<real>(dense * d * rows);
    workspace.values = layout.take<real>(has_values() ? round_up(s.T, L) * pL_ : 0);
    workspace.packed = layout.take<real>(has_values() ? pL_ * round_up(s.T, L) : 0);
    workspace.x_rows = layout.take<real>(s.identity_v || (values_first_ && gradient) ? T * dL_ : 0);
    workspace.f_lanes = layout.take<real>(values_first_ ? pL_ * rows : 0);
    workspace.by_v = layout.take<real>(values_first_ && gradient ? s.p * dL_ : 0);
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
    heads.keys = layout.take<real>(T * dL_);
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
  state_.own.run(pass, first, last, block_, workspace.own,
                 [&](Pass phase, std::ptrdiff_t begin, std::ptrdiff_t end) {
                   return run_tiles(phase, chunk, first, begin, end, workspace);
                 });
}

/// Units `begin` to `end` of the chunk whose first one is `first`; returns their rows.
template <class real>
std::ptrdiff_t LayerRowPass<real>::run_tiles(Pass pass, int chunk, std::ptrdiff_t first,
                                             std::ptrdiff_t begin, std::ptrdiff_t end,
                                             const Workspace& workspace) const {
  const bool in_block = state_.own.takes_blocks(pass);
  std::ptrdiff_t rows = 0;
  for (std::ptrdiff_t unit = begin; unit < end; ++unit) {
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

/// The tile of query rows that is unit `unit`, its keys and queries packed.
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
  state_.kernels.pack_rows(data.x + sample * s.T * s.d, slab.keys, s.d,
                           int(round_up(slab.keys, state_.lanes.lanes)), workspace.x);
  if (!s.shared_query)
    state_.kernels.pack_rows(data.z + (sample * s.q + slab.first_row) * s.d, slab.rows, s.d, qL,
                             workspace.z);
  if (s.identity_v || (values_first_ && state_.options.gradient && state_.options.wrt_readout))
    state_.kernels.scale_rows(data.x + sample * s.T * s.d, real(1), slab.keys, s.d, dL_,
                              workspace.x_rows);
  return slab;
}

/// The part of the memory that one head's scores are written to.
template <class real>
ScoreMemory<real> LayerRowPass<real>::of_head(int head, const Workspace& workspace) const {
  ScoreMemory<real> to = workspace.heads.scores;
  if (state_.options.gradient && state_.plan.keep) to.s += head * steps_.weights_size();
  return to;
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
    const ScoreArguments<real> in =
        steps_.scores(RowMode::kWeights, h, slab, workspace.heads, of_head(h, workspace), gap);
    steps_.run_scores(in);
    if (values_first_) {  // F^T, rows being the lanes of A
      load_values(h, slab, workspace);
      state_.kernels.product({{s.p, qL / L, slab.keys},
                              {workspace.values, pL_},
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

/// The values of the tile's keys; of X V the same packed.
template <class real>
void LayerRowPass<real>::load_values(int head, const Slab<real>& slab,
                                     const Workspace& workspace) const {
  const Kernels<real>& kernels = state_.kernels;
  const int L = state_.lanes.lanes, keys = int(round_up(slab.keys, L));
  if (values_first_) {
    const int p = state_.data.shape.p;
    kernels.product({{p, keys / L, state_.data.shape.d},
                     {padded_readout(head), pL_},
                     {slab.x, keys, L},
                     {workspace.packed, keys, L},
                     false});
    kernels.pack_rows(workspace.packed, p, keys, pL_, workspace.values);
    return;
  }
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
  const auto find_largest = [&](std::ptrdiff_t, double derivative) {
    largest = std::max(largest, std::fabs(derivative));
  };
  if (pass == Pass::kScaledGradient) {  // derivatives relative to the tile's largest
    LaneTotals unused;
    measure(unused, slab, workspace.f, own, find_largest);
    measure(totals, slab, workspace.f, own, [&](std::ptrdiff_t at, double derivative) {
      workspace.g[at] = largest > 0 ? real(derivative / largest) : real(0);
    });
  } else {
    measure(totals, slab, workspace.f, own, [&](std::ptrdiff_t at, double derivative) {
      workspace.g[at] = real(derivative * state_.shares.of_lane[0]);
      if (gaps) find_largest(at, derivative);
    });
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
    steps_.run_scores(
        steps_.scores(RowMode::kWeights, head, slab, workspace.heads, memory, nullptr));
  if (values_first_) {
    std::fill_n(workspace.values, std::ptrdiff_t(slab.keys) * pL_, real(0));
    kernels.values_words(
        {slab.keys, slab.rows, pL_ / L, all_keys_.data(), memory.s, g, workspace.values});
    kernels.product({{s.p, dL_ / L, slab.keys},
                     {workspace.values, pL_},
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
  kernels.values_words({slab.keys, slab.rows, pL_ / L, slab.words.keys, memory.s, g, to});
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
  if (s.identity_v) {
    in.ut = workspace.g_transposed;
    return in;
  }
  if (!has_values()) {
    kernels.product({{s.d, qL / L, s.p},
                     {state_.model.transposed(head), dL_},
                     {workspace.g_transposed, qL, L},
                     {workspace.ut, qL, L},
                     false});
    in.ut = workspace.ut;
    return in;
  }
  const int keys = int(round_up(slab.keys, L));
  load_values(head, slab, workspace);
  if (!values_first_) kernels.pack_rows(workspace.values, slab.keys, pL_, keys, workspace.packed);
  if (kept) {
    in.x = workspace.packed;
    in.d = s.p;
    in.ut = workspace.g_transposed;
    return in;
  }
  kernels.product({{slab.keys, qL / L, s.p},
                   {workspace.packed, keys},
                   {workspace.g_transposed, qL, L},
                   {in.c, qL, L}});
  in.ut = nullptr;
  return in;
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
  const real* keys = workspace.heads.keys;
  if (state_.data.has_words())
    workspace.heads.keys[0] = real(1);  // a factor of the tile, see scale_keys
  else if (!scaled && options.wrt_W)
    kernels.scale_rows(state_.data.x + slab.first_sample * s.T * s.d, real(1), slab.keys, s.d, dL_,
                       workspace.heads.keys);
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
    const ScoreArguments<real> again =
        steps_.scores(mode, h, slab, workspace.heads, of_head(h, workspace), gap);
    const bool kept = state_.plan.keep && !scaled && state_.data.row_map.is_softmax();
    if (options.wrt_readout) differentiate_readout(chunk, h, slab, g, workspace);
    if (!options.wrt_W) continue;
    const ScoreArguments<real> in = upstream(again, h, slab, kept, workspace);
    if (kept)
      kernels.derivative_rows(in);
    else
      steps_.run_scores(in);  // from the logits
    if (scaled)
      keys = steps_.scale_keys(
          slab,
          steps_.scaled_factors(slab, gap, state_.scales.log_of_W(h), nullptr, workspace.heads),
          workspace.heads);
    steps_.accumulate(chunk, h, slab, nullptr, workspace.heads.scores.c, keys, workspace.heads);
  }
}

template class LayerRowPass<float>;
template class LayerRowPass<double>;

}  // namespace mhfast
