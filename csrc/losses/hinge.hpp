// Hinge loss max(0, 1 - m), m = y f. At the kink m = 1 the derivative is 0, one of its
// subgradients; the curvature is 0 everywhere.
#pragma once

#include "loss.hpp"

namespace mhfast {

struct Hinge {
  static constexpr Targets kTargets = Targets::kSigns;

  template <class Math, class Number = typename Math::Number>
  static LossTerm<Number> term(Number f, Number y, bool) {
    const Number m = y * f, zero{};
    const Number derivative = Math::select(m < 1.0, -y, m);  // of NaN, NaN
    return {Math::select(m >= 1.0, zero, 1.0 - m), Math::select(m >= 1.0, zero, derivative),
            Math::select(m >= 1.0, zero - __builtin_huge_val(), zero)};
  }

  template <class Math, class Number = typename Math::Number>
  static Number curvature(Number, Number) {
    return Number{};
  }
};

}  // namespace mhfast
