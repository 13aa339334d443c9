#include "balls.hpp"

#include <algorithm>
#include <cmath>

#include "polar.hpp"

namespace mhfast {
namespace {

constexpr int kMostNewton = 200, kMostBisections = 100;  // some 10 and 55 are needed
constexpr double kEnough = 4e-16;                        // relative change at rounding
constexpr double kMost = 1e300;

double power_norm(const double* x, std::size_t size, double p) {
  double largest = 0, sum = 0;
  for (std::size_t i = 0; i < size; ++i) largest = std::max(largest, std::fabs(x[i]));
  if (std::isinf(p) || !(largest > 0)) return largest;
  for (std::size_t i = 0; i < size; ++i) sum += std::pow(std::fabs(x[i]) / largest, p);
  return largest * std::pow(sum, 1 / p);
}

/// The threshold by which absolute values must shrink for their sum to be `radius`, less than now.
double threshold(const double* x, std::size_t size, double radius) {
  double least = 0;
  for (std::size_t before = 0;;) {
    double sum = 0;
    std::size_t count = 0;
    for (std::size_t i = 0; i < size; ++i)
      if (std::fabs(x[i]) > least) {
        sum += std::fabs(x[i]);
        ++count;
      }
    if (count == before || count == 0) return least;
    before = count;
    least = std::max(least, (sum - radius) / double(count));
  }
}

/// The x in [0, y] with x + m x^(p - 1) = y.
double shrunk(double y, double m, double p) {
  if (!(y > 0)) return 0;
  // In t, with x = t^e, one of the two terms is linear and the other convex.
  const double e = p < 2 ? 1 / (p - 1) : 1, f = e * (p - 1);
  double t = std::min(std::pow(y, 1 / e), std::pow(y / m, 1 / f));
  for (int i = 0; i < kMostNewton; ++i) {
    const double x = std::pow(t, e), z = m * std::pow(t, f);
    const double next = t - (x + z - y) / ((e * x + f * z) / t);
    if (!(next > 0)) break;
    const bool ends = t - next <= kEnough * t;
    t = next;
    if (ends) break;
  }
  return std::pow(t, e);
}

/// Lengths are in units of the radius: then sums of powers near 1 decide, whatever p.
void shrink_powers(double* x, std::size_t size, double p, double radius) {
  const auto is_outside = [&](double m) {
    double sum = 0;
    for (std::size_t i = 0; i < size; ++i)
      sum += std::pow(shrunk(std::fabs(x[i]) / radius, m, p), p);
    return sum > 1;
  };
  double low = 1, high = 1;
  while (is_outside(high) && high < kMost) high *= 4;
  while (high == 1 && !is_outside(low) && low > 1 / kMost) low /= 4;
  if (high > 1) low = high / 4;
  if (low < 1) high = 4 * low;
  for (int i = 0; i < kMostBisections; ++i) {
    const double middle = low + (high - low) / 2;
    if (middle <= low || middle >= high) break;
    (is_outside(middle) ? low : high) = middle;
  }
  for (std::size_t i = 0; i < size; ++i)
    x[i] = std::copysign(radius * shrunk(std::fabs(x[i]) / radius, high, p), x[i]);
}

void shrink_all(double* x, std::size_t size, double by) {
  for (std::size_t i = 0; i < size; ++i)
    x[i] = std::copysign(std::max(std::fabs(x[i]) - by, 0.0), x[i]);
}

}  // namespace

void project_power(double* x, std::size_t size, double p, double radius, bool sphere) {
  const double norm = power_norm(x, size, p);
  if (!(norm > 0) || (!sphere && norm <= radius)) return;
  if (sphere || p == 2) {
    for (std::size_t i = 0; i < size; ++i) x[i] *= radius / norm;
  } else if (std::isinf(p)) {
    for (std::size_t i = 0; i < size; ++i) x[i] = std::clamp(x[i], -radius, radius);
  } else if (p == 1) {
    shrink_all(x, size, threshold(x, size, radius));
  } else {
    shrink_powers(x, size, p, radius);
  }
}

void project_singular(double* m, int rows, int columns, BallNorm norm, double radius, bool sphere,
                      double* scratch) {
  const std::size_t size = std::size_t(rows) * columns;
  const int count = std::min(rows, columns);
  Singular found(m, rows, columns, scratch);
  double* values = found.values();
  double now = 0;
  for (int j = 0; j < count; ++j)
    now = norm == BallNorm::kSpectral ? std::max(now, values[j]) : now + values[j];
  if (!(now > 0) || (!sphere && now <= radius)) return;
  if (sphere) {
    for (std::size_t i = 0; i < size; ++i) m[i] *= radius / now;
    return;
  }
  if (norm == BallNorm::kSpectral) {
    for (int j = 0; j < count; ++j) values[j] = std::min(values[j], radius);
  } else {
    shrink_all(values, count, threshold(values, count, radius));
  }
  found.compose(m);
}

}  // namespace mhfast
