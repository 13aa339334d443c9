// Factored weights: W_h = Q_h K_h^T and V_h = A_h B_h composed, and the chain rule back to the
// factors.
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

/// Writes head `h` of A B (d, p), or adds it.
template <class real>
void compose_values(const Kernels<real>& kernels, const Shape& s, const real* A, const real* B,
                    int h, int width, real* V, bool add = false) {
  const int r = s.value_rank;
  const std::ptrdiff_t at_A = std::ptrdiff_t(h) * s.d * r, at_B = std::ptrdiff_t(h) * r * s.p;
  kernels.batched_gemm({s.d, s.p, r, width, A + at_A * width, r, 1, B + at_B * width, s.p, 1,
                        V + std::ptrdiff_t(h) * s.d * s.p * width, s.p, 1, real(1), add});
}

/// Writes head `h` of gV B^T and A^T gV, or adds them; any of the two may be null.
template <class real>
void differentiate_values(const Kernels<real>& kernels, const Shape& s, const real* A,
                          const real* B, const real* gV, int h, int width, real* gA, real* gB,
                          bool add = false) {
  const int r = s.value_rank;
  const std::ptrdiff_t at_A = std::ptrdiff_t(h) * s.d * r * width;
  const std::ptrdiff_t at_B = std::ptrdiff_t(h) * r * s.p * width;
  gV += std::ptrdiff_t(h) * s.d * s.p * width;
  if (gA)
    kernels.batched_gemm(
        {s.d, r, s.p, width, gV, s.p, 1, B + at_B, 1, s.p, gA + at_A, r, 1, real(1), add});
  if (gB)
    kernels.batched_gemm(
        {r, s.p, s.d, width, A + at_A, 1, r, gV, s.p, 1, gB + at_B, s.p, 1, real(1), add});
}

}  // namespace mhfast
