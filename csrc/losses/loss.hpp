// What a loss is: a class with the kind of target it takes, its value, derivative and curvature at
// an output f. Arithmetic is double whatever the type of the model, and stable at any output.
//
//   struct Name {
//     static constexpr Targets kTargets = ...;
//     template <class Math>
//     static LossTerm<typename Math::Number> term(Number f, Number y, bool values);
//     template <class Math>
//     static Number curvature(Number f, Number y);      // second derivative by f
//   };
//
// A loss with a parameter has it as its only member, with a default, and its name in kParameter;
// term and curvature are then const members. Where a derivative does not exist, the header defines
// what is used instead.
//
// Math computes on one number or on one for each lane: Number, exp, log1p (of 0 to 1), log,
// power(base, exponent), absolute, select(mask, yes, no). A loss of a row's outputs together, whose
// target is a class or a row of probabilities, has `row` and `derivative_tangents` in place of
// `term` and `curvature`, see cross_entropy.hpp.
//
// Included by kernels: nothing here may have external linkage once Math is a kernel's.
#pragma once

namespace mhfast {

/// What a target may be: -1 or 1; any number; a number of at least 0; a class of the row, 0 to
/// p - 1; the probabilities of these; the derivative of a loss, in its place; or whatever the
/// caller's own function takes.
enum class Targets { kSigns, kReals, kNonnegative, kClasses, kProbabilities, kDerivatives, kOwn };

/// Whether the loss is one of a row's outputs together.
constexpr bool are_of_rows(Targets targets) {
  return targets == Targets::kClasses || targets == Targets::kProbabilities;
}

/// Whether the loss is a formula of one output.
constexpr bool are_of_outputs(Targets targets) {
  return !are_of_rows(targets) && targets != Targets::kOwn;
}

template <class Number>
struct LossTerm {
  Number value;           // without `values` it is only finite where the loss is, and not elsewhere
  Number derivative;      // d value / d f
  Number log_derivative;  // log |derivative|, finite where derivative underflows; without `values`
                          // it may be too large by log 2
};

/// Loss of one row of outputs f[0], f[stride], ..., and the properties of its targets.
struct RowLoss {
  double value = 0, correct = 0, margin = __builtin_huge_val();
};

}  // namespace mhfast
