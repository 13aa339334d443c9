// Norms of arrays whose powers may lie outside the range of double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace mhfast {

/// A sum of |x|^power as largest^power times sum: neither underflows nor overflows.
struct PowerSum {
  double largest = 0, sum = 0, power = 2;

  double norm() const { return largest * (power == 2 ? std::sqrt(sum) : std::pow(sum, 1 / power)); }
  bool is_zero() const { return largest == 0; }

  void add(const PowerSum& other) {
    if (other.largest > largest) {
      sum = sum * raised(largest / other.largest) + other.sum;
      largest = other.largest;
    } else if (other.largest > 0) {
      sum += other.sum * raised(other.largest / largest);
    } else if (std::isnan(other.largest)) {
      *this = other;
    }
  }

 private:
  double raised(double x) const { return power == 2 ? x * x : std::pow(x, power); }
};

/// Whether squares of numbers up to `largest` can be added as they are: their sum is finite, and
/// what underflows is no part of it.
inline bool squares_are_normal(double largest) { return largest > 1e-140 && largest < 1e140; }

}  // namespace mhfast
