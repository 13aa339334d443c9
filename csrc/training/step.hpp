// One step of an optimizer on tensors whose gradients the caller has, for models of which the loop
// of a training knows nothing.
#pragma once

#include <vector>

#include "descent.hpp"

namespace mhfast {

/// From theta_step to theta_{step + 1}, in place, on the calling thread; the gradients are used up.
/// Several tensors may have one name, whose settings they then share. `loss`: that of theta_step,
/// which some rules ask for.
template <class real>
void take_step(const Optimizer& optimizer, const std::vector<Trained<real>>& tensors,
               std::int64_t step, double loss);

}  // namespace mhfast
