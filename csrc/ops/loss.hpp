// Losses of single outputs and of rows. Arithmetic is double whatever the type of the model.
//
//   of a row, beside those of loss_term.hpp: cross entropy log sum_o exp(f_o) - f_y, y the class
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "../kernels/loss_term.hpp"

namespace mhfast {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct ScalarMath {
  using Number = double;
  static double exp(double x) { return std::exp(x); }
  static double log1p(double x) { return std::log1p(x); }
  static double log(double x) { return std::log(x); }
  static double absolute(double x) { return std::fabs(x); }
  static double select(bool mask, double yes, double no) { return mask ? yes : no; }
};

/// d slope / d f.
inline double curvature(Loss loss, double f, double y) {
  const double m = y * f;
  switch (loss) {
    case Loss::kLogistic: {
      const double t = std::exp(-std::fabs(m));
      return t / ((1 + t) * (1 + t));
    }
    case Loss::kExponential:
      return std::exp(-m);
    case Loss::kSquared:
      return 2;
    case Loss::kLinear:
    case Loss::kGiven:
    case Loss::kCrossEntropy:
      break;
  }
  return 0;
}

/// Loss of one row of outputs f[0], f[stride], ..., and what its labels say of it.
struct RowLoss {
  double value = 0, correct = 0, margin = HUGE_VAL;
};

/// y[0] is the class. Calls emit(o, d value / d f_o) for every output.
template <class real, class Emit>
inline RowLoss cross_entropy(const real* f, const real* y, std::ptrdiff_t stride, int p,
                             const Emit& emit) {
  const int label = int(y[0]);
  const double of_class = double(f[label * stride]);
  double other = -HUGE_VAL;
  for (int o = 0; o < p; ++o)
    if (o != label) other = std::max(other, double(f[o * stride]));
  const double largest = std::max(other, of_class), own = std::exp(of_class - largest);
  // The other classes apart from the own one, so that a small loss keeps its digits.
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

/// Sum over the outputs of a row; cross entropy has one label for the row, others one for each
/// output. Without `values` as for loss_term.
template <class real, class Emit>
inline RowLoss row_loss(Loss loss, const real* f, const real* y, std::ptrdiff_t stride, int p,
                        bool values, const Emit& emit) {
  if (loss == Loss::kCrossEntropy) return cross_entropy(f, y, stride, p, emit);
  RowLoss row;
  for (int o = 0; o < p; ++o) {
    const double output = double(f[o * stride]), label = double(y[o * stride]);
    const LossTerm<double> term = loss_term<ScalarMath>(loss, output, label, values);
    row.value += term.value;
    row.correct += output * label > 0 ? 1.0 : 0.0;
    row.margin = std::min(row.margin, output * label);
    emit(o, term.slope);
  }
  return row;
}

/// Calls emit(o, move of the slope of output o) as the row's outputs f move by df.
template <class real, class Emit>
inline void move_slopes(Loss loss, const real* f, const real* df, const real* y,
                        std::ptrdiff_t stride, int p, const Emit& emit) {
  if (loss != Loss::kCrossEntropy) {
    for (int o = 0; o < p; ++o)
      emit(o,
           curvature(loss, double(f[o * stride]), double(y[o * stride])) * double(df[o * stride]));
    return;
  }
  // P (df - sum(P df)), the differences taken from the likeliest output's.
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

}  // namespace mhfast
