// Losses of one output, stable at any margin. Arithmetic is double whatever the type of the model.
//
//   logistic log(1 + exp(-m)) · exponential exp(-m) · linear -m,   m = y phi, y = +-1
//   squared  (phi - y)^2
#pragma once

#include <cmath>

namespace mhfast {

enum class Loss { kLogistic, kExponential, kLinear, kSquared };

struct LossTerm {
  double value;
  double slope;      // d value / d phi
  double log_slope;  // log |slope|, finite where slope underflows
};

inline LossTerm loss_term(Loss loss, double phi, double y) {
  const double m = y * phi;
  switch (loss) {
    case Loss::kLogistic: {
      // With t = exp(-|m|): value = max(-m, 0) + log1p(t), |slope| = 1 / (1 + exp(m)).
      const double t = std::exp(-std::fabs(m)), log1p_t = std::log1p(t);
      const double positive = m > 0 ? m : 0;
      return {positive - m + log1p_t, -y * (m > 0 ? t : 1.0) / (1 + t), -positive - log1p_t};
    }
    case Loss::kExponential: {
      const double value = std::exp(-m);
      return {value, -y * value, -m};
    }
    case Loss::kLinear:
      return {-m, -y, 0.0};
    case Loss::kSquared:
      break;
  }
  const double r = phi - y;
  return {r * r, 2 * r, std::log(2 * std::fabs(r))};
}

}  // namespace mhfast
