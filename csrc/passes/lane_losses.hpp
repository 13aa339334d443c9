// The losses of a layer's outputs where samples or runs are lanes, of a slab at a time, and what
// the gradient needs of them.
#pragma once

#include "row_losses.hpp"

namespace mhfast {

/// Outputs of a slab, [unit][row][output][L], and what becomes of them.
template <class real>
struct LaneOutputs {
  real *f, *g;         // outputs; derivatives of the loss by them
  double* largest;     // the largest derivative of each entry
  OwnLossNumbers own;  // of the slab at hand
};

template <class real>
class LaneLosses {
 public:
  /// `unit_targets`: numbers of a unit's packed targets.
  LaneLosses(const PassState<real>& state, std::ptrdiff_t unit_targets)
      : state_(state),
        unit_targets_(unit_targets),
        rows_weigh_alike_(!state.data.lengths && !(state.data.weight && state.data.weighs_rows)),
        samples_weigh_alike_(rows_weigh_alike_ && !state.data.weight) {}

  /// Outputs and targets of the slab as the caller's own loss takes them.
  void load_own(const Slab<real>& slab, const LaneOutputs<real>& of) const;

  /// Adds to the totals and, but in a pass for the loss alone, writes g: derivatives of the run's
  /// loss, or in a scaled pass relative to the largest of their entry. Where the pass gathers
  /// scales or is scaled, `log_derivative` becomes the logarithms of the largest.
  void measure(Pass pass, LaneTotals& totals, const Slab<real>& slab, const LaneOutputs<real>& of,
               double* log_derivative) const;

 private:
  void load_row_weights(const Slab<real>& slab, int unit, int row, double* w) const;
  template <class Body>
  void for_rows(const Slab<real>& slab, bool once, const Body& body) const;
  void add_totals(LaneTotals& totals, const double* w, const RowLoss* rows) const;
  template <class Emit>
  void measure_rows(LaneTotals& totals, const Slab<real>& slab, const LaneOutputs<real>& of,
                    const Emit& emit) const;
  void measure_derivatives(DerivativeUse use, LaneTotals& totals, const Slab<real>& slab,
                           const LaneOutputs<real>& of) const;
  void measure_squares(LaneTotals& totals, const Slab<real>& slab, const LaneOutputs<real>& of,
                       const double* shares, double* largest) const;
  void measure_relative(LaneTotals& totals, const Slab<real>& slab,
                        const LaneOutputs<real>& of) const;

  const PassState<real>& state_;
  const std::ptrdiff_t unit_targets_;
  const bool rows_weigh_alike_;  // of a sample
  const bool samples_weigh_alike_;
};

}  // namespace mhfast
