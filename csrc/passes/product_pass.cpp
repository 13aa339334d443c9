#include "product_pass.hpp"

#include <algorithm>
#include <cmath>

namespace mhfast {

template <class real>
ProductPass<real>::ProductPass(PassState<real>& state)
    : ChunkPass<real>(state),
      sizes_(state.data.shape, state.kernels.lanes),
      z_size_(std::ptrdiff_t(state.data.shape.q) * state.data.shape.d * state.kernels.lanes),
      y_size_(state.data.targets * state.kernels.lanes),
      f_size_(state.data.shape.outputs() * state.kernels.lanes),
      losses_(state, y_size_),
      tensor_(state.kernels, state.data.shape),
      workspaces_(state.threads) {}

template <class real>
void ProductPass<real>::lay_out(Arena& layout) {
  const std::size_t L = state_.kernels.lanes;
  const std::size_t units = std::min<std::ptrdiff_t>(state_.plan.slab, state_.plan.units);
  const std::size_t held = units * L, entries = held * sizes_.entries, outputs = units * f_size_;
  const std::ptrdiff_t slab = state_.plan.slab;
  block_ = state_.own.slabs_of_block((state_.plan.units / state_.plan.chunks + slab) / slab,
                                     double(outputs), 0);
  tensor_.lay_out(layout, state_.threads);
  for (Workspace& of : workspaces_) {
    of.products = layout.take<real>(held * sizes_.row);
    of.z = layout.take<real>(packed_ ? 0 : units * z_size_);
    of.y = layout.take<real>(packed_ ? 0 : units * y_size_);
    of.m = layout.take<real>(entries);
    of.dm = layout.take<real>(entries);
    of.dm_rows = layout.take<real>(held * sizes_.padded);
    of.outputs.f = layout.take<real>(outputs);
    of.outputs.g = layout.take<real>(outputs);
    of.outputs.largest = layout.take<double>(held);
    of.log_derivative = layout.take<double>(held);
    of.gaps = layout.take<real>(state_.options.gaps ? state_.data.shape.H * held : 0);
    of.factors = layout.take<real>(held);
    of.scaled_g = layout.take<real>(state_.options.gaps ? outputs : 0);
    of.own.lay_out(layout, state_.own.exists() ? block_ * outputs : 0);
  }
}

/// Only the first member's, who is the one that all wait for before a pass.
template <class real>
void ProductPass<real>::load(const Parameters<real>& parameters, const Member& member) {
  if (member.index == 0) given_ = parameters;
}

template <class real>
void ProductPass<real>::run(Pass pass, const Member& member) {
  tensor_.load(given_, member);
  member.wait();
  workspaces_[member.index].tensor = tensor_.transpose(member);
  ChunkPass<real>::run(pass, member);
}

template <class real>
std::shared_ptr<Packed<real>> ProductPass<real>::make_packed() const {
  const std::ptrdiff_t units = state_.plan.units;
  auto packed = std::make_shared<Packed<real>>();
  const auto lay_out = [&](Arena layout) {
    packed->x = nullptr;
    packed->z = layout.template take<real>(units * z_size_);
    packed->y = layout.template take<real>(units * y_size_);
    return layout.size();
  };
  lay_out(Arena(packed->block.reserve(lay_out(Arena()))));
  return packed;
}

/// Query rows and targets of units `first` to `last`.
template <class real>
void ProductPass<real>::pack(std::ptrdiff_t first, std::ptrdiff_t last, real* z, real* y) const {
  const Data<real>& data = state_.data;
  const int L = state_.kernels.lanes;
  const std::ptrdiff_t rows = z_size_ / L, targets = y_size_ / L;
  for (std::ptrdiff_t u = first; u < last; ++u, z += z_size_, y += y_size_) {
    const int valid = int(std::min<std::ptrdiff_t>(L, data.shape.n - u * L));
    state_.kernels.pack_lanes(data.z + u * L * rows, rows, valid, rows, z);
    state_.kernels.pack_lanes(data.y + u * L * targets, targets, valid, targets, y);
  }
}

template <class real>
void ProductPass<real>::pack_all(const Member& member) {
  if (!packed_) return;
  const std::ptrdiff_t units = state_.plan.units;
  const std::ptrdiff_t first = units * member.index / member.count,
                       last = units * (member.index + 1) / member.count;
  pack(first, last, packed_->z + first * z_size_, packed_->y + first * y_size_);
}

template <class real>
void ProductPass<real>::run_units(Pass pass, int chunk, std::ptrdiff_t first, std::ptrdiff_t last,
                                  int thread) {
  Workspace& of = workspaces_[thread];
  state_.own.run_slabs(
      pass, first, last, state_.plan.slab, block_, of.own,
      [&](Pass phase, std::ptrdiff_t unit, std::ptrdiff_t end, std::ptrdiff_t place, bool begins) {
        Slab<real> slab = open_slab(unit, end, of);
        slab.first = begins;
        slab.row = place;
        run_slab(phase, chunk, slab, of);
        return std::ptrdiff_t(slab.samples) * slab.rows;
      });
}

template <class real>
Slab<real> ProductPass<real>::open_slab(std::ptrdiff_t first, std::ptrdiff_t last,
                                        const Workspace& of) const {
  const int L = state_.kernels.lanes;
  Slab<real> slab{};
  slab.first_sample = first * L;
  slab.units = int(last - first);
  slab.samples = int(std::min(last * L, state_.data.shape.n) - slab.first_sample);
  slab.rows = state_.data.shape.q;
  if (!packed_) pack(first, last, of.z, of.y);
  slab.z = packed_ ? packed_->z + first * z_size_ : of.z;
  slab.y = packed_ ? packed_->y + first * y_size_ : of.y;
  return slab;
}

template <class real>
void ProductPass<real>::run_outputs(const Slab<real>& slab, const Workspace& of) const {
  const Kernels<real>& kernels = state_.kernels;
  const Shape& s = state_.data.shape;
  const int L = kernels.lanes, entries = int(sizes_.entries), pairs = int(sizes_.pairs);
  const std::ptrdiff_t of_unit = sizes_.row * L, p = s.p, d = s.d;
  for (int u = 0; u < slab.units; ++u)
    kernels.pack_lanes(state_.data.x + (slab.first_sample + u * L) * sizes_.row, sizes_.row,
                       std::min(L, slab.samples - u * L), sizes_.row, of.products + u * of_unit);
  kernels.product({{entries, slab.units, pairs},
                   {of.tensor, sizes_.padded},
                   {of.products, L, of_unit},
                   {of.m, L, std::ptrdiff_t(entries) * L}});
  kernels.product_lanes({{s.p, s.q, s.d, 1, slab.units},
                         {of.m, p * L, 0, std::ptrdiff_t(entries) * L},
                         {slab.z, L, d * L, 0, z_size_},
                         {of.outputs.f, L, p * L, f_size_}});
  if (state_.data.limits) mark_rows(slab, of.outputs.f);
}

/// Outputs of rows that are not finite, or see what is not, are NaN: see problem/clean.hpp.
template <class real>
void ProductPass<real>::mark_rows(const Slab<real>& slab, real* f) const {
  const Shape& s = state_.data.shape;
  const int L = state_.kernels.lanes;
  for (int i = 0; i < slab.samples; ++i)
    for (int t = 0; t < s.q; ++t) {
      const double limit = state_.data.limit(slab.first_sample + i, 0, t);
      if (!std::isnan(limit)) continue;
      real* const row = f + (i / L) * f_size_ + std::ptrdiff_t(t) * s.p * L + i % L;
      for (int o = 0; o < s.p; ++o) row[o * L] = real(limit);
    }
}

template <class real>
void ProductPass<real>::run_slab(Pass pass, int chunk, const Slab<real>& slab, Workspace& of) {
  const bool blocks = state_.own.takes_blocks();
  if (state_.own.exists()) of.outputs.own = of.own.from(slab.row * state_.data.shape.p);
  if (!blocks || pass == Pass::kOwnOutputs) run_outputs(slab, of);
  if (pass == Pass::kOwnOutputs) return losses_.load_own(slab, of.outputs);
  if (state_.own.exists() && !blocks) {
    losses_.load_own(slab, of.outputs);
    state_.own.call(std::ptrdiff_t(slab.samples) * slab.rows, of.outputs.own);
  }
  losses_.measure(pass, state_.totals[chunk], slab, of.outputs, of.log_derivative);
  if (state_.options.gathers_scales(pass)) gather_scales(chunk, slab, of);
  if (!is_gradient(pass)) return;
  differentiate(chunk, slab, pass == Pass::kScaledGradient ? scale(slab, of) : of.outputs.g, of);
}

/// Weights that are linear have no gaps.
template <class real>
void ProductPass<real>::gather_scales(int chunk, const Slab<real>& slab,
                                      const Workspace& of) const {
  const int held = state_.entries_held(slab), H = state_.data.shape.H;
  std::fill_n(of.gaps, std::ptrdiff_t(H) * held, real(0));
  state_.kernels.gather_scales(
      {held, H, of.log_derivative, of.gaps, held, state_.scales.of_chunk(chunk)});
}

/// Derivatives of a scaled pass: relative to the largest of all samples, which is the same for
/// heads and readout.
template <class real>
const real* ProductPass<real>::scale(const Slab<real>& slab, const Workspace& of) const {
  const int L = state_.kernels.lanes;
  state_.kernels.scaled_factors({state_.entries_held(slab), nullptr, state_.scales.log_of_readout(),
                                 of.log_derivative, nullptr, of.factors});
  for (int u = 0; u < slab.units; ++u)
    state_.kernels.scale_samples(of.outputs.g + u * f_size_, of.factors + u * L, f_size_ / L,
                                 of.scaled_g + u * f_size_);
  return of.scaled_g;
}

template <class real>
void ProductPass<real>::differentiate(int chunk, const Slab<real>& slab, const real* g,
                                      const Workspace& of) const {
  const Kernels<real>& kernels = state_.kernels;
  const Shape& s = state_.data.shape;
  const int L = kernels.lanes, entries = int(sizes_.entries);
  const std::ptrdiff_t p = s.p, d = s.d, of_unit = std::ptrdiff_t(entries) * L;
  kernels.product_lanes({{s.d, s.p, s.q, 1, slab.units},
                         {slab.z, d * L, 0, z_size_},
                         {g, p * L, L, 0, f_size_},
                         {of.dm, p * L, L, of_unit}});
  for (int u = 0; u < slab.units; ++u)
    kernels.pack_rows(of.dm + u * of_unit, entries, L, int(sizes_.padded),
                      of.dm_rows + u * L * sizes_.padded);
  kernels.product({{entries, int(sizes_.row) / L, slab.samples},
                   {of.dm_rows, sizes_.padded},
                   {state_.data.x + slab.first_sample * sizes_.row, sizes_.row, L},
                   {state_.gradients.readout(chunk, 0), sizes_.row, L},
                   !slab.first});
}

template class ProductPass<float>;
template class ProductPass<double>;

}  // namespace mhfast
