// f(s) = 1 / (1 + exp(-s)), not divided by the tokens. With t = exp(-|s|), f is 1 / (1 + t) or
// t / (1 + t), and f' = t / (1 + t)^2: no digits cancel on either side.
#pragma once

#include "row_map.hpp"

namespace mhfast::row_maps {

struct Sigmoid {
  static constexpr RowKind kKind = RowKind::kEntries;
  static constexpr bool kByTokens = false;

  template <class Math, class Number = typename Math::Number>
  static Number value(Number s) {
    const Number t = Math::exp(-Math::absolute(s)), one = Number{} + 1;
    return Math::select(s > Number{}, one, t) / (one + t);
  }
  template <class Math, class Number = typename Math::Number>
  static Number derivative(Number s) {
    const Number t = Math::exp(-Math::absolute(s)), sum = t + 1;
    return t / (sum * sum);
  }
  /// f' (1 - 2 f), where 1 - 2 f = (t - 1) / (1 + t) for positive s.
  template <class Math, class Number = typename Math::Number>
  static Number curvature(Number s) {
    const Number t = Math::exp(-Math::absolute(s)), sum = t + 1;
    return t * Math::select(s > Number{}, t - 1, 1 - t) / (sum * sum * sum);
  }
};

}  // namespace mhfast::row_maps
