// Attention weights of one run, by a single call.
#pragma once

#include "../problem/data.hpp"

namespace mhfast {

/// Attention weights of samples `first` to `last` into out (last - first, H, q, T). Denormal
/// weights are kept.
template <class real>
void attention(const Data<real>& data, const Model<const real*>& model, real scale,
               std::ptrdiff_t first, std::ptrdiff_t last, int threads, real* out);

}  // namespace mhfast
