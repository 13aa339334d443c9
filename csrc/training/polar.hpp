// Singular values and vectors of small matrices, in double, and the factor U V' of M = U S V'.
//
// exact           One-sided Jacobi: pairs of columns are rotated until all are orthogonal, which
//                 gives U S and V. Singular values up to 32 max(rows, columns) epsilon of the
//                 largest count as zero, and their vectors are left out: a gradient of low rank has
//                 a partial isometry. Without that, rounding errors would become steps of full
//                 length.
// Newton-Schulz   Five steps of X <- a X + (b X X' + c (X X')^2) X from M / |M|, with the
//                 coefficients of Muon: singular values come near 1, within about .3, except those
//                 that are tiny relative to |M|.
//
// Loops have a fixed order, so that results do not depend on threads.
#pragma once

#include <cstddef>

namespace mhfast {

/// Numbers of scratch for matrices of this size, for whichever function takes it.
std::size_t polar_scratch(int rows, int columns);

/// Singular values and vectors, kept in the caller's scratch.
class Singular {
 public:
  /// Of m (rows, columns), in no order.
  Singular(const double* m, int rows, int columns, double* scratch);

  int count() const { return count_; }
  double* values() { return values_; }

  /// The matrix of the same vectors with `values` as they have become; those that were zero are
  /// left out.
  void compose(double* m) const;

 private:
  const int rows_, columns_, count_, length_;
  double *values_, *vectors_, *rotations_;  // (count), (count, length) of length 1, (count, count)
};

/// Replaces the matrix m (rows, columns) by its factor; returns the sum of its singular values,
/// which Newton-Schulz takes from <U V', M>. epsilon is that of the numbers that m came from.
double polar_exact(double* m, int rows, int columns, double epsilon, double* scratch);
double polar_newton_schulz(double* m, int rows, int columns, double* scratch);

}  // namespace mhfast
