// Factored weights: W_h = Q_h K_h^T composed, and the chain rule back to the factors.
#pragma once

#include "../kernels/table.hpp"
#include "data.hpp"

namespace mhfast {

/// Writes head `h` of W (d, d); entries are `width` numbers.
template <class real>
void compose(const Kernels<real>& kernels, const Shape& s, int rank, const real* Q, const real* K,
             int h, int width, real* W) {
  const std::ptrdiff_t factor = std::ptrdiff_t(h) * s.d * rank * width;
  kernels.batched_gemm({s.d, s.d, rank, width, Q + factor, rank, 1, (K ? K : Q) + factor, 1, rank,
                        W + std::ptrdiff_t(h) * s.d * s.d * width, s.d, 1, real(1), false});
}

/// Writes head `h` of the gradients by Q and K (either may be null) from that by W. K null: tied.
template <class real>
void differentiate_factors(const Kernels<real>& kernels, const Shape& s, int rank, const real* Q,
                           const real* K, const real* gW, int h, int width, real* gQ, real* gK) {
  const std::ptrdiff_t factor = std::ptrdiff_t(h) * s.d * rank * width;
  gW += std::ptrdiff_t(h) * s.d * s.d * width;
  const real* right = (K ? K : Q) + factor;
  if (gQ)
    kernels.batched_gemm(
        {s.d, rank, s.d, width, gW, s.d, 1, right, rank, 1, gQ + factor, rank, 1, real(1), false});
  if (gQ && !K)
    kernels.batched_gemm(
        {s.d, rank, s.d, width, gW, 1, s.d, right, rank, 1, gQ + factor, rank, 1, real(1), true});
  if (gK)
    kernels.batched_gemm({s.d, rank, s.d, width, gW, 1, s.d, Q + factor, rank, 1, gK + factor, rank,
                          1, real(1), false});
}

}  // namespace mhfast
