// Small products of the learner, of matrices that lie by rows.
#pragma once

#include <algorithm>
#include <cstddef>

#include "../dispatch/dispatch.hpp"

namespace mhfast {

inline double dot(const double* a, const double* b, int size) {
  double sum = 0;
  for (int i = 0; i < size; ++i) sum += a[i] * b[i];
  return sum;
}

/// out (rows, columns) = a (rows, inner) b (inner, columns)
inline void multiply(const double* a, const double* b, int rows, int inner, int columns,
                     double* out) {
  std::fill(out, out + rows * columns, 0.0);
  for (int i = 0; i < rows; ++i)
    for (int k = 0; k < inner; ++k)
      for (int j = 0; j < columns; ++j)
        out[i * columns + j] += a[i * inner + k] * b[k * columns + j];
}

/// Numbers in as many whole vectors as hold `size` numbers.
inline int in_vectors(int size) {
  const int lanes = active_kernels<double>().lanes;
  return (size + lanes - 1) / lanes * lanes;
}

/// Operands of a batch of products: rows of a matrix are `row` numbers apart, matrices `next`.
template <class Number>
struct Matrices {
  Number* at;
  std::ptrdiff_t row, next = 0;
};

/// out (M, columns) = aᵀ b for a (depth, M) and b (depth, columns), `batch` times, by the kernels:
/// of b and out whole vectors are read and written.
inline void multiply_transposed(Matrices<const double> a, int M, int depth,
                                Matrices<const double> b, int columns, Matrices<double> out,
                                int batch = 1) {
  const Kernels<double>& kernels = active_kernels<double>();
  Product<double> product{};
  product.size.M = M;
  product.size.N = in_vectors(columns) / kernels.lanes;
  product.size.K1 = depth;
  product.size.batch = batch;
  product.a.at = a.at;
  product.a.k1 = a.row;
  product.a.batch = a.next;
  product.b.at = b.at;
  product.b.k1 = b.row;
  product.b.batch = b.next;
  product.c.at = out.at;
  product.c.m = out.row;
  product.c.batch = out.next;
  product.b.n = product.c.n = kernels.lanes;
  kernels.product(product);
}

}  // namespace mhfast
