// RMSProp: v = beta v + (1 - beta) g^2;  b = momentum b + g / (sqrt(v) + eps);  theta -= lr b.
#pragma once

#include "step_rule.hpp"

namespace mhfast {

struct RMSProp : StepRule {
  double beta = 0.99, eps = 1e-8, momentum = 0;

  template <class Visit>
  static void fields(const Visit& visit) {
    visit("beta", &RMSProp::beta);
    visit("eps", &RMSProp::eps);
    visit("momentum", &RMSProp::momentum);
  }
  static constexpr int kSlots = 2;
  double rate(const AtStep& at) const { return at.lr; }

  template <class Math>
  struct Step {
    using Number = typename Math::Number;
    using Real = typename Math::Real;
    const Number rate, kept;
    const Real beta, rest, eps, momentum;

    Step(const RMSProp& rule, const Factors<Number>& factors)
        : rate(factors.rate),
          kept(factors.kept),
          beta(Real(rule.beta)),
          rest(Real(1 - rule.beta)),
          eps(Real(rule.eps)),
          momentum(Real(rule.momentum)) {}
    /// If eps is 0, a mean square of zero makes no step.
    Number operator()(Number theta, Number g, Number& v, Number& b) const {
      const Number push = kept * g;
      v = beta * v + rest * (push * push);
      b = momentum * b + Math::divide(push, Math::root(v) + eps);
      return theta - rate * b;
    }
  };
};

}  // namespace mhfast
