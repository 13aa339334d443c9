// Engine's passes over long sequences. Few samples must occupy all threads, so a unit of work is
// one sample, one head and one part of its query rows; it goes through its rows a tile at a time
// and leaves the gradient of its readout. The loss of a slab's samples is known when all their
// units are done; the units' gradients are then combined with the slopes, in a fixed order.
#include <algorithm>
#include <cmath>
#include <limits>

#include "engine.hpp"

namespace mhfast {
namespace {

/// As FactorArguments has it, for one sample.
double scaled_factor(double gap, double log_scale, double log_slope) {
  return std::isinf(gap) || std::isinf(log_slope) ? 0.0 : std::exp((gap - log_scale) + log_slope);
}

}  // namespace

template <class real>
void Engine<real>::lay_out_tiles(Layout& layout) {
  const Shape& s = data_.shape;
  const std::size_t L = kernels_.lanes, dL = round_up(s.d, L), TL = round_up(s.T, L);
  const std::size_t qL = round_up(s.q, L), slab = plan_.slab, units = slab * s.H * plan_.parts;
  const std::size_t part_rows = (s.q + plan_.parts - 1) / plan_.parts;
  tile_gradient_size_ = (s.d + part_rows) * dL;
  tile_scratch_.gradients = layout.take<real>(options_.gradient ? units * tile_gradient_size_ : 0);
  tile_scratch_.readouts = layout.take<real>(slab * s.H * s.q);
  tile_scratch_.gaps = layout.take<real>(units);
  const std::size_t held = round_up(slab, L);  // entries
  tile_scratch_.phi = layout.take<double>(held);
  tile_scratch_.log_slope = layout.take<double>(held);
  tile_scratch_.slope = layout.take<real>(held);
  for (Room& room : rooms_) {
    room.x = layout.take<real>(s.d * TL);
    room.z = data_.self ? room.x : layout.take<real>(s.d * qL);
    room.x_rows = layout.take<real>(s.T * dL);
    room.pu = layout.take<real>(2 * plan_.tile * s.d);
    room.sc = layout.take<real>(std::size_t(2 * plan_.tile) * s.T);
    room.axdx = layout.take<real>(2 * plan_.tile * dL);
    room.row_readouts = layout.take<real>(plan_.tile);
    room.row_gaps = layout.take<real>(plan_.tile);
    room.limits = layout.take<real>(data_.is_limited() ? qL + L : 0);  // the last tile reads on
    room.packed_sample = -1;
  }
}

template <class real>
void Engine<real>::run_tiles(Pass pass, const Member& member) {
  const Shape& s = data_.shape;
  const bool gradient = is_gradient(pass);
  for (std::ptrdiff_t first = 0; first < s.n; first += plan_.slab) {
    const int samples = int(std::min<std::ptrdiff_t>(plan_.slab, s.n - first));
    // Every member has its own: one may still combine a slab when another is at the next.
    const Slab slab{first, samples, samples, nullptr, nullptr, nullptr, 0, s.q, s.T, first == 0};
    if (member.index == 0) next_chunk_.store(0, std::memory_order_relaxed);
    member.wait();
    const int units = samples * s.H * plan_.parts;
    for (int unit; (unit = next_chunk_.fetch_add(1, std::memory_order_relaxed)) < units;) {
      run_tile_unit(pass, slab, unit, rooms_[member.index]);
      if (member.index == 0 && interrupted_ && interrupted_()) {
        next_chunk_.store(units, std::memory_order_relaxed);
        stopped_ = true;
      }
    }
    member.wait();
    if (stopped_) return;
    if (member.index == 0) finish_tile_slab(pass, slab);
    if (!gradient) continue;
    member.wait();
    for (int h = member.index; h < s.H; h += member.count) combine_tiles(pass, slab, h);
  }
  member.wait();
}

/// Readout of one sample, head and part, and its gradient.
template <class real>
void Engine<real>::run_tile_unit(Pass pass, const Slab& slab, int unit, Room& room) {
  const Shape& s = data_.shape;
  const int L = kernels_.lanes, dL = int(round_up(s.d, L));
  const int TL = int(round_up(s.T, L)), qL = int(round_up(s.q, L));
  const int part = unit % plan_.parts, h = unit / plan_.parts % s.H;
  const int i = unit / plan_.parts / s.H;
  const std::ptrdiff_t sample = slab.first_sample + i;
  const bool gradient = is_gradient(pass);
  if (room.packed_sample != sample) {
    const real* x = data_.x + sample * s.T * s.d;
    kernels_.pack_rows(x, s.T, s.d, TL, room.x);
    if (!data_.self) kernels_.pack_rows(data_.z + sample * s.q * s.d, s.q, s.d, qL, room.z);
    if (gradient) kernels_.scale_rows(x, real(1), s.T, s.d, dL, room.x_rows);
    if (data_.is_limited()) data_.write_limits(sample, 0, s.q, qL + L, room.limits);
    room.packed_sample = gradient ? sample : -1;
  }
  real* gW = gradient ? tile_scratch_.gradients + unit * tile_gradient_size_ : nullptr;
  real* gap = finds_gaps(pass) ? tile_scratch_.gaps + unit : nullptr;
  const std::ptrdiff_t begin = part_begin(part), end = part_begin(part + 1);
  // Calls `body` with the arguments of each tile of the part.
  const auto for_tiles = [&](TileMode mode, const auto& body) {
    for (std::ptrdiff_t t = begin; t < end; t += plan_.tile) {
      TileArguments<real> tile{};
      tile.T = s.T;
      tile.rows = int(std::min<std::ptrdiff_t>(plan_.tile, end - t));
      tile.d = s.d;
      tile.w = w_ + std::ptrdiff_t(h) * s.d * s.d;
      tile.zt = room.z + t;
      tile.ut = ut_ + h * ut_size_ + t;
      tile.z_row = qL;
      tile.xt = room.x;
      tile.x_row = TL;
      tile.x = room.x_rows;
      tile.z = data_.z + (sample * s.q + t) * s.d;
      tile.limits = data_.is_limited() ? room.limits + t : nullptr;
      tile.pu = room.pu;
      tile.sc = room.sc;
      tile.axdx = room.axdx;
      tile.readouts = room.row_readouts;
      tile.row_gaps = room.row_gaps;
      tile.gw = gW;
      tile.gu = gradient ? gW + (s.d + t - begin) * dL : nullptr;
      tile.mode = mode;
      tile.add = t > begin;
      body(tile);
    }
  };
  real largest = -std::numeric_limits<real>::infinity();
  if (pass == Pass::kScaledGradient) {
    for_tiles(TileMode::kGap, [&](TileArguments<real>& tile) {
      real of_tile = 0;
      tile.gap = &of_tile;
      kernels_.tile_scores(tile);
      largest = std::max(largest, of_tile);
    });
    *gap = largest;
    if (largest == -std::numeric_limits<real>::infinity()) largest = 0;  // a single key: D is 0
  }
  const TileMode mode = !gradient && !gap               ? TileMode::kReadout
                        : pass == Pass::kScaledGradient ? TileMode::kScaled
                                                        : TileMode::kDerivative;
  real* readouts = tile_scratch_.readouts + (std::ptrdiff_t(i) * s.H + h) * s.q;
  for_tiles(mode, [&](TileArguments<real>& tile) {
    real shared_gap = largest;  // in, when scaled; out, when gaps are gathered
    tile.gap = gap ? &shared_gap : nullptr;
    kernels_.tile_scores(tile);
    if (mode == TileMode::kDerivative) largest = std::max(largest, shared_gap);
    std::copy_n(tile.readouts, tile.rows, readouts + (tile.zt - room.z));
    if (gradient) kernels_.tile_gradients(tile);
  });
  if (gap && mode == TileMode::kDerivative) *gap = largest;
}

/// Outputs, loss and slopes of the slab's samples, once all units are done.
template <class real>
void Engine<real>::finish_tile_slab(Pass pass, const Slab& slab) {
  const Shape& s = data_.shape;
  const TileScratch& shared = tile_scratch_;
  const double scale = 1.0 / std::sqrt(double(s.H));
  if (slab.first) chunk_totals_[0] = LaneTotals();
  for (int i = 0; i < slab.samples; ++i) {
    double phi = 0;
    for (int h = 0; h < s.H; ++h) {
      const real* row = shared.readouts + (std::ptrdiff_t(i) * s.H + h) * s.q;
      real readout = row[0];
      for (int t = 1; t < s.q; ++t) readout += row[t];
      phi += double(readout);
    }
    shared.phi[i] = phi * scale;
    if (outputs_) outputs_[slab.first_sample + i] = real(shared.phi[i]);
  }
  if (pass == Pass::kOutputs) return;
  measure_loss(pass, chunk_totals_[0], slab, shared.phi, shared.slope, shared.log_slope);
  if (!gathers_scales(pass)) return;
  if (slab.first) std::fill(chunk_scales_.begin(), chunk_scales_.end(), -kInfinity);
  for (int i = 0; i < slab.samples; ++i) {
    double& slope_scale = chunk_scales_[std::size_t(s.H) * kernels_.lanes];
    slope_scale = std::max(slope_scale, shared.log_slope[i]);
    for (int h = 0; h < s.H; ++h)
      for (int part = 0; part < plan_.parts; ++part)
        chunk_scales_[h * kernels_.lanes] =
            std::max(chunk_scales_[h * kernels_.lanes],
                     shared.log_slope[i] + double(shared.gaps[(i * s.H + h) * plan_.parts + part]));
  }
}

/// One head's gradient of the slab: the units' gradients times the samples' slopes.
template <class real>
void Engine<real>::combine_tiles(Pass pass, const Slab& slab, int head) {
  const Shape& s = data_.shape;
  const TileScratch& shared = tile_scratch_;
  const std::ptrdiff_t dL = round_up(s.d, kernels_.lanes);
  const std::ptrdiff_t stride = std::ptrdiff_t(s.H) * plan_.parts * tile_gradient_size_;
  const bool add = !slab.first, scaled = pass == Pass::kScaledGradient;
  std::vector<real> factors(slab.samples);
  real* gW = partial_ + head * (s.d * dL);
  real* gU = partial_ + s.H * (s.d * dL) + head * (s.q * dL);
  for (int part = 0; part < plan_.parts; ++part) {
    const int unit = head * plan_.parts + part;
    const real* from = shared.gradients + unit * tile_gradient_size_;
    const auto combine = [&](const real* x, std::ptrdiff_t size, real* out, bool more,
                             const auto& gap, double log_scale) {
      for (int i = 0; i < slab.samples; ++i) {
        const double size_of_i = scaled_factor(gap(i), log_scale, shared.log_slope[i]);
        factors[i] = scaled ? std::copysign(real(size_of_i), shared.slope[i]) : shared.slope[i];
      }
      kernels_.combine(x, stride, factors.data(), slab.samples, size, out, more);
    };
    combine(
        from, s.d * dL, gW, add || part > 0,
        [&](int i) { return double(shared.gaps[i * s.H * plan_.parts + unit]); },
        scaled ? log_scale_W(head) : 0.0);
    combine(
        from + s.d * dL, (part_begin(part + 1) - part_begin(part)) * dL, gU + part_begin(part) * dL,
        add, [](int) { return 0.0; }, scaled ? log_scale_readout() : 0.0);
  }
}

#define MHFAST_INSTANTIATE(real)                      \
  template void Engine<real>::lay_out_tiles(Layout&); \
  template void Engine<real>::run_tiles(Pass, const Member&);
MHFAST_INSTANTIATE(float)
MHFAST_INSTANTIATE(double)

}  // namespace mhfast
