// Exponentiated gradient for entries of any sign, entry by entry, with s = lr g:
//
//   theta = scale sinh(arcsinh(theta / scale) - s);   scale 0: theta = theta exp(-sign(theta) s)
//
// Mirror descent with the hyperbolic entropy of Ghai, Hazan and Singer: multiplicative for entries
// far above the scale, gradient descent of step size lr scale for those far below.
#pragma once

#include "step_rule.hpp"

namespace mhfast {

struct ExponentiatedGradient : StepRule {
  double scale = 0;

  template <class Visit>
  static void fields(const Visit& visit) {
    visit("scale", &ExponentiatedGradient::scale);
  }

  template <class Math>
  struct Step {
    using Number = typename Math::Number;
    const Number rate;
    const double scale;

    Step(const ExponentiatedGradient& rule, const Factors<Number>& factors)
        : rate(factors.rate), scale(rule.scale) {}
    Number operator()(Number theta, Number g, Number&, Number&) const {
      return Math::multiplied(theta, rate * g, scale);
    }
  };
};

}  // namespace mhfast
