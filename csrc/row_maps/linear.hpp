// f(s) = s, divided by the tokens.
#pragma once

#include "row_map.hpp"

namespace mhfast::row_maps {

struct Linear {
  static constexpr RowKind kKind = RowKind::kEntries;
  static constexpr bool kByTokens = true;

  template <class Math, class Number = typename Math::Number>
  static Number value(Number s) {
    return s;
  }
  template <class Math, class Number = typename Math::Number>
  static Number derivative(Number) {
    return Number{} + 1;
  }
  template <class Math, class Number = typename Math::Number>
  static Number curvature(Number) {
    return Number{};
  }
};

}  // namespace mhfast::row_maps
