#include "polar.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace mhfast {
namespace {

constexpr int kMostSweeps = 60;  // some ten are needed
constexpr double kZero = 32;     // singular values below this, times the size, are rounding errors
constexpr int kNewtonSchulzSteps = 5;
// Keller Jordan's quintic: steep at zero, near 1 from some .01 on after five steps.
constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;

double dot(const double* x, const double* y, std::size_t size) {
  double sum = 0;
  for (std::size_t i = 0; i < size; ++i) sum += x[i] * y[i];
  return sum;
}

void rotate(double* x, double* y, int size, double c, double s) {
  for (int i = 0; i < size; ++i) {
    const double a = x[i], b = y[i];
    x[i] = c * a - s * b;
    y[i] = s * a + c * b;
  }
}

/// Columns `a` (count, length) become orthogonal; v (count, count) collects the rotations.
void orthogonalize(double* a, double* v, int count, int length) {
  std::fill_n(v, std::size_t(count) * count, 0.0);
  for (int j = 0; j < count; ++j) v[std::size_t(j) * count + j] = 1;
  const double small = length * std::numeric_limits<double>::epsilon();
  bool rotated = true;
  for (int sweep = 0; sweep < kMostSweeps && rotated; ++sweep) {
    rotated = false;
    for (int p = 0; p < count; ++p)
      for (int q = p + 1; q < count; ++q) {
        double *x = a + std::size_t(p) * length, *y = a + std::size_t(q) * length;
        const double xx = dot(x, x, length), yy = dot(y, y, length), xy = dot(x, y, length);
        if (!(std::fabs(xy) > small * std::sqrt(xx) * std::sqrt(yy))) continue;
        const double zeta = (yy - xx) / (2 * xy);
        const double t = std::copysign(1 / (std::fabs(zeta) + std::hypot(1.0, zeta)), zeta);
        const double c = 1 / std::sqrt(1 + t * t), s = c * t;
        rotate(x, y, length, c, s);
        rotate(v + std::size_t(p) * count, v + std::size_t(q) * count, count, c, s);
        rotated = true;
      }
  }
}

/// c (rows, columns) = a (rows, inner) b (inner, columns)
void multiply(const double* a, const double* b, double* c, int rows, int inner, int columns) {
  for (int i = 0; i < rows; ++i) {
    double* row = c + std::size_t(i) * columns;
    std::fill_n(row, columns, 0.0);
    for (int k = 0; k < inner; ++k) {
      const double factor = a[std::size_t(i) * inner + k];
      for (int j = 0; j < columns; ++j) row[j] += factor * b[std::size_t(k) * columns + j];
    }
  }
}

void transpose(const double* from, double* to, int rows, int columns) {
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < columns; ++j)
      to[std::size_t(j) * rows + i] = from[std::size_t(i) * columns + j];
}

double largest_entry(const double* m, std::size_t size) {
  double largest = 0;
  for (std::size_t i = 0; i < size; ++i) largest = std::max(largest, std::fabs(m[i]));
  return largest;
}

}  // namespace

std::size_t polar_scratch(int rows, int columns) {
  const std::size_t few = std::min(rows, columns), all = std::size_t(rows) * columns;
  return 2 * all + 2 * few * few + few;
}

/// Entries are divided by the largest, so that no square is out of range.
Singular::Singular(const double* m, int rows, int columns, double* scratch)
    : rows_(rows),
      columns_(columns),
      count_(std::min(rows, columns)),
      length_(std::max(rows, columns)),
      values_(scratch),
      vectors_(values_ + count_),
      rotations_(vectors_ + std::size_t(rows) * columns) {
  const std::size_t size = std::size_t(rows) * columns;
  const double largest = largest_entry(m, size);
  // What is rotated are rows or columns, whichever are fewer.
  if (rows <= columns)
    std::copy_n(m, size, vectors_);
  else
    transpose(m, vectors_, rows, columns);
  if (largest > 0)
    for (std::size_t i = 0; i < size; ++i) vectors_[i] /= largest;
  orthogonalize(vectors_, rotations_, count_, length_);
  for (int j = 0; j < count_; ++j) {
    double* vector = vectors_ + std::size_t(j) * length_;
    const double norm = std::sqrt(dot(vector, vector, length_));
    values_[j] = norm * largest;
    if (norm > 0)
      for (int i = 0; i < length_; ++i) vector[i] /= norm;
  }
}

void Singular::compose(double* m) const {
  std::fill_n(m, std::size_t(rows_) * columns_, 0.0);
  for (int j = 0; j < count_; ++j) {
    if (!(values_[j] > 0)) continue;
    const double* vector = vectors_ + std::size_t(j) * length_;
    for (int k = 0; k < count_; ++k) {
      const double factor = values_[j] * rotations_[std::size_t(j) * count_ + k];
      if (rows_ <= columns_)
        for (int i = 0; i < length_; ++i) m[std::size_t(k) * length_ + i] += factor * vector[i];
      else
        for (int i = 0; i < length_; ++i) m[std::size_t(i) * count_ + k] += factor * vector[i];
    }
  }
}

double polar_exact(double* m, int rows, int columns, double epsilon, double* scratch) {
  Singular found(m, rows, columns, scratch);
  double* values = found.values();
  const double most = *std::max_element(values, values + found.count());
  const double zero = kZero * std::max(rows, columns) * epsilon * most;
  double sum = 0;
  for (int j = 0; j < found.count(); ++j) {
    const bool counts = values[j] > zero;
    sum += counts ? values[j] : 0.0;
    values[j] = counts ? 1.0 : 0.0;
  }
  found.compose(m);
  return sum;
}

double polar_newton_schulz(double* m, int rows, int columns, double* scratch) {
  const std::size_t size = std::size_t(rows) * columns;
  const double largest = largest_entry(m, size);
  if (!(largest > 0)) return largest;
  for (std::size_t i = 0; i < size; ++i) m[i] /= largest;
  const int count = std::min(rows, columns), length = std::max(rows, columns);
  double *x = scratch, *y = x + size, *gram = y + size, *square = gram + std::size_t(count) * count;
  if (rows <= columns)
    std::copy_n(m, size, x);
  else
    transpose(m, x, rows, columns);
  const double norm = std::sqrt(dot(x, x, size));
  for (std::size_t i = 0; i < size; ++i) x[i] /= norm;
  for (int step = 0; step < kNewtonSchulzSteps; ++step) {
    for (int i = 0; i < count; ++i)
      for (int j = 0; j < count; ++j)
        gram[std::size_t(i) * count + j] =
            dot(x + std::size_t(i) * length, x + std::size_t(j) * length, length);
    multiply(gram, gram, square, count, count, count);
    for (int i = 0; i < count * count; ++i) gram[i] = kB * gram[i] + kC * square[i];
    for (int i = 0; i < count; ++i) gram[std::size_t(i) * count + i] += kA;
    multiply(gram, x, y, count, count, length);
    std::swap(x, y);
  }
  if (rows <= columns)
    std::copy_n(x, size, y);
  else
    transpose(x, y, count, length);
  const double sum = dot(y, m, size);
  std::copy_n(y, size, m);
  return sum * largest;
}

}  // namespace mhfast
