#include "population.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <type_traits>
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

/// Outputs of a classifier in self-attention, of samples x (n, T, d).
template <class real>
void outputs_of(const std::vector<real>& W, const std::vector<real>& U, int heads, const Shape& s,
                std::ptrdiff_t n, const real* x, real* f) {
  Data<real> data{};
  data.shape = {n, s.T, s.T, s.d, heads};
  data.self = true;
  data.x = data.z = x;
  data.runs = 1;
  Model<const real*> model{};
  model.at[kW] = W.data();
  model.at[kU] = U.data();
  outputs<real>(data, model, 1, 1, f);
}

/// The sum of squares, in four sums.
template <class real>
double squares(const real* x, std::ptrdiff_t size) {
  double sums[4] = {};
  std::ptrdiff_t k = 0;
  for (; k + 4 <= size; k += 4)
    for (int j = 0; j < 4; ++j) sums[j] += double(x[k + j]) * x[k + j];
  for (; k < size; ++k) sums[0] += double(x[k]) * x[k];
  return sums[0] + sums[1] + (sums[2] + sums[3]);
}

/// Labels of the sign of outputs in double: from float where its error cannot change them.
class FloatOutputs {
 public:
  FloatOutputs(const std::vector<double>& W, const std::vector<double>& U, int heads)
      : W_(W.begin(), W.end()), U_(U.begin(), U.end()), heads_(heads) {
    const std::ptrdiff_t of_head = std::ptrdiff_t(W.size()) / heads;
    for (int h = 0; h < heads; ++h)
      norms_of_W_.push_back(std::sqrt(squares(&W[h * of_head], of_head)));
    const int d = int(std::sqrt(double(of_head)) + .5);
    for (std::size_t row = 0; row < U.size(); row += d)
      norms_of_U_.push_back(std::sqrt(squares(&U[row], d)));
  }

  /// Writes +-1 to y where the sign of f is certain; returns the samples where it is not.
  std::vector<std::ptrdiff_t> label(std::ptrdiff_t n, const Shape& s, const float* x,
                                    float* y) const {
    std::vector<float> f(n);
    outputs_of(W_, U_, heads_, s, n, x, f.data());
    std::vector<std::ptrdiff_t> doubtful;
    std::vector<double> lengths(s.T);
    for (std::ptrdiff_t i = 0; i < n; ++i, x += std::ptrdiff_t(s.T) * s.d) {
      for (int t = 0; t < s.T; ++t)
        lengths[t] = std::sqrt(squares(x + std::ptrdiff_t(t) * s.d, s.d));
      if (std::fabs(double(f[i])) > error(s, lengths))
        y[i] = f[i] > 0 ? 1.0f : -1.0f;
      else
        doubtful.push_back(i);
    }
    return doubtful;
  }

 private:
  /// Bound of the error of an output, for tokens of these lengths m_t, the largest of them m.
  ///
  /// With e = 2^-24 a sum of k products in any order has an error of at most k e / (1 - k e) times
  /// the sum of absolute values. A logit of row t, two such sums of d products, thus has one of
  /// 2 (d + 2) e m_t |W_h| m, roundings of W included, and its difference from the largest one more
  /// of 2 e m_t |W_h| m. Twice the sum of both, to first order, is the relative error of a weight
  /// beside those of exp, of the sum over keys and of the quotient, (T + 6) e; a weighted mean of
  /// <u_t, x_s> is at most |u_t| m, and summing them over d, T, rows and heads adds
  /// (d + T + H T + 4) e times that. The factor 1.2 is for higher orders, while the first is small.
  double error(const Shape& s, const std::vector<double>& lengths) const {
    constexpr double kUnit = 0x1p-24, kSmall = .05;
    const double m = *std::max_element(lengths.begin(), lengths.end());
    const double of_logits = 2 * (2 * (s.d + 2) + 2) * kUnit * m;
    const double beside = (s.d + (2.0 + heads_) * s.T + 10) * kUnit;
    double sum = 0, largest = beside;
    for (int h = 0; h < heads_; ++h) {
      const double* const norms = &norms_of_U_[std::ptrdiff_t(h) * s.T];
      double of_U = 0, of_rows = 0;
      for (int t = 0; t < s.T; ++t) {
        of_U += norms[t];
        of_rows += norms[t] * lengths[t];
      }
      sum += of_logits * norms_of_W_[h] * of_rows + beside * of_U;
      largest = std::max(largest, of_logits * norms_of_W_[h] * m);
    }
    if (!(largest < kSmall)) return INFINITY;
    return 1.2 * sum * m / std::sqrt(double(heads_)) + 0x1p-100;
  }

  const std::vector<float> W_, U_;
  const int heads_;
  std::vector<double> norms_of_W_, norms_of_U_;
};

template <class real>
class Planted final : public Population<real> {
 public:
  Planted(std::vector<double> W, std::vector<double> U, int heads)
      : W_(std::move(W)), U_(std::move(U)), heads_(heads), in_float_(W_, U_, heads) {}

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
    const auto sign = [](double f) { return f > 0 ? real(1) : real(-1); };
    std::vector<double> f(n);
    if constexpr (std::is_same_v<real, double>) {
      outputs_of(W_, U_, heads_, s, n, x, f.data());
      std::transform(f.begin(), f.end(), y, sign);
    } else {
      const std::vector<std::ptrdiff_t> doubtful = in_float_.label(n, s, x, y);
      if (doubtful.empty()) return;
      const std::ptrdiff_t size = std::ptrdiff_t(s.T) * s.d;
      std::vector<double> tokens;
      tokens.reserve(doubtful.size() * size);
      for (const std::ptrdiff_t i : doubtful)
        tokens.insert(tokens.end(), x + i * size, x + (i + 1) * size);
      outputs_of(W_, U_, heads_, s, std::ptrdiff_t(doubtful.size()), tokens.data(), f.data());
      for (std::size_t k = 0; k < doubtful.size(); ++k) y[doubtful[k]] = sign(f[k]);
    }
  }

 private:
  const std::vector<double> W_, U_;
  const int heads_;
  const FloatOutputs in_float_;
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
