// log(1 + t) of a register of doubles from 0 to 1.
//
//   log(1 + t) = k log 2 + log(1 + f),   k = 0, f = t up to sqrt(2) - 1,   k = 1, f = (t - 1) / 2
//   log(1 + f) = f - (f^2/2 - s (f^2/2 + s^2 p(s^2))),   s = f / (2 + f)
//
// Numeric method: f is exact in both cases, and no leading term is divided; p a near-minimax
// polynomial of (log((1 + s)/(1 - s)) / s - 2) / s^2, relative error 5e-18 of the result before
// rounding. NaN stays NaN.
#pragma once

#include "vec.hpp"

namespace mhfast {
namespace MHFAST_ISA {
namespace {

inline Vec<double> log1p_of_unit(Vec<double> t) {
  constexpr double kSwitch = 0.41421356237309505;
  constexpr double kLn2High = 0x1.62e42fefa39efp-1, kLn2Low = 2.3190468138462996e-17;
  constexpr double kP[] = {0x1.2b584aae78a57p-3, 0x1.39fe606542ddep-3, 0x1.7462b4ab2ef6bp-3,
                           0x1.c71c62e5800a1p-3, 0x1.2492492df148dp-2, 0x1.99999999952e2p-2,
                           0x1.5555555555558p-1};
  const IntVec<double> upper = t > kSwitch;
  const Vec<double> f = upper ? 0.5 * (t - 1.0) : t;
  const Vec<double> s = f / (2.0 + f), z = s * s, half = 0.5 * f * f;
  Vec<double> p = broadcast<double>(kP[0]);
#pragma GCC unroll 8
  for (int i = 1; i < int(sizeof(kP) / sizeof(double)); ++i) p = p * z + kP[i];
  const Vec<double> tail = s * (half + z * p), zero{};
  const Vec<double> high = upper ? zero + kLn2High : zero, low = upper ? zero + kLn2Low : zero;
  return high + (f - (half - (tail + low)));
}

}  // namespace
}  // namespace MHFAST_ISA
}  // namespace mhfast
