// Correlation loss -y f for any real targets; for labels it is the linear loss.
#pragma once

#include "loss.hpp"

namespace mhfast {

struct Correlation {
  static constexpr Targets kTargets = Targets::kReals;

  template <class Math, class Number = typename Math::Number>
  static LossTerm<Number> term(Number f, Number y, bool) {
    return {-(y * f), -y, Math::log(Math::absolute(y))};
  }

  template <class Math, class Number = typename Math::Number>
  static Number curvature(Number, Number) {
    return Number{};
  }
};

}  // namespace mhfast
