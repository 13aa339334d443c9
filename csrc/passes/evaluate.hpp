// Single calls for one run: outputs, loss and gradients.
#pragma once

#include "engine.hpp"

namespace mhfast {

/// Outputs (n,) of a classifier, (n, q, p) of a layer.
template <class real>
void outputs(const Data<real>& data, const Model<const real*>& model, real scale, int threads,
             real* out);

/// Where gradients go: those of the parameters, each in place of its tensor, and of the inputs;
/// null: not requested. The gradient by X includes the query side of self-attention. That by the
/// embedding is of words only, and those by inputs are not.
template <class real>
struct Gradients {
  Tensors<real*> of{};
  real *x = nullptr, *z = nullptr;  // (n, T, d), (n, q, d)

  bool of_parameters() const {
    for (const real* at : of)
      if (at) return true;
    return false;
  }
};

/// Returns the loss.
template <class real>
double value_and_grad(const Data<real>& data, const Model<const real*>& model, real scale,
                      Loss loss, int threads, const Gradients<real>& gradients);

/// Calls body(run, threads) for every run, several at a time if a single one is small: each then
/// uses one thread. Rethrows exceptions of the calls.
void for_runs(std::ptrdiff_t runs, int threads, double flops_of_one,
              const std::function<void(std::ptrdiff_t, int)>& body);

}  // namespace mhfast
