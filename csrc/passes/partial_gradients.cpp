#include "partial_gradients.hpp"

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
      part_(partial_gradient(shape, plan.kind, kernels.lanes)) {}

template <class real>
void PartialGradients<real>::lay_out(Arena& layout) {
  const Shape& s = shape_;
  if (!options_.gradient) return;
  partial_ = layout.take<real>(chunks_ * part_.size);
  shared_ = layout.take<real>(s.shared_query ? std::size_t(s.H) * s.q * s.d * width_ : 0);
}

template <class real>
void PartialGradients<real>::sum_chunks(const real* partial, int rows, int columns,
                                        real* out) const {
  if (width_ > 1) {  // runs: each block of them is one chunk
    std::copy_n(partial, std::ptrdiff_t(rows) * columns * width_, out);
    return;
  }
  (features_are_lanes_ ? kernels_.reduce_features : kernels_.reduce_samples)(
      {partial, part_.size, chunks_, rows, columns, out});
}

template <class real>
void PartialGradients<real>::reduce(const LoadedModel<real>& model, const GradientOut<real>& to,
                                    const Member& member) const {
  const Shape& s = shape_;
  const std::ptrdiff_t dd = std::ptrdiff_t(s.d) * s.d, qd = std::ptrdiff_t(s.q) * s.d;
  for (int h = member.index; h < s.H; h += member.count) {
    if (s.shared_query && options_.wrt_W) {
      real* e = shared_ + h * qd * width_;
      sum_chunks(weight(0, h), s.q, s.d, e);
      if (to.W)
        kernels_.batched_gemm({s.d, s.d, s.q, width_, model.prompt(), 1, s.d, e, s.d, 1,
                               to.W + h * dd * width_, s.d, 1, model.scale(), false});
    } else if (to.W) {
      real* out = to.W + h * dd * width_;
      sum_chunks(weight(0, h), s.d, s.d, out);
      if (model.scale() != real(1))
        for (std::ptrdiff_t i = 0; i < dd * width_; ++i) out[i] *= model.scale();
    }
    if (to.readout)
      sum_chunks(readout(0, h), of_.rows, of_.columns,
                 to.readout + std::ptrdiff_t(h) * of_.rows * of_.columns * width_);
  }
  if (!to.prompt) return;
  member.wait();
  if (member.index > 0) return;
  for (int h = 0; s.identity_w && h < s.H; ++h)
    for (std::ptrdiff_t i = 0; i < qd * width_; ++i)
      to.prompt[i] =
          (h > 0 ? to.prompt[i] : real(0)) + model.scale() * shared_[h * qd * width_ + i];
  for (int h = 0; !s.identity_w && h < s.H; ++h)
    kernels_.batched_gemm({s.q, s.d, s.d, width_, shared_ + h * qd * width_, s.d, 1, model.w(h), 1,
                           s.d, to.prompt, s.d, 1, real(1), h > 0});
}

template class PartialGradients<float>;
template class PartialGradients<double>;

}  // namespace mhfast
