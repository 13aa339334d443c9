// Single calls: outputs, loss and gradients, attention weights.
#pragma once

#include "engine.hpp"

namespace mhfast {

template <class real>
void outputs(const Data<real>& data, const Parameters<real>& parameters, int threads, real* out);

/// Returns the loss; gW (H, d, d) and gU (H, q, d) may be null.
template <class real>
double value_and_grad(const Data<real>& data, const Parameters<real>& parameters, Loss loss,
                      int threads, real* gW, real* gU);

/// Attention weights of samples `first` to `last` into out (last - first, H, q, T). Denormal
/// weights are kept.
template <class real>
void attention(const Data<real>& data, const real* W, real scale, std::ptrdiff_t first,
               std::ptrdiff_t last, int threads, real* out);

}  // namespace mhfast
