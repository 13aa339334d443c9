// Gradient descent: theta -= lr g.
#pragma once

#include "step_rule.hpp"

namespace mhfast {

struct GradientDescent : StepRule {
  static constexpr bool kIsLinear = true;
  template <class Math>
  using Step = GradientStep<Math>;
};

}  // namespace mhfast
