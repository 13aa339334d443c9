// Mirror descent with the potential |theta|_p^p / p, entry by entry:
//
//   s = sign(theta) |theta|^(p - 1) - lr g;  theta = sign(s) |s|^(1 / (p - 1))
//
// A normalized step divides g by its dual norm, that of power p / (p - 1).
#pragma once

#include "step_rule.hpp"

namespace mhfast {

struct MirrorDescent : StepRule {
  double p = 2;
  bool normalized = false;
  Scope by = Scope::kTensor;

  template <class Visit>
  static void fields(const Visit& visit) {
    visit("p", &MirrorDescent::p);
    visit("normalized", &MirrorDescent::normalized);
    visit("by", &MirrorDescent::by);
  }
  bool normalizes() const { return normalized; }
  bool ignores_scale() const { return normalized; }
  Scope norm_scope() const { return by; }
  double norm_power() const { return p / (p - 1); }

  template <class Math>
  struct Step {
    using Number = typename Math::Number;
    const Number rate;
    const double power;

    Step(const MirrorDescent& rule, const Factors<Number>& factors)
        : rate(factors.rate), power(rule.p) {}
    Number operator()(Number theta, Number g, Number&, Number&) const {
      return Math::signed_power(Math::signed_power(theta, power - 1) - rate * g, 1 / (power - 1));
    }
  };
};

}  // namespace mhfast
