// The losses of a layer's query rows whose outputs are known, one row after another.
#pragma once

#include "strategy.hpp"

namespace mhfast {

/// What a pass over the losses does with each derivative.
enum class DerivativeUse {
  kLargest,   // finds the largest of each entry
  kRelative,  // writes g, relative to that
  kGradient,  // writes g, times the run's share
  kBoth,      // the first and the last
};

/// Of `rows` query rows from `first` on, counted over all samples, whose outputs are `stride`
/// numbers apart: adds to the totals and calls emit(row, output, derivative) for every output, the
/// derivative being that of the sample's weighted loss by it.
template <class real, class Emit>
void measure_rows(const PassState<real>& state, LaneTotals& totals, std::ptrdiff_t first, int rows,
                  const real* f, std::ptrdiff_t stride, const OwnLossNumbers& own,
                  const Emit& emit) {
  const Shape& s = state.data.shape;
  const std::ptrdiff_t targets = state.data.targets / s.q;
  for (int t = 0; t < rows; ++t) {
    const std::ptrdiff_t row = first + t;
    const double w = state.data.weight_of(0, row / s.q, int(row % s.q));
    if (w == 0) {  // whatever the outputs are
      for (int o = 0; o < s.p; ++o) emit(t, o, 0.0);
      continue;
    }
    const auto emit_weighted = [&](int o, double derivative) { emit(t, o, w * derivative); };
    const RowLoss loss = state.own.exists()
                             ? own.row(std::ptrdiff_t(t) * s.p, s.p, emit_weighted)
                             : row_loss(*state.loss, f + t * stride, state.data.y + row * targets,
                                        1, s.p, state.totals_wanted, emit_weighted);
    totals.loss[0] += w * loss.value;
    totals.correct[0] += w * loss.correct;
    totals.margin[0] = std::min(totals.margin[0], loss.margin);
  }
}

}  // namespace mhfast
