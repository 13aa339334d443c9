// Engine's passes over a layer: samples or runs are lanes, a slab of them and all heads at a time.
//
//   F = sum over heads of A X V  ->  loss and G = dL/dF  ->  by head: U = G V^T, D, gradients
//
// The loss is a sum over query rows, so that rows of a long sequence are worked on a few at a time,
// and nothing of the size of rows times keys is held.
#include <algorithm>
#include <cmath>

#include "engine.hpp"

namespace mhfast {

template <class real>
void Engine<real>::lay_out_layer(Layout& layout, Room& room) {
  const Shape& s = data_.shape;
  const std::size_t slab = std::min<std::ptrdiff_t>(plan_.slab, plan_.units);
  const std::size_t rows = slab * rows_size_;  // vectors of rows, in numbers
  room.largest = layout.take<double>(slab * kernels_.lanes);
  room.ax = layout.take<real>((options_.gradient ? s.H : 1) * rows * s.d);
  room.f = layout.take<real>(rows * s.p);
  room.g = layout.take<real>(options_.gradient ? rows * s.p : 0);
  room.scaled_g = layout.take<real>(options_.gaps ? rows * s.p : 0);
  room.ut = layout.take<real>(options_.gradient ? rows * s.d : 0);
}

template <class real>
LayerArguments<real> Engine<real>::layer(int head, const Slab& slab, Room& room) const {
  const Shape& s = data_.shape;
  const std::ptrdiff_t rows = std::ptrdiff_t(slab.units) * slab.rows * kernels_.lanes;
  const int kept = options_.gradient ? head : 0;
  LayerArguments<real> in{};
  in.T = s.T;
  in.q = slab.rows;
  in.d = s.d;
  in.p = s.p;
  in.units = slab.units;
  in.v = v_ + std::ptrdiff_t(head) * s.d * s.p * parameter_;
  in.vt = ut_ + head * ut_size_;
  in.x = slab.x;
  in.a = room.s + kept * (slab.units * weights_size_);
  in.unit_stride = weights_size_;
  in.y = room.ax + kept * rows * s.d;
  in.f = room.f;
  in.g = room.g;
  in.ut = room.ut;
  in.c = room.c;
  return in;
}

/// The weights (L) of the samples' row `row` of unit `unit`, 0 for lanes without a sample.
template <class real>
void Engine<real>::load_row_weights(const Slab& slab, int unit, int row, double* w) const {
  const int L = kernels_.lanes, count = entries(slab);
  for (int l = 0; l < L; ++l) {
    const int e = unit * L + l;
    w[l] = e < count ? data_.weight_of(run_of(e), sample_of(slab, e), slab.first_row + row) : 0.0;
  }
}

/// Calls body(unit, row, index in room.f, targets, weights) for every row of the slab.
template <class real>
template <class Body>
void Engine<real>::for_layer_rows(const Slab& slab, const Body& body) const {
  const Shape& s = data_.shape;
  const std::ptrdiff_t outputs = std::ptrdiff_t(s.p) * kernels_.lanes;
  const std::ptrdiff_t row_targets = data_.targets / s.q * kernels_.lanes;
  double w[kMostLanes];
  for (int u = 0; u < slab.units; ++u)
    for (int t = 0; t < slab.rows; ++t) {
      load_row_weights(slab, u, t, w);
      body(u, t, (std::ptrdiff_t(u) * slab.rows + t) * outputs,
           slab.y + u * target_size_ + (slab.first_row + t) * row_targets, w);
    }
}

template <class real>
void Engine<real>::add_totals(LaneTotals& totals, const double* w, const RowLoss* rows) const {
  for (int l = 0; l < kernels_.lanes; ++l) {
    if (w[l] == 0) continue;
    totals.loss[l] += w[l] * rows[l].value;
    totals.correct[l] += w[l] * rows[l].correct;
    totals.margin[l] = std::min(totals.margin[l], rows[l].margin);
  }
}

/// Calls emit(index, entry, slope) for every output of the slab, slope being the derivative of the
/// sample's weighted loss by it (0 for lanes without a sample) and index its place in room.f.
template <class real>
template <class Emit>
void Engine<real>::measure_layer(LaneTotals& totals, const Slab& slab, const Room& room,
                                 const Emit& emit) const {
  const int L = kernels_.lanes, p = data_.shape.p;
  for_layer_rows(slab, [&](int u, int, std::ptrdiff_t at, const real* y, const double* w) {
    RowLoss rows[kMostLanes];
    for (int l = 0; l < L; ++l) {
      const auto emit_weighted = [&](int o, double slope) {
        emit(at + o * L + l, u * L + l, w[l] * slope);
      };
      if (w[l] != 0)
        rows[l] = row_loss(*loss_, room.f + at + l, y + l, L, p, totals_wanted_, emit_weighted);
      else  // whatever the outputs are
        for (int o = 0; o < p; ++o) emit(at + o * L + l, u * L + l, 0.0);
    }
    add_totals(totals, w, rows);
  });
}

/// The same for squared losses, all lanes at a time: slopes go to room.g, times the run's `shares`
/// or, without, divided by the weight; the largest of each entry's slopes, not so changed, to
/// `largest`, unless that is null.
template <class real>
void Engine<real>::measure_squares(LaneTotals& totals, const Slab& slab, const Room& room,
                                   const double* shares, double* largest) const {
  const int L = kernels_.lanes;
  real counts[kMostLanes], factor[kMostLanes], most[kMostLanes];
  double squares[kMostLanes], correct[kMostLanes] = {}, margin[kMostLanes];
  std::fill_n(margin, kMostLanes, kInfinity);
  for_layer_rows(slab, [&](int u, int, std::ptrdiff_t at, const real* y, const double* w) {
    for (int l = 0; l < L; ++l) {
      counts[l] = real(w[l] != 0);
      factor[l] = shares ? real(2 * w[l] * shares[l]) : real(2);
    }
    kernels_.layer_residuals(
        {data_.shape.p, room.f + at, y, counts, factor, options_.gradient ? room.g + at : nullptr,
         squares, most, totals_wanted_ ? correct : nullptr, totals_wanted_ ? margin : nullptr});
    RowLoss rows[kMostLanes];
    for (int l = 0; l < L; ++l) {
      rows[l] = {squares[l], correct[l], margin[l]};
      if (largest) largest[u * L + l] = std::max(largest[u * L + l], 2 * w[l] * double(most[l]));
    }
    add_totals(totals, w, rows);
  });
}

/// Slopes in room.g relative to the largest of their entry, which is written to room.largest.
template <class real>
void Engine<real>::measure_relative(LaneTotals& totals, const Slab& slab, Room& room) const {
  const int L = kernels_.lanes;
  double* largest = room.largest;
  const auto relative_slope = [&](double slope, int entry) {
    return largest[entry] > 0 ? real(slope / largest[entry]) : real(0);
  };
  if (loss_->name == LossName::kSquared) {
    measure_squares(totals, slab, room, nullptr, largest);
    for_layer_rows(slab, [&](int u, int, std::ptrdiff_t at, const real*, const double* w) {
      for (int k = 0; k < data_.shape.p * L; ++k)
        room.g[at + k] = relative_slope(w[k % L] * double(room.g[at + k]), u * L + k % L);
    });
    return;
  }
  LaneTotals unused;
  measure_layer(unused, slab, room, [&](std::ptrdiff_t, int entry, double slope) {
    largest[entry] = std::max(largest[entry], std::fabs(slope));
  });
  measure_layer(totals, slab, room, [&](std::ptrdiff_t at, int entry, double slope) {
    room.g[at] = relative_slope(slope, entry);
  });
}

template <class real>
void Engine<real>::write_layer_outputs(const Slab& slab, const Room& room) const {
  const Shape& s = data_.shape;
  const int L = kernels_.lanes;
  const std::ptrdiff_t size = std::ptrdiff_t(slab.rows) * s.p;
  for (int i = 0; i < slab.samples; ++i) {
    const real* from = room.f + (i / L) * size * L + i % L;
    real* to = outputs_ + ((slab.first_sample + i) * s.q + slab.first_row) * s.p;
    for (std::ptrdiff_t k = 0; k < size; ++k) to[k] = from[k * L];
  }
}

template <class real>
void Engine<real>::run_layer_slab(Pass pass, int chunk, const Slab& slab, Room& room) {
  const Shape& s = data_.shape;
  const bool gaps = gathers_scales(pass);
  const int held = entries_held(slab);
  const auto outputs =
      plan_.runs_are_lanes() ? kernels_.layer_outputs_runs : kernels_.layer_outputs_samples;
  for (int h = 0; h < s.H; ++h) {
    run_scores(scores(RowMode::kWeights, h, slab, room, gaps ? room.gap + h * held : nullptr,
                      options_.gradient));
    LayerArguments<real> in = layer(h, slab, room);
    in.add = h > 0;
    outputs(in);
  }
  if (outputs_) write_layer_outputs(slab, room);
  if (pass == Pass::kOutputs) return;
  LaneTotals& totals = chunk_totals_[chunk];
  const bool squares = loss_ && loss_->name == LossName::kSquared;
  if (pass == Pass::kLoss) {
    if (squares)
      measure_squares(totals, slab, room, nullptr, nullptr);
    else
      measure_layer(totals, slab, room, [](std::ptrdiff_t, int, double) {});
    return;
  }
  double* largest = room.largest;
  std::fill_n(largest, held, 0.0);
  if (pass == Pass::kScaledGradient) {
    measure_relative(totals, slab, room);
    for (int e = 0; e < held; ++e) room.log_slope[e] = std::log(largest[e]);
    differentiate_layer_scaled(chunk, slab, room);
    return;
  }
  if (squares)
    measure_squares(totals, slab, room, shares_.data(), gaps ? largest : nullptr);
  else
    measure_layer(totals, slab, room, [&](std::ptrdiff_t at, int entry, double slope) {
      room.g[at] = real(slope * shares_[entry % kernels_.lanes]);
      if (gaps) largest[entry] = std::max(largest[entry], std::fabs(slope));
    });
  for (int e = 0; gaps && e < held; ++e) room.log_slope[e] = std::log(largest[e]);
  if (gaps) gather_scales(chunk, slab, room);
  if (pass == Pass::kScales) return;
  differentiate_layer(chunk, slab, room);
}

/// Adds one head's gradient by V, from the outputs' slopes g.
template <class real>
void Engine<real>::add_layer_gradient(int chunk, int head, const Slab& slab, Room& room,
                                      const real* g) const {
  LayerArguments<real> in = layer(head, slab, room);
  in.g = g;
  in.gv = partial_ + chunk * part_.size + part_.readout_at + head * part_.readout_head;
  in.add = !slab.first || slab.first_row > 0;
  kernels_.layer_gradient(in);
}

template <class real>
void Engine<real>::differentiate_layer(int chunk, const Slab& slab, Room& room) {
  const auto upstream =
      plan_.runs_are_lanes() ? kernels_.layer_upstream_runs : kernels_.layer_upstream_samples;
  for (int h = 0; h < data_.shape.H; ++h) {
    if (options_.wrt_W) {
      const LayerArguments<real> in = layer(h, slab, room);
      upstream(in);
      kernels_.layer_derivative(in);
      accumulate(chunk, h, slab, nullptr, room.c, slab.x, room);
    }
    if (options_.wrt_readout) add_layer_gradient(chunk, h, slab, room, room.g);
  }
}

/// The same with the largest factors of each entry taken out, see needs_scaling.
template <class real>
void Engine<real>::differentiate_layer_scaled(int chunk, const Slab& slab, Room& room) {
  const Shape& s = data_.shape;
  const int L = kernels_.lanes, held = entries_held(slab);
  const std::ptrdiff_t rows = std::ptrdiff_t(slab.rows) * L;
  const auto upstream =
      plan_.runs_are_lanes() ? kernels_.layer_upstream_runs : kernels_.layer_upstream_samples;
  for (int h = 0; h < s.H; ++h) {
    if (options_.wrt_readout) {
      const real* factors = scaled_factors(slab, nullptr, log_scales_readout(), nullptr, room);
      for (int u = 0; u < slab.units; ++u)
        kernels_.scale_samples(room.g + u * rows * s.p, factors + u * L,
                               std::ptrdiff_t(slab.rows) * s.p, room.scaled_g + u * rows * s.p);
      add_layer_gradient(chunk, h, slab, room, room.scaled_g);
    }
    if (!options_.wrt_W) continue;
    const LayerArguments<real> in = layer(h, slab, room);
    upstream(in);
    real* gap = room.gap + h * held;
    ScoreArguments<real> again = scores(RowMode::kScaled, h, slab, room, gap, true);
    again.ut = room.ut;
    again.ut_k = slab.units * rows;
    again.ut_unit = rows;
    again.ut_laned = true;
    run_scores(again);
    const real* factors = scaled_factors(slab, gap, log_scales_W(h), nullptr, room);
    accumulate(chunk, h, slab, nullptr, room.c, scale_keys(slab, factors, room), room);
  }
}

#define MHFAST_INSTANTIATE(real)                             \
  template void Engine<real>::lay_out_layer(Layout&, Room&); \
  template void Engine<real>::run_layer_slab(Pass, int, const Slab&, Room&);
MHFAST_INSTANTIATE(float)
MHFAST_INSTANTIATE(double)

}  // namespace mhfast
