// Norms and inner products of arrays whose squares may lie outside the range of double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace mhfast {

/// A sum of squares as largest^2 times sum: neither underflows nor overflows.
struct SquareSum {
  double largest = 0, sum = 0;

  double norm() const { return largest * std::sqrt(sum); }
  bool is_zero() const { return largest == 0; }

  void add(const SquareSum& other) {
    if (other.largest > largest) {
      sum = sum * square(largest / other.largest) + other.sum;
      largest = other.largest;
    } else if (other.largest > 0) {
      sum += other.sum * square(other.largest / largest);
    } else if (std::isnan(other.largest)) {
      *this = other;
    }
  }

 private:
  static double square(double x) { return x * x; }
};

/// Squares of value(0), ..., value(size - 1). A NaN or infinite entry makes the norm NaN or
/// infinite.
template <class Value>
SquareSum square_sum(std::ptrdiff_t size, const Value& value) {
  double largest = 0, plain = 0;
  for (std::ptrdiff_t i = 0; i < size; ++i) {
    const double x = std::fabs(double(value(i)));
    largest = x > largest ? x : largest;
    plain += x * x;
  }
  if (largest == 0 || std::isnan(plain) || std::isinf(largest)) return {plain, 1};
  SquareSum result{largest, 0};
  for (std::ptrdiff_t i = 0; i < size; ++i) {
    const double x = double(value(i)) / largest;
    result.sum += x * x;
  }
  return result;
}

}  // namespace mhfast
