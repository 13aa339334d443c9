#include "simplex.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace mhfast {
namespace {

// Relative to the size of the terms: smaller slopes are rounding, smaller pivots those of corners
// that coincide.
constexpr double kSlope = 1e-13, kPivot = 1e-13;

}  // namespace

NearestInSimplex::NearestInSimplex(int corners, int support)
    : corners_(corners),
      support_(std::min(corners, support)),
      active_(corners),
      factor_(std::size_t(corners) * corners),
      best_(corners),
      slope_(corners) {}

/// Adds the corner of steepest descent; false if there is none.
bool NearestInSimplex::enter(const double* gram, const double* inner, const double* p) {
  double along_p = 0, magnitude = 0;
  for (int b = 0; b < corners_; ++b) {
    double slope = -inner[b];
    for (int i = 0; i < size_; ++i) slope += gram[b * corners_ + active_[i]] * p[active_[i]];
    slope_[b] = slope;
    along_p += p[b] * slope;
    magnitude = std::max(magnitude, gram[b * corners_ + b] + std::abs(inner[b]));
  }
  int steepest = -1;
  double lowest = along_p - kSlope * magnitude;
  for (int b = 0; b < corners_; ++b) {
    const bool is_active =
        std::find(active_.begin(), active_.begin() + size_, b) != active_.begin() + size_;
    if (!is_active && slope_[b] < lowest) lowest = slope_[b], steepest = b;
  }
  if (steepest < 0) return false;
  active_[size_++] = steepest;
  return true;
}

/// Weights best_ of the active corners, of any sign, that sum to one: a Cholesky solve for all but
/// the first, whose corner is the origin.
void NearestInSimplex::minimize(const double* gram, const double* inner) {
  const int n = size_ - 1;
  const double* first = gram + active_[0] * corners_;
  double* const x = best_.data() + 1;
  for (int i = 0; i < n; ++i) {
    const double* row = gram + active_[i + 1] * corners_;
    double* const factor = factor_.data() + i * corners_;
    x[i] = inner[active_[i + 1]] - inner[active_[0]] - row[active_[0]] + first[active_[0]];
    for (int j = 0; j <= i; ++j) {
      const double* other = factor_.data() + j * corners_;
      double sum =
          row[active_[j + 1]] - row[active_[0]] - first[active_[j + 1]] + first[active_[0]];
      const double size = sum;
      for (int k = 0; k < j; ++k) sum -= factor[k] * other[k];
      if (j < i)
        factor[j] = sum / other[j];
      else  // a corner on top of others gets no weight
        factor[j] = sum > kPivot * size ? std::sqrt(sum) : std::numeric_limits<double>::infinity();
    }
    for (int k = 0; k < i; ++k) x[i] -= factor[k] * x[k];
    x[i] /= factor[i];
  }
  for (int i = n - 1; i >= 0; --i) {
    for (int k = i + 1; k < n; ++k) x[i] -= factor_[k * corners_ + i] * x[k];
    x[i] /= factor_[i * corners_ + i];
  }
  best_[0] = 1;
  for (int i = 0; i < n; ++i) best_[0] -= x[i];
}

void NearestInSimplex::solve(const double* gram, const double* inner, double* p) {
  const auto excess = [&](int b) { return gram[b * corners_ + b] - 2 * inner[b]; };
  int nearest = 0;
  for (int b = 1; b < corners_; ++b)
    if (excess(b) < excess(nearest)) nearest = b;
  std::fill(p, p + corners_, 0.0);
  p[nearest] = 1;
  active_[0] = nearest;
  size_ = 1;
  // Each entry lowers the error, so no active set comes twice; the bound is for rounding.
  for (int entries = 4 * corners_; entries > 0 && size_ < support_; --entries) {
    if (!enter(gram, inner, p)) return;
    for (;;) {
      minimize(gram, inner);
      double step = 1;
      int leaves = -1;
      for (int i = 0; i < size_; ++i) {
        const double now = std::max(p[active_[i]], 0.0);  // rounding can leave less
        if (best_[i] < 0 && now < step * (now - best_[i]))
          step = now / (now - best_[i]), leaves = i;
      }
      for (int i = 0; i < size_; ++i) p[active_[i]] += step * (best_[i] - p[active_[i]]);
      if (leaves < 0) break;
      p[active_[leaves]] = 0;
      active_[leaves] = active_[--size_];
    }
  }
}

}  // namespace mhfast
