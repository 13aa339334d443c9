// Logistic loss log(1 + exp(-m)), m = y f. With t = exp(-|m|): value = max(-m, 0) + log1p(t),
// |derivative| = 1 / (1 + exp(m)).
#pragma once

#include "loss.hpp"

namespace mhfast {

struct Logistic {
  static constexpr Targets kTargets = Targets::kSigns;

  template <class Math, class Number = typename Math::Number>
  static LossTerm<Number> term(Number f, Number y, bool values) {
    const Number m = y * f, zero{};
    const Number t = Math::exp(-Math::absolute(m)), one = zero + 1.0;
    const Number log1p_t = values ? Math::log1p(t) : 0.0 * m;
    const Number positive = Math::select(m > zero, m, zero);
    return {positive - m + log1p_t, -y * Math::select(m > zero, t, one) / (1.0 + t),
            -positive - log1p_t};
  }

  template <class Math, class Number = typename Math::Number>
  static Number curvature(Number f, Number y) {
    const Number t = Math::exp(-Math::absolute(y * f));
    return t / ((1.0 + t) * (1.0 + t));
  }
};

}  // namespace mhfast
