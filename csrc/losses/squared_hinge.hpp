// Squared hinge loss max(0, 1 - m)^2, m = y f.
#pragma once

#include "loss.hpp"

namespace mhfast {

struct SquaredHinge {
  static constexpr Targets kTargets = Targets::kSigns;

  template <class Math, class Number = typename Math::Number>
  static LossTerm<Number> term(Number f, Number y, bool) {
    const Number lack = lack_of<Math>(f, y);
    return {lack * lack, -2.0 * y * lack, Math::log(2.0 * lack)};
  }

  template <class Math, class Number = typename Math::Number>
  static Number curvature(Number f, Number y) {
    return Math::select(y * f >= 1.0, Number{}, Number{} + 2.0);
  }

 private:
  /// max(0, 1 - m); NaN of a NaN.
  template <class Math, class Number>
  static Number lack_of(Number f, Number y) {
    const Number m = y * f;
    return Math::select(m >= 1.0, Number{}, 1.0 - m);
  }
};

}  // namespace mhfast
