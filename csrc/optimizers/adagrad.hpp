// AdaGrad: v += g^2;  theta -= lr g / (sqrt(v) + eps).
#pragma once

#include "step_rule.hpp"

namespace mhfast {

struct AdaGrad : StepRule {
  double eps = 1e-10;

  template <class Visit>
  static void fields(const Visit& visit) {
    visit("eps", &AdaGrad::eps);
  }
  static constexpr int kSlots = 1;
  double rate(const AtStep& at) const { return at.lr; }

  template <class Math>
  struct Step {
    using Number = typename Math::Number;
    using Real = typename Math::Real;
    const Number rate, kept;
    const Real eps;

    Step(const AdaGrad& rule, const Factors<Number>& factors)
        : rate(factors.rate), kept(factors.kept), eps(Real(rule.eps)) {}
    /// If eps is 0, a sum of zero makes no step.
    Number operator()(Number theta, Number g, Number& v, Number&) const {
      const Number push = kept * g;
      v = v + push * push;
      return theta - Math::divide(rate * push, Math::root(v) + eps);
    }
  };
};

}  // namespace mhfast
