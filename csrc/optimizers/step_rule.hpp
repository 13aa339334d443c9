// What an optimizer is: a class with its settings and the step that it takes for a gradient.
//
//   struct Name : StepRule {
//     double beta;                                     // settings, those that callers give ...
//     template <class Visit> static void fields(const Visit& visit) { visit("beta", &Name::beta); }
//     static constexpr int kSlots = 1;                 // ... and overrides of StepRule
//     template <class Math> struct Step { ... };       // one step of one parameter
//   };
//
// A Step is constructed from the rule and the Factors of a step, and called for every vector of
// numbers:
//
//   Number operator()(Number theta, Number g, Number& first, Number& second) const  // next theta
//
// g is the gradient after l2, before clipping; first and second are what the rule keeps of the
// parameter, `kSlots` arrays of its shape, and may be changed. Math has Number, Real and root,
// divide, signed_power, sign.
//
// Included by kernels: nothing here may have external linkage once Math is a kernel's.
#pragma once

namespace mhfast {

/// What has a norm of its own.
enum class Scope { kTensor, kHead, kAll };

/// What a rule may base the factor of its step on; of one run and one parameter.
struct AtStep {
  double lr;        // the parameter's, times its schedule's entry
  double schedule;  // that entry alone
  double kept;      // the factor by which clipping shrinks the gradient
  double norm;      // of the whole gradient before clipping, where the rule needs it
  double loss;      // where the rule needs it
  double taken;     // steps since the state was zero, this one included
};

/// Factors of a step, of one lane or one for each: of the gradient; what clipping leaves of it, for
/// rules whose `rate` leaves that out; the share of theta that is subtracted; the rule's own.
template <class Number>
struct Factors {
  Number rate, kept, decay, own;
};

/// The defaults of a rule.
struct StepRule {
  static constexpr int kSlots = 0;
  static constexpr bool kNeedsLoss = false, kNeedsNorm = false;
  /// Whether steps are sums of gradients, whatever their coordinates.
  static constexpr bool kIsLinear = false;

  /// Whether the gradient is divided by a norm, that of `by`, of power `norm_power()`, plus `eps`.
  bool normalizes() const { return false; }
  Scope norm_scope() const { return Scope::kTensor; }
  double norm_power() const { return 2; }
  double norm_eps() const { return 0; }
  /// Whether a positive factor of the gradient of a head does not matter for the step; where it
  /// normalizes, because it is divided out.
  bool ignores_scale() const { return normalizes(); }

  /// Factor of the gradient in the step, where it is not normalized.
  double rate(const AtStep& at) const { return at.lr * at.kept; }
  /// Share of theta that the step subtracts.
  double decay(const AtStep&) const { return 0; }
  /// A further factor, of which only the rule's Step knows the meaning; not of lr, which parameters
  /// may have of their own.
  double own(const AtStep&) const { return 1; }

  template <class Visit>
  static void fields(const Visit&) {}
};

/// theta - rate g
template <class Math>
struct GradientStep {
  using Number = typename Math::Number;
  const Number rate;

  template <class Rule>
  GradientStep(const Rule&, const Factors<Number>& factors) : rate(factors.rate) {}
  Number operator()(Number theta, Number g, Number&, Number&) const { return theta - rate * g; }
};

}  // namespace mhfast
