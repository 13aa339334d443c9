#include "head_tensor.hpp"

#include <algorithm>

namespace mhfast {

template <class real>
HeadTensor<real>::HeadTensor(const Kernels<real>& kernels, const Shape& shape)
    : kernels_(kernels),
      shape_(shape),
      sizes_(shape, kernels.lanes),
      dL_(round_up(shape.d, kernels.lanes)) {}

template <class real>
void HeadTensor<real>::lay_out(Arena& layout, int threads) {
  sums_ = layout.take<real>(shape_.d * sizes_.entries * dL_);
  w_ = layout.take<real>(std::size_t(shape_.d) * shape_.H * dL_);
  entries_ = layout.take<real>(sizes_.entries * sizes_.pairs);
  copies_.resize(threads);
  for (real*& copy : copies_) copy = layout.take<real>(sizes_.padded * sizes_.pairs);
}

template <class real>
void HeadTensor<real>::load(const Parameters<real>& parameters, const Member& member) const {
  const int d = shape_.d, p = shape_.p, H = shape_.H, L = kernels_.lanes;
  const std::ptrdiff_t dd = std::ptrdiff_t(d) * d, dp = sizes_.entries;
  for (int a = member.index; a < d; a += member.count) {
    real* const w = w_ + a * H * dL_;
    for (int h = 0; h < H; ++h)
      kernels_.scale_rows(parameters.W + h * dd + std::ptrdiff_t(a) * d, parameters.scale, 1, d,
                          int(dL_), w + h * dL_);
    real* const sums = sums_ + a * dp * dL_;
    kernels_.product({{int(dp), int(dL_) / L, H}, {parameters.V, dp}, {w, dL_, L}, {sums, dL_, L}});
    for (int o = 0; o < p; ++o) {
      real* to = entries_ + (std::ptrdiff_t(a) * p + o) * sizes_.pairs;
      for (int b = 0; b < d; ++b) {
        const auto sum = [&](int c, int column) {
          return sums[(std::ptrdiff_t(c) * p + o) * dL_ + column];
        };
        *to++ = sum(b, b);
        for (int c = b + 1; c < d; ++c) *to++ = sum(b, c) + sum(c, b);
      }
    }
  }
}

template <class real>
const real* HeadTensor<real>::transpose(const Member& member) const {
  real* const copy = copies_[member.index];
  kernels_.pack_rows(entries_, int(sizes_.entries), int(sizes_.pairs), int(sizes_.padded), copy);
  return copy;
}

template <class real>
HeadTensorGradient<real>::HeadTensorGradient(const Kernels<real>& kernels, const Shape& shape)
    : kernels_(kernels),
      shape_(shape),
      sizes_(shape, kernels.lanes),
      dL_(round_up(shape.d, kernels.lanes)) {}

template <class real>
void HeadTensorGradient<real>::lay_out(Arena& layout) {
  const std::size_t H = shape_.H, d = shape_.d, most = std::max<int>(shape_.d, shape_.p);
  pairs_ = layout.take<real>(sizes_.entries * sizes_.pairs);
  full_ = layout.take<real>(sizes_.entries * d * dL_);
  left_ = layout.take<real>(H * d * most);
  out_ = layout.take<real>(H * most * dL_);
}

/// The sum over chunks of the gradient by one entry of M, as a symmetric matrix.
template <class real>
void HeadTensorGradient<real>::sum(const TensorParts<real>& parts, std::ptrdiff_t entry) const {
  const int d = shape_.d;
  real* const summed = pairs_ + entry * sizes_.pairs;
  kernels_.reduce_features(
      {parts.first + entry * sizes_.row, parts.stride, parts.chunks, 1, int(sizes_.pairs), summed});
  const real* pair = summed;
  real* const full = full_ + entry * d * dL_;
  for (int b = 0; b < d; ++b) {
    real* const row = full + b * dL_;
    for (int c = b; c < d; ++c) row[c] = *pair++;
    for (int c = b + 1; c < d; ++c) full[c * dL_ + b] = row[c];
    std::fill(row + d, row + dL_, real(0));
  }
}

/// Of `count` heads from `first` on.
template <class real>
void HeadTensorGradient<real>::reduce_w(const LoadedModel<real>& model, int first, int count,
                                        real* to) const {
  const int d = shape_.d, p = shape_.p, L = kernels_.lanes;
  const std::ptrdiff_t dp = sizes_.entries, most = std::max(d, p), of_entry = d * dL_;
  real* const left = left_ + first * d * most;
  real* const out = out_ + first * most * dL_;
  kernels_.pack_rows(model.readout(first), count, int(dp), count, left);  // [c][o][head]
  kernels_.product({{count, int(dL_) / L, d, p, d},
                    {left, std::ptrdiff_t(p) * count, count},
                    {full_, dL_, L, of_entry, p * of_entry},
                    {out, of_entry, L, dL_}});
  for (int h = 0; h < count; ++h)
    for (int a = 0; a < d; ++a) {
      const real* const from = out + h * of_entry + a * dL_;
      real* const row = to + (std::ptrdiff_t(first + h) * d + a) * d;
      for (int b = 0; b < d; ++b) row[b] = model.scale() * from[b];
    }
}

template <class real>
void HeadTensorGradient<real>::reduce_v(const LoadedModel<real>& model, int first, int count,
                                        real* to) const {
  const int d = shape_.d, p = shape_.p, L = kernels_.lanes;
  const std::ptrdiff_t dd = std::ptrdiff_t(d) * d, most = std::max(d, p), of_entry = d * dL_;
  real* const left = left_ + first * d * most;
  real* const out = out_ + first * most * dL_;
  kernels_.pack_rows(model.w(first), count, int(dd), count, left);  // [a][b][head]
  kernels_.product({{count, int(dL_) / L, d, d, p},
                    {left, count, std::ptrdiff_t(d) * count},
                    {full_, dL_, L, p * of_entry, of_entry},
                    {out, p * dL_, L, dL_}});
  for (int h = 0; h < count; ++h)
    for (int o = 0; o < p; ++o) {
      const real* const from = out + (std::ptrdiff_t(h) * p + o) * dL_;
      real* const column = to + std::ptrdiff_t(first + h) * d * p + o;
      for (int c = 0; c < d; ++c) column[std::ptrdiff_t(c) * p] = from[c];
    }
}

template <class real>
void HeadTensorGradient<real>::reduce(const LoadedModel<real>& model,
                                      const TensorParts<real>& parts, real* W, real* V,
                                      const Member& member) const {
  for (std::ptrdiff_t entry = member.index; entry < sizes_.entries; entry += member.count)
    sum(parts, entry);
  member.wait();
  const int first = shape_.H * member.index / member.count;
  const int count = shape_.H * (member.index + 1) / member.count - first;
  if (W && count > 0) reduce_w(model, first, count, W);
  if (V && count > 0) reduce_v(model, first, count, V);
  member.wait();
}

template class HeadTensor<float>;
template class HeadTensor<double>;
template class HeadTensorGradient<float>;
template class HeadTensorGradient<double>;

}  // namespace mhfast
