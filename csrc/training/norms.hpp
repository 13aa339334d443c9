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

/// Squares of value(0), ..., value(size - 1). A NaN or infinite entry makes the norm NaN or
/// infinite.
template <class Value>
PowerSum square_sum(std::ptrdiff_t size, const Value& value) {
  double largest = 0, plain = 0;
  for (std::ptrdiff_t i = 0; i < size; ++i) {
    const double x = std::fabs(double(value(i)));
    largest = x > largest ? x : largest;
    plain += x * x;
  }
  if (largest == 0 || std::isnan(plain) || std::isinf(largest)) return {plain, 1};
  PowerSum result{largest, 0};
  for (std::ptrdiff_t i = 0; i < size; ++i) {
    const double x = double(value(i)) / largest;
    result.sum += x * x;
  }
  return result;
}

}  // namespace mhfast
