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

/// The sum of value(0), ..., value(size - 1), and of parts: as many additions at a time as a
/// register may hold, since each waits for the one before.
template <class Value>
double sum_in_parts(std::ptrdiff_t size, const Value& value) {
  constexpr int kParts = 8;
  double parts[kParts] = {};
  std::ptrdiff_t i = 0;
  for (; i + kParts <= size; i += kParts)
    for (int j = 0; j < kParts; ++j) parts[j] += value(i + j);
  for (; i < size; ++i) parts[0] += value(i);
  double sum = 0;
  for (const double part : parts) sum += part;
  return sum;
}

/// Squares of value(0), ..., value(size - 1). A NaN or infinite entry makes the norm NaN or
/// infinite.
template <class Value>
PowerSum square_sum(std::ptrdiff_t size, const Value& value) {
  double largest = 0;
  const double plain = sum_in_parts(size, [&](std::ptrdiff_t i) {
    const double x = std::fabs(double(value(i)));
    largest = x > largest ? x : largest;
    return x * x;
  });
  if (largest == 0 || std::isnan(plain) || std::isinf(largest)) return {plain, 1};
  if (squares_are_normal(largest)) return {largest, plain / (largest * largest)};
  return {largest, sum_in_parts(size, [&](std::ptrdiff_t i) {
            const double x = double(value(i)) / largest;
            return x * x;
          })};
}

}  // namespace mhfast
