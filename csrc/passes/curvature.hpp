// Hessian-vector products of the loss.
#pragma once

#include "../problem/data.hpp"

namespace mhfast {

/// Writes the rows of H * tangent that belong to the tensors of `out` that are not null. Tensors of
/// `tangent` that are null are zero. K null: tied, then K of tangent and out are, too.
template <class real>
void hessian_product(const Data<real>& data, const Model<const real*>& model,
                     const Tensors<const real*>& tangent, real scale, Loss loss, int threads,
                     const Tensors<real*>& out);

}  // namespace mhfast
