// Huber's loss of r = f - y: r^2 / 2 up to |r| = delta and delta (|r| - delta / 2) beyond. The
// derivative is continuous, the curvature 1 up to delta, included, and 0 beyond.
#pragma once

#include "loss.hpp"

namespace mhfast {

struct Huber {
  static constexpr Targets kTargets = Targets::kReals;
  static constexpr const char* kParameter = "delta";
  double delta = 1;  // above 0

  template <class Math, class Number = typename Math::Number>
  LossTerm<Number> term(Number f, Number y, bool) const {
    const Number r = f - y, size = Math::absolute(r), most = Number{} + delta;
    const Number derivative = Math::select(r > delta, most, Math::select(r < -delta, -most, r));
    return {Math::select(size <= delta, 0.5 * r * r, delta * (size - 0.5 * delta)), derivative,
            Math::log(Math::absolute(derivative))};
  }

  template <class Math, class Number = typename Math::Number>
  Number curvature(Number f, Number y) const {
    return Math::select(Math::absolute(f - y) <= delta, Number{} + 1.0, Number{});
  }
};

}  // namespace mhfast
