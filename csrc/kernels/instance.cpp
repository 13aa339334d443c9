// Compiled once per instruction set, with its flags and MHFAST_ISA (name and namespace),
// MHFAST_VECTOR_BYTES and MHFAST_VECTOR_REGISTERS. Exports one symbol: the set's tables.
#include "attended.hpp"
#include "attention.hpp"
#include "layer.hpp"
#include "loss.hpp"
#include "normal.hpp"
#include "pack.hpp"
#include "random_words.hpp"
#include "reduce.hpp"
#include "step.hpp"
#include "tangent.hpp"
#include "tile.hpp"
#include "triangle.hpp"
#include "words.hpp"

#define MHFAST_TEXT_(x) #x
#define MHFAST_TEXT(x) MHFAST_TEXT_(x)

namespace mhfast {
namespace MHFAST_ISA {
namespace {

template <class real>
void exponentials(const real* x, Index size, real* out) {
  constexpr int L = kLanes<real>;
  Index i = 0;
  for (; i + L <= size; i += L) store<real>(out + i, exp<real>(load<real>(x + i)));
  if (i == size) return;
  real rest[L] = {};
  for (Index j = i; j < size; ++j) rest[j - i] = x[j];
  store<real>(rest, exp<real>(load<real>(rest)));
  for (Index j = i; j < size; ++j) out[j] = rest[j - i];
}

/// Independent chains of multiply-adds, enough to hide their latency: the arithmetic peak.
template <class real>
double multiply_adds(std::int64_t rounds) {
  constexpr int kChains = 12, kUnrolled = 8;
  Vec<real> sum[kChains];
  for (int c = 0; c < kChains; ++c) sum[c] = broadcast<real>(real(c));
  volatile real half = real(0.5);
  const Vec<real> factor = broadcast<real>(half), term = broadcast<real>(half);
  for (std::int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 8
    for (int u = 0; u < kUnrolled; ++u)
#pragma GCC unroll 12
      for (int c = 0; c < kChains; ++c) sum[c] = sum[c] * factor + term;
  }
  Vec<real> total{};
  for (int c = 0; c < kChains; ++c) total += sum[c];
  volatile real sink = lane_sum<real>(total);
  (void)sink;
  return 2.0 * double(rounds) * kUnrolled * kChains * kLanes<real>;
}

/// By name, so that no two can be exchanged.
template <class real>
constexpr Kernels<real> table() noexcept {
  Kernels<real> kernels{};
  kernels.lanes = kLanes<real>;
  kernels.tiles = {kAccumulators, kMaxNR, kMaxMR};
  if (kPermutesTwo)
    kernels.permuted = {kMostWordVectors * kLanes<real>, kMostQueryVectors * kLanes<real>};
#define MHFAST_KERNEL(result, name, ...) kernels.name = name<real>;
#include "../lists/kernels.inc"
#undef MHFAST_KERNEL
#define MHFAST_STEP(Type, name) kernels.step_##name = step<Type, real>;
  MHFAST_OPTIMIZERS(MHFAST_STEP)
#undef MHFAST_STEP
  return kernels;
}

}  // namespace

extern const InstructionSet kTables;
const InstructionSet kTables = {MHFAST_TEXT(MHFAST_ISA), table<float>(), table<double>()};

}  // namespace MHFAST_ISA
}  // namespace mhfast
