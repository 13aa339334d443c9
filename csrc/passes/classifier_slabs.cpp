#include "classifier_slabs.hpp"

namespace mhfast {

template <class real>
ClassifierSlabs<real>::ClassifierSlabs(PassState<real>& state)
    : SlabPass<real>(state, {state.data.shape.q, 0,
                             (state.options.gradient && state.plan.keep) || state.plan.heads > 1
                                 ? state.data.shape.H
                                 : 1,
                             state.data.shape.H, state.plan.heads}),
      outputs_(state.threads),
      loss_(state.kernels, state.data, state.loss, state.width, state.options.gaps) {}

template <class real>
void ClassifierSlabs<real>::lay_out_readout(Arena& layout, int thread, std::size_t units) {
  const std::size_t held =
      round_up(units * (state_.lanes.laned ? state_.lanes.lanes : 1), state_.lanes.lanes);
  outputs_[thread].value = layout.take<double>(held);
  outputs_[thread].derivative = layout.take<real>(held);
}

/// The part of the memory that one head's scores are written to.
template <class real>
ScoreMemory<real> ClassifierSlabs<real>::of_head(const HeadMemory<real>& memory, int head,
                                                 const Slab<real>& slab, bool kept) const {
  const std::ptrdiff_t at = kept ? head * (slab.units * steps_.weights_size()) : 0;
  ScoreMemory<real> to = memory.scores;
  to.s += at;
  to.c += at;
  to.readout += head * state_.entries_held(slab);
  return to;
}

template <class real>
double ClassifierSlabs<real>::kept_bytes(std::size_t units) const {
  return 2.0 * state_.data.shape.H * double(units) * double(steps_.weights_size()) * sizeof(real);
}

/// A thread's memory for the slab, at its place in its block.
template <class real>
HeadMemory<real> ClassifierSlabs<real>::memory_of(const Slab<real>& slab, int thread) const {
  HeadMemory<real> memory = this->workspaces_[thread].heads;
  if (slab.place == 0 || !this->keeps_weights()) return memory;
  const std::ptrdiff_t heads = std::ptrdiff_t(slab.place) * state_.data.shape.H;
  memory.scores.s += heads * this->slab_units() * steps_.weights_size();
  memory.scores.c += heads * this->slab_units() * steps_.weights_size();
  if (state_.options.gaps) memory.gap += heads * this->held();
  return memory;
}

template <class real>
void ClassifierSlabs<real>::run_scores(Pass pass, const Slab<real>& slab, int thread,
                                       const HeadMemory<real>& memory) const {
  const bool keeps = pass == Pass::kOwnOutputs && this->keeps_weights();
  const bool gaps = state_.options.finds_gaps(pass) || (keeps && state_.options.gaps);
  const bool keep = state_.plan.keep;
  // Weights that are not kept are computed again later; here they matter only for their gaps.
  const RowMode mode = !gaps && !keeps && !(is_gradient(pass) && keep) ? RowMode::kReadout
                       : pass == Pass::kScaledGradient                 ? RowMode::kScaled
                                                                       : RowMode::kDerivative;
  const int held = state_.entries_held(slab);
  for (int h = 0; h < state_.data.shape.H; h += slab.heads)
    score_head(mode, h, slab, thread, memory,
               of_head(memory, h, slab, keep && mode != RowMode::kReadout),
               gaps ? memory.gap + h * held : nullptr);
}

template <class real>
void ClassifierSlabs<real>::score_head(RowMode mode, int head, const Slab<real>& slab, int thread,
                                       const HeadMemory<real>& memory, const ScoreMemory<real>& to,
                                       real* gap) const {
  ScoreArguments<real> in = steps_.scores(mode, head, slab, memory, to, gap);
  if (this->projections_.exist()) {
    this->projections_.take_factors(head, thread, in);
    this->projections_.load_readout(head, slab, thread, in.c);
  }
  steps_.run_scores(in);
}

template <class real>
void ClassifierSlabs<real>::run_slab(Pass pass, int chunk, const Slab<real>& slab, int thread) {
  const HeadMemory<real> memory = memory_of(slab, thread);
  const Outputs& outputs = outputs_[thread];
  const int count = state_.entries(slab);
  if (this->projections_.exist()) this->projections_.load(slab, is_gradient(pass), thread);
  // Weights that are not kept are computed again with the gradient.
  const bool later = state_.own.takes_blocks() && pass == Pass::kGradient && !state_.plan.keep &&
                     !state_.options.gaps;
  if (!this->knows_outputs(pass) && !later) {
    run_scores(pass, slab, thread, memory);
    state_.kernels.sum_readouts({count, state_.data.shape.H, memory.scores.readout,
                                 state_.entries_held(slab),
                                 1.0 / readout_of(state_.data.shape).divisor, outputs.value});
    if (state_.outputs)
      for (int i = 0; i < count; ++i)
        state_.outputs[slab.first_sample + i] = real(outputs.value[i]);
  }
  if (pass == Pass::kOutputs) return;
  if (pass == Pass::kOwnOutputs) {
    const OwnLossNumbers own = this->own_numbers(slab, thread);
    std::copy_n(outputs.value, count, own.outputs);
    std::copy_n(loss_.labels(slab.first_sample), count, own.targets);
    return;
  }
  this->write_attention(pass, slab, memory.scores.s);
  measure(pass, chunk, slab, thread);
  if (state_.options.gathers_scales(pass)) steps_.gather_scales(chunk, slab, memory);
  if (is_gradient(pass)) differentiate(pass, chunk, slab, thread, memory, outputs.derivative);
}

/// Loss and its derivatives of a slab whose outputs are known.
template <class real>
void ClassifierSlabs<real>::measure(Pass pass, int chunk, const Slab<real>& slab, int thread) {
  const int count = state_.entries(slab);
  const Outputs& outputs = outputs_[thread];
  double* const log_derivative = this->workspaces_[thread].heads.log_derivative;
  LaneTotals& totals = state_.totals[chunk];
  if (!state_.own.exists())
    return loss_.measure(state_.totals_wanted || pass == Pass::kScaledGradient, state_.shares,
                         slab.first_sample, count, outputs.value, totals, outputs.derivative,
                         log_derivative);
  const OwnLossNumbers own = this->own_numbers(slab, thread);
  if (!state_.own.takes_blocks()) {
    std::copy_n(outputs.value, count, own.outputs);
    std::copy_n(loss_.labels(slab.first_sample), count, own.targets);
    state_.own.call(count, own);
  }
  loss_.measure_own(own, state_.shares, slab.first_sample, count, totals, outputs.derivative,
                    log_derivative);
}

/// A or D of a head, or of those that go together, of the slab times a factor for each entry, in
/// place: of few rows less work than the keys.
template <class real>
void ClassifierSlabs<real>::scale_weights(const Slab<real>& slab, const real* factors,
                                          real* weights) const {
  const int L = state_.lanes.lanes;
  const std::ptrdiff_t size = slab.heads * steps_.weights_size();
  for (int u = 0; u < slab.units; ++u) {
    real* of_unit = weights + u * size;
    state_.kernels.scale_samples(of_unit, factors + u * L, size / L, of_unit);
  }
}

/// Gradients of a slab whose loss is known.
template <class real>
void ClassifierSlabs<real>::differentiate(Pass pass, int chunk, const Slab<real>& slab, int thread,
                                          const HeadMemory<real>& memory,
                                          const real* derivative) const {
  const PassOptions& options = state_.options;
  const int held = state_.entries_held(slab);
  const bool scaled = pass == Pass::kScaledGradient, by_weights = scales_weights(scaled);
  const bool projected = this->projections_.exist();
  const real* keys = by_weights            ? slab.x
                     : scaled || projected ? nullptr
                                           : steps_.scale_keys(slab, derivative, memory);
  for (int h = 0; h < state_.data.shape.H; h += slab.heads) {
    const ScoreMemory<real> to = of_head(memory, h, slab, state_.plan.keep);
    real *a = options.wrt_readout ? to.s : nullptr, *dd = options.wrt_W ? to.c : nullptr;
    real* gap = options.gaps ? memory.gap + h * held : nullptr;
    if (!state_.plan.keep)
      score_head(scaled ? RowMode::kScaled : RowMode::kDerivative, h, slab, thread, memory, to,
                 gap);
    if (projected) {
      differentiate_projected(scaled, chunk, h, slab, thread, memory, to, derivative);
      continue;
    }
    // The keys, or else the weights, times factors.
    const auto scale = [&](const real* factors, real* weights) {
      if (!by_weights) return steps_.scale_keys(slab, factors, memory);
      scale_weights(slab, factors, weights);
      return slab.x;
    };
    if (!scaled) {
      if (by_weights && a) scale(derivative, a);
      if (by_weights && dd) scale(derivative, dd);
      steps_.accumulate(chunk, h, slab, a, dd, keys, memory);
      continue;
    }
    if (dd) {
      const real* factors =
          steps_.scaled_factors(slab, gap, state_.scales.log_of_W(h), derivative, memory);
      steps_.accumulate(chunk, h, slab, nullptr, dd, scale(factors, dd), memory);
    }
    if (a) {
      const real* factors =
          steps_.scaled_factors(slab, nullptr, state_.scales.log_of_readout(), derivative, memory);
      steps_.accumulate(chunk, h, slab, a, nullptr, scale(factors, a), memory);
    }
  }
}

/// The gradients of a head by factors and U, whose tokens A and D are multiplied with.
template <class real>
void ClassifierSlabs<real>::differentiate_projected(bool scaled, int chunk, int head,
                                                    const Slab<real>& slab, int thread,
                                                    const HeadMemory<real>& memory,
                                                    const ScoreMemory<real>& to,
                                                    const real* derivative) const {
  const PassOptions& options = state_.options;
  const real* gap = scaled ? memory.gap + head * state_.entries_held(slab) : nullptr;
  const auto factors = [&](const real* gaps, const double* log_scale) {
    return scaled ? steps_.scaled_factors(slab, gaps, log_scale, derivative, memory) : derivative;
  };
  const bool inputs = options.wrt_inputs && !scaled;
  if (options.wrt_W || inputs)
    this->projections_.add_factors(chunk, head, slab, thread, to.c,
                                   factors(gap, state_.scales.log_of_W(head)), inputs);
  if (options.wrt_readout || inputs)
    this->projections_.add_readout(chunk, head, slab, thread, to.s, nullptr,
                                   factors(nullptr, state_.scales.log_of_readout()), inputs);
}

/// Whether a slab's gradients take the derivatives of the loss with A and D of every head, not with
/// the keys.
template <class real>
bool ClassifierSlabs<real>::scales_weights(bool scaled) const {
  const Shape& s = state_.data.shape;
  const PassOptions& options = state_.options;
  // Scaled, factors are of a head and of A or D, so that the keys are scaled as often as these.
  const int arrays = scaled ? 1 : s.H * (options.wrt_W + options.wrt_readout);
  return !state_.plan.features_are_lanes() && arrays * s.q < s.d;
}

template class ClassifierSlabs<float>;
template class ClassifierSlabs<double>;

}  // namespace mhfast
