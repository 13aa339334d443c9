// Linear loss -m, m = y f.
#pragma once

#include "loss.hpp"

namespace mhfast {

struct Linear {
  static constexpr Targets kTargets = Targets::kSigns;

  template <class Math, class Number = typename Math::Number>
  static LossTerm<Number> term(Number f, Number y, bool) {
    const Number m = y * f;
    return {-m, -y, Number{}};
  }

  template <class Math, class Number = typename Math::Number>
  static Number curvature(Number, Number) {
    return Number{};
  }
};

}  // namespace mhfast
