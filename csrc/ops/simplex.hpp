// The point of a simplex that is nearest to a target, with few corners taking part.
#pragma once

#include <vector>

namespace mhfast {

/// Solves  min |y - sum_b p_b g_b|  over  p >= 0, sum_b p_b = 1, at most `support` of them
/// positive, by an active set: from the best corner on, the corner along which the error falls
/// fastest enters and the ones whose weight would turn negative leave. With all corners allowed
/// that is the exact minimum; with fewer the corners are a greedy choice, and their weights are
/// exact.
class NearestInSimplex {
 public:
  NearestInSimplex(int corners, int support);

  /// `gram` (corners, corners) holds <g_b, g_c>, `inner` (corners) <g_b, y>. Writes p (corners).
  void solve(const double* gram, const double* inner, double* p);

 private:
  bool enter(const double* gram, const double* inner, const double* p);
  void minimize(const double* gram, const double* inner);

  const int corners_, support_;
  int size_ = 0;             // of the active set
  std::vector<int> active_;  // its corners
  std::vector<double> factor_, best_, slope_;
};

}  // namespace mhfast
