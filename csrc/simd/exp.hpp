// exp of a register: over the whole range of the type, and a cheaper one for arguments up to 0.
//
//   x = k log 2 + r,  |r| <= log(2)/2,   exp(x) = 2^(k/2) 2^(k - k/2) (1 + r + r^2 q(r))
//
// Numeric method: k by adding a large constant (rounds to nearest, no conversion instruction); log
// 2 in two parts (Cody and Waite), the first with enough trailing zeros that k times it is exact; q
// a near-minimax polynomial, relative error 8e-9 (float) and 2e-17 (double) of the result before
// rounding. The power of two is applied in two halves, so that results reach down through the
// denormals with one rounding and up to overflow.
//
// Error: below 1.25 ULP for float and for double (rounding of r .25, of the sums .25 and .5, the
// polynomial .13; observed at most 1.01), denormal results included (with flush-to-zero on,
// those become 0). exp(-inf) = 0, exp(inf) = inf, NaN stays NaN.
#pragma once

#include "vec.hpp"

namespace mhfast {
namespace MHFAST_ISA {
namespace {

template <class real>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  static constexpr int kMantissaBits = 23;
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
  static constexpr float kRoundBiased = 12582912.0f + 127.0f;
  static constexpr float kLowest = -104.0f, kHighest = 89.0f;
  static constexpr float kLowestNormal = -88.0f;  // rounds to k = -127, whose 2^k reads as 0
  static constexpr float kLog2e = 1.44269504f;
  static constexpr float kLn2High = 0.693145751953125f, kLn2Low = 1.42860682e-6f;
  static constexpr float kQ[] = {0.00139261762f, 0.00836317307f, 0.0416665547f, 0.16666577f, 0.5f};
};

template <>
struct ExpConstants<double> {
  static constexpr int kMantissaBits = 52;
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kRoundBiased = 6755399441055744.0 + 1023.0;
  static constexpr double kLowest = -746.0, kHighest = 710.0;
  static constexpr double kLowestNormal = -709.1;  // rounds to k = -1023, whose 2^k reads as 0
  static constexpr double kLog2e = 1.442695040888963407;
  static constexpr double kLn2High = 0x1.62e42fefa3000p-1, kLn2Low = 2.823529056303157713e-13;
  static constexpr double kQ[] = {2.5100375832561233664e-8, 2.7620075879983366586e-7,
                                  2.7557268480310025526e-6, 2.4801521322368693266e-5,
                                  1.9841269863040545271e-4, 1.3888888917196719077e-3,
                                  8.3333333333300644495e-3, 4.1666666666624161903e-2,
                                  1.6666666666666667452e-1, 0.5};
};

/// 2^n from y = kRoundBiased + n: the low bits of y are the biased exponent.
template <class real>
inline Vec<real> power_of_two(Vec<real> y) {
  return (Vec<real>)((IntVec<real>)y << ExpConstants<real>::kMantissaBits);
}

/// exp(x - k log 2), for the k nearest to x / log 2.
template <class real>
__attribute__((always_inline)) inline Vec<real> exp_of_rest(Vec<real> x, Vec<real> k) {
  using C = ExpConstants<real>;
  const Vec<real> r = (x - k * C::kLn2High) - k * C::kLn2Low;
  Vec<real> q = broadcast<real>(C::kQ[0]);
#pragma GCC unroll 16
  for (int i = 1; i < int(sizeof(C::kQ) / sizeof(real)); ++i) q = q * r + C::kQ[i];
  return (r * r) * q + r + real(1);
}

/// For x <= 0. Results below the normal range are 0. Always inlined: it is called once for each
/// weight, and compilers find it too long where its callers are many.
template <class real>
__attribute__((always_inline)) inline Vec<real> exp_flushed(Vec<real> x) {
  using C = ExpConstants<real>;
  x = C::kLowestNormal > x ? broadcast<real>(C::kLowestNormal) : x;
  const Vec<real> biased = x * C::kLog2e + C::kRoundBiased;
  return exp_of_rest<real>(x, biased - C::kRoundBiased) * power_of_two<real>(biased);
}

template <class real>
inline Vec<real> exp(Vec<real> x) {
  using C = ExpConstants<real>;
  x = C::kLowest > x ? broadcast<real>(C::kLowest) : x;
  x = C::kHighest < x ? broadcast<real>(C::kHighest) : x;
  const Vec<real> k = (x * C::kLog2e + C::kRound) - C::kRound;
  const Vec<real> y = exp_of_rest<real>(x, k);
  const Vec<real> half = k * real(0.5) + C::kRoundBiased;
  const Vec<real> rest = (k - (half - C::kRoundBiased)) + C::kRoundBiased;
  return y * power_of_two<real>(half) * power_of_two<real>(rest);
}

}  // namespace
}  // namespace MHFAST_ISA
}  // namespace mhfast
