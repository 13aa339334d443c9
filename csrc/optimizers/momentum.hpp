// Momentum: v = beta v + g;  theta -= lr v, with Nesterov's lookahead theta -= lr (g + beta v).
#pragma once

#include "step_rule.hpp"

namespace mhfast {

struct Momentum : StepRule {
  double beta = 0.9;
  bool nesterov = false;

  template <class Visit>
  static void fields(const Visit& visit) {
    visit("beta", &Momentum::beta);
    visit("nesterov", &Momentum::nesterov);
  }
  static constexpr int kSlots = 1;
  static constexpr bool kIsLinear = true;
  double rate(const AtStep& at) const { return at.lr; }

  template <class Math>
  struct Step {
    using Number = typename Math::Number;
    const Number rate, kept;
    const typename Math::Real beta;
    const bool nesterov;

    Step(const Momentum& rule, const Factors<Number>& factors)
        : rate(factors.rate),
          kept(factors.kept),
          beta(typename Math::Real(rule.beta)),
          nesterov(rule.nesterov) {}
    Number operator()(Number theta, Number g, Number& v, Number&) const {
      const Number push = kept * g;
      v = beta * v + push;
      return theta - rate * (nesterov ? push + beta * v : v);
    }
  };
};

}  // namespace mhfast
