// Cross entropy of a row of outputs and a row of probabilities y, sum_o y_o (log sum_k exp(f_k) -
// f_o). The first of the likeliest targets counts as the class of the row.
#pragma once

#include "likelihood.hpp"

namespace mhfast {

struct SoftCrossEntropy {
  static constexpr Targets kTargets = Targets::kProbabilities;

  template <class real, class Emit>
  static RowLoss row(const real* f, const real* y, std::ptrdiff_t stride, int p, const Emit& emit) {
    int label = 0;
    for (int o = 1; o < p; ++o)
      if (y[o * stride] > y[label * stride]) label = o;
    return likelihood_row(f, stride, p, label, [=](int o) { return double(y[o * stride]); }, emit);
  }

  template <class real, class Emit>
  static void derivative_tangents(const real* f, const real* df, const real* y,
                                  std::ptrdiff_t stride, int p, const Emit& emit) {
    double total = 0;
    for (int o = 0; o < p; ++o) total += double(y[o * stride]);
    move_softmax(f, df, stride, p, total, emit);
  }
};

}  // namespace mhfast
