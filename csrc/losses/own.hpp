// The caller's own loss, whose values and derivatives a function computes, see
// problem/own_loss.hpp. It is not a formula that kernels could take.
#pragma once

#include "loss.hpp"

namespace mhfast {

struct Own {
  static constexpr Targets kTargets = Targets::kOwn;
};

}  // namespace mhfast
