// Adam, with AdamW's decay. At step k + 1 of its moments:
//
//   m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
//   theta -= lr weight_decay theta
//   theta -= lr m / (1 - beta1^(k+1)) / (sqrt(v / (1 - beta2^(k+1))) + eps)
#pragma once

#include <cmath>

#include "step_rule.hpp"

namespace mhfast {

struct Adam : StepRule {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;

  template <class Visit>
  static void fields(const Visit& visit) {
    visit("beta1", &Adam::beta1);
    visit("beta2", &Adam::beta2);
    visit("eps", &Adam::eps);
    visit("weight_decay", &Adam::weight_decay);
  }
  static constexpr int kSlots = 2;
  // The correction of the bias of moments that start at zero.
  double rate(const AtStep& at) const { return at.lr * (1 / (1 - std::pow(beta1, at.taken))); }
  double own(const AtStep& at) const { return 1 / std::sqrt(1 - std::pow(beta2, at.taken)); }
  double decay(const AtStep& at) const { return at.lr * weight_decay; }

  template <class Math>
  struct Step {
    using Number = typename Math::Number;
    using Real = typename Math::Real;
    const Number rate, kept, decay, scale;
    const Real beta1, rest1, beta2, rest2, eps;

    Step(const Adam& rule, const Factors<Number>& factors)
        : rate(factors.rate),
          kept(factors.kept),
          decay(factors.decay),
          scale(factors.own),
          beta1(Real(rule.beta1)),
          rest1(Real(1 - rule.beta1)),
          beta2(Real(rule.beta2)),
          rest2(Real(1 - rule.beta2)),
          eps(Real(rule.eps)) {}
    /// If eps is 0, a second moment of zero makes no step.
    Number operator()(Number theta, Number g, Number& m, Number& v) const {
      const Number push = kept * g;
      m = beta1 * m + rest1 * push;
      v = beta2 * v + rest2 * (push * push);
      return (theta - decay * theta) - Math::divide(rate * m, Math::root(v) * scale + eps);
    }
  };
};

}  // namespace mhfast
