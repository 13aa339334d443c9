// From the readouts of a classifier's heads to its loss, a vector of samples or runs at a time:
// outputs, losses and derivatives, and how large the gradients' factors are. Arithmetic is double
// whatever the type of the model.
//
// Entry e, a sample or a sample of a run, is in lane e mod kLanes<real>; lanes are summed
// separately.
#pragma once

#include <limits>

#include "../simd/log1p.hpp"
#include "table.hpp"

namespace mhfast {
namespace MHFAST_ISA {
namespace {

struct VectorMath {
  using Number = Vec<double>;
  static Number exp(Number x) { return MHFAST_ISA::exp<double>(x); }
  static Number log1p(Number x) { return log1p_of_unit(x); }
  static Number log(Number x) {
    return by_lane<double>(x, [](double e) { return __builtin_log(e); });
  }
  static Number power(Number x, double exponent) {
    return by_lane<double>(x, [=](double e) { return __builtin_pow(e, exponent); });
  }
  static Number absolute(Number x) { return MHFAST_ISA::absolute<double>(x); }
  static Number select(IntVec<double> mask, Number yes, Number no) { return mask ? yes : no; }
};

template <class real>
void sum_readouts(const ReadoutArguments<real>& in) {
  const Vec<double> scale = broadcast<double>(in.scale);
  for (Index e = 0; e < in.count; e += kLanes<double>) {
    Vec<double> sum{};
    for (int h = 0; h < in.heads; ++h) sum += load_wide<real>(in.readouts + h * in.stride + e);
    store<double>(in.f + e, scale * sum);
  }
}

template <class real>
void classifier_loss(const LossArguments<real>& in) {
  constexpr int L = kLanes<real>, D = kLanes<double>;
  const Index held = (in.count + L - 1) / L * L;
  const Vec<double> zero{}, none = broadcast<double>(-std::numeric_limits<double>::infinity());
  Vec<double> index{};
  for (int l = 0; l < D; ++l) index[l] = l;
  for (int lane = 0; lane < L; lane += D) {
    Vec<double> loss = load<double>(in.loss + lane), correct = load<double>(in.correct + lane);
    Vec<double> margin = load<double>(in.margin + lane);
    const Vec<double> shares = load<double>(in.shares + lane);
    for (Index e = lane; e < held; e += L) {
      const Vec<double> f = load<double>(in.f + e), y = load<double>(in.y + e);
      Vec<double> w = load<double>(in.w + e);
      w = index < double(in.count - e) ? w : zero;
      const IntVec<double> counts = w != zero;  // the others are left out, whatever the output is
      const LossTerm<Vec<double>> term = with_loss_of_outputs(
          in.kind, [&](auto loss) { return loss.template term<VectorMath>(f, y, in.values); });
      loss += counts ? w * term.value : zero;
      const Vec<double> m = y * f;
      correct += (counts & (m > zero)) ? w : zero;
      margin = (counts & (m < margin)) ? m : margin;
      store_narrow<real>(in.derivative + e, counts ? term.derivative * (w * shares) : zero);
      if (!in.log_derivative) continue;
      const Vec<double> log_derivative =
          in.log_w ? term.log_derivative + load<double>(in.log_w + e) : term.log_derivative;
      store<double>(in.log_derivative + e, counts ? log_derivative : none);
    }
    store<double>(in.loss + lane, loss);
    store<double>(in.correct + lane, correct);
    store<double>(in.margin + lane, margin);
  }
}

template <class real>
void gather_scales(const ScaleArguments<real>& in) {
  constexpr int L = kLanes<real>, D = kLanes<double>;
  for (int lane = 0; lane < L; lane += D)
    for (int h = 0; h <= in.heads; ++h) {
      double* to = in.scales + h * L + lane;
      Vec<double> scale = load<double>(to);
      for (Index e = lane; e < in.count; e += L) {
        Vec<double> x = load<double>(in.log_derivative + e);
        if (h < in.heads) x += load_wide<real>(in.gaps + h * in.stride + e);
        scale = scale < x ? x : scale;
      }
      store<double>(to, scale);
    }
}

/// The difference is taken first: both may be large, and it is exact.
template <class real>
void scaled_factors(const FactorArguments<real>& in) {
  constexpr int L = kLanes<real>, D = kLanes<double>;
  using Int = IntVec<double>;
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  const Int sign_bit = Int{} + std::numeric_limits<Lane<double>::Int>::min();
  for (int lane = 0; lane < L; lane += D) {
    const Vec<double> scale = load<double>(in.log_scale + lane);
    for (Index e = lane; e < in.count; e += L) {
      const Vec<double> gap = in.gaps ? load_wide<real>(in.gaps + e) : Vec<double>{};
      const Vec<double> log_derivative = load<double>(in.log_derivative + e);
      const Int is_zero =
          (absolute<double>(gap) == kInfinite) | (absolute<double>(log_derivative) == kInfinite);
      Vec<double> factor = is_zero ? Vec<double>{} : exp<double>((gap - scale) + log_derivative);
      if (in.signs)
        factor = (Vec<double>)((Int)factor | ((Int)load_wide<real>(in.signs + e) & sign_bit));
      store_narrow<real>(in.factors + e, factor);
    }
  }
}

}  // namespace
}  // namespace MHFAST_ISA
}  // namespace mhfast
