// Sign descent: theta -= lr sign(g), entry by entry, with sign(0) = 0. The size of the gradient
// does not matter, so that clipping changes nothing, and heads whose gradients are far too small
// for the number format step like others.
#pragma once

#include "step_rule.hpp"

namespace mhfast {

struct SignDescent : StepRule {
  bool ignores_scale() const { return true; }
  Scope norm_scope() const { return Scope::kHead; }
  double rate(const AtStep& at) const { return at.lr; }

  template <class Math>
  struct Step {
    using Number = typename Math::Number;
    const Number rate;

    Step(const SignDescent&, const Factors<Number>& factors) : rate(factors.rate) {}
    Number operator()(Number theta, Number g, Number&, Number&) const {
      return theta - rate * Math::sign(g);
    }
  };
};

}  // namespace mhfast
