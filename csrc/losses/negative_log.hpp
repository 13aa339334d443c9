// Negative logarithm -y log f, y >= 0, of outputs that are above 0, such as probabilities: with
// y = 1 it is -log f. Where y is 0 it is 0 whatever f is; elsewhere infinite at f = 0, and below,
// where it has no derivative.
#pragma once

#include "loss.hpp"

namespace mhfast {

struct NegativeLog {
  static constexpr Targets kTargets = Targets::kNonnegative;

  template <class Math, class Number = typename Math::Number>
  static LossTerm<Number> term(Number f, Number y, bool) {
    const Number zero{}, infinite = zero + __builtin_huge_val();
    const Number value =
        Math::select(f > 0.0, -y * Math::log(f), Math::select(f <= 0.0, infinite, f));
    const Number derivative = Math::select(f >= 0.0, -y / f, zero + __builtin_nan(""));
    return {Math::select(y <= 0.0, zero, value), Math::select(y <= 0.0, zero, derivative),
            Math::select(y <= 0.0, -infinite, Math::log(y) - Math::log(f))};
  }

  template <class Math, class Number = typename Math::Number>
  static Number curvature(Number f, Number y) {
    return Math::select(y <= 0.0, Number{}, y / f / f);
  }
};

}  // namespace mhfast
