// The caller's own loss, of which only the derivative by each output is given, in place of y.
// Its value is 0 and it counts every sample once.
#pragma once

#include "loss.hpp"

namespace mhfast {

struct Cotangent {
  static constexpr Targets kTargets = Targets::kDerivatives;

  template <class Math, class Number = typename Math::Number>
  static LossTerm<Number> term(Number, Number y, bool) {
    return {Number{}, y, Math::log(Math::absolute(y))};
  }

  template <class Math, class Number = typename Math::Number>
  static Number curvature(Number, Number) {
    return Number{};
  }
};

}  // namespace mhfast
