// Polyak's step: theta -= min(max_lr, factor (loss - target) / |g|^2) g, none below the target. A
// schedule multiplies it.
#pragma once

#include "step_rule.hpp"

namespace mhfast {

struct PolyakStep : StepRule {
  double max_lr = __builtin_huge_val(), target = 0;
  double factor = 0.5;

  template <class Visit>
  static void fields(const Visit& visit) {
    visit("max_lr", &PolyakStep::max_lr);
    visit("target", &PolyakStep::target);
    visit("factor", &PolyakStep::factor);
  }
  static constexpr bool kNeedsLoss = true, kNeedsNorm = true;
  double rate(const AtStep& at) const {
    const double excess = at.loss - target, clipped = at.norm * at.kept;
    const double polyak = excess > 0 && clipped > 0 ? factor * excess / clipped / clipped : 0;
    return (max_lr < polyak ? max_lr : polyak) * at.schedule * at.kept;
  }

  template <class Math>
  using Step = GradientStep<Math>;
};

}  // namespace mhfast
