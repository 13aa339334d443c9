// One SIMD register as a value, at the native width of the instruction set being compiled.
//
//   Vec<real>   kLanes<real> numbers, all of + - * / and comparisons lane by lane
//   IntVec      the signed integers of the same lane width; a comparison yields one (0 or -1)
//
// Based on the vector extension of GCC and Clang, so the same source is used for SSE2, AVX2,
// AVX-512 and NEON. Width comes from MHFAST_VECTOR_BYTES, which the build sets once per instruction
// set. Wider than native is correct but several times slower.
//
// Everything lives in the namespace MHFAST_ISA and in an anonymous one inside it: the linker may
// never merge the copies made for two instruction sets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

namespace mhfast {
namespace MHFAST_ISA {
namespace {

using Index = std::ptrdiff_t;

template <class real>
struct Lane;
template <>
struct Lane<float> {
  using Int = std::int32_t;
};
template <>
struct Lane<double> {
  using Int = std::int64_t;
};

template <class real>
inline constexpr int kLanes = MHFAST_VECTOR_BYTES / sizeof(real);

template <class real>
struct Register {
  using Int = typename Lane<real>::Int;
  typedef real Type __attribute__((vector_size(MHFAST_VECTOR_BYTES)));
  typedef Int IntType __attribute__((vector_size(MHFAST_VECTOR_BYTES)));
  typedef real Unaligned
      __attribute__((vector_size(MHFAST_VECTOR_BYTES), aligned(sizeof(real)), may_alias));
};

/// As many doubles as a register has numbers.
template <class real>
struct DoubleRegister {
  typedef double Type __attribute__((vector_size(kLanes<real> * sizeof(double))));
};

/// As many numbers as a register has doubles.
template <class real>
struct Narrow {
  typedef real Type __attribute__((vector_size(kLanes<double> * sizeof(real))));
  typedef real Unaligned
      __attribute__((vector_size(kLanes<double> * sizeof(real)), aligned(sizeof(real)), may_alias));
};

template <class real>
using Vec = typename Register<real>::Type;
template <class real>
using IntVec = typename Register<real>::IntType;

template <class real>
inline Vec<real> load(const real* p) {
  return *reinterpret_cast<const typename Register<real>::Unaligned*>(p);
}

template <class real>
inline void store(real* p, Vec<real> v) {
  *reinterpret_cast<typename Register<real>::Unaligned*>(p) = v;
}

/// The same number in every lane. (x - 0 is x for every x, so this costs one broadcast.)
template <class real>
inline Vec<real> broadcast(real x) {
  return x - Vec<real>{};
}

template <class real>
inline Vec<real> select(IntVec<real> mask, Vec<real> yes, Vec<real> no) {
  return mask ? yes : no;
}

template <class real>
inline Vec<real> maximum(Vec<real> a, Vec<real> b) {
  return a > b ? a : b;
}

/// Without the sign bit.
template <class real>
inline Vec<real> absolute(Vec<real> x) {
  return (Vec<real>)((IntVec<real>)x & std::numeric_limits<typename Lane<real>::Int>::max());
}

/// The same value, opaque to the compiler: a product is rounded here instead of being fused into a
/// multiply-add.
template <class real>
inline Vec<real> rounded(Vec<real> x) {
#if defined(__x86_64__) || defined(__i386__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
  return x;
}

template <class real, class Function>
inline Vec<real> by_lane(Vec<real> x, const Function& function) {
  for (int l = 0; l < kLanes<real>; ++l) x[l] = function(x[l]);
  return x;
}

/// A register of doubles from as many numbers of type real, and back.
template <class real>
inline Vec<double> load_wide(const real* p) {
  return __builtin_convertvector(*reinterpret_cast<const typename Narrow<real>::Unaligned*>(p),
                                 Vec<double>);
}

template <class real>
inline void store_narrow(real* p, Vec<double> v) {
  *reinterpret_cast<typename Narrow<real>::Unaligned*>(p) =
      __builtin_convertvector(v, typename Narrow<real>::Type);
}

/// Of every 2 half lanes of two rows, the second `half` of the one above changes places with the
/// first of the one below.
template <class real, int half, int... lane>
inline void exchange_lanes(Vec<real>& above, Vec<real>& below,
                           std::integer_sequence<int, lane...>) {
  constexpr int L = kLanes<real>;
  const Vec<real> a = above, b = below;
#if defined(__clang__) || __GNUC__ >= 12
  above = __builtin_shufflevector(a, b, (lane & half ? L + lane - half : lane)...);
  below = __builtin_shufflevector(a, b, (lane & half ? L + lane : lane + half)...);
#else
  above = __builtin_shuffle(a, b, IntVec<real>{(lane & half ? L + lane - half : lane)...});
  below = __builtin_shuffle(a, b, IntVec<real>{(lane & half ? L + lane : lane + half)...});
#endif
}

/// Transposes a square of as many registers as one has lanes, in place.
template <class real, int half = kLanes<real> / 2>
inline void transpose(Vec<real> (&rows)[kLanes<real>]) {
  constexpr int L = kLanes<real>;
#pragma GCC unroll 16
  for (int r = 0; r < L; ++r)
    if (!(r & half))
      exchange_lanes<real, half>(rows[r], rows[r + half], std::make_integer_sequence<int, L>());
  if constexpr (half > 1) transpose<real, half / 2>(rows);
}

/// The sums over lanes of as many registers as one has lanes, that of row r in lane r. Halves of a
/// row are added first; the rows are not needed any more.
template <class real, int half = kLanes<real> / 2>
inline Vec<real> row_sums(Vec<real> (&rows)[kLanes<real>]) {
#pragma GCC unroll 8
  for (int r = 0; r < half; ++r) {
    exchange_lanes<real, half>(rows[r], rows[r + half],
                               std::make_integer_sequence<int, kLanes<real>>());
    rows[r] += rows[r + half];
  }
  if constexpr (half > 1) return row_sums<real, half / 2>(rows);
  return rows[0];
}

/// Sum over lanes in a fixed order.
template <class real>
inline real lane_sum(Vec<real> v) {
  real sum = v[0];
  for (int l = 1; l < kLanes<real>; ++l) sum += v[l];
  return sum;
}

}  // namespace
}  // namespace MHFAST_ISA
}  // namespace mhfast
