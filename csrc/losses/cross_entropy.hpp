// Cross entropy of a row of outputs, log sum_o exp(f_o) - f_y with y the class.
//
// The other classes are summed apart from the own one, so that a small loss keeps its digits. The
// derivative is P - onehot(y), P = softmax(f), and along df it changes by P (df - sum(P df)), the
// differences of df being taken from the likeliest output's.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "loss.hpp"

namespace mhfast {

struct CrossEntropy {
  static constexpr Targets kTargets = Targets::kClasses;

  /// y[0] is the class. Calls emit(o, d value / d f_o) for every output.
  template <class real, class Emit>
  static RowLoss row(const real* f, const real* y, std::ptrdiff_t stride, int p, const Emit& emit) {
    const int label = int(y[0]);
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

  /// Calls emit(o, change of the derivative by f_o as the outputs move by df).
  template <class real, class Emit>
  static void move_slopes(const real* f, const real* df, std::ptrdiff_t stride, int p,
                          const Emit& emit) {
    double largest = -HUGE_VAL, sum = 0, mean = 0, centre = 0;
    for (int o = 0; o < p; ++o)
      if (double(f[o * stride]) > largest) {
        largest = double(f[o * stride]);
        centre = double(df[o * stride]);
      }
    for (int o = 0; o < p; ++o) {
      const double e = std::exp(double(f[o * stride]) - largest);
      sum += e;
      mean += e * (double(df[o * stride]) - centre);
    }
    mean /= sum;
    for (int o = 0; o < p; ++o)
      emit(o, std::exp(double(f[o * stride]) - largest) / sum *
                  ((double(df[o * stride]) - centre) - mean));
  }
};

}  // namespace mhfast
