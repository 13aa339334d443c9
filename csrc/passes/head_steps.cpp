#include "head_steps.hpp"

namespace mhfast {

template <class real>
HeadSteps<real>::HeadSteps(PassState<real>& state, int rows)
    : state_(state),
      rows_size_(state.lanes.rows(rows)),
      weights_size_(state.data.shape.T * rows_size_),
      transposed_row_(state.model.heads_are_columns() ? std::ptrdiff_t(state.data.shape.H)
                      : state.lanes.laned ? std::ptrdiff_t(state.data.shape.q) * state.width
                                          : rows_size_),
      run_scores_(state.data.has_words()           ? state.kernels.scores_words
                  : state.plan.runs_are_lanes()    ? state.kernels.scores_runs
                  : state.plan.samples_are_lanes() ? state.kernels.scores_samples
                                                   : state.kernels.scores_rows),
      gradient_(make_gradient_lanes(state)) {}

template <class real>
ScoreArguments<real> HeadSteps<real>::scores(RowMode mode, int head, const Slab<real>& slab,
                                             const HeadMemory<real>& memory,
                                             const ScoreMemory<real>& to, real* gap) const {
  const int d = state_.data.shape.d;
  const LaneLayout& lanes = state_.lanes;
  const bool words = state_.data.has_words();
  const std::ptrdiff_t row = lanes.laned ? lanes.rows(slab.first_row) : 0;
  const ScoreOperands<real> operands{
      words ? state_.model.scores_table(head) : state_.model.w(head),
      slab.x,
      words ? nullptr : slab.z + row * d,
      state_.data.is_limited() ? memory.limits : nullptr,
      words ? state_.model.values_table(head) : state_.model.transposed(head),
      transposed_row_,
      state_.width > 1,
      state_.data.row_map,
      state_.model.scale(),
      slab.words,
      state_.data.shape.rank,
      state_.model.kt(head),
      state_.model.exps_table(head)};
  ScoreArguments<real> in = score_arguments(mode, d, {slab.keys, slab.rows, slab.units}, operands,
                                            to, slab.heads * weights_size_);
  in.gap = gap;
  in.heads = slab.heads;
  in.readout_head = state_.entries_held(slab);
  const real* product = words ? nullptr : state_.model.shared_product(head);
  if (product) {
    in.shared_p = product + row;
    in.shared_p_k = lanes.rows(state_.data.shape.q);
  }
  return in;
}

template <class real>
void HeadSteps<real>::gather_scales(int chunk, const Slab<real>& slab,
                                    const HeadMemory<real>& memory) const {
  const int held = state_.entries_held(slab);
  state_.kernels.gather_scales({held, state_.data.shape.H, memory.log_derivative, memory.gap, held,
                                state_.scales.of_chunk(chunk)});
}

template <class real>
const real* HeadSteps<real>::scaled_factors(const Slab<real>& slab, const real* gaps,
                                            const double* log_scale, const real* signs,
                                            const HeadMemory<real>& memory) const {
  state_.kernels.scaled_factors(
      {state_.entries_held(slab), gaps, log_scale, memory.log_derivative, signs, memory.factors});
  return memory.factors;
}

template class HeadSteps<float>;
template class HeadSteps<double>;

}  // namespace mhfast
