// The point of a simplex that is nearest to a target, with few nonzero weights.
#pragma once

#include <cstddef>
#include <vector>

namespace mhfast {

/// Solves  min |y - sum_b p_b g_b|  over  p >= 0, sum_b p_b = 1, at most `support` of them
/// positive, by an active set: starting from the best corner, the corner along which the error
/// decreases fastest enters, and corners whose weight would become negative leave. With all corners
/// allowed that is the exact minimum; with fewer the corners are a greedy choice, and their weights
/// are exact.
class NearestInSimplex {
 public:
  NearestInSimplex(int corners, int support);

  /// `gram` (corners, stride) holds <g_b, g_c>, `inner` (corners) <g_b, y>. Writes p (corners).
  void solve(const double* gram, std::ptrdiff_t stride, const double* inner, double* p);

  /// The corners that the last solution may have, `size()` of them.
  const int* active() const { return active_.data(); }
  int size() const { return size_; }

 private:
  bool enter(const double* gram, std::ptrdiff_t stride, const double* inner, const double* p);
  void minimize(const double* gram, std::ptrdiff_t stride, const double* inner);

  const int corners_, support_;
  int size_ = 0;             // of the active set
  std::vector<int> active_;  // its corners
  // Of all active corners but the first, which is the origin: rows of the Cholesky factor with
  // inverse diagonals, the right side behind it, the weights. `factored_` rows are up to date.
  int factored_ = 0;
  std::vector<double> factor_, forward_, best_;
  std::vector<double> slope_;
};

}  // namespace mhfast
