// Engine's passes over a layer whose query rows are the lanes of scores and softmax and whose
// features are those of outputs and gradients: few samples, or long ones. A unit of work is a tile
// of the query rows of one sample; threads share the tiles. Every head of a tile goes through
//
//   A = softmax,  (A X)^T,  F += A X V      then, with G = dL/dF of the tile,
//   U^T = (G V^T)^T,  D,  gV += (A X)^T G,  gW += Z^T D X
//
// Keys that no row of the tile sees are left out. Of all heads A is kept if that is little
// (Plan::keep), else it is computed again for D.
#include <algorithm>
#include <cmath>

#include "engine.hpp"

namespace mhfast {

template <class real>
void Engine<real>::lay_out_layer_rows(Layout& layout) {
  const Shape& s = data_.shape;
  const std::size_t L = kernels_.lanes, H = s.H, d = s.d, T = s.T, rows = rows_size_;
  const std::size_t dL = round_up(s.d, L), pL = round_up(s.p, L);
  const bool gradient = options_.gradient;
  v_rows_ = layout.take<real>(H * d * pL);
  for (Room& room : rooms_) {
    room.x = layout.take<real>(d * round_up(s.T, L));
    room.z = layout.take<real>(d * rows);
    room.limits = layout.take<real>(rows);
    room.p = layout.take<real>(d * rows);
    room.s = layout.take<real>((gradient && plan_.keep ? H : 1) * T * rows);
    room.c = layout.take<real>(gradient ? T * rows : 0);
    room.readout = layout.take<real>(L);
    room.row_readouts = layout.take<real>(rows);
    room.row_gaps = layout.take<real>(rows);
    room.gap = layout.take<real>(options_.gaps ? H * L : 0);
    room.log_slope = layout.take<double>(L);
    room.largest = layout.take<double>(L);
    room.factors = layout.take<real>(L);
    room.ax = layout.take<real>((gradient ? H : 1) * d * rows);
    room.f = layout.take<real>(rows * pL);
    if (!gradient) continue;
    room.g = layout.take<real>(rows * pL);
    room.scaled_g = layout.take<real>(options_.gaps ? rows * pL : 0);
    room.g_transposed = layout.take<real>(rows * pL);
    room.ax_rows = layout.take<real>(rows * dL);
    room.ut = layout.take<real>(d * rows);
    room.gx = layout.take<real>(T * dL);
    room.e = layout.take<real>(rows * dL);
  }
}

/// The tile of query rows that is unit `unit`, its keys and queries packed.
template <class real>
typename Engine<real>::Slab Engine<real>::open_layer_tile(std::ptrdiff_t unit, Room& room) const {
  const Shape& s = data_.shape;
  const std::ptrdiff_t sample = unit / plan_.parts;
  const int first = int(unit % plan_.parts) * plan_.tile, rows = std::min(plan_.tile, s.q - first);
  Slab slab{sample, 1, 1, room.x, room.z, nullptr, first, rows, s.T, false};
  if (data_.y) slab.y = data_.y + sample * data_.targets + first * (data_.targets / s.q);
  const int qL = int(round_up(rows, kernels_.lanes));
  if (data_.is_limited()) {
    data_.write_limits(sample, first, rows, qL, room.limits);
    slab.keys = std::max(1, int(*std::max_element(room.limits, room.limits + rows)));
  }
  kernels_.pack_rows(data_.x + sample * s.T * s.d, slab.keys, s.d,
                     int(round_up(slab.keys, kernels_.lanes)), room.x);
  if (!s.shared_query)
    kernels_.pack_rows(data_.z + (sample * s.q + first) * s.d, rows, s.d, qL, room.z);
  return slab;
}

/// Outputs of the tile, into room.f; (A X)^T of every head stays for the gradient.
template <class real>
void Engine<real>::run_layer_tile_outputs(bool gaps, const Slab& slab, Room& room) const {
  const Shape& s = data_.shape;
  const int L = kernels_.lanes, qL = int(round_up(slab.rows, L)), pL = int(round_up(s.p, L));
  const real* x = data_.x + slab.first_sample * s.T * s.d;
  for (int h = 0; h < s.H; ++h) {
    real* gap = gaps ? room.gap + h * L : nullptr;
    if (gap) std::fill_n(gap, L, real(0));
    const ScoreArguments<real> in =
        scores(RowMode::kWeights, h, slab, room, gap, options_.gradient && plan_.keep);
    run_scores(in);
    real* ax = room.ax + (options_.gradient ? h * std::ptrdiff_t(s.d) * rows_size_ : 0);
    kernels_.product({{s.d, qL / L, slab.keys}, {x, s.d}, {in.s, qL, L}, {ax, qL, L}, false});
    kernels_.product({{slab.rows, pL / L, s.d},
                      {ax, qL},
                      {v_rows_ + h * std::ptrdiff_t(s.d) * pL, pL, L},
                      {room.f, pL, L},
                      h > 0});
  }
}

/// Calls emit(index in room.f, slope) for every output of the tile, slope being the derivative of
/// the sample's weighted loss by it.
template <class real>
template <class Emit>
void Engine<real>::measure_layer_tile(LaneTotals& totals, const Slab& slab, const Room& room,
                                      const Emit& emit) const {
  const Shape& s = data_.shape;
  const std::ptrdiff_t pL = round_up(s.p, kernels_.lanes), targets = data_.targets / s.q;
  for (int t = 0; t < slab.rows; ++t) {
    const double w = data_.weight_of(0, slab.first_sample, slab.first_row + t);
    const std::ptrdiff_t at = t * pL;
    if (w == 0) {  // whatever the outputs are
      for (int o = 0; o < s.p; ++o) emit(at + o, 0.0);
      continue;
    }
    const RowLoss row = row_loss(*loss_, room.f + at, slab.y + t * targets, 1, s.p, totals_wanted_,
                                 [&](int o, double slope) { emit(at + o, w * slope); });
    totals.loss[0] += w * row.value;
    totals.correct[0] += w * row.correct;
    totals.margin[0] = std::min(totals.margin[0], row.margin);
  }
}

template <class real>
void Engine<real>::run_layer_tile(Pass pass, int chunk, const Slab& slab, Room& room) {
  const Shape& s = data_.shape;
  const int L = kernels_.lanes;
  const std::ptrdiff_t pL = round_up(s.p, L);
  const bool gaps = gathers_scales(pass);
  run_layer_tile_outputs(gaps, slab, room);
  if (outputs_)
    for (int t = 0; t < slab.rows; ++t)
      std::copy_n(room.f + t * pL, s.p,
                  outputs_ + (slab.first_sample * s.q + slab.first_row + t) * s.p);
  if (pass == Pass::kOutputs) return;
  LaneTotals& totals = chunk_totals_[chunk];
  if (pass == Pass::kLoss)
    return measure_layer_tile(totals, slab, room, [](std::ptrdiff_t, double) {});
  std::fill_n(room.largest, L, 0.0);
  double& largest = room.largest[0];
  std::fill_n(room.g, round_up(slab.rows, L) * pL, real(0));
  const auto find_largest = [&](std::ptrdiff_t, double slope) {
    largest = std::max(largest, std::fabs(slope));
  };
  if (pass == Pass::kScaledGradient) {  // derivatives relative to the tile's largest
    LaneTotals unused;
    measure_layer_tile(unused, slab, room, find_largest);
    measure_layer_tile(totals, slab, room, [&](std::ptrdiff_t at, double slope) {
      room.g[at] = largest > 0 ? real(slope / largest) : real(0);
    });
  } else {
    measure_layer_tile(totals, slab, room, [&](std::ptrdiff_t at, double slope) {
      room.g[at] = real(slope * shares_[0]);
      if (gaps) find_largest(at, slope);
    });
  }
  for (int l = 0; l < L; ++l) room.log_slope[l] = std::log(room.largest[l]);
  if (gaps) gather_scales(chunk, slab, room);
  if (pass != Pass::kScales) differentiate_layer_tile(pass, chunk, slab, room);
}

template <class real>
void Engine<real>::differentiate_layer_tile(Pass pass, int chunk, const Slab& slab, Room& room) {
  const Shape& s = data_.shape;
  const int L = kernels_.lanes, qL = int(round_up(slab.rows, L)), dL = int(round_up(s.d, L));
  const int pL = int(round_up(s.p, L));
  const bool scaled = pass == Pass::kScaledGradient;
  const std::ptrdiff_t of_head = std::ptrdiff_t(s.d) * rows_size_;
  kernels_.pack_rows(room.g, slab.rows, pL, qL, room.g_transposed);
  const real* keys = room.gx;
  if (!scaled && options_.wrt_W)
    kernels_.scale_rows(data_.x + slab.first_sample * s.T * s.d, real(1), slab.keys, s.d, dL,
                        room.gx);
  const real* g = room.g;
  if (scaled && options_.wrt_readout) {
    const real factor = scaled_factors(slab, nullptr, log_scales_readout(), nullptr, room)[0];
    std::transform(g, g + qL * pL, room.scaled_g, [factor](real x) { return factor * x; });
    g = room.scaled_g;
  }
  for (int h = 0; h < s.H; ++h) {
    if (options_.wrt_readout) {
      kernels_.pack_rows(room.ax + h * of_head, s.d, qL, dL, room.ax_rows);
      real* gv = partial_ + chunk * part_.size + part_.readout_at + h * part_.readout_head;
      kernels_.product(
          {{s.d, pL / L, slab.rows}, {room.ax_rows, dL}, {g, pL, L}, {gv, pL, L}, !slab.first});
    }
    if (!options_.wrt_W) continue;
    kernels_.product({{s.d, qL / L, s.p},
                      {ut_ + h * ut_size_, dL},
                      {room.g_transposed, qL, L},
                      {room.ut, qL, L},
                      false});
    real* gap = scaled ? room.gap + h * L : nullptr;
    ScoreArguments<real> again =
        scores(scaled ? RowMode::kScaled : RowMode::kDerivative, h, slab, room, gap, plan_.keep);
    again.ut = room.ut;
    again.ut_k = qL;
    if (scaled || !plan_.keep)
      run_scores(again);
    else
      kernels_.derivative_rows(again);
    if (scaled)
      keys = scale_keys(slab, scaled_factors(slab, gap, log_scales_W(h), nullptr, room), room);
    accumulate(chunk, h, slab, nullptr, room.c, keys, room);
  }
}

#define MHFAST_INSTANTIATE(real)                                                                   \
  template void Engine<real>::lay_out_layer_rows(Layout&);                                         \
  template typename Engine<real>::Slab Engine<real>::open_layer_tile(std::ptrdiff_t, Room&) const; \
  template void Engine<real>::run_layer_tile(Pass, int, const Slab&, Room&);
MHFAST_INSTANTIATE(float)
MHFAST_INSTANTIATE(double)

}  // namespace mhfast
