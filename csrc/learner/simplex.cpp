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
      forward_(corners),
      best_(corners),
      slope_(corners) {}

/// Adds the corner of steepest descent; returns false if there is none.
bool NearestInSimplex::enter(const double* gram, std::ptrdiff_t stride, const double* inner,
                             const double* p) {
  double along_p = 0, magnitude = 0;
  for (int b = 0; b < corners_; ++b) {
    slope_[b] = -inner[b];
    magnitude = std::max(magnitude, gram[b * stride + b] + std::abs(inner[b]));
  }
  for (int i = 0; i < size_; ++i) {
    const double* row = gram + active_[i] * stride;
    const double weight = p[active_[i]];
    for (int b = 0; b < corners_; ++b) slope_[b] += weight * row[b];
  }
  for (int i = 0; i < size_; ++i) {
    double& slope = slope_[active_[i]];
    along_p += p[active_[i]] * slope;
    slope = std::numeric_limits<double>::infinity();  // it has entered
  }
  const auto steepest = std::min_element(slope_.begin(), slope_.end());
  if (!(*steepest < along_p - kSlope * magnitude)) return false;
  active_[size_++] = int(steepest - slope_.begin());
  return true;
}

/// Weights best_ of the active corners, of any sign, that sum to one: a Cholesky solve for all but
/// the first, whose corner is the origin.
void NearestInSimplex::minimize(const double* gram, std::ptrdiff_t stride, const double* inner) {
  const int n = size_ - 1, origin = active_[0];
  const double* first = gram + origin * stride;
  for (int i = factored_; i < n; ++i) {
    const double* row = gram + active_[i + 1] * stride;
    double* const factor = factor_.data() + i * corners_;
    const double offset = row[origin] - first[origin];
    for (int j = 0; j < i; ++j) {
      const double* other = factor_.data() + j * corners_;
      double sum = row[active_[j + 1]] - first[active_[j + 1]] - offset;
      for (int k = 0; k < j; ++k) sum -= factor[k] * other[k];
      factor[j] = sum * other[j];
    }
    const double square = row[active_[i + 1]] - first[active_[i + 1]] - offset;
    double pivot = square, right = inner[active_[i + 1]] - inner[origin] - offset;
    for (int k = 0; k < i; ++k) {
      pivot -= factor[k] * factor[k];
      right -= factor[k] * forward_[k];
    }
    // A corner that coincides with others gets no weight.
    factor[i] = pivot > kPivot * square ? 1 / std::sqrt(pivot) : 0;
    forward_[i] = right * factor[i];
  }
  factored_ = n;
  double* const x = best_.data() + 1;
  best_[0] = 1;
  for (int i = n - 1; i >= 0; --i) {
    double sum = forward_[i];
    for (int k = i + 1; k < n; ++k) sum -= factor_[k * corners_ + i] * x[k];
    best_[0] -= x[i] = sum * factor_[i * corners_ + i];
  }
}

void NearestInSimplex::solve(const double* gram, std::ptrdiff_t stride, const double* inner,
                             double* p) {
  const auto excess = [&](int b) { return gram[b * stride + b] - 2 * inner[b]; };
  int nearest = 0;
  for (int b = 1; b < corners_; ++b)
    if (excess(b) < excess(nearest)) nearest = b;
  std::fill(p, p + corners_, 0.0);
  p[nearest] = 1;
  active_[0] = nearest;
  size_ = 1;
  factored_ = 0;
  // Each entering corner lowers the error, so no active set repeats; the bound guards against
  // rounding.
  for (int entries = 4 * corners_; entries > 0 && size_ < support_; --entries) {
    if (!enter(gram, stride, inner, p)) return;
    for (;;) {
      minimize(gram, stride, inner);
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
      factored_ = std::max(leaves - 1, 0);
    }
  }
}

}  // namespace mhfast
