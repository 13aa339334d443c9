#include "lane_losses.hpp"

#include <cmath>

namespace mhfast {
namespace {

template <class real>
inline real relative_derivative(double derivative, double largest) {
  return largest > 0 ? real(derivative / largest) : real(0);
}

}  // namespace

/// The weights (L) of the samples' row `row` of unit `unit`, 0 for lanes without a sample.
template <class real>
void LaneLosses<real>::load_row_weights(const Slab<real>& slab, int unit, int row,
                                        double* w) const {
  const Data<real>& data = state_.data;
  const int L = state_.lanes.lanes, count = state_.entries(slab);
  for (int l = 0; l < L; ++l) {
    const int e = unit * L + l;
    w[l] = e < count
               ? data.weight_of(state_.run_of(e), state_.sample_of(slab, e), slab.first_row + row)
               : 0.0;
  }
}

/// Calls body(unit, row, index in the outputs, targets, weights) for every row of the slab, or for
/// the first of each unit where `once` and all have its weights.
template <class real>
template <class Body>
void LaneLosses<real>::for_rows(const Slab<real>& slab, bool once, const Body& body) const {
  const Shape& s = state_.data.shape;
  const std::ptrdiff_t outputs = std::ptrdiff_t(s.p) * state_.lanes.lanes;
  const std::ptrdiff_t row_targets = state_.data.targets / s.q * state_.lanes.lanes;
  const auto is_whole = [&](int u) {  // and so weighs as the unit before
    return samples_weigh_alike_ && (u + 1) * state_.lanes.lanes <= state_.entries(slab);
  };
  double w[kMaxLanes];
  for (int u = 0; u < slab.units; ++u)
    for (int t = 0; t < slab.rows; ++t) {
      if (t == 0 ? u == 0 || !is_whole(u) : !rows_weigh_alike_) load_row_weights(slab, u, t, w);
      if (t > 0 && once) break;
      body(u, t, (std::ptrdiff_t(u) * slab.rows + t) * outputs,
           slab.y + u * unit_targets_ + (slab.first_row + t) * row_targets, w);
    }
}

template <class real>
void LaneLosses<real>::add_totals(LaneTotals& totals, const double* w, const RowLoss* rows) const {
  for (int l = 0; l < state_.lanes.lanes; ++l) {
    if (w[l] == 0) continue;
    totals.loss[l] += w[l] * rows[l].value;
    totals.correct[l] += w[l] * rows[l].correct;
    totals.margin[l] = std::min(totals.margin[l], rows[l].margin);
  }
}

/// Calls emit(index, entry, derivative) for every output of the slab, derivative being the
/// derivative of the sample's weighted loss by it (0 for lanes without a sample) and index its
/// place among the outputs.
template <class real>
template <class Emit>
void LaneLosses<real>::measure_rows(LaneTotals& totals, const Slab<real>& slab,
                                    const LaneOutputs<real>& of, const Emit& emit) const {
  const int L = state_.lanes.lanes, p = state_.data.shape.p;
  for_rows(slab, false, [&](int u, int t, std::ptrdiff_t at, const real* y, const double* w) {
    RowLoss rows[kMaxLanes];
    for (int l = 0; l < L; ++l) {
      const auto emit_weighted = [&](int o, double derivative) {
        emit(at + o * L + l, u * L + l, w[l] * derivative);
      };
      if (w[l] == 0)  // whatever the outputs are
        for (int o = 0; o < p; ++o) emit(at + o * L + l, u * L + l, 0.0);
      else if (state_.own.exists())
        rows[l] = of.own.row((std::ptrdiff_t(u * L + l) * slab.rows + t) * p, p, emit_weighted);
      else
        rows[l] =
            row_loss(*state_.loss, of.f + at + l, y + l, L, p, state_.totals_wanted, emit_weighted);
    }
    add_totals(totals, w, rows);
  });
}

/// The same, by what becomes of the derivatives: one compilation of all losses for the three of
/// them.
template <class real>
void LaneLosses<real>::measure_derivatives(DerivativeUse use, LaneTotals& totals,
                                           const Slab<real>& slab,
                                           const LaneOutputs<real>& of) const {
  const int L = state_.lanes.lanes;
  const double* shares = state_.shares.of_lane.data();
  double* largest = of.largest;
  measure_rows(totals, slab, of, [=](std::ptrdiff_t at, int entry, double derivative) {
    if (use == DerivativeUse::kRelative) {
      of.g[at] = relative_derivative<real>(derivative, largest[entry]);
      return;
    }
    if (use != DerivativeUse::kLargest) of.g[at] = real(derivative * shares[entry % L]);
    if (use != DerivativeUse::kGradient)
      largest[entry] = std::max(largest[entry], std::fabs(derivative));
  });
}

/// The same for squared losses, all lanes at a time: derivatives go to the derivatives g, times the
/// run's `shares` or, without, divided by the weight; the largest of each entry's derivatives, not
/// so changed, to `largest`, unless that is null.
template <class real>
void LaneLosses<real>::measure_squares(LaneTotals& totals, const Slab<real>& slab,
                                       const LaneOutputs<real>& of, const double* shares,
                                       double* largest) const {
  const int L = state_.lanes.lanes;
  real counts[kMaxLanes], factor[kMaxLanes], most[kMaxLanes];
  double squares[kMaxLanes], correct[kMaxLanes], margin[kMaxLanes];
  const bool once = rows_weigh_alike_;
  const int outputs = state_.data.shape.p * (once ? slab.rows : 1);
  for_rows(slab, once, [&](int u, int, std::ptrdiff_t at, const real* y, const double* w) {
    for (int l = 0; l < L; ++l) {
      counts[l] = real(w[l] != 0);
      factor[l] = shares ? real(2 * w[l] * shares[l]) : real(2);
    }
    state_.kernels.layer_residuals({outputs, of.f + at, y, counts, factor,
                                    state_.options.gradient ? of.g + at : nullptr, squares, most,
                                    state_.totals_wanted ? correct : nullptr,
                                    state_.totals_wanted ? margin : nullptr});
    // Residuals of lanes of weight 0 are 0.
    for (int l = 0; l < L; ++l) totals.loss[l] += w[l] * squares[l];
    for (int l = 0; largest && l < L; ++l)
      largest[u * L + l] = std::max(largest[u * L + l], 2 * w[l] * double(most[l]));
    for (int l = 0; state_.totals_wanted && l < L; ++l) {
      if (w[l] == 0) continue;
      totals.correct[l] += w[l] * correct[l];
      totals.margin[l] = std::min(totals.margin[l], margin[l]);
    }
  });
}

/// Derivatives in g relative to the largest of their entry, which is written to `largest`.
template <class real>
void LaneLosses<real>::measure_relative(LaneTotals& totals, const Slab<real>& slab,
                                        const LaneOutputs<real>& of) const {
  if (state_.loss->name == LossName::kSquared) {
    const int L = state_.lanes.lanes;
    measure_squares(totals, slab, of, nullptr, of.largest);
    for_rows(slab, false, [&](int u, int, std::ptrdiff_t at, const real*, const double* w) {
      for (int k = 0; k < state_.data.shape.p * L; ++k)
        of.g[at + k] =
            relative_derivative<real>(w[k % L] * double(of.g[at + k]), of.largest[u * L + k % L]);
    });
    return;
  }
  LaneTotals unused;
  measure_derivatives(DerivativeUse::kLargest, unused, slab, of);
  measure_derivatives(DerivativeUse::kRelative, totals, slab, of);
}

template <class real>
void LaneLosses<real>::load_own(const Slab<real>& slab, const LaneOutputs<real>& of) const {
  const int L = state_.lanes.lanes, p = state_.data.shape.p, count = state_.entries(slab);
  for_rows(slab, false, [&](int u, int t, std::ptrdiff_t at, const real* y, const double*) {
    for (int e = u * L; e < std::min((u + 1) * L, count); ++e)
      for (int o = 0; o < p; ++o) {
        const std::ptrdiff_t to = (std::ptrdiff_t(e) * slab.rows + t) * p + o;
        of.own.outputs[to] = double(of.f[at + o * L + e % L]);
        of.own.targets[to] = double(y[o * L + e % L]);
      }
  });
}

template <class real>
void LaneLosses<real>::measure(Pass pass, LaneTotals& totals, const Slab<real>& slab,
                               const LaneOutputs<real>& of, double* log_derivative) const {
  const bool squares = state_.loss->name == LossName::kSquared;
  const bool gaps = state_.options.gathers_scales(pass);
  if (pass == Pass::kLoss) {
    if (squares)
      measure_squares(totals, slab, of, nullptr, nullptr);
    else
      measure_rows(totals, slab, of, [](std::ptrdiff_t, int, double) {});
    return;
  }
  const int held = state_.entries_held(slab);
  std::fill_n(of.largest, held, 0.0);
  const double* shares = state_.shares.of_lane.data();
  if (pass == Pass::kScaledGradient)
    measure_relative(totals, slab, of);
  else if (squares)
    measure_squares(totals, slab, of, shares, gaps ? of.largest : nullptr);
  else
    measure_derivatives(gaps ? DerivativeUse::kBoth : DerivativeUse::kGradient, totals, slab, of);
  if (!gaps && pass != Pass::kScaledGradient) return;
  for (int e = 0; e < held; ++e) log_derivative[e] = std::log(of.largest[e]);
}

template class LaneLosses<float>;
template class LaneLosses<double>;

}  // namespace mhfast
