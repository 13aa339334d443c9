// Sums of the partial gradients of the chunks, always in the order of the chunks: the result does
// not depend on which thread computed which chunk.
#pragma once

#include "../simd/vec.hpp"
#include "table.hpp"

namespace mhfast {
namespace MHFAST_ISA {
namespace {

template <class real>
inline Vec<real> sum_chunks(const real* at, Index stride, int chunks) {
  Vec<real> sum = load<real>(at);
  for (int c = 1; c < chunks; ++c) sum += load<real>(at + c * stride);
  return sum;
}

/// out (+)= sum over i of factors[i] x[i], in the order of i.
template <class real>
void combine(const real* x, Index stride, const real* factors, int count, Index size, real* out,
             bool add) {
  constexpr int L = kLanes<real>;
  for (Index k = 0; k < size; k += L) {
    Vec<real> sum = add ? load<real>(out + k) : Vec<real>{};
    for (int i = 0; i < count; ++i) sum += factors[i] * load<real>(x + i * stride + k);
    store<real>(out + k, sum);
  }
}

/// A row is padded to whole vectors: out = sum over chunks, padding dropped.
template <class real>
void reduce_features(const ReduceArguments<real>& in) {
  constexpr int L = kLanes<real>;
  const real* row = in.partial;
  real* out = in.out;
  for (int r = 0; r < in.rows; ++r, out += in.d) {
    for (int k = 0; k < in.d; k += L, row += L) {
      const Vec<real> sum = sum_chunks(row, in.chunk_stride, in.chunks);
      if (k + L <= in.d) {
        store<real>(out + k, sum);
      } else {
        for (int l = 0; k + l < in.d; ++l) out[k + l] = sum[l];
      }
    }
  }
}

}  // namespace
}  // namespace MHFAST_ISA
}  // namespace mhfast
