#include "population.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "../dispatch/dispatch.hpp"
#include "../passes/evaluate.hpp"

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

template <class real>
class Planted final : public Population<real> {
 public:
  Planted(std::vector<double> W, std::vector<double> U, int heads)
      : W_(std::move(W)), U_(std::move(U)), heads_(heads) {}

  std::ptrdiff_t scratch(const Shape& s) const override {
    return SampleNumbers::rounded(std::ptrdiff_t(s.T) * s.d);
  }
  void draw(const SampleNumbers& numbers, const Shape& s, double* scratch, real* x, real*,
            real*) const override {
    const std::ptrdiff_t size = std::ptrdiff_t(s.T) * s.d;
    numbers.normals(0, size, scratch);
    std::copy_n(scratch, size, x);
  }
  void label(std::ptrdiff_t n, const Shape& s, const real* x, real* y) const override {
    const std::vector<double> tokens(x, x + n * s.T * s.d);
    std::vector<double> f(n);
    Data<double> data{};
    data.shape = {n, s.T, s.T, s.d, heads_};
    data.self = true;
    data.x = data.z = tokens.data();
    data.runs = 1;
    Model<const double*> model{};
    model.at[kW] = W_.data();
    model.at[kU] = U_.data();
    outputs(data, model, 1.0, 1, f.data());
    for (std::ptrdiff_t i = 0; i < n; ++i) y[i] = f[i] > 0 ? real(1) : real(-1);
  }

 private:
  const std::vector<double> W_, U_;
  const int heads_;
};

template <class real>
class Markov final : public Population<real> {
 public:
  explicit Markov(MarkovChain chain) : chain_(std::move(chain)) {}

  std::ptrdiff_t scratch(const Shape& s) const override { return s.T + 1; }
  std::ptrdiff_t targets(const Shape& s) const override { return s.T; }
  void draw(const SampleNumbers& numbers, const Shape& s, double* scratch, real* x, real*,
            real* y) const override {
    const int V = chain_.words, d = s.d;
    double* const words = scratch;
    Philox::Block block{};
    for (int t = 0; t <= s.T; ++t) {
      if (t % 4 == 0) block = numbers.words(0, std::uint64_t(t / 4));
      words[t] = t < chain_.order ? double(below(std::uint64_t(V), block[t % 4]))
                                  : next(words + t, block[t % 4]);
    }
    for (int t = 0; t < s.T; ++t) {
      const double* row = &chain_.embedding[std::ptrdiff_t(words[t]) * d];
      for (int k = 0; k < d; ++k) *x++ = real(row[k]);
      *y++ = real(words[t + 1]);
    }
  }

 private:
  /// The word after those that end at `end`.
  double next(const double* end, std::uint64_t bits) const {
    std::ptrdiff_t place = 0;
    for (const double* word = end - chain_.order; word < end; ++word)
      place = place * chain_.words + std::ptrdiff_t(*word);
    const double* const sums = chain_.sums.data() + place * (chain_.words - 1);
    const double uniform = double(bits >> 11) * 0x1p-53;
    return double(std::upper_bound(sums, sums + chain_.words - 1, uniform) - sums);
  }

  const MarkovChain chain_;
};

}  // namespace

void SampleNumbers::normals(int part, std::ptrdiff_t count, double* out) const {
  constexpr int kGroups = 16;
  const Kernels<double>& kernels = active_kernels<double>();
  std::uint64_t bits[16 * kGroups];
  const std::ptrdiff_t groups = rounded(count) / 16;
  for (std::ptrdiff_t first = 0; first < groups; first += kGroups) {
    const std::ptrdiff_t now = std::min<std::ptrdiff_t>(kGroups, groups - first);
    kernels.random_words(key_, counter(part, std::uint64_t(4 * first)), 4 * now, bits);
    kernels.normals(bits, now, out + 16 * first);
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

template <class real>
std::shared_ptr<Population<real>> planted_attention(std::vector<double> W, std::vector<double> U,
                                                    int heads) {
  return std::make_shared<Planted<real>>(std::move(W), std::move(U), heads);
}

template <class real>
std::shared_ptr<Population<real>> markov_chain(MarkovChain chain) {
  return std::make_shared<Markov<real>>(std::move(chain));
}

#define MHFAST_INSTANTIATE(real)                                                                \
  template std::shared_ptr<Population<real>> sphere_tokens<real>();                             \
  template std::shared_ptr<Population<real>> markov_chain<real>(MarkovChain);                   \
  template std::shared_ptr<Population<real>> planted_attention<real>(std::vector<double>,       \
                                                                     std::vector<double>, int); \
  template std::shared_ptr<Population<real>> tokenized_mixture<real>(Mixture);                  \
  template std::shared_ptr<Population<real>> icl_regression<real>(std::vector<double>, double);
MHFAST_INSTANTIATE(float)
MHFAST_INSTANTIATE(double)
#undef MHFAST_INSTANTIATE

}  // namespace mhfast
