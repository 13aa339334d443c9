#include "population.hpp"

#include <cmath>
#include <numeric>
#include <utility>

#include "../dispatch/dispatch.hpp"

namespace mhfast {
namespace {

/// |z|, which z is divided by.
double length_of(const double* z, int d) {
  double sum = 0;
  for (int k = 0; k < d; ++k) sum += z[k] * z[k];
  return std::sqrt(sum);
}

template <class real>
class Sphere final : public Population<real> {
 public:
  std::ptrdiff_t scratch(const Shape& s) const override {
    return SampleNumbers::rounded(std::ptrdiff_t(std::max(s.T, s.q)) * s.d);
  }
  void draw(const SampleNumbers& numbers, const Shape& s, double* scratch, real* x, real* z,
            real* y) const override {
    draw_rows(numbers, 0, s.T, s.d, scratch, x);
    if (z) draw_rows(numbers, 2, s.q, s.d, scratch, z);
    *y = real(numbers.sign(1));
  }

 private:
  static void draw_rows(const SampleNumbers& numbers, int part, int rows, int d, double* scratch,
                        real* to) {
    numbers.normals(part, std::ptrdiff_t(rows) * d, scratch);
    for (int t = 0; t < rows; ++t, scratch += d, to += d) {
      const double length = length_of(scratch, d);
      for (int k = 0; k < d; ++k) to[k] = real(scratch[k] / length);
    }
  }
};

template <class real>
class TokenizedMixture final : public Population<real> {
 public:
  explicit TokenizedMixture(Mixture mixture) : mixture_(std::move(mixture)) {}

  std::ptrdiff_t scratch(const Shape& s) const override {
    return SampleNumbers::rounded(std::ptrdiff_t(s.T) * s.d) + 2 * s.T;
  }
  void draw(const SampleNumbers& numbers, const Shape& s, double* scratch, real* x, real*,
            real* y) const override {
    const int T = s.T, d = s.d;
    const std::ptrdiff_t size = std::ptrdiff_t(T) * d;
    double* slots = scratch + SampleNumbers::rounded(size);  // small integers
    double* contexts = slots + T;
    std::iota(slots, slots + T, 0.0);
    if (mixture_.random_positions)
      numbers.integers(
          3, T, [&](int i) { return T - i; },
          [&](int i, int j) { std::swap(slots[i], slots[i + j]); });
    numbers.integers(
        2, T, [&](int) { return mixture_.contexts; }, [&](int t, int c) { contexts[t] = c; });
    if (mixture_.noise > 0) numbers.normals(0, size, scratch);
    const double label = numbers.sign(1), root = std::sqrt(double(d));
    *y = real(label);
    for (int p = 0; p < T; ++p) {
      const int slot = int(slots[p]);
      const bool is_class = slot < mixture_.relevant;
      const int id = is_class ? (label > 0) : 2 + int(contexts[slot]);
      const double* token = &mixture_.table[std::ptrdiff_t(id) * d];
      const double* noise = scratch + std::ptrdiff_t(slot) * d;
      const bool noisy = !is_class && mixture_.noise > 0;
      const double divisor = !noisy ? 1 : mixture_.bounded ? length_of(noise, d) : root;
      for (int k = 0; k < d; ++k)
        *x++ = real(noisy ? token[k] + mixture_.noise * (noise[k] / divisor) : token[k]);
    }
  }

 private:
  const Mixture mixture_;
};

template <class real>
class Regression final : public Population<real> {
 public:
  Regression(std::vector<double> root, double noise) : root_(std::move(root)), noise_(noise) {}

  std::ptrdiff_t scratch(const Shape& s) const override {
    return SampleNumbers::rounded(s.d - 1) +
           SampleNumbers::rounded(std::ptrdiff_t(s.T) * (s.d - 1)) + SampleNumbers::rounded(s.T) +
           s.d;
  }
  void draw(const SampleNumbers& numbers, const Shape& s, double* scratch, real* x, real*,
            real* y) const override {
    const int T = s.T, features = s.d - 1;
    double* task = scratch;
    double* z = task + SampleNumbers::rounded(features);
    double* noise = z + SampleNumbers::rounded(std::ptrdiff_t(T) * features);
    double* row = noise + SampleNumbers::rounded(T);
    numbers.normals(0, features, task);
    numbers.normals(1, std::ptrdiff_t(T) * features, z);
    if (noise_ > 0) numbers.normals(2, T, noise);
    for (int t = 0; t < T; ++t, z += features) {
      double response = 0;
      for (int k = 0; k < features; ++k) {
        row[k] = 0;
        for (int l = 0; l <= k; ++l) row[k] += root_[std::ptrdiff_t(k) * features + l] * z[l];
        response += task[k] * row[k];
        *x++ = real(row[k]);
      }
      const bool is_question = t + 1 == T;
      if (is_question) *y = real(response);
      *x++ = is_question ? real(0) : real(noise_ > 0 ? response + noise_ * noise[t] : response);
    }
  }

 private:
  const std::vector<double> root_;
  const double noise_;
};

}  // namespace

void SampleNumbers::normals(int part, std::ptrdiff_t count, double* out) const {
  constexpr int kGroups = 8;
  std::uint64_t bits[16 * kGroups];
  const std::ptrdiff_t groups = rounded(count) / 16;
  for (std::ptrdiff_t first = 0; first < groups; first += kGroups) {
    const std::ptrdiff_t now = std::min<std::ptrdiff_t>(kGroups, groups - first);
    for (std::ptrdiff_t m = 0; m < 4 * now; ++m) {
      const Philox::Block block = words(part, std::uint64_t(4 * first + m));
      std::copy(block.begin(), block.end(), bits + 4 * m);
    }
    active_kernels<double>().normals(bits, now, out + 16 * first);
  }
}

template <class real>
std::shared_ptr<Population<real>> sphere_tokens() {
  return std::make_shared<Sphere<real>>();
}

template <class real>
std::shared_ptr<Population<real>> tokenized_mixture(Mixture mixture) {
  return std::make_shared<TokenizedMixture<real>>(std::move(mixture));
}

template <class real>
std::shared_ptr<Population<real>> icl_regression(std::vector<double> root, double noise) {
  return std::make_shared<Regression<real>>(std::move(root), noise);
}

#define MHFAST_INSTANTIATE(real)                                               \
  template std::shared_ptr<Population<real>> sphere_tokens<real>();            \
  template std::shared_ptr<Population<real>> tokenized_mixture<real>(Mixture); \
  template std::shared_ptr<Population<real>> icl_regression<real>(std::vector<double>, double);
MHFAST_INSTANTIATE(float)
MHFAST_INSTANTIATE(double)
#undef MHFAST_INSTANTIATE

}  // namespace mhfast
