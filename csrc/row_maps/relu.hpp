// f(s) = max(s, 0), divided by the tokens. At s = 0 the derivative is 0.
#pragma once

#include "row_map.hpp"

namespace mhfast::row_maps {

struct Relu {
  static constexpr RowKind kKind = RowKind::kEntries;
  static constexpr bool kByTokens = true;

  template <class Math, class Number = typename Math::Number>
  static Number value(Number s) {
    return Math::select(s <= Number{}, Number{}, s);
  }
  template <class Math, class Number = typename Math::Number>
  static Number derivative(Number s) {
    return Math::select(s > Number{}, Number{} + 1, Math::select(s <= Number{}, Number{}, s));
  }
  template <class Math, class Number = typename Math::Number>
  static Number curvature(Number) {
    return Number{};
  }
};

}  // namespace mhfast::row_maps
