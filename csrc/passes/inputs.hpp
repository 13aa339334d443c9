// Gradients of the loss by the inputs of a model: its tokens and its query rows.
#pragma once

#include <functional>

#include "../problem/data.hpp"

namespace mhfast {

/// Returns the loss, from the `outputs` of the model, (n,) or (n, q, p), or if these are null from
/// those that `find` writes, unless they are found on the way. gx (n, T, d) and gz (n, q, d) may be
/// null; gx includes the query side of self-attention, of which gz is not asked.
template <class real>
double input_gradients(const Data<real>& data, const Parameters<real>& parameters, Loss loss,
                       const real* outputs, const std::function<void(real*)>& find, int threads,
                       real* gx, real* gz);

/// Whether the next function is there.
template <class real>
bool inputs_find_parameters(const Data<real>& data, Loss loss, const real* gx, const real* gz);

/// The same with the gradients by W and the readout, which may be null, in one pass.
template <class real>
double input_and_parameter_gradients(const Data<real>& data, const Parameters<real>& parameters,
                                     Loss loss, int threads, real* gx, real* gz, real* by_W,
                                     real* by_readout);

}  // namespace mhfast
