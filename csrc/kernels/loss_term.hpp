// Losses of one output f, stable at any margin, for whichever numbers Math works on: one number or
// one for each lane.
//
//   logistic log(1 + exp(-m)) · exponential exp(-m) · linear -m,  m = y f, y = +-1
//   squared (f - y)^2
//   given: the derivative itself is given in the place of y
#pragma once

namespace mhfast {

enum class Loss { kLogistic, kExponential, kLinear, kSquared, kCrossEntropy, kGiven };

template <class Number>
struct LossTerm {
  Number value;
  Number slope;      // d value / d f
  Number log_slope;  // log |slope|, finite where slope underflows
};

/// Without `values`, value only tells by being finite or not whether the loss is, and log_slope may
/// be too large by log 2: both are cheaper. Math::log1p is called for numbers from 0 to 1.
template <class Math>
inline LossTerm<typename Math::Number> loss_term(Loss loss, typename Math::Number f,
                                                 typename Math::Number y, bool values) {
  using Number = typename Math::Number;
  const Number m = y * f, zero{};
  switch (loss) {
    case Loss::kLogistic: {
      // With t = exp(-|m|): value = max(-m, 0) + log1p(t), |slope| = 1 / (1 + exp(m)).
      const Number t = Math::exp(-Math::absolute(m)), one = zero + 1.0;
      const Number log1p_t = values ? Math::log1p(t) : 0.0 * m;
      const Number positive = Math::select(m > zero, m, zero);
      return {positive - m + log1p_t, -y * Math::select(m > zero, t, one) / (1.0 + t),
              -positive - log1p_t};
    }
    case Loss::kExponential: {
      const Number value = Math::exp(-m);
      return {value, -y * value, -m};
    }
    case Loss::kLinear:
      return {-m, -y, zero};
    case Loss::kGiven:
      return {zero, y, Math::log(Math::absolute(y))};
    case Loss::kSquared:
    case Loss::kCrossEntropy:
      break;
  }
  const Number r = f - y;
  return {r * r, 2.0 * r, Math::log(2.0 * Math::absolute(r))};
}

}  // namespace mhfast
