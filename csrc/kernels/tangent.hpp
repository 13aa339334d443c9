// Softmax, its derivative and the tangents of both along a direction, one query row per lane.
//
//   weights      A = softmax(S),  a = dS - sum(A dS)                 so that dA = A a
//   derivative   b = C - sum(A C),  D = A b,  E = a b + dC,  dD = A (E - sum(A E))
//                readout <A, C>, its move sum(A E)
//
// All three differences are centred first at the row's largest weight, as in softmax.hpp, so that
// they keep full relative accuracy in saturation.
#pragma once

#include "product.hpp"
#include "softmax.hpp"

namespace mhfast {
namespace MHFAST_ISA {
namespace {

template <class real>
void product(const Product<real>& p) {
  multiply<Left::kShared>(p);
}

/// sum over keys of a[s] (x[s] - x[m]), and x[m]; m is the key of the row's peak. Where a is 0 so
/// is what it is multiplied by, whatever that is.
template <class real, class Columns, class Entry>
inline Vec<real> centred_sum(const Columns& columns, const Peak<real>& peak, int w,
                             const Entry& entry, Vec<real>& centre) {
  using Int = typename Lane<real>::Int;
  centre = Vec<real>{};
  for (int key = 0; key < columns.keys; ++key)
    centre = select<real>(peak.key == Int(key), entry(key), centre);
  Vec<real> sum{};
  for (int key = 0; key < columns.keys; ++key) {
    const Vec<real> a = load<real>(columns.s + key * columns.stride + w * kLanes<real>);
    sum += a * select<real>(a == Vec<real>{}, a, entry(key) - centre);
  }
  return sum;
}

template <class real>
void tangent_weights(const TangentArguments<real>& in) {
  const Rows<real> logits{in.keys, in.columns, in.stride, in.s, in.ds, in.limits};
  attend<true, real>(logits, nullptr);
  // From here on S holds A: its largest entry is the row's peak.
  const Rows<real> rows{in.keys, in.columns, in.stride, in.s, in.ds};
  for_columns_of<false>(rows, [](const auto& columns, const auto& peaks) {
    for (int w = 0; w < std::decay_t<decltype(columns)>::kWidth; ++w) {
      real* ds = columns.c + w * kLanes<real>;
      Vec<real> centre;
      const auto entry = [&](int key) { return load<real>(ds + key * columns.stride); };
      const Vec<real> p = centred_sum(columns, peaks[w], w, entry, centre);
      for (int key = 0; key < columns.keys; ++key) {
        const Vec<real> a = load<real>(columns.s + w * kLanes<real> + key * columns.stride);
        const Vec<real> move = (entry(key) - centre) - p;
        store<real>(ds + key * columns.stride, select<real>(a == Vec<real>{}, a, move));
      }
    }
  });
}

template <class real>
void tangent_derivative(const TangentArguments<real>& in) {
  const Rows<real> rows{in.keys, in.columns, in.stride, in.s, in.c};
  for_columns_of<false>(rows, [&](const auto& columns, const auto& peaks) {
    for (int w = 0; w < std::decay_t<decltype(columns)>::kWidth; ++w) {
      const Index at = columns.at + w * kLanes<real>;
      const auto load_at = [&](const real* x, int key) {
        return load<real>(x + at + key * columns.stride);
      };
      const auto coefficient = [&](int key) { return load_at(in.c, key); };
      Vec<real> centre;
      const Vec<real> p = centred_sum(columns, peaks[w], w, coefficient, centre);
      // A row that sees no key has weights 0; its readout is 0 as well.
      const IntVec<real> sees = peaks[w].logit != Vec<real>{};
      store<real>(in.readouts + at, select<real>(sees, centre + p, Vec<real>{}));
      const auto b = [&](int key) { return (coefficient(key) - centre) - p; };
      const auto e = [&](int key) { return load_at(in.ds, key) * b(key) + load_at(in.dc, key); };
      Vec<real> e_centre;
      const Vec<real> e_sum = centred_sum(columns, peaks[w], w, e, e_centre);
      store<real>(in.moves + at, select<real>(sees, e_centre + e_sum, Vec<real>{}));
      for (int key = 0; key < columns.keys; ++key) {
        const Vec<real> a = load_at(in.s, key), of_key = a * b(key);
        const Vec<real> moved = a * ((e(key) - e_centre) - e_sum);
        const IntVec<real> unseen = a == Vec<real>{};
        store<real>(in.dc + at + key * columns.stride, select<real>(unseen, a, moved));
        store<real>(in.c + at + key * columns.stride, select<real>(unseen, a, of_key));
      }
    }
  });
}

}  // namespace
}  // namespace MHFAST_ISA
}  // namespace mhfast
