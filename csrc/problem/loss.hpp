// Losses of one output and of rows, by the list of losses. Arithmetic is double whatever the type
// of the model.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "../lists/losses.hpp"

namespace mhfast {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct ScalarMath {
  using Number = double;
  static double exp(double x) { return std::exp(x); }
  static double log1p(double x) { return std::log1p(x); }
  static double log(double x) { return std::log(x); }
  static double power(double x, double exponent) { return std::pow(x, exponent); }
  static double absolute(double x) { return std::fabs(x); }
  static double select(bool mask, double yes, double no) { return mask ? yes : no; }
};

/// Loss, derivative and logarithm of the derivative at one output.
inline LossTerm<double> loss_term(Loss loss, double f, double y) {
  return with_loss_of_outputs(
      loss, [=](auto kind) { return kind.template term<ScalarMath>(f, y, true); });
}

/// d derivative / d f.
inline double curvature(Loss loss, double f, double y) {
  return with_loss_of_outputs(loss,
                              [=](auto kind) { return kind.template curvature<ScalarMath>(f, y); });
}

template <class Type, class real, class Emit>
inline RowLoss row_loss_of(const Type& loss, const real* f, const real* y, std::ptrdiff_t stride,
                           int p, bool values, const Emit& emit) {
  if constexpr (are_of_rows(Type::kTargets)) {
    return loss.row(f, y, stride, p, emit);
  } else {
    RowLoss row;
    for (int o = 0; o < p; ++o) {
      const double output = double(f[o * stride]), label = double(y[o * stride]);
      const LossTerm<double> term = loss.template term<ScalarMath>(output, label, values);
      row.value += term.value;
      row.correct += output * label > 0 ? 1.0 : 0.0;
      row.margin = std::min(row.margin, output * label);
      emit(o, term.derivative);
    }
    return row;
  }
}

template <class Type, class real, class Emit>
inline void derivative_tangents_of(const Type& loss, const real* f, const real* df, const real* y,
                                   std::ptrdiff_t stride, int p, const Emit& emit) {
  if constexpr (are_of_rows(Type::kTargets)) {
    loss.derivative_tangents(f, df, y, stride, p, emit);
  } else {
    for (int o = 0; o < p; ++o) {
      const double output = double(f[o * stride]), label = double(y[o * stride]);
      emit(o, loss.template curvature<ScalarMath>(output, label) * double(df[o * stride]));
    }
  }
}

/// Calls emit(o, d value / d f_o) for every output of a row. Cross entropy has one target for the
/// row or one for each output, others one for each output and sum over these. Without `values` as
/// for LossTerm.
template <class real, class Emit>
inline RowLoss row_loss(Loss loss, const real* f, const real* y, std::ptrdiff_t stride, int p,
                        bool values, const Emit& emit) {
  switch (loss.name) {
#define MHFAST_CASE(Type, name)                                                         \
  case LossName::k##Type:                                                               \
    if constexpr (Type::kTargets != Targets::kOwn)                                      \
      return row_loss_of(loss_of<Type>(loss.parameter), f, y, stride, p, values, emit); \
    break;
    MHFAST_LOSSES(MHFAST_CASE)
#undef MHFAST_CASE
  }
  __builtin_unreachable();
}

/// Calls emit(o, change of the derivative of output o) as the row's outputs f change by df.
template <class real, class Emit>
inline void derivative_tangents(Loss loss, const real* f, const real* df, const real* y,
                                std::ptrdiff_t stride, int p, const Emit& emit) {
  switch (loss.name) {
#define MHFAST_CASE(Type, name)                                                                \
  case LossName::k##Type:                                                                      \
    if constexpr (Type::kTargets != Targets::kOwn)                                             \
      return derivative_tangents_of(loss_of<Type>(loss.parameter), f, df, y, stride, p, emit); \
    break;
    MHFAST_LOSSES(MHFAST_CASE)
#undef MHFAST_CASE
  }
}

}  // namespace mhfast
