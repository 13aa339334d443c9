// Standard normals from random bits, the same on every platform and instruction set to the last
// bit: every product and sum is rounded by itself, never fused.
//
// Box and Muller: from words b and c of 64 bits,
//
//   u = 1 - (b >> 12) 2^-52,   r = sqrt(-2 log u),   a = pi/2 ((c >> 10) mod 2^52 - 2^51) 2^-52,
//   r cos(a + q pi/2)  and  r sin(a + q pi/2)   with the quarter q = c >> 62.
//
// log u = e log 2 + 2 s (1 + s^2 / 3 + ... + s^20 / 21), with u = 2^e m, m from sqrt(1/2) to
// sqrt(2), s = (m - 1) / (m + 1); sine and cosine by Taylor's series to a^15 and a^16. The error is
// a few units in the last place of r; |r| is at most 8.5.
//
// 16 words give 16 numbers: r and a of number i < 8 come from words i and 8 + i; number i has the
// cosine, number 8 + i the sine.
#pragma once

#include "../simd/vec.hpp"

namespace mhfast {
namespace MHFAST_ISA {
namespace {

using Doubles = Vec<double>;
using DoubleBits = IntVec<double>;

inline constexpr std::int64_t kMantissa = 0x000FFFFFFFFFFFFF, kOne = 0x3FF0000000000000;

inline Doubles times(Doubles a, Doubles b) { return rounded<double>(a * b); }
inline Doubles times(double a, Doubles b) { return rounded<double>(a * b); }

/// sum + x times the polynomial with these coefficients, from the highest on, in x.
template <std::size_t count>
inline Doubles horner(const double (&coefficients)[count], Doubles x) {
  Doubles sum = broadcast<double>(coefficients[0]);
  for (std::size_t i = 1; i < count; ++i) sum = times(sum, x) + coefficients[i];
  return sum;
}

inline Doubles log_of_unit(Doubles u) {
  constexpr double kOdd[] = {1.0 / 21, 1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11,
                             1.0 / 9,  1.0 / 7,  1.0 / 5,  1.0 / 3,  1.0};
  constexpr double kLog2 = 0x1.62e42fefa39efp-1, kSqrt2 = 0x1.6a09e667f3bcdp+0;
  constexpr std::int64_t kShift = 0x4330000000000000;  // bits of 2^52
  const DoubleBits bits = (DoubleBits)u;
  Doubles e = (Doubles)((bits >> 52) | kShift) - (0x1p52 + 1023.0);
  Doubles m = (Doubles)((bits & kMantissa) | kOne);
  const DoubleBits large = m > kSqrt2;
  m = select<double>(large, m * 0.5, m);
  e = select<double>(large, e + 1.0, e);
  const Doubles s = (m - 1.0) / (m + 1.0);
  return times(kLog2, e) + times(2.0 * s, horner(kOdd, times(s, s)));
}

template <class real>
void normals(const std::uint64_t* words, std::ptrdiff_t groups, real* out) {
  constexpr int L = kLanes<double>;
  constexpr double kSine[] = {-1.0 / 1307674368000, 1.0 / 6227020800, -1.0 / 39916800, 1.0 / 362880,
                              -1.0 / 5040,          1.0 / 120,        -1.0 / 6,        1.0};
  constexpr double kCosine[] = {1.0 / 20922789888000,
                                -1.0 / 87178291200,
                                1.0 / 479001600,
                                -1.0 / 3628800,
                                1.0 / 40320,
                                -1.0 / 720,
                                1.0 / 24,
                                -1.0 / 2,
                                1.0};
  constexpr double kQuarter = 0x1.921fb54442d18p+0;  // pi / 2
  static_assert(8 % L == 0);
  for (; groups > 0; --groups, words += 16, out += 16)
    for (int i = 0; i < 8; i += L) {
      DoubleBits b, c;
      __builtin_memcpy(&b, words + i, sizeof b);
      __builtin_memcpy(&c, words + 8 + i, sizeof c);
      const Doubles u = 2.0 - (Doubles)(((b >> 12) & kMantissa) | kOne);
      const Doubles r =
          by_lane<double>(-2.0 * log_of_unit(u), [](double x) { return __builtin_sqrt(x); });
      const Doubles a = times(kQuarter, (Doubles)(((c >> 10) & kMantissa) | kOne) - 1.5);
      const Doubles square = times(a, a);
      const Doubles sine = times(a, horner(kSine, square)), cosine = horner(kCosine, square);
      const DoubleBits quarter = (c >> 62) & 3, odd = -(quarter & 1);
      const Doubles x = select<double>(odd, sine, cosine), y = select<double>(odd, cosine, sine);
      const DoubleBits x_sign = ((quarter + 1) & 2) << 62, y_sign = (quarter & 2) << 62;
      store_narrow<real>(out + i, r * (Doubles)((DoubleBits)x ^ x_sign));
      store_narrow<real>(out + 8 + i, r * (Doubles)((DoubleBits)y ^ y_sign));
    }
}

}  // namespace
}  // namespace MHFAST_ISA
}  // namespace mhfast
