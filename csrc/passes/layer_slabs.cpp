#include "layer_slabs.hpp"

#include <cmath>

namespace mhfast {

template <class real>
LayerSlabs<real>::LayerSlabs(PassState<real>& state)
    : SlabPass<real>(state, {state.plan.tile, state.data.targets * state.lanes.lanes,
                             state.plan.heads, state.plan.heads, state.plan.heads}),
      losses_(state, sizes_.unit_targets),
      outputs_(state.threads),
      layer_outputs_(state.plan.runs_are_lanes() ? state.kernels.layer_outputs_runs
                                                 : state.kernels.layer_outputs_samples),
      layer_upstream_(state.plan.runs_are_lanes() ? state.kernels.layer_upstream_runs
                                                  : state.kernels.layer_upstream_samples) {}

template <class real>
void LayerSlabs<real>::lay_out_readout(Arena& layout, int thread, std::size_t units) {
  const Shape& s = state_.data.shape;
  const PassOptions& options = state_.options;
  const std::size_t rows = units * steps_.rows_size();  // vectors of rows, in numbers
  Outputs& of = outputs_[thread];
  of.largest = layout.take<double>(units * state_.lanes.lanes);
  const std::size_t attended = options.gradient ? this->block_ * s.H : sizes_.heads;
  of.ax = layout.take<real>(this->projections_.exist() ? 0 : attended * rows * s.d);
  of.f = layout.take<real>(rows * s.p);
  of.g = layout.take<real>(options.gradient ? rows * s.p : 0);
  of.scaled_g = layout.take<real>(options.gaps ? rows * s.p : 0);
  of.ut = layout.take<real>(options.gradient ? sizes_.heads * rows * s.d : 0);
}

template <class real>
double LayerSlabs<real>::kept_bytes(std::size_t units) const {
  const Shape& s = state_.data.shape;
  const double of_unit = double(steps_.weights_size()) + double(steps_.rows_size()) * s.d;
  return s.H * double(units) * of_unit * sizeof(real);
}

template <class real>
typename LayerSlabs<real>::Memory LayerSlabs<real>::memory_of(const Slab<real>& slab,
                                                              int thread) const {
  Memory memory{this->workspaces_[thread].heads, outputs_[thread].ax};
  if (slab.place == 0 || !this->keeps_weights()) return memory;
  const std::ptrdiff_t heads = std::ptrdiff_t(slab.place) * state_.data.shape.H;
  const std::ptrdiff_t units = heads * this->slab_units();
  memory.heads.scores.s += units * steps_.weights_size();
  memory.ax += units * steps_.rows_size() * state_.data.shape.d;
  if (state_.options.gaps) memory.heads.gap += heads * this->held();
  return memory;
}

/// The part of the memory that one head's scores are written to: A of all heads is kept for the
/// gradient, D of one at a time.
template <class real>
ScoreMemory<real> LayerSlabs<real>::of_head(int head, const Slab<real>& slab,
                                            const Memory& memory) const {
  ScoreMemory<real> to = memory.heads.scores;
  if (state_.options.gradient) to.s += head * (slab.units * steps_.weights_size());
  return to;
}

template <class real>
LayerArguments<real> LayerSlabs<real>::layer(int head, const Slab<real>& slab, int thread,
                                             const Memory& memory) const {
  const Shape& s = state_.data.shape;
  const Outputs& of = outputs_[thread];
  const ScoreMemory<real> scores = of_head(head, slab, memory);
  const std::ptrdiff_t rows = std::ptrdiff_t(slab.units) * slab.rows * state_.lanes.lanes;
  LayerArguments<real> in{};
  in.T = s.T;
  in.q = slab.rows;
  in.d = s.d;
  in.p = s.p;
  in.units = slab.units;
  in.v = state_.model.readout(head);
  in.vt = state_.model.transposed(head);
  in.x = slab.x;
  in.a = scores.s;
  in.heads = slab.heads;
  in.unit_stride = slab.heads * steps_.weights_size();
  in.y = memory.ax + (state_.options.gradient ? head : 0) * rows * s.d;
  in.f = of.f;
  in.g = of.g;
  in.ut = of.ut;
  in.c = scores.c;
  if (!this->projections_.exist()) return in;
  in.d = s.p;  // tokens are those of an identity
  in.v = in.vt = nullptr;
  in.x = this->projections_.values(head, thread);
  return in;
}

/// Scores of a head, without C.
template <class real>
ScoreArguments<real> LayerSlabs<real>::scores_of(RowMode mode, int head, const Slab<real>& slab,
                                                 int thread, const Memory& memory,
                                                 real* gap) const {
  ScoreArguments<real> in =
      steps_.scores(mode, head, slab, memory.heads, of_head(head, slab, memory), gap);
  if (this->projections_.exist()) this->projections_.take_factors(head, thread, in);
  return in;
}

template <class real>
void LayerSlabs<real>::write_outputs(const Slab<real>& slab, const real* f) const {
  const Shape& s = state_.data.shape;
  const int L = state_.lanes.lanes;
  const std::ptrdiff_t size = std::ptrdiff_t(slab.rows) * s.p;
  for (int i = 0; i < slab.samples; ++i) {
    const real* from = f + (i / L) * size * L + i % L;
    real* to = state_.outputs + ((slab.first_sample + i) * s.q + slab.first_row) * s.p;
    for (std::ptrdiff_t k = 0; k < size; ++k) to[k] = from[k * L];
  }
}

/// Outputs of the slab; A and A X of every head stay for the gradient.
template <class real>
void LayerSlabs<real>::run_outputs(bool gaps, const Slab<real>& slab, int thread,
                                   const Memory& memory) const {
  const int held = state_.entries_held(slab);
  for (int h = 0; h < state_.data.shape.H; h += slab.heads) {
    steps_.run_scores(scores_of(RowMode::kWeights, h, slab, thread, memory,
                                gaps ? memory.heads.gap + h * held : nullptr));
    LayerArguments<real> in = layer(h, slab, thread, memory);
    in.add = h > 0;
    layer_outputs_(in);
  }
}

template <class real>
void LayerSlabs<real>::run_slab(Pass pass, int chunk, const Slab<real>& slab, int thread) {
  const Memory memory = memory_of(slab, thread);
  Outputs& of = outputs_[thread];
  const bool gaps = state_.options.gathers_scales(pass);
  if (this->projections_.exist()) this->projections_.load(slab, is_gradient(pass), thread);
  if (!this->knows_outputs(pass)) {
    const bool keeps_gaps =
        pass == Pass::kOwnOutputs && state_.options.gaps && this->keeps_weights();
    run_outputs(gaps || keeps_gaps, slab, thread, memory);
    if (state_.outputs) write_outputs(slab, of.f);
  }
  if (pass == Pass::kOutputs) return;
  if (state_.own.exists()) of.own = this->own_numbers(slab, thread);
  if (pass == Pass::kOwnOutputs) return losses_.load_own(slab, of);
  if (state_.own.exists() && !state_.own.takes_blocks()) {
    losses_.load_own(slab, of);
    state_.own.call(std::ptrdiff_t(state_.entries(slab)) * slab.rows, of.own);
  }
  losses_.measure(pass, state_.totals[chunk], slab, of, memory.heads.log_derivative);
  this->write_attention(pass, slab, memory.heads.scores.s);
  if (pass == Pass::kLoss) return;
  if (pass == Pass::kScaledGradient) return differentiate_scaled(chunk, slab, thread, memory);
  if (gaps) steps_.gather_scales(chunk, slab, memory.heads);
  if (pass != Pass::kScales) differentiate(chunk, slab, thread, memory);
}

/// Adds one head's gradient by V, from the derivatives g of the outputs.
template <class real>
void LayerSlabs<real>::add_readout_gradient(int chunk, int head, const Slab<real>& slab, int thread,
                                            const Memory& memory, const real* g,
                                            bool inputs) const {
  LayerArguments<real> in = layer(head, slab, thread, memory);
  if (this->projections_.exist()) {
    std::fill_n(memory.heads.factors, state_.entries_held(slab), real(1));  // they are in g
    return this->projections_.add_readout(chunk, head, slab, thread, in.a, g, memory.heads.factors,
                                          inputs);
  }
  in.g = g;
  in.gv = state_.gradients.readout(chunk, head, slab.laned);
  in.add = !slab.first || slab.follows;
  in.sums_lanes = state_.plan.samples_are_lanes() && !slab.laned;
  state_.kernels.layer_gradient(in);
}

/// Scores of a head whose U is G V^T.
template <class real>
ScoreArguments<real> LayerSlabs<real>::scores_of_upstream(RowMode mode, int head,
                                                          const Slab<real>& slab, int thread,
                                                          const Memory& memory, real* gap) const {
  const std::ptrdiff_t rows = std::ptrdiff_t(slab.rows) * slab.heads * state_.lanes.lanes;
  ScoreArguments<real> in = scores_of(mode, head, slab, thread, memory, gap);
  if (this->projections_.exist()) {  // which have other keys
    const std::ptrdiff_t L = state_.lanes.lanes, row = state_.data.shape.p * L;
    state_.kernels.product_lanes(
        {{slab.rows, slab.keys, state_.data.shape.p, 1, slab.units},
         {outputs_[thread].ut, slab.units * rows, 0, rows},
         {this->projections_.values(head, thread), L, row, 0, slab.keys * row},
         {in.c, L, rows, in.unit_stride}});
    return in;
  }
  in.ut = outputs_[thread].ut;
  in.ut_k = slab.units * rows;
  in.ut_unit = rows;
  in.ut_laned = true;
  return in;
}

/// Adds one head's gradient by W or its factors, from D and keys times the factors of the entries,
/// or from D times these.
template <class real>
void LayerSlabs<real>::add_weight_gradient(int chunk, int head, const Slab<real>& slab, int thread,
                                           const Memory& memory, const real* keys,
                                           const real* factors, bool inputs) const {
  const real* const dd = memory.heads.scores.c;
  if (!this->projections_.exist())
    return steps_.accumulate(chunk, head, slab, nullptr, dd, keys, memory.heads);
  this->projections_.add_factors(chunk, head, slab, thread, dd, factors, inputs);
}

template <class real>
void LayerSlabs<real>::differentiate(int chunk, const Slab<real>& slab, int thread,
                                     const Memory& memory) const {
  const real* keys = slab.x;
  const bool projected = this->projections_.exist(), inputs = state_.options.wrt_inputs;
  std::fill_n(memory.heads.factors, state_.entries_held(slab), real(1));
  if (state_.options.wrt_W && state_.plan.features_are_lanes() && !projected)
    keys = steps_.scale_keys(slab, memory.heads.factors, memory.heads);
  const RowMap map = state_.data.row_map;
  // The derivative of linear weights does not depend on the logits.
  const bool is_linear = map.name == RowMapName::kLinear && !state_.data.is_limited();
  const real slope = !is_linear      ? real(0)
                     : map.by_tokens ? real(1) / real(state_.data.shape.T)
                                     : real(1);
  for (int h = 0; h < state_.data.shape.H; h += slab.heads) {
    if (state_.options.wrt_W || inputs) {
      LayerArguments<real> in = layer(h, slab, thread, memory);
      in.slope = slope;
      if (in.v || h == 0) layer_upstream_(in);  // G itself is that of all heads
      if (map.is_softmax() || is_linear)
        state_.kernels.layer_derivative(in);
      else  // needs the logits
        steps_.run_scores(
            scores_of_upstream(RowMode::kDerivative, h, slab, thread, memory, nullptr));
      add_weight_gradient(chunk, h, slab, thread, memory, keys, memory.heads.factors, inputs);
    }
    if (state_.options.wrt_readout || inputs)
      add_readout_gradient(chunk, h, slab, thread, memory, outputs_[thread].g, inputs);
  }
}

/// The same with the largest factors of each entry taken out, see GradientScales.
template <class real>
void LayerSlabs<real>::differentiate_scaled(int chunk, const Slab<real>& slab, int thread,
                                            const Memory& memory) const {
  const Shape& s = state_.data.shape;
  const HeadMemory<real>& heads = memory.heads;
  const Outputs& of = outputs_[thread];
  const int L = state_.lanes.lanes, held = state_.entries_held(slab);
  const std::ptrdiff_t rows = std::ptrdiff_t(slab.rows) * L;
  for (int h = 0; h < s.H; ++h) {
    if (state_.options.wrt_readout) {
      const real* factors =
          steps_.scaled_factors(slab, nullptr, state_.scales.log_of_readout(), nullptr, heads);
      for (int u = 0; u < slab.units; ++u)
        state_.kernels.scale_samples(of.g + u * rows * s.p, factors + u * L,
                                     std::ptrdiff_t(slab.rows) * s.p, of.scaled_g + u * rows * s.p);
      add_readout_gradient(chunk, h, slab, thread, memory, of.scaled_g, false);
    }
    if (!state_.options.wrt_W) continue;
    if (!s.identity_v || h == 0) layer_upstream_(layer(h, slab, thread, memory));
    real* gap = heads.gap + h * held;
    steps_.run_scores(scores_of_upstream(RowMode::kScaled, h, slab, thread, memory, gap));
    const real* factors =
        steps_.scaled_factors(slab, gap, state_.scales.log_of_W(h), nullptr, heads);
    const bool projected = this->projections_.exist();
    const real* keys = projected ? nullptr : steps_.scale_keys(slab, factors, heads);
    add_weight_gradient(chunk, h, slab, thread, memory, keys, factors, false);
  }
}

template class LayerSlabs<float>;
template class LayerSlabs<double>;

}  // namespace mhfast
