#include "embedding_gradient.hpp"

namespace mhfast {

template <class real>
EmbeddingGradient<real>::EmbeddingGradient(const Kernels<real>& kernels, const Shape& shape)
    : kernels_(kernels),
      shape_(shape),
      dL_(int(round_up(shape.d, kernels.lanes))),
      pL_(int(round_up(shape.p, kernels.lanes))),
      padded_(int(round_up(shape.words, kernels.lanes))),
      left_size_(std::ptrdiff_t(padded_) * std::max({shape.words, shape.q, dL_, pL_})),
      right_size_(std::ptrdiff_t(dL_) * std::max({shape.d, shape.q, pL_})),
      size_(std::ptrdiff_t(dL_) * shape.words) {}

template <class real>
void EmbeddingGradient<real>::lay_out(Arena& layout) {
  const std::size_t H = shape_.H;
  left_ = layout.take<real>(H * left_size_);
  right_ = layout.take<real>(H * right_size_);
  words_ = layout.take<real>(H * size_);
  product_ = layout.take<real>(H * size_);
  by_scores_ = layout.take<real>(H * size_);
  by_values_ = layout.take<real>(H * size_);
}

/// to (words, dL) (+)= left^T right, left (rows, words), right (rows, dL).
template <class real>
void EmbeddingGradient<real>::multiply(const real* left, int rows, const real* right, bool add,
                                       real* to) const {
  const int L = kernels_.lanes;
  kernels_.product(
      {{shape_.words, dL_ / L, rows}, {left, padded_}, {right, dL_, L}, {to, dL_, L}, add});
}

template <class real>
void EmbeddingGradient<real>::add_scores(const LoadedModel<real>& model, const real* words,
                                         const real* derivatives, int head) const {
  const int V = shape_.words, d = shape_.d, q = shape_.q, L = kernels_.lanes;
  real* const left = left_ + head * left_size_;
  real* const right = right_ + head * right_size_;
  real* const to = by_scores_ + head * size_;
  if (shape_.shared_query) {
    kernels_.pack_rows(derivatives, V, q, padded_, left);
    kernels_.scale_rows(model.shared_rows(head), real(1), q, d, dL_, right);
    return multiply(left, q, right, false, to);
  }
  real* const rows = words_ + head * size_;
  real* const product = product_ + head * size_;
  kernels_.scale_rows(words, real(1), V, d, dL_, rows);
  kernels_.product({{V, dL_ / L, V}, {derivatives, V}, {rows, dL_, L}, {product, dL_, L}});
  kernels_.pack_rows(product, V, dL_, padded_, left);
  kernels_.pack_rows(model.w(head), d, d, dL_, right);
  multiply(left, d, right, false, to);
  kernels_.pack_rows(derivatives, V, V, padded_, left);
  multiply(left, V, rows, false, product);
  kernels_.pack_rows(product, V, dL_, padded_, left);
  kernels_.scale_rows(model.w(head), real(1), d, d, dL_, right);
  multiply(left, d, right, true, to);
}

template <class real>
void EmbeddingGradient<real>::add_values(const LoadedModel<real>& model, const real* derivatives,
                                         int head) const {
  const Shape& s = shape_;
  real* const left = left_ + head * left_size_;
  real* const right = right_ + head * right_size_;
  kernels_.pack_rows(derivatives, s.words, s.is_layer() ? pL_ : s.q, padded_, left);
  if (s.is_layer())
    kernels_.pack_rows(model.readout(head), s.d, s.p, dL_, right);
  else
    kernels_.scale_rows(model.readout(head), real(1), s.q, s.d, dL_, right);
  multiply(left, s.is_layer() ? s.p : s.q, right, false, by_values_ + head * size_);
}

template <class real>
void EmbeddingGradient<real>::sum(const real* heads, real* to) const {
  for (int a = 0; a < shape_.words; ++a)
    for (int k = 0; k < shape_.d; ++k) {
      real total = 0;
      for (int h = 0; h < shape_.H; ++h) total += heads[h * size_ + std::ptrdiff_t(a) * dL_ + k];
      *to++ = total;
    }
}

template class EmbeddingGradient<float>;
template class EmbeddingGradient<double>;

}  // namespace mhfast
