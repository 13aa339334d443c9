// Engine's passes over a classifier: a slab of samples or runs and all heads at a time.
//
//   readouts of all heads  ->  output, loss and slope of each sample  ->  gradients, by head
#include <algorithm>
#include <cmath>

#include "engine.hpp"

namespace mhfast {

template <class real>
void Engine<real>::run_classifier_slab(Pass pass, int chunk, const Slab& slab, Room& room) {
  const Shape& s = data_.shape;
  const bool gaps = finds_gaps(pass);
  // Weights that are not kept are computed again later; here they matter only for their gaps.
  const RowMode mode = !gaps && !(is_gradient(pass) && plan_.keep) ? RowMode::kReadout
                       : pass == Pass::kScaledGradient             ? RowMode::kScaled
                                                                   : RowMode::kDerivative;
  const int held = entries_held(slab), count = entries(slab);
  for (int h = 0; h < s.H; ++h)
    run_scores(scores(mode, h, slab, room, gaps ? room.gap + h * held : nullptr,
                      plan_.keep && mode != RowMode::kReadout));
  kernels_.sum_readouts({count, s.H, room.readout, held, 1.0 / std::sqrt(double(s.H)), room.phi});
  if (outputs_)
    for (int i = 0; i < count; ++i) outputs_[slab.first_sample + i] = real(room.phi[i]);
  if (pass == Pass::kOutputs) return;
  measure_loss(pass, chunk_totals_[chunk], slab, room.phi, room.slope, room.log_slope);
  if (gathers_scales(pass)) gather_scales(chunk, slab, room);
  if (is_gradient(pass)) differentiate(pass, chunk, slab, room);
}

/// Loss and slope of a slab's entries from their outputs.
template <class real>
void Engine<real>::measure_loss(Pass pass, LaneTotals& totals, const Slab& slab, const double* phi,
                                real* slope, double* log_slope) const {
  const std::ptrdiff_t at = slab.first_sample * width_;
  LossArguments<real> in{};
  in.kind = *loss_;
  in.values = totals_wanted_ || pass == Pass::kScaledGradient;
  in.count = entries(slab);
  in.f = phi;
  in.y = labels_.data() + at;
  in.w = weights_.data() + at;
  in.log_w = log_weights_.empty() ? nullptr : log_weights_.data() + at;
  in.shares = shares_.data();
  in.slope = slope;
  in.log_slope = options_.gaps ? log_slope : nullptr;
  in.loss = totals.loss;
  in.correct = totals.correct;
  in.margin = totals.margin;
  kernels_.classifier_loss(in);
}

/// One head's A or D of the slab times a factor for each entry, in place: of few rows less work
/// than the keys.
template <class real>
void Engine<real>::scale_weights(const Slab& slab, const real* factors, real* weights) const {
  const int L = kernels_.lanes;
  for (int u = 0; u < slab.units; ++u) {
    real* of_unit = weights + u * weights_size_;
    kernels_.scale_samples(of_unit, factors + u * L, weights_size_ / L, of_unit);
  }
}

/// Gradients of a slab whose loss is known.
template <class real>
void Engine<real>::differentiate(Pass pass, int chunk, const Slab& slab, Room& room) {
  const Shape& s = data_.shape;
  const int held = entries_held(slab);
  const bool scaled = pass == Pass::kScaledGradient, by_weights = scales_weights(scaled);
  const real* keys = by_weights ? slab.x : scaled ? nullptr : scale_keys(slab, room.slope, room);
  for (int h = 0; h < s.H; ++h) {
    const std::ptrdiff_t at = plan_.keep ? h * (slab.units * weights_size_) : 0;
    real *a = options_.wrt_readout ? room.s + at : nullptr,
         *dd = options_.wrt_W ? room.c + at : nullptr;
    real* gap = options_.gaps ? room.gap + h * held : nullptr;
    if (!plan_.keep)
      run_scores(
          scores(scaled ? RowMode::kScaled : RowMode::kDerivative, h, slab, room, gap, false));
    // The keys, or else the weights, times factors.
    const auto scale = [&](const real* factors, real* weights) {
      if (!by_weights) return scale_keys(slab, factors, room);
      scale_weights(slab, factors, weights);
      return slab.x;
    };
    if (!scaled) {
      if (by_weights && a) scale(room.slope, a);
      if (by_weights && dd) scale(room.slope, dd);
      accumulate(chunk, h, slab, a, dd, keys, room);
      continue;
    }
    if (dd) {
      const real* factors = scaled_factors(slab, gap, log_scales_W(h), room.slope, room);
      accumulate(chunk, h, slab, nullptr, dd, scale(factors, dd), room);
    }
    if (a) {
      const real* factors = scaled_factors(slab, nullptr, log_scales_readout(), room.slope, room);
      accumulate(chunk, h, slab, a, nullptr, scale(factors, a), room);
    }
  }
}

/// Whether a slab's gradients take the slopes with A and D of every head, not with the keys.
template <class real>
bool Engine<real>::scales_weights(bool scaled) const {
  const Shape& s = data_.shape;
  // Scaled, factors are of a head and of A or D, so that the keys are scaled as often as these.
  const int arrays = scaled ? 1 : s.H * (options_.wrt_W + options_.wrt_readout);
  return !plan_.features_are_lanes() && arrays * s.q < s.d;
}

#define MHFAST_INSTANTIATE(real)                                                                 \
  template void Engine<real>::run_classifier_slab(Pass, int, const Slab&, Room&);                \
  template void Engine<real>::measure_loss(Pass, LaneTotals&, const Slab&, const double*, real*, \
                                           double*) const;
MHFAST_INSTANTIATE(float)
MHFAST_INSTANTIATE(double)

}  // namespace mhfast
