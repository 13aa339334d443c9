// Cross entropy of a row of outputs, log sum_o exp(f_o) - f_y with y the class. The derivative is
// P - onehot(y), P = softmax(f). With smoothing s of the labels, the class has probability
// 1 - s + s / p in place of 1 and every other output s / p.
//
// The other classes are summed separately from the true one, so that a small loss keeps its digits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "likelihood.hpp"

namespace mhfast {

struct CrossEntropy {
  static constexpr Targets kTargets = Targets::kClasses;
  static constexpr const char* kParameter = "smoothing";
  double smoothing = 0;  // at least 0, below 1

  /// y[0] is the class. Calls emit(o, d value / d f_o) for every output.
  template <class real, class Emit>
  RowLoss row(const real* f, const real* y, std::ptrdiff_t stride, int p, const Emit& emit) const {
    const int label = int(y[0]);
    if (smoothing > 0) {
      const double each = smoothing / p;
      return likelihood_row(
          f, stride, p, label, [=](int o) { return o == label ? 1 - smoothing + each : each; },
          emit);
    }
    const double of_class = double(f[label * stride]);
    double other = -HUGE_VAL;
    for (int o = 0; o < p; ++o)
      if (o != label) other = std::max(other, double(f[o * stride]));
    const double largest = std::max(other, of_class), own = std::exp(of_class - largest);
    double rest = 0;
    for (int o = 0; o < p; ++o)
      if (o != label) rest += std::exp(double(f[o * stride]) - largest);
    const double sum = own + rest;
    for (int o = 0; o < p; ++o)
      emit(o, o == label ? -rest / sum : std::exp(double(f[o * stride]) - largest) / sum);
    const double value =
        own > 0.5 * sum ? std::log1p(rest / own) : std::log(sum) + (largest - of_class);
    return {value, of_class > other ? 1.0 : 0.0, of_class - other};
  }

  /// Calls emit(o, change of the derivative by f_o as the outputs change by df).
  template <class real, class Emit>
  static void derivative_tangents(const real* f, const real* df, const real*, std::ptrdiff_t stride,
                                  int p, const Emit& emit) {
    move_softmax(f, df, stride, p, 1.0, emit);
  }
};

}  // namespace mhfast
