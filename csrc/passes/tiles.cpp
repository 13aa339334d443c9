#include "tiles.hpp"

#include <cmath>
#include <limits>

namespace mhfast {
namespace {

/// As FactorArguments has it, for one sample.
double scaled_factor(double gap, double log_scale, double log_derivative) {
  return std::isinf(gap) || std::isinf(log_derivative)
             ? 0.0
             : std::exp((gap - log_scale) + log_derivative);
}

}  // namespace

template <class real>
TilePass<real>::TilePass(PassState<real>& state)
    : state_(state),
      loss_(state.kernels, state.data, state.loss, state.width, state.options.gaps),
      dL_(int(round_up(state.data.shape.d, state.lanes.lanes))),
      TL_(int(odd_vectors(state.data.shape.T, state.lanes.lanes))),
      qL_(int(odd_vectors(state.data.shape.q, state.lanes.lanes))),
      keys_first_(has_keys_first(state.data.shape)),
      gradients_of_keys_(has_gradients_of_keys(state.data.shape, state.lanes.lanes)),
      wants_W_(state.options.wrt_W && state.gradients.weight_size() > 0),
      weight_size_(wants_W_ ? state.gradients.weight_size() : 0),
      gradient_size_(weight_size_ + (state.data.shape.q + state.plan.parts - 1) / state.plan.parts *
                                        std::ptrdiff_t(dL_)),
      workspaces_(state.threads, Workspace(FactoredKeys<real>(state.kernels, state.data.shape))) {}

template <class real>
void TilePass<real>::lay_out(Arena& layout) {
  const Shape& s = state_.data.shape;
  const Data<real>& data = state_.data;
  const std::size_t L = state_.lanes.lanes, slab = state_.plan.slab, tile = state_.plan.tile;
  const std::size_t units = slab * s.H * state_.plan.parts, held = round_up(slab, L);
  shared_.gradients = layout.take<real>(state_.options.gradient ? units * gradient_size_ : 0);
  shared_.readouts = layout.take<real>(slab * s.H * s.q);
  shared_.gaps = layout.take<real>(units);
  shared_.outputs = layout.take<double>(held);
  shared_.log_derivative = layout.take<double>(held);
  shared_.derivative = layout.take<real>(held);
  shared_.own.lay_out(layout, state_.own.exists() ? held : 0);
  for (Workspace& workspace : workspaces_) {
    workspace.x = layout.take<real>(std::size_t(s.d) * TL_);
    workspace.z = data.self ? workspace.x : layout.take<real>(std::size_t(s.d) * qL_);
    workspace.x_rows = layout.take<real>(std::size_t(s.T) * dL_);
    workspace.pu = layout.take<real>(2 * tile * (s.d + s.rank));
    workspace.sc = layout.take<real>(2 * tile * s.T);
    const bool factors = state_.gradients.has_factors() && !gradients_of_keys_;
    workspace.axdx = layout.take<real>(
        2 * tile * dL_ + (factors ? factor_scratch(tile, s.rank, s.d, int(L), true) : 0));
    workspace.row_readouts = layout.take<real>(tile);
    workspace.row_gaps = layout.take<real>(tile);
    workspace.limits =
        layout.take<real>(data.is_limited() ? qL_ + L : 0);  // the last tile reads on
    workspace.packed_sample = -1;
    if (keys_first_)
      workspace.factored.lay_out(layout, 1, tile, gradients_of_keys_ && state_.options.gradient);
  }
}

template <class real>
void TilePass<real>::run(Pass pass, const Member& member) {
  const Shape& s = state_.data.shape;
  const int slab = state_.plan.slab;
  for (std::ptrdiff_t first = 0; first < s.n; first += slab) {
    const int samples = int(std::min<std::ptrdiff_t>(slab, s.n - first));
    if (member.index == 0) next_unit_.store(0, std::memory_order_relaxed);
    member.wait();
    const int units = samples * s.H * state_.plan.parts;
    for (int unit; (unit = next_unit_.fetch_add(1, std::memory_order_relaxed)) < units;) {
      run_unit(pass, first, unit, workspaces_[member.index]);
      if (member.index == 0 && state_.interrupted && state_.interrupted()) {
        next_unit_.store(units, std::memory_order_relaxed);
        stopped_ = true;
      }
    }
    member.wait();
    if (stopped_) return;
    if (member.index == 0) finish_slab(pass, first, samples);
    if (!is_gradient(pass)) continue;
    member.wait();
    for (int h = member.index; h < s.H; h += member.count) combine(pass, first, samples, h);
  }
  member.wait();
}

template <class real>
void TilePass<real>::pack_sample(std::ptrdiff_t sample, bool gradient, Workspace& workspace) const {
  if (workspace.packed_sample == sample) return;
  const Shape& s = state_.data.shape;
  const Data<real>& data = state_.data;
  const Kernels<real>& kernels = state_.kernels;
  const real* x = data.x + sample * s.T * s.d;
  kernels.pack_rows(x, s.T, s.d, TL_, workspace.x);
  if (!data.self) kernels.pack_rows(data.z + sample * s.q * s.d, s.q, s.d, qL_, workspace.z);
  if (gradient) kernels.scale_rows(x, real(1), s.T, s.d, dL_, workspace.x_rows);
  if (data.is_limited())
    data.write_limits(sample, 0, s.q, qL_ + state_.lanes.lanes, workspace.limits);
  workspace.packed_sample = gradient ? sample : -1;
}

/// Keys that a row of the part sees.
template <class real>
int TilePass<real>::keys_of(int part, const Workspace& workspace) const {
  if (!state_.data.is_limited()) return state_.data.shape.T;
  const std::ptrdiff_t begin = part_begin(part);
  return seen_keys(workspace.limits + begin, int(part_begin(part + 1) - begin));
}

/// What a tile, whose D is in sc, adds to the gradient by Q and to the sums of that by K.
template <class real>
void TilePass<real>::add_factors(const Unit& unit, const TileArguments<real>& tile,
                                 Workspace& workspace) const {
  const std::ptrdiff_t rows = round_up(tile.rows, state_.lanes.lanes);
  const real* queries = tile.zq;
  if (state_.model.scale() != real(1))  // which is left to the end
    queries = workspace.factored.load_queries(state_.model.factor_q(unit.head), tile.zt, tile.z_row,
                                              int(rows));
  const real* const projected =
      workspace.factored.add(0, tile.T, tile.rows, tile.sc + rows, 2 * rows, queries);
  workspace.factored.differentiate_q(tile.rows, tile.z, projected, tile.add, tile.gq);
}

/// Readout of one sample, head and part, and its gradient.
template <class real>
void TilePass<real>::run_unit(Pass pass, std::ptrdiff_t first_sample, int unit,
                              Workspace& workspace) const {
  const Shape& s = state_.data.shape;
  const Data<real>& data = state_.data;
  const int part = unit % state_.plan.parts, h = unit / state_.plan.parts % s.H;
  const int i = unit / state_.plan.parts / s.H;
  const std::ptrdiff_t sample = first_sample + i;
  const bool gradient = is_gradient(pass);
  pack_sample(sample, gradient, workspace);
  real* const gW = gradient ? shared_.gradients + unit * gradient_size_ : nullptr;
  real* gap = state_.options.finds_gaps(pass) ? shared_.gaps + unit : nullptr;
  const std::ptrdiff_t begin = part_begin(part), end = part_begin(part + 1);
  const Unit of_unit{sample, h, keys_of(part, workspace)};
  if (keys_first_) workspace.factored.load(0, of_unit.keys, workspace.x, state_.model.factor_k(h));
  // Calls `body` with the arguments of each tile of the part.
  const auto for_tiles = [&](TileMode mode, const auto& body) {
    for (std::ptrdiff_t t = begin; t < end; t += state_.plan.tile) {
      TileArguments<real> tile{};
      tile.rows = int(std::min<std::ptrdiff_t>(state_.plan.tile, end - t));
      tile.limits = data.is_limited() ? workspace.limits + t : nullptr;
      tile.T = tile.limits ? seen_keys(tile.limits, tile.rows) : s.T;
      tile.d = s.d;
      tile.w = state_.model.w(h);
      tile.rank = s.rank;
      tile.kt = state_.model.kt(h);
      tile.scale = state_.model.scale();
      tile.zt = workspace.z + t;
      tile.ut = state_.model.transposed(h) + t;
      tile.z_row = qL_;
      tile.u_row = round_up(s.q, state_.lanes.lanes);
      tile.xt = workspace.x;
      tile.x_row = TL_;
      tile.x = workspace.x_rows;
      tile.z = data.z + (sample * s.q + t) * s.d;
      tile.pu = workspace.pu;
      tile.sc = workspace.sc;
      tile.axdx = workspace.axdx;
      tile.readouts = workspace.row_readouts;
      tile.row_gaps = workspace.row_gaps;
      if (keys_first_) {
        tile.kx = workspace.factored.transposed(0);
        tile.zq = workspace.factored.load_queries(state_.model.w(h), tile.zt, qL_,
                                                  int(round_up(tile.rows, state_.lanes.lanes)));
      }
      if (gradients_of_keys_) {
        tile.gq = gW;
      } else if (wants_W_ && state_.gradients.has_factors()) {
        tile.fq = state_.model.gradient_q(h);
        tile.fk = state_.model.gradient_k(h);
        tile.gq = gW;
        tile.gk = gW + state_.gradients.to_k(state_.model.is_tied());
      } else {
        tile.gw = wants_W_ ? gW : nullptr;
      }
      tile.gu = gradient ? gW + weight_size_ + (t - begin) * dL_ : nullptr;
      tile.mode = mode;
      tile.map = data.row_map;
      tile.add = t > begin;
      body(tile);
    }
  };
  real largest = -std::numeric_limits<real>::infinity();
  if (pass == Pass::kScaledGradient) {
    for_tiles(TileMode::kGap, [&](TileArguments<real>& tile) {
      real of_tile = 0;
      tile.gap = &of_tile;
      state_.kernels.tile_scores(tile);
      largest = std::max(largest, of_tile);
    });
    *gap = largest;
    if (largest == -std::numeric_limits<real>::infinity()) largest = 0;  // a single key: D is 0
  }
  const bool by_U_alone = gradient && !gap && !wants_W_ && data.row_map.is_softmax();
  const TileMode mode = by_U_alone                      ? TileMode::kWeights
                        : !gradient && !gap             ? TileMode::kReadout
                        : pass == Pass::kScaledGradient ? TileMode::kScaled
                                                        : TileMode::kDerivative;
  real* readouts = shared_.readouts + (std::ptrdiff_t(i) * s.H + h) * s.q;
  for_tiles(mode, [&](TileArguments<real>& tile) {
    real shared_gap = largest;  // in, when scaled; out, when gaps are gathered
    tile.gap = gap ? &shared_gap : nullptr;
    state_.kernels.tile_scores(tile);
    if (mode == TileMode::kDerivative) largest = std::max(largest, shared_gap);
    if (gradient) {
      if (gradients_of_keys_) {
        if (wants_W_) add_factors(of_unit, tile, workspace);
        tile.gq = nullptr;
      }
      state_.kernels.tile_gradients(tile);
    }
    std::copy_n(tile.readouts, tile.rows, readouts + (tile.zt - workspace.z));
  });
  if (gradient && gradients_of_keys_ && wants_W_) {
    const std::ptrdiff_t to_k = state_.gradients.to_k(state_.model.is_tied());
    workspace.factored.differentiate_k(0, of_unit.keys, data.x + sample * s.T * s.d, to_k == 0,
                                       gW + to_k);
  }
  if (gap && mode == TileMode::kDerivative) *gap = largest;
}

/// Loss and its derivatives of the slab's samples from their outputs. The gradients of a slab do
/// not wait for the loss, so that the caller's own is called for each.
template <class real>
void TilePass<real>::measure(Pass pass, std::ptrdiff_t first_sample, int samples) {
  LaneTotals& totals = state_.totals[0];
  if (!state_.own.exists())
    return loss_.measure(state_.totals_wanted || pass == Pass::kScaledGradient, state_.shares,
                         first_sample, samples, shared_.outputs, totals, shared_.derivative,
                         shared_.log_derivative);
  std::copy_n(shared_.outputs, samples, shared_.own.outputs);
  std::copy_n(loss_.labels(first_sample), samples, shared_.own.targets);
  state_.own.call(samples, shared_.own);
  loss_.measure_own(shared_.own, state_.shares, first_sample, samples, totals, shared_.derivative,
                    shared_.log_derivative);
}

/// Outputs, loss and its derivatives of the slab's samples, once all units are done.
template <class real>
void TilePass<real>::finish_slab(Pass pass, std::ptrdiff_t first_sample, int samples) {
  const Shape& s = state_.data.shape;
  const int parts = state_.plan.parts;
  const double scale = 1.0 / readout_of(s).divisor;
  const bool first = first_sample == 0;
  if (first) state_.totals[0] = LaneTotals();
  for (int i = 0; i < samples; ++i) {
    double output = 0;
    for (int h = 0; h < s.H; ++h) {
      const real* row = shared_.readouts + (std::ptrdiff_t(i) * s.H + h) * s.q;
      real readout = row[0];
      for (int t = 1; t < s.q; ++t) readout += row[t];
      output += double(readout);
    }
    shared_.outputs[i] = output * scale;
    if (state_.outputs) state_.outputs[first_sample + i] = real(shared_.outputs[i]);
  }
  if (pass == Pass::kOutputs) return;
  measure(pass, first_sample, samples);
  if (!state_.options.gathers_scales(pass)) return;
  if (first) state_.scales.begin_chunk(0);
  double* scales = state_.scales.of_chunk(0);
  const auto gather = [&](int at, double log_scale) {
    scales[at * state_.lanes.lanes] = std::max(scales[at * state_.lanes.lanes], log_scale);
  };
  for (int i = 0; i < samples; ++i) {
    gather(s.H, shared_.log_derivative[i]);
    for (int h = 0; h < s.H; ++h)
      for (int part = 0; part < parts; ++part)
        gather(h, shared_.log_derivative[i] + double(shared_.gaps[(i * s.H + h) * parts + part]));
  }
}

/// One head's gradient of the slab: the units' gradients times the derivatives of the loss.
template <class real>
void TilePass<real>::combine(Pass pass, std::ptrdiff_t first_sample, int samples, int head) const {
  const Shape& s = state_.data.shape;
  const int parts = state_.plan.parts;
  const std::ptrdiff_t stride = std::ptrdiff_t(s.H) * parts * gradient_size_;
  const bool add = first_sample > 0, scaled = pass == Pass::kScaledGradient;
  std::vector<real> factors(samples);
  real *gW = state_.gradients.weight(0, head), *gU = state_.gradients.readout(0, head);
  for (int part = 0; part < parts; ++part) {
    const int unit = head * parts + part;
    const real* from = shared_.gradients + unit * gradient_size_;
    const auto sum = [&](const real* x, std::ptrdiff_t size, real* out, bool more, const auto& gap,
                         double log_scale) {
      for (int i = 0; i < samples; ++i) {
        const double size_of_i = scaled_factor(gap(i), log_scale, shared_.log_derivative[i]);
        factors[i] =
            scaled ? std::copysign(real(size_of_i), shared_.derivative[i]) : shared_.derivative[i];
      }
      state_.kernels.combine(x, stride, factors.data(), samples, size, out, more);
    };
    const std::ptrdiff_t of_W = weight_size_, row = part_begin(part);
    if (of_W > 0)
      sum(
          from, of_W, gW, add || part > 0,
          [&](int i) { return double(shared_.gaps[i * s.H * parts + unit]); },
          scaled ? state_.scales.log_of_W(head)[0] : 0.0);
    sum(
        from + of_W, (part_begin(part + 1) - row) * dL_, gU + row * dL_, add,
        [](int) { return 0.0; }, scaled ? state_.scales.log_of_readout()[0] : 0.0);
  }
}

template class TilePass<float>;
template class TilePass<double>;

}  // namespace mhfast
