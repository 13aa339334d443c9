#include "loaded_model.hpp"

#include <algorithm>
#include <limits>

namespace mhfast {

template <class real>
LoadedModel<real>::LoadedModel(const Kernels<real>& kernels, const Shape& shape, const Plan& plan,
                               int width, bool has_exps)
    : kernels_(kernels),
      shape_(shape),
      of_(readout_of(shape)),
      lanes_(plan, kernels.lanes),
      width_(width),
      has_exps_(has_exps),
      heads_are_columns_(plan.samples_are_lanes() && shape.q == 1 && !shape.is_layer()),
      tables_(shape, kernels.lanes),
      query_size_(shape.d * lanes_.rows(shape.q)),
      transposed_size_(std::ptrdiff_t(width) * of_.columns *
                       (lanes_.laned ? of_.rows : round_up(of_.rows, kernels.lanes))),
      has_factor_gradients_(mhfast::has_factor_gradients(shape, plan.kind, kernels.lanes) &&
                            !has_projections(shape)),
      w_size_(std::ptrdiff_t(shape.d) * shape.first_columns() * width),
      gradient_factor_size_(shape.d * (plan.features_are_lanes()
                                           ? round_up(shape.rank, kernels.lanes)
                                           : shape.rank)) {}

template <class real>
void LoadedModel<real>::lay_out(Arena& layout) {
  const Shape& s = shape_;
  const std::size_t H = s.H, shared = s.shared_query ? H : 0;
  w_scaled_ = layout.take<real>(H * w_size_);
  kt_ = layout.take<real>(s.rank > 0 ? H * w_size_ : 0);
  const std::size_t factors = has_factor_gradients_ ? H * gradient_factor_size_ : 0;
  gradient_q_ = layout.take<real>(factors);
  gradient_k_ = layout.take<real>(factors);
  shared_factor_ = layout.take<real>(shared * s.q * s.rank);
  transposed_ = layout.take<real>(H * transposed_size_);
  product_ = layout.take<real>(shared * s.q * s.d);
  packed_product_ = layout.take<real>(shared * query_size_);
  scores_table_ = layout.take<real>(H * tables_.scores);
  values_table_ = layout.take<real>(H * tables_.values);
  exps_table_ = layout.take<real>(has_exps_ ? H * tables_.scores : 0);
  packed_words_ = layout.take<real>(H * tables_.padded * s.d);
  queries_ = layout.take<real>(H * std::max(tables_.padded, tables_.value_row) * s.d *
                               (s.words > 0 ? 1 : 0));
}

template <class real>
void LoadedModel<real>::load(const Parameters<real>& parameters, const real* words,
                             const Member& member) {
  const Shape& s = shape_;
  const real* const w = s.rank > 0 ? parameters.Q : parameters.W;
  const bool scaled = parameters.scale != real(1) && w;
  const real* readout = parameters.readout();
  if (member.index == 0) {
    w_ = scaled ? w_scaled_ : w;
    q_ = parameters.Q;
    k_ = parameters.right();
    is_tied_ = !parameters.K;
    readout_ = readout;
    scale_ = parameters.scale;
    prompt_ = parameters.prompt;
  }
  const int padded = lanes_.laned ? of_.rows : int(round_up(of_.rows, lanes_.lanes));
  for (int h = member.index; h < s.H; h += member.count) {
    if (s.shared_query) load_shared_product(parameters, h);
    if (s.rank > 0) load_factors(parameters, h);
    if (readout) {
      const real* from = readout + std::ptrdiff_t(h) * of_.rows * of_.columns * width_;
      real* to = transposed_ + h * transposed_size_;
      if (heads_are_columns_)
        for (int k = 0; k < s.d; ++k) transposed_[std::ptrdiff_t(k) * s.H + h] = from[k];
      else if (width_ > 1)
        kernels_.transpose_lanes(from, of_.rows, of_.columns, to);
      else
        kernels_.pack_rows(from, of_.rows, of_.columns, padded, to);
    }
    if (scaled)
      for (std::ptrdiff_t i = h * w_size_; i < (h + 1) * w_size_; ++i)
        w_scaled_[i] = parameters.scale * w[i];
    if (s.words > 0) load_tables(parameters, words, h);
  }
}

/// The factors of one head besides Q times the scale.
template <class real>
void LoadedModel<real>::load_factors(const Parameters<real>& parameters, int head) {
  const int d = shape_.d, r = shape_.rank;
  const std::ptrdiff_t at = head * w_size_;
  kernels_.pack_rows(parameters.right() + at, d, r, d, kt_ + at);
  if (!has_factor_gradients_) return;
  const int row = int(gradient_factor_size_ / d);
  const auto copy = [&](const real* from, real* to) {
    kernels_.scale_rows(from + at, real(1), d, r, row, to + head * gradient_factor_size_);
  };
  copy(parameters.Q, gradient_q_);
  copy(parameters.right(), gradient_k_);
}

/// Tables of one head, whose W times the scale and U or V this member has loaded. What the first
/// member sets, others do not read in the phase of loading.
template <class real>
void LoadedModel<real>::load_tables(const Parameters<real>& parameters, const real* words,
                                    int head) {
  const Shape& s = shape_;
  const int d = s.d, L = lanes_.lanes, padded = int(tables_.padded);
  const std::ptrdiff_t dd = std::ptrdiff_t(d) * d;
  real* const keys = packed_words_ + head * (std::ptrdiff_t(padded) * d);
  real* const queries = queries_ + head * (std::max(tables_.padded, tables_.value_row) * d);
  kernels_.pack_rows(words, s.words, d, padded, keys);
  const auto multiply = [&](const real* by, std::ptrdiff_t row, real* table) {
    kernels_.product({{s.words, int(row) / L, d}, {keys, padded}, {by, row, L}, {table, row, L}});
  };
  real* const scores = scores_table_ + head * tables_.scores;
  if (s.shared_query) {
    multiply(shared_product(head), tables_.row, scores);
  } else {
    const real* w = parameters.scale == real(1) ? parameters.W : w_scaled_;
    kernels_.product(
        {{d, padded / L, d}, {w + head * dd, d}, {keys, padded, L}, {queries, padded, L}});
    multiply(queries, tables_.row, scores);
  }
  if (has_exps_) {
    real* const exps = exps_table_ + head * tables_.scores;
    kernels_.exponentials(scores, tables_.scores, exps);
    // Whether denormal numbers are flushed depends on the caller.
    for (std::ptrdiff_t i = 0; i < tables_.scores; ++i)
      exps[i] = exps[i] < std::numeric_limits<real>::min() ? real(0) : exps[i];
  }
  real* const values = values_table_ + head * tables_.values;
  if (!s.is_layer())
    return multiply(transposed_ + head * transposed_size_, tables_.value_row, values);
  kernels_.scale_rows(parameters.V + head * (std::ptrdiff_t(d) * s.p), real(1), d, s.p,
                      int(tables_.value_row), queries);
  multiply(queries, tables_.value_row, values);
}

/// Z W of one head, Z being the query rows of all samples, as scores would compute it for a unit.
template <class real>
void LoadedModel<real>::load_shared_product(const Parameters<real>& parameters, int head) {
  const Shape& s = shape_;
  real* to = packed_product_ + head * query_size_;
  // Runs have a vector for each entry, [feature][row]; else there are rows, which are copied.
  const bool by_rows = width_ == 1;
  const std::ptrdiff_t row = by_rows ? s.d : 1, column = by_rows ? 1 : s.q;
  real* product = width_ > 1 ? to : product_ + head * std::ptrdiff_t(s.q) * s.d;
  if (s.identity_w) {
    const real* z = parameters.prompt;
    for (int t = 0; t < s.q; ++t)
      for (int k = 0; k < s.d; ++k)
        for (int l = 0; l < width_; ++l)
          product[(t * row + k * column) * width_ + l] = parameters.scale * *z++;
  } else if (s.rank > 0) {
    const int r = s.rank;
    real* const by_q = shared_factor_ + head * (std::ptrdiff_t(s.q) * r);
    kernels_.batched_gemm({s.q, r, s.d, 1, parameters.prompt, s.d, 1, parameters.Q + head * w_size_,
                           r, 1, by_q, r, 1, parameters.scale, false});
    kernels_.batched_gemm({s.q, s.d, r, 1, by_q, r, 1, parameters.right() + head * w_size_, 1, r,
                           product, row, column, real(1), false});
  } else {
    const real* w = parameters.W + head * w_size_;
    kernels_.batched_gemm({s.q, s.d, s.d, width_, parameters.prompt, s.d, 1, w, s.d, 1, product,
                           row, column, parameters.scale, false});
  }
  if (!lanes_.laned) kernels_.pack_rows(product, s.q, s.d, int(round_up(s.q, lanes_.lanes)), to);
  if (!lanes_.laned || width_ > 1) return;
  for (int k = 0; k < s.d; ++k)  // the same in all lanes
    for (int t = 0; t < s.q; ++t, to += lanes_.lanes)
      std::fill_n(to, lanes_.lanes, product[std::ptrdiff_t(t) * s.d + k]);
}

template class LoadedModel<float>;
template class LoadedModel<double>;

}  // namespace mhfast
