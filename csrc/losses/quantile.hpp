// Quantile loss of r = f - y: (1 - level) r where the output is too large and -level r where it is
// too small. At the kink r = 0 the derivative is 0, one of its subgradients; the curvature is 0
// everywhere.
#pragma once

#include "loss.hpp"

namespace mhfast {

struct Quantile {
  static constexpr Targets kTargets = Targets::kReals;
  static constexpr const char* kParameter = "level";
  double level = 0.5;  // between 0 and 1

  template <class Math, class Number = typename Math::Number>
  LossTerm<Number> term(Number f, Number y, bool) const {
    const Number r = f - y, above = Number{} + (1.0 - level), below = Number{} - level;
    const Number derivative = Math::select(r > 0.0, above, Math::select(r < 0.0, below, r));
    return {Math::select(r < 0.0, below, above) * r, derivative,
            Math::log(Math::absolute(derivative))};
  }

  template <class Math, class Number = typename Math::Number>
  static Number curvature(Number, Number) {
    return Number{};
  }
};

}  // namespace mhfast
