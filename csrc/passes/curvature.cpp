// Hessian-vector products of the loss: what is done around those of a classifier or a layer.
#include "curvature.hpp"

#include <optional>
#include <vector>

#include "../problem/alike_heads.hpp"
#include "../problem/clean.hpp"
#include "../problem/factors.hpp"
#include "../problem/rescale.hpp"
#include "classifier_hessian.hpp"
#include "evaluate.hpp"
#include "layer_hessian.hpp"
#include "loadable_model.hpp"
#include "own_loss.hpp"
#include "triangular.hpp"

namespace mhfast {
namespace {

/// With V as it is; `by_V`: the gradient by it, or null.
template <class real>
void product_of_dense(const Data<real>& data, const Model<const real*>& given_model,
                      const Tensors<const real*>& tangent, real scale, Loss loss, int threads,
                      const Tensors<real*>& out, real* by_V) {
  AlikeHeads<real> heads(data, given_model);
  const Model<const real*>& model = heads.model();
  const CleanData<real> clean(heads.data(), 1);
  const Shape& s = heads.data().shape;
  const bool tied = model.is_tied();
  const Exponents exponents = exponents_of_call(*clean, model, true);
  const RescaledData<real> scaled_data(*clean, 1, exponents);
  const RescaledTensors<real> tensors(model.at, s, model.rank, tied, exponents);
  const RescaledTensors<real> tangents(heads.merged(tangent), s, model.rank, tied, exponents);
  const Model<const real*> scaled_model{*tensors, model.rank};
  std::optional<OwnLossResults> own;
  if (loss.own) {
    std::vector<real> f(s.n * s.outputs());
    outputs(*clean, model, scale, threads, f.data());
    own.emplace(*clean, *loss.own, f.data(), true);
    if (!own->succeeded()) return;
    loss.results = &*own;
  }
  const CheaperKeys<real> keys(*scaled_data, TriangleUse::kGradient, threads);
  CallScratch scratch;
  const HessianCall<real> call{*keys,   scaled_model, *tangents, scale,           loss,
                               threads, out,          by_V,      scratch.engine()};
  if (s.is_layer())
    LayerHessian<real>(call).run();
  else
    ClassifierHessian<real>(call).run();
  for (int name = 0; name < kTensors && exponents.any(); ++name)
    if (out[name])
      scale_by_power(out[name], extent(TensorName(name), s, model.rank).all(),
                     exponents.of(TensorName(name), tied), out[name]);
  heads.spread(out);
  if (!by_V) return;
  scale_by_power(by_V, extent(kV, s, 0).all(), exponents.of(kV, tied), by_V);
  Tensors<real*> gradient{};
  gradient[kV] = by_V;
  heads.spread(gradient);
}

/// That of V = A B: H. = V' of the dense product for V. = A. B + A B., and by the factors
/// V' B^T + G B.^T and A^T V' + A.^T G, where G is the gradient by V.
template <class real>
void product_by_values(const Data<real>& data, const Model<const real*>& model,
                       const Tensors<const real*>& tangent, real scale, Loss loss, int threads,
                       const Tensors<real*>& out) {
  const Kernels<real>& kernels = active_kernels<real>();
  const Shape& s = data.shape;
  const real *A = model.at[kValueA], *B = model.at[kValueB], *dA = tangent[kValueA],
             *dB = tangent[kValueB];
  const std::ptrdiff_t size = extent(kV, s, 0).all();
  std::vector<real> value(size), moving(dA || dB ? size : 0);
  for (int h = 0; h < s.H; ++h) {
    compose_values(kernels, s, A, B, h, 1, value.data());
    if (dA) compose_values(kernels, s, dA, B, h, 1, moving.data());
    if (dB) compose_values(kernels, s, A, dB, h, 1, moving.data(), dA != nullptr);
  }
  Model<const real*> dense = model;
  Tensors<const real*> along = tangent;
  Tensors<real*> to = out;
  for (const TensorName name : {kValueA, kValueB}) {
    dense.at[name] = along[name] = nullptr;
    to[name] = nullptr;
  }
  dense.at[kV] = value.data();
  if (dA || dB) along[kV] = moving.data();
  std::vector<real> change(out[kValueA] || out[kValueB] ? size : 0);
  real* const by_A = dB ? out[kValueA] : nullptr;
  real* const by_B = dA ? out[kValueB] : nullptr;
  std::vector<real> gradient(by_A || by_B ? size : 0);
  if (!change.empty()) to[kV] = change.data();
  product_of_dense(data, dense, along, scale, loss, threads, to,
                   gradient.empty() ? nullptr : gradient.data());
  for (int h = 0; h < s.H && !change.empty(); ++h)
    differentiate_values(kernels, s, A, B, change.data(), h, 1, out[kValueA], out[kValueB]);
  for (int h = 0; h < s.H && !gradient.empty(); ++h)
    differentiate_values(kernels, s, dA, dB, gradient.data(), h, 1, by_A, by_B, true);
}

}  // namespace

template <class real>
void hessian_product(const Data<real>& data, const Model<const real*>& model,
                     const Tensors<const real*>& tangent, real scale, Loss loss, int threads,
                     const Tensors<real*>& out) {
  if (model.has_factored_values())
    return product_by_values(data, model, tangent, scale, loss, threads, out);
  product_of_dense<real>(data, model, tangent, scale, loss, threads, out, nullptr);
}

template void hessian_product<float>(const Data<float>&, const Model<const float*>&,
                                     const Tensors<const float*>&, float, Loss, int,
                                     const Tensors<float*>&);
template void hessian_product<double>(const Data<double>&, const Model<const double*>&,
                                      const Tensors<const double*>&, double, Loss, int,
                                      const Tensors<double*>&);

}  // namespace mhfast
