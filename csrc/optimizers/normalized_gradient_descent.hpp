// Normalized gradient descent: theta -= lr g / (|g| + eps), the norm that of a tensor, a head or
// all.
#pragma once

#include "step_rule.hpp"

namespace mhfast {

struct NormalizedGradientDescent : StepRule {
  double eps = 0;
  Scope by = Scope::kTensor;

  template <class Visit>
  static void fields(const Visit& visit) {
    visit("eps", &NormalizedGradientDescent::eps);
    visit("by", &NormalizedGradientDescent::by);
  }
  bool normalizes() const { return true; }
  bool ignores_scale() const { return true; }
  Scope norm_scope() const { return by; }
  double norm_eps() const { return eps; }

  template <class Math>
  using Step = GradientStep<Math>;
};

}  // namespace mhfast
