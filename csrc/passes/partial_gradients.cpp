#include "partial_gradients.hpp"

#include "../problem/alike_heads.hpp"
#include "../problem/factors.hpp"
#include "row_gradients.hpp"

namespace mhfast {

template <class real>
PartialGradients<real>::PartialGradients(const Kernels<real>& kernels, const Shape& shape,
                                         const Plan& plan, const PassOptions& options, int width)
    : kernels_(kernels),
      shape_(shape),
      of_(readout_of(shape)),
      options_(options),
      chunks_(plan.chunks),
      width_(width),
      features_are_lanes_(plan.features_are_lanes()),
      of_projections_(plan.kind == PlanKind::kHybrid && has_projections(shape)),
      readout_by_features_(features_are_lanes_ && (of_projections_ || !shape.is_layer() ||
                                                   plan.kind != PlanKind::kHybrid)),
      has_factors_(has_factor_gradients(shape, plan.kind, kernels.lanes)),
      has_rows_(options.wrt_W && has_row_gradients(shape, plan.kind)),
      part_(partial_gradient(shape, plan.kind, kernels.lanes)),
      rows_row_(row_gradient_size(shape, kernels.lanes)),
      embedding_(kernels, shape),
      tensor_(kernels, shape) {
  const bool by_W = plan.kind == PlanKind::kSamples && options.wrt_W;
  if (!plan.samples_are_lanes() || readout_by_features_) return;
  laned_.begin = by_W ? 0 : part_.readout_at;
  laned_.size =
      (options.wrt_readout ? part_.size - kernels.lanes : part_.readout_at) - laned_.begin;
}

template <class real>
void PartialGradients<real>::lay_out(Arena& layout) {
  const Shape& s = shape_;
  if (!options_.gradient) return;
  partial_ = layout.take<real>(chunks_ * part_.size);
  if (s.products) return tensor_.lay_out(layout);
  if (s.attended) {
    transposed_ = layout.take<real>(s.is_layer() ? s.H * of_.rows * std::size_t(of_.columns) : 0);
    return;
  }
  if (of_projections_) {
    transposed_size_ = std::ptrdiff_t(std::max(s.rank, s.p)) * s.d;
    transposed_ = layout.take<real>(s.H * transposed_size_);
  }
  rows_ = layout.take<real>(has_rows_ ? std::size_t(s.H) * s.n * s.q * rows_row_ : 0);
  shared_ = layout.take<real>(s.shared_query ? std::size_t(s.H) * s.q * s.d * width_ : 0);
  shared_k_ = layout.take<real>(s.shared_query ? std::size_t(s.H) * s.q * s.rank : 0);
  const bool summed = s.rank > 0 && !s.shared_query && !has_factors_;
  dense_ = layout.take<real>(summed ? std::size_t(s.H) * s.d * s.d : 0);
  if (s.words == 0) return;
  const std::ptrdiff_t dL = round_up(s.d, kernels_.lanes), most = std::max({s.words, s.q, s.d});
  table_.sum_size = std::max(s.words * std::max(part_.weight_row, part_.readout_row), s.d * dL);
  table_.words_size = s.words * dL;
  table_.product_size = most * std::max(dL, part_.readout_row);
  table_.sum = layout.take<real>(s.H * table_.sum_size);
  table_.words = layout.take<real>(s.H * table_.words_size);
  table_.product = layout.take<real>(s.H * table_.product_size);
  if (options_.wrt_embedding) embedding_.lay_out(layout);
}

/// The sum of the chunks of a table of words: (words, columns).
template <class real>
real* PartialGradients<real>::sum_table(const real* partial, int columns, real* to) const {
  kernels_.reduce_features({partial, part_.size, chunks_, shape_.words, columns, to});
  return to;
}

/// The gradients of one head from those of its tables:
///
///   scores    by W: E^T (S^T E), S [key word][query word]; of a shared query S^T E is D X
///   values    by U: C^T E, C [key word][row];  by V: E^T C, C [key word][output]
template <class real>
void PartialGradients<real>::reduce_words(const LoadedModel<real>& model, const real* words,
                                          const GradientOut<real>& to, int head) const {
  const Shape& s = shape_;
  const int L = kernels_.lanes, d = s.d, dL = int(round_up(d, L)), V = s.words;
  real* const sum = table_.sum + head * table_.sum_size;
  real* const rows = table_.words + head * table_.words_size;
  real* const product = table_.product + head * table_.product_size;
  kernels_.scale_rows(words, real(1), V, d, dL, rows);
  /// Copies rows without what fills their vectors.
  const auto copy = [](const real* from, int count, int columns, std::ptrdiff_t row, real* out,
                       real factor) {
    for (int i = 0; i < count; ++i)
      for (int j = 0; j < columns; ++j)
        out[std::ptrdiff_t(i) * columns + j] = factor * from[i * row + j];
  };
  if (options_.wrt_W && (to.W || s.shared_query)) {
    const int queries = s.shared_query ? s.q : V;
    sum_table(weight(0, head), queries, sum);
    kernels_.product({{queries, dL / L, V}, {sum, queries}, {rows, dL, L}, {product, dL, L}});
    if (s.shared_query) {
      copy(product, s.q, d, dL, shared_ + head * (std::ptrdiff_t(s.q) * d), real(1));
    } else {
      real* const gradient = sum;  // which is not needed any more
      kernels_.product({{d, dL / L, V}, {words, d}, {product, dL, L}, {gradient, dL, L}});
      copy(gradient, d, d, dL, to.W + head * (std::ptrdiff_t(d) * d), model.scale());
    }
  }
  if (!to.readout) return;
  const int columns = s.is_layer() ? s.p : s.q;
  real* const out = to.readout + std::ptrdiff_t(head) * of_.rows * of_.columns;
  if (s.is_layer()) {
    const std::ptrdiff_t pL = part_.readout_row;
    sum_table(readout(0, head), int(pL), sum);
    kernels_.product({{d, int(pL) / L, V}, {words, d}, {sum, pL, L}, {product, pL, L}});
    copy(product, d, s.p, pL, out, real(1));
  } else {
    sum_table(readout(0, head), columns, sum);
    kernels_.product({{s.q, dL / L, V}, {sum, columns}, {rows, dL, L}, {product, dL, L}});
    copy(product, s.q, d, dL, out, real(1));
  }
}

template <class real>
void PartialGradients<real>::sum_chunks(const real* partial, int rows, int columns, bool features,
                                        real* out) const {
  if (width_ > 1) {  // runs: each block of them is one chunk
    std::copy_n(partial, std::ptrdiff_t(rows) * columns * width_, out);
    return;
  }
  if (!features) {  // numbers without gaps
    columns *= rows;
    rows = 1;
  }
  kernels_.reduce_features({partial, part_.size, chunks_, rows, columns, out});
}

/// Of a head, from (columns, dL) of each chunk to (d, columns).
template <class real>
void PartialGradients<real>::sum_transposed(const real* partial, int head, int columns,
                                            real* out) const {
  real* const sum = transposed_ + head * transposed_size_;
  sum_chunks(partial, columns, shape_.d, true, sum);
  kernels_.pack_rows(sum, columns, shape_.d, columns, out);
}

/// The gradients of one head by its factors, from those of the chunks or, of a shared query z, from
/// E = D X summed over samples: z^T (E K) and E^T (z Q).
template <class real>
void PartialGradients<real>::reduce_factors(const LoadedModel<real>& model,
                                            const GradientOut<real>& to, int head) const {
  const Shape& s = shape_;
  const int d = s.d, q = s.q, r = s.rank;
  const std::ptrdiff_t size = std::ptrdiff_t(d) * r, at = head * size;
  real *const gQ = to.Q ? to.Q + at : nullptr, *const gK = to.K ? to.K + at : nullptr;
  const bool tied = model.is_tied();
  if (s.shared_query) {
    const real* e = shared_ + head * (std::ptrdiff_t(q) * d);
    real* const by_k = shared_k_ + head * (std::ptrdiff_t(q) * r);
    kernels_.batched_gemm(
        {q, r, d, 1, e, d, 1, model.factor_k(head), r, 1, by_k, r, 1, model.scale(), false});
    const auto add = [&](const real* rows, const real* by, real* out, bool more) {
      if (out) kernels_.batched_gemm({d, r, q, 1, rows, 1, d, by, r, 1, out, r, 1, real(1), more});
    };
    add(model.prompt(), by_k, gQ, false);
    add(e, model.shared_factor(head), tied ? gQ : gK, tied);
  } else if (has_factors_) {
    const auto sum = [&](const real* partial, real* out) {
      if (!out) return;
      if (of_projections_)
        sum_transposed(partial, head, r, out);
      else
        sum_chunks(partial, d, r, features_are_lanes_, out);
      if (model.scale() != real(1))
        for (std::ptrdiff_t i = 0; i < size; ++i) out[i] *= model.scale();
    };
    sum(weight(0, head), gQ);
    sum(weight(0, head) + to_k(false), gK);
  } else if (to.Q || to.K) {
    const std::ptrdiff_t dd = std::ptrdiff_t(d) * d;
    real* const gW = dense_ + head * dd;
    sum_chunks(weight(0, head), d, d, features_are_lanes_, gW);
    if (model.scale() != real(1))
      for (std::ptrdiff_t i = 0; i < dd; ++i) gW[i] *= model.scale();
    differentiate_factors(kernels_, s, r, model.factor_q(0), tied ? nullptr : model.factor_k(0),
                          dense_, head, 1, to.Q, to.K);
  }
}

/// The gradients by the readouts of a member's heads from those of attended tokens: features of one
/// head, or those that all share.
template <class real>
void PartialGradients<real>::reduce_attended(real* to, const Member& member) const {
  const Shape& s = shape_;
  const int rows = of_.rows, columns = of_.columns, heads = computed_heads(s);
  const std::ptrdiff_t size = std::ptrdiff_t(rows) * columns;
  for (int h = member.index; h < s.H; h += member.count) {
    real* const out = to + h * size;
    if (h >= heads && h > member.index) {
      std::copy_n(to + member.index * size, size, out);
      continue;
    }
    const real* const partial = readout(0, std::min(h, heads - 1));
    if (!s.is_layer()) {
      kernels_.reduce_features({partial, part_.size, chunks_, 1, int(size), out});
      continue;
    }
    real* const transposed = transposed_ + h * size;
    for (int o = 0; o < columns; ++o) {
      const real* const of_output = partial + o * part_.readout_row;
      kernels_.reduce_features(
          {of_output, part_.size, chunks_, 1, rows, transposed + std::ptrdiff_t(o) * rows});
    }
    for (int k = 0; k < rows; ++k)
      for (int o = 0; o < columns; ++o)
        out[std::ptrdiff_t(k) * columns + o] = transposed[std::ptrdiff_t(o) * rows + k];
  }
}

/// A member's part of the gradient by W from D X of all rows: Z^T (D X), some rows at a time.
template <class real>
void PartialGradients<real>::multiply_rows(const LoadedModel<real>& model, const real* z, real* gW,
                                           const Member& member) const {
  const Shape& s = shape_;
  const std::ptrdiff_t dd = std::ptrdiff_t(s.d) * s.d;
  const int pieces = RowGradients<real>::pieces(s.d);
  for (int piece = member.index; piece < s.H * pieces; piece += member.count) {
    const int head = piece / pieces, part = piece % pieces;
    real* const of_head = gW + head * dd;
    const RowGradients<real> of{s.d, int(s.n * s.q), z, rows(head, 0), rows_row_};
    of.multiply(kernels_, part, of_head);
    if (model.scale() == real(1)) continue;
    const std::ptrdiff_t row = std::ptrdiff_t(kGradientRows) * s.d;
    std::transform(of_head + part * row, of_head + std::min((part + 1) * row, dd),
                   of_head + part * row, [&](real x) { return model.scale() * x; });
  }
}

template <class real>
void PartialGradients<real>::reduce(const LoadedModel<real>& model, const real* words,
                                    const real* z, const GradientOut<real>& to,
                                    const Member& member) const {
  const Shape& s = shape_;
  if (s.attended) return reduce_attended(to.readout, member);
  if (s.products)
    return tensor_.reduce(model, {readout(0, 0), part_.size, chunks_}, to.W, to.readout, member);
  if (has_rows_ && to.W) multiply_rows(model, z, to.W, member);
  const std::ptrdiff_t dd = std::ptrdiff_t(s.d) * s.d, qd = std::ptrdiff_t(s.q) * s.d;
  for (int h = member.index; h < s.H; h += member.count) {
    if (words) reduce_words(model, words, to, h);
    if (s.shared_query && options_.wrt_W) {
      real* e = shared_ + h * qd * width_;
      if (!words) sum_chunks(weight(0, h), s.q, s.d, features_are_lanes_, e);
      if (s.rank > 0)
        reduce_factors(model, to, h);
      else if (to.W)
        kernels_.batched_gemm({s.d, s.d, s.q, width_, model.prompt(), 1, s.d, e, s.d, 1,
                               to.W + h * dd * width_, s.d, 1, model.scale(), false});
    } else if (s.rank > 0) {
      reduce_factors(model, to, h);
    } else if (to.W && !words && !has_rows_) {
      real* out = to.W + h * dd * width_;
      sum_chunks(weight(0, h), s.d, s.d, features_are_lanes_, out);
      if (model.scale() != real(1))
        for (std::ptrdiff_t i = 0; i < dd * width_; ++i) out[i] *= model.scale();
    }
    real* const by_readout =
        to.readout ? to.readout + std::ptrdiff_t(h) * of_.rows * of_.columns * width_ : nullptr;
    if (by_readout && of_projections_ && s.is_layer())
      sum_transposed(readout(0, h), h, s.p, by_readout);
    else if (by_readout && !words)
      sum_chunks(readout(0, h), of_.rows, of_.columns, readout_by_features_, by_readout);
    if (!to.words_by_scores) continue;
    real* const sum = table_.sum + h * table_.sum_size;
    const int queries = s.shared_query ? s.q : s.words;
    embedding_.add_scores(model, words, sum_table(weight(0, h), queries, sum), h);
    const int columns = s.is_layer() ? int(part_.readout_row) : s.q;
    embedding_.add_values(model, sum_table(readout(0, h), columns, sum), h);
  }
  if (!to.prompt && !to.words_by_scores) return;
  member.wait();
  if (member.index > 0) return;
  if (to.words_by_scores) {
    embedding_.sum_scores(to.words_by_scores);
    embedding_.sum_values(to.words_by_values);
  }
  if (to.prompt) reduce_prompt(model, to.prompt);
}

/// From D X of all heads.
template <class real>
void PartialGradients<real>::reduce_prompt(const LoadedModel<real>& model, real* to) const {
  const Shape& s = shape_;
  const std::ptrdiff_t qd = std::ptrdiff_t(s.q) * s.d;
  for (int h = 0; s.identity_w && h < s.H; ++h)
    for (std::ptrdiff_t i = 0; i < qd * width_; ++i)
      to[i] = (h > 0 ? to[i] : real(0)) + model.scale() * shared_[h * qd * width_ + i];
  // E W^T, or of factors (E K) Q^T, of which the scale is in E K.
  const real* rows = s.rank > 0 ? shared_k_ : shared_;
  const std::ptrdiff_t columns = s.first_columns();
  for (int h = 0; !s.identity_w && h < s.H; ++h)
    kernels_.batched_gemm({s.q, s.d, int(columns), width_, rows + h * s.q * columns * width_,
                           columns, 1, s.rank > 0 ? model.factor_q(h) : model.w(h), 1, columns, to,
                           s.d, 1, real(1), h > 0});
}

template class PartialGradients<float>;
template class PartialGradients<double>;

}  // namespace mhfast
