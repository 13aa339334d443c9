#include "gradient_lanes.hpp"

namespace mhfast {
namespace {

/// Samples or runs are the lanes.
template <class real>
class ProblemsAsLanes final : public GradientLanes<real> {
 public:
  explicit ProblemsAsLanes(const PassState<real>& state) : GradientLanes<real>(state) {}

  std::ptrdiff_t row_size(std::ptrdiff_t units) const override {
    return units * state_.data.shape.d * state_.lanes.lanes;
  }

  const real* scale_keys(const Slab<real>& slab, const real* factors, real* to) const override {
    const int L = state_.lanes.lanes;
    const std::ptrdiff_t size = std::ptrdiff_t(state_.data.shape.T) * state_.data.shape.d;
    for (int u = 0; u < slab.units; ++u)
      state_.kernels.scale_samples(slab.x + u * size * L, factors + u * L, size, to + u * size * L);
    return to;
  }

  void accumulate(int chunk, int head, const Slab<real>& slab, const real* a, const real* dd,
                  const real* keys, real* e) const override {
    GradientArguments<real> in = this->arguments(chunk, head, slab, a, dd, keys, e);
    in.units = slab.units;
    in.sums_lanes = state_.plan.samples_are_lanes() && !slab.laned;
    in.z = slab.z + std::ptrdiff_t(slab.first_row) * state_.data.shape.d * state_.lanes.lanes;
    state_.kernels.gradients_samples(in);
  }

 private:
  using GradientLanes<real>::state_;
};

/// Features are the lanes; A and D have query rows as theirs, or samples.
template <class real>
class FeaturesAsLanes final : public GradientLanes<real> {
 public:
  explicit FeaturesAsLanes(const PassState<real>& state)
      : GradientLanes<real>(state),
        padded_(int(round_up(state.data.shape.d, state.lanes.lanes))),
        unit_weights_(state.data.shape.T * state.lanes.rows(state.data.shape.q)) {}

  std::ptrdiff_t row_size(std::ptrdiff_t units) const override {
    return round_up(units * state_.lanes.samples_in_unit, state_.lanes.lanes) * padded_;
  }

  const real* scale_keys(const Slab<real>& slab, const real* factors, real* to) const override {
    const Shape& s = state_.data.shape;
    const std::ptrdiff_t size = std::ptrdiff_t(s.T) * s.d;
    for (int i = 0; i < slab.samples; ++i)
      state_.kernels.scale_rows(state_.data.x + (slab.first_sample + i) * size, factors[i],
                                slab.keys, s.d, padded_, to + std::ptrdiff_t(i) * s.T * padded_);
    return to;
  }

  void accumulate(int chunk, int head, const Slab<real>& slab, const real* a, const real* dd,
                  const real* keys, real* e) const override {
    const Shape& s = state_.data.shape;
    GradientArguments<real> in = this->arguments(chunk, head, slab, a, dd, keys, e);
    in.units = slab.samples;
    if (dd && state_.gradients.has_rows()) {
      in.e = state_.gradients.rows(head, slab.first_sample * s.q + slab.first_row);
      in.e_row = state_.gradients.rows_row();
      in.e_head = s.n * s.q * in.e_row;
    }
    if (!s.shared_query) in.z = state_.data.z + (slab.first_sample * s.q + slab.first_row) * s.d;
    const int L = state_.lanes.lanes;
    if (state_.lanes.samples_in_unit == 1) return state_.kernels.gradients_features_of_rows(in);
    // Samples were lanes: a block of them is what one product can sum over.
    for (int block = 0; block < slab.units; ++block) {
      in.units = std::min(L, slab.samples - block * L);
      state_.kernels.gradients_features_of_samples(in);
      if (a) in.a += slab.heads * unit_weights_;
      if (dd) in.dd += slab.heads * unit_weights_;
      in.gx += std::ptrdiff_t(L) * s.T * padded_;
      in.e += L * s.q * in.e_row;
      if (in.z) in.z += std::ptrdiff_t(L) * s.q * s.d;
      in.add = true;
    }
  }

 private:
  using GradientLanes<real>::state_;
  const int padded_;
  const std::ptrdiff_t unit_weights_;  // A, or D, of a block of samples
};

/// Tokens are words: A and D, times factors, are added to the gradients of tables.
template <class real>
class WordsAsLanes final : public GradientLanes<real> {
 public:
  explicit WordsAsLanes(const PassState<real>& state)
      : GradientLanes<real>(state),
        unit_weights_(state.data.shape.T * state.lanes.rows(state.plan.tile)) {}

  std::ptrdiff_t row_size(std::ptrdiff_t units) const override { return units; }

  /// The factors themselves.
  const real* scale_keys(const Slab<real>& slab, const real* factors, real* to) const override {
    std::copy_n(factors, slab.samples, to);
    return to;
  }

  void accumulate(int chunk, int head, const Slab<real>& slab, const real* a, const real* dd,
                  const real* keys, real*) const override {
    const PartialGradients<real>& to = state_.gradients;
    WordGradientArguments<real> in{};
    in.T = slab.keys;
    in.q = slab.rows;
    in.units = slab.samples;
    in.words = slab.words;
    in.words.row = to.weight_row();
    in.a = a;
    in.dd = dd;
    in.unit_stride = unit_weights_;
    in.factors = keys;
    if (a) in.gu = to.readout(chunk, head);
    if (dd) in.gw = to.weight(chunk, head);
    if (a && slab.first) std::fill_n(in.gu, to.readout_size(), real(0));
    if (dd && slab.first) std::fill_n(in.gw, to.weight_size(), real(0));
    state_.kernels.gradients_words(in);
  }

 private:
  using GradientLanes<real>::state_;
  const std::ptrdiff_t unit_weights_;
};

}  // namespace

template <class real>
std::ptrdiff_t GradientLanes<real>::scratch_size(std::ptrdiff_t units, int rows) const {
  const Shape& s = state_.data.shape;
  const bool features = state_.plan.features_are_lanes();
  const std::ptrdiff_t samples =
      features ? round_up(units * state_.lanes.samples_in_unit, state_.lanes.lanes) : units;
  if (state_.gradients.has_rows() || state_.gradients.of_projections()) return 0;
  return row_size(units) * rows +
         (state_.gradients.has_factors()
              ? factor_scratch(samples * rows, s.rank, s.d, state_.lanes.lanes, features)
              : 0);
}

template <class real>
GradientArguments<real> GradientLanes<real>::arguments(int chunk, int head, const Slab<real>& slab,
                                                       const real* a, const real* dd,
                                                       const real* keys, real* e) const {
  const Shape& s = state_.data.shape;
  const PartialGradients<real>& to = state_.gradients;
  GradientArguments<real> in{};
  in.T = slab.keys;
  in.q = slab.rows;
  in.d = s.d;
  in.a = a;
  in.dd = dd;
  in.gx = keys;
  in.e = e;
  real* const laned = state_.plan.features_are_lanes() ? nullptr : slab.laned;
  const std::ptrdiff_t number = laned ? state_.lanes.lanes : 1;  // registers in their place
  real* const weight = dd ? to.weight(chunk, head, laned) : nullptr;
  if (a) in.gu = to.readout(chunk, head, laned);
  if (dd && s.shared_query) {
    in.ge = weight + slab.first_row * to.weight_row() * number;
  } else if (dd && to.has_factors()) {
    in.rank = s.rank;
    in.fq = state_.model.gradient_q(head);
    in.fk = state_.model.gradient_k(head);
    in.gq = weight;
    in.gk = in.gq + to.to_k(state_.model.is_tied()) * number;
  } else if (dd && !to.has_rows())
    in.gw = weight;
  in.heads = slab.heads;
  in.weight_head = to.weight_size() * number;
  in.factor_head = state_.model.gradient_factor_size();
  in.add = !slab.first || (slab.follows && !s.shared_query);
  return in;
}

template <class real>
std::unique_ptr<GradientLanes<real>> make_gradient_lanes(const PassState<real>& state) {
  if (state.data.has_words()) return std::make_unique<WordsAsLanes<real>>(state);
  if (state.plan.features_are_lanes()) return std::make_unique<FeaturesAsLanes<real>>(state);
  return std::make_unique<ProblemsAsLanes<real>>(state);
}

template class GradientLanes<float>;
template class GradientLanes<double>;
template std::unique_ptr<GradientLanes<float>> make_gradient_lanes(const PassState<float>&);
template std::unique_ptr<GradientLanes<double>> make_gradient_lanes(const PassState<double>&);

}  // namespace mhfast
