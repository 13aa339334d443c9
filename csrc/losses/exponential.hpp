// Exponential loss exp(-m), m = y f.
#pragma once

#include "loss.hpp"

namespace mhfast {

struct Exponential {
  static constexpr Targets kTargets = Targets::kSigns;

  template <class Math, class Number = typename Math::Number>
  static LossTerm<Number> term(Number f, Number y, bool) {
    const Number m = y * f, value = Math::exp(-m);
    return {value, -y * value, -m};
  }

  template <class Math, class Number = typename Math::Number>
  static Number curvature(Number f, Number y) {
    return Math::exp(-(y * f));
  }
};

}  // namespace mhfast
