#include "attended_pass.hpp"

#include <cmath>

namespace mhfast {

template <class real>
AttendedPass<real>::AttendedPass(PassState<real>& state)
    : ChunkPass<real>(state),
      rows_(state.data.shape, state.kernels.lanes),
      p_(state.data.shape.row_outputs()),
      heads_(state.data.shape.H / computed_heads(state.data.shape)),
      loss_(state.kernels, state.data,
            state.data.shape.is_layer() ? std::optional<Loss>() : state.loss, state.width,
            state.options.gaps),
      workspaces_(state.threads),
      ones_(heads_, real(1)) {}

template <class real>
void AttendedPass<real>::lay_out(Arena& layout) {
  const std::size_t slab = std::min<std::ptrdiff_t>(state_.plan.slab, state_.plan.units);
  const std::size_t held = this->held(int(slab)), outputs = held * p_, L = state_.kernels.lanes;
  block_ = state_.own.slabs_of_block((state_.plan.units / state_.plan.chunks + slab) / slab,
                                     double(slab) * p_, 0);
  summed_ = layout.take<real>(heads_ > 1 ? rows_.features * p_ : 0);
  readout_ = layout.take<real>(rows_.size * p_);
  for (Workspace& of : workspaces_) {
    of.sums = layout.take<real>(slab * p_ * L);
    of.f = layout.take<real>(outputs);
    of.g = layout.take<real>(outputs);
    of.value = layout.take<double>(held);
    of.derivative = layout.take<double>(outputs);
    of.log_derivative = layout.take<double>(held);
    of.factors = layout.take<real>(held);
    of.own.lay_out(layout, state_.own.exists() ? block_ * outputs : 0);
  }
}

/// Only the first member's, who is the one that all wait for before a pass.
template <class real>
void AttendedPass<real>::load(const Parameters<real>& parameters, const Member& member) {
  if (member.index == 0) given_ = parameters.readout();
}

template <class real>
void AttendedPass<real>::run(Pass pass, const Member& member) {
  load_readout(member);
  member.wait();
  ChunkPass<real>::run(pass, member);
}

/// A member's part of the features, from the readout of all heads, or their sum.
template <class real>
void AttendedPass<real>::load_readout(const Member& member) {
  const std::ptrdiff_t L = state_.kernels.lanes, vectors = rows_.size / L;
  const std::ptrdiff_t first = vectors * member.index / member.count * L;
  const std::ptrdiff_t end = vectors * (member.index + 1) / member.count * L;
  const std::ptrdiff_t last = std::min(end, rows_.features), all = rows_.features * p_;
  const real* from = given_;
  if (heads_ > 1) {
    const std::ptrdiff_t begin = first * p_, whole = (last * p_ - begin) / L;
    if (whole > 0)
      state_.kernels.product({{1, int(whole), heads_},
                              {ones_.data(), 1},
                              {given_ + begin, all, L},
                              {summed_ + begin, 0, L}});
    for (std::ptrdiff_t i = begin + whole * L; i < last * p_; ++i) {
      real sum = 0;
      for (int h = 0; h < heads_; ++h) sum += given_[h * all + i];
      summed_[i] = sum;
    }
    from = summed_;
  }
  if (p_ == 1) {
    std::copy(from + first, from + last, readout_ + first);
    std::fill(readout_ + last, readout_ + end, real(0));
    return;
  }
  for (std::ptrdiff_t k = first; k < end; ++k) {
    real* to = readout_ + (k / L * p_) * L + k % L;
    for (int o = 0; o < p_; ++o, to += L) *to = k < last ? from[k * p_ + o] : real(0);
  }
}

template <class real>
void AttendedPass<real>::run_units(Pass pass, int chunk, std::ptrdiff_t first, std::ptrdiff_t last,
                                   int thread) {
  const Workspace& of = workspaces_[thread];
  state_.own.run_slabs(
      pass, first, last, state_.plan.slab, block_, of.own,
      [&](Pass phase, std::ptrdiff_t row, std::ptrdiff_t end, std::ptrdiff_t place, bool begins) {
        const int count = int(end - row);
        run_rows(phase, chunk, {row, count, place, begins}, of);
        return count;
      });
}

template <class real>
void AttendedPass<real>::run_outputs(const Rows& rows, const Workspace& of) const {
  state_.kernels.attended_outputs({rows.count, p_, int(rows_.size / state_.kernels.lanes),
                                   state_.data.x + rows.first * rows_.size, readout_, of.sums,
                                   of.f});
  if (state_.data.shape.is_layer()) return;
  state_.kernels.sum_readouts(
      {rows.count, 1, of.f, 0, 1.0 / readout_of(state_.data.shape).divisor, of.value});
}

/// Outputs and targets of the rows as the caller's own loss takes them.
template <class real>
void AttendedPass<real>::load_own(const Rows& rows, const Workspace& of,
                                  const OwnLossNumbers& own) const {
  const std::ptrdiff_t count = std::ptrdiff_t(rows.count) * p_;
  if (state_.data.shape.is_layer()) {
    std::copy_n(of.f, count, own.outputs);
    std::copy_n(state_.data.y + rows.first * p_, count, own.targets);
  } else {
    std::copy_n(of.value, count, own.outputs);
    std::copy_n(loss_.labels(rows.first), count, own.targets);
  }
}

template <class real>
void AttendedPass<real>::run_rows(Pass pass, int chunk, const Rows& rows,
                                  const Workspace& of) const {
  const bool blocks = state_.own.takes_blocks();
  const OwnLossNumbers own = state_.own.exists() ? of.own.from(rows.place * p_) : OwnLossNumbers{};
  if (!blocks || pass == Pass::kOwnOutputs) run_outputs(rows, of);
  if (pass == Pass::kOwnOutputs) return load_own(rows, of, own);
  if (state_.own.exists() && !blocks) {
    load_own(rows, of, own);
    state_.own.call(std::ptrdiff_t(rows.count), own);
  }
  LaneTotals& totals = state_.totals[chunk];
  if (state_.data.shape.is_layer())
    measure_layer(pass, totals, rows, of, own);
  else
    measure_classifier(pass, totals, rows, of, own);
  if (state_.options.gathers_scales(pass)) gather_scales(chunk, rows, of);
  if (!is_gradient(pass)) return;
  const std::ptrdiff_t L = state_.kernels.lanes;
  state_.kernels.product({{p_, int(rows_.size / L), rows.count},
                          {of.g, p_},
                          {state_.data.x + rows.first * rows_.size, rows_.size, L},
                          {state_.gradients.readout(chunk, 0), rows_.size, L},
                          !rows.begins});
}

/// Losses and, in g, what their derivatives by the outputs are in the gradient.
template <class real>
void AttendedPass<real>::measure_classifier(Pass pass, LaneTotals& totals, const Rows& rows,
                                            const Workspace& of, const OwnLossNumbers& own) const {
  const bool scaled = pass == Pass::kScaledGradient;
  if (state_.own.exists())
    loss_.measure_own(own, state_.shares, rows.first, rows.count, totals, of.g, of.log_derivative);
  else
    loss_.measure(state_.totals_wanted || scaled, state_.shares, rows.first, rows.count, of.value,
                  totals, of.g, of.log_derivative);
  if (scaled) std::copy_n(scaled_factors(rows, of, of.g), rows.count, of.g);
}

template <class real>
void AttendedPass<real>::measure_layer(Pass pass, LaneTotals& totals, const Rows& rows,
                                       const Workspace& of, const OwnLossNumbers& own) const {
  const bool scaled = pass == Pass::kScaledGradient;
  const bool largest = scaled || state_.options.gathers_scales(pass);
  const double share = state_.shares.of_lane[0];
  const auto measure = [&](const auto& emit) {
    measure_rows(state_, totals, rows.first, rows.count, of.f, p_, own, emit);
  };
  if (pass == Pass::kLoss) return measure([](int, int, double) {});
  measure([&](int row, int o, double derivative) {
    const std::ptrdiff_t at = std::ptrdiff_t(row) * p_ + o;
    if (largest)
      of.derivative[at] = derivative;
    else
      of.g[at] = real(derivative * share);
  });
  if (!largest) return;
  const auto largest_of = [&](int row) {
    const double* derivatives = of.derivative + std::ptrdiff_t(row) * p_;
    double most = 0;
    for (int o = 0; o < p_; ++o) most = std::max(most, std::fabs(derivatives[o]));
    return most;
  };
  for (int t = 0; t < held(rows.count); ++t)
    of.log_derivative[t] = t < rows.count ? std::log(largest_of(t)) : -kInfinity;
  const real* factors = scaled ? scaled_factors(rows, of, nullptr) : nullptr;
  for (int t = 0; t < rows.count; ++t) {
    const double most = scaled ? largest_of(t) : 0;
    for (int o = 0; o < p_; ++o) {
      const std::ptrdiff_t at = std::ptrdiff_t(t) * p_ + o;
      of.g[at] = !scaled    ? real(of.derivative[at] * share)
                 : most > 0 ? real(of.derivative[at] / most) * factors[t]
                            : real(0);
    }
  }
}

/// Those of the readout alone, whose factors have no gaps.
template <class real>
void AttendedPass<real>::gather_scales(int chunk, const Rows& rows, const Workspace& of) const {
  double* const of_readout =
      state_.scales.of_chunk(chunk) + std::ptrdiff_t(state_.data.shape.H) * state_.kernels.lanes;
  state_.kernels.gather_scales({held(rows.count), 0, of.log_derivative, nullptr, 0, of_readout});
}

/// Factors of a scaled pass, see FactorArguments.
template <class real>
const real* AttendedPass<real>::scaled_factors(const Rows& rows, const Workspace& of,
                                               const real* signs) const {
  state_.kernels.scaled_factors({held(rows.count), nullptr, state_.scales.log_of_readout(),
                                 of.log_derivative, signs, of.factors});
  return of.factors;
}

template class AttendedPass<float>;
template class AttendedPass<double>;

}  // namespace mhfast
