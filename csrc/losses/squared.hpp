// Squared loss (f - y)^2, without a factor 1/2.
#pragma once

#include "loss.hpp"

namespace mhfast {

struct Squared {
  static constexpr Targets kTargets = Targets::kReals;

  template <class Math, class Number = typename Math::Number>
  static LossTerm<Number> term(Number f, Number y, bool) {
    const Number r = f - y;
    return {r * r, 2.0 * r, Math::log(2.0 * Math::absolute(r))};
  }

  template <class Math, class Number = typename Math::Number>
  static Number curvature(Number, Number) {
    return Number{} + 2.0;
  }
};

}  // namespace mhfast
