// Steepest descent in a norm, with momentum: v = beta v + g and m = v, or g + beta v with
// Nesterov's lookahead;
//
//   theta -= lr D(m),   D(m) the point of norm 1 with the largest <D, m>
//
// norm       D(m)                                  dual norm <D, m>
// max        sign(m)                               sum of |m_j|
// l1         sign of the largest |m_j|, in place   largest |m_j|
// fro        m / |m|                               |m|
// spectral   U V' of each head's m = U S V'        sum of the singular values
//
// or D times the dual norm where `scaled`. Norms are those of a tensor, with the largest of its
// heads in "spectral", or of a head. D is made of whole heads, between the decision on a step and
// the step itself (training/directions.hpp), and replaces the gradient.
#pragma once

#include "step_rule.hpp"

namespace mhfast {

enum class Norm { kMax, kL1, kFro, kSpectral };

/// How U V' is computed: from singular vectors, or by five steps of a polynomial, as Muon does.
enum class Polar { kExact, kNewtonSchulz };

struct SteepestDescent : StepRule {
  Norm norm = Norm::kMax;
  double beta = 0;
  bool nesterov = false, scaled = false;
  Scope by = Scope::kTensor;
  Polar polar = Polar::kExact;

  template <class Visit>
  static void fields(const Visit& visit) {
    visit("norm", &SteepestDescent::norm);
    visit("beta", &SteepestDescent::beta);
    visit("nesterov", &SteepestDescent::nesterov);
    visit("scaled", &SteepestDescent::scaled);
    visit("by", &SteepestDescent::by);
    visit("polar", &SteepestDescent::polar);
  }
  static constexpr int kSlots = 1;
  bool ignores_scale() const { return !scaled && beta == 0; }
  Scope norm_scope() const {
    return norm == Norm::kMax || norm == Norm::kSpectral ? Scope::kHead : by;
  }
  double rate(const AtStep& at) const { return at.lr; }

  template <class Math>
  using Step = GradientStep<Math>;
};

}  // namespace mhfast
