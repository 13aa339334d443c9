// Nearest points of balls in norms other than the Euclidean one, computed in double.
//
// p-norms     max: entries are clipped. 1: entries shrink by a common threshold (Michelot's
//             iteration, finite). Else entry x solves x + m x^(p-1) = |y|, by Newton's method from
//             above, with the m for which the norm is the radius, by bisection.
// spectral    singular values are clipped, nuclear: they shrink by a common threshold; those of
//             one-sided Jacobi rotations.
//
// Points inside keep their bits. Loops have a fixed order, so that results do not depend on
// threads.
#pragma once

#include <cstddef>

namespace mhfast {

enum class BallNorm { kFro, kNuclear, kSpectral, kPower };

/// x (size) to the nearest point of p-norm at most `radius`, or on the sphere scaled to norm
/// `radius` unless it is zero. p from 1 to infinity.
void project_power(double* x, std::size_t size, double p, double radius, bool sphere);

/// The same for a matrix m (rows, columns) and a norm of its singular values, which take part of
/// the scratch (see polar_scratch).
void project_singular(double* m, int rows, int columns, BallNorm norm, double radius, bool sphere,
                      double* scratch);

}  // namespace mhfast
