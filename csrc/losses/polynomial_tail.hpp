// Loss with a polynomial tail, (1 + m)^-a for margins m = y f of at least 0 and its tangent 1 - a m
// below. The derivative is continuous; the curvature at m = 0 is that from above.
#pragma once

#include "loss.hpp"

namespace mhfast {

struct PolynomialTail {
  static constexpr Targets kTargets = Targets::kSigns;
  static constexpr const char* kParameter = "exponent";
  double exponent = 1;  // a, above 0

  template <class Math, class Number = typename Math::Number>
  LossTerm<Number> term(Number f, Number y, bool) const {
    const Number m = y * f, base = base_of<Math>(m), one = Number{} + 1.0;
    const Number tail = Math::power(base, -exponent);
    return {Math::select(m < 0.0, 1.0 - exponent * m, tail),
            -y * (exponent * Math::select(m < 0.0, one, tail / base)),
            __builtin_log(exponent) - (exponent + 1) * Math::log(base)};
  }

  template <class Math, class Number = typename Math::Number>
  Number curvature(Number f, Number y) const {
    const Number m = y * f, base = base_of<Math>(m);
    const Number tail = Math::power(base, -exponent);
    return Math::select(m < 0.0, Number{}, exponent * (exponent + 1) * tail / base / base);
  }

 private:
  /// 1 + max(m, 0); NaN of a NaN.
  template <class Math, class Number>
  static Number base_of(Number m) {
    return 1.0 + Math::select(m < 0.0, Number{}, m);
  }
};

}  // namespace mhfast
