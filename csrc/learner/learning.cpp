#include "learning.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "../runtime/team.hpp"
#include "gram.hpp"
#include "products.hpp"
#include "simplex.hpp"

namespace mhfast {
namespace {

/// Approximates one row after another; data of a sample is kept while rows belong to it. Tokens and
/// the values they have by `sum` are transposed, with tokens in whole vectors.
class RowFit {
 public:
  RowFit(const Examples& examples, const double* sum, int support)
      : examples_(examples),
        sum_(sum),
        stride_(in_vectors(examples.T)),
        nearest_(examples.T, support),
        tokens_(examples.d * stride_),
        values_(examples.p * stride_),
        gram_(examples.T * stride_),
        inner_(stride_) {}

  /// Writes the weights (T) of a row; returns the norm of the residual.
  double fit(std::int64_t row, double* weights) {
    const int p = examples_.p;
    prepare(row / examples_.T);
    const double* y = examples_.Y + row * p;
    multiply(y, 1, 1, p, values_, inner_);
    nearest_.solve(gram_.data(), stride_, inner_.data(), weights);
    // Computed from the difference, because the Gram matrix would lose half of the digits.
    double square = nan_;
    for (int o = 0; o < p; ++o) {
      double left = y[o];
      for (int i = 0; i < nearest_.size(); ++i) {
        const int b = nearest_.active()[i];
        left -= weights[b] * values_[o * stride_ + b];
      }
      square += left * left;
    }
    return std::sqrt(square);
  }

 private:
  void prepare(std::int64_t sample) {
    if (sample == sample_) return;
    sample_ = sample;
    const int T = examples_.T, d = examples_.d, p = examples_.p;
    const double* X = examples_.X + sample * T * d;
    for (int f = 0; f < d; ++f)
      for (int b = 0; b < T; ++b) tokens_[f * stride_ + b] = X[b * d + f];
    multiply(sum_, p, p, d, tokens_, values_);
    multiply(values_.data(), stride_, T, p, values_, gram_);
    nan_ = 0;
    for (int b = 0; b < T; ++b) nan_ += 0 * gram_[b * stride_ + b];
  }

  /// out (M, stride) = aᵀ b for a (depth, M), rows `a_row` apart, and b (depth, stride).
  void multiply(const double* a, std::ptrdiff_t a_row, int M, int depth,
                const std::vector<double>& b, std::vector<double>& out) const {
    multiply_transposed({a, a_row}, M, depth, {b.data(), stride_}, examples_.T,
                        {out.data(), stride_});
  }

  const Examples& examples_;
  const double* sum_;
  const std::ptrdiff_t stride_;
  NearestInSimplex nearest_;
  std::int64_t sample_ = -1;
  double nan_ = 0;  // NaN if a token of the sample is not finite
  std::vector<double> tokens_, values_, gram_, inner_;
};

double fit_flops(const Examples& e) { return 4.0 * e.T * e.T * e.p + 2.0 * e.d * e.p + 200.0; }

}  // namespace

void fit_rows(const Examples& examples, const double* sum, int support, int threads,
              double* weights, double* residuals) {
  const std::int64_t rows = examples.rows;
  const int team = useful_threads(threads, rows, double(rows) * fit_flops(examples));
  std::vector<RowFit> fits(team, RowFit(examples, sum, support));
  run_team(team, [&](const Member& member) {
    for (std::int64_t i = rows * member.index / member.count;
         i < rows * (member.index + 1) / member.count; ++i)
      residuals[i] = fits[member.index].fit(examples.row(i), weights + i * examples.T);
  });
}

void sum_equations(const Examples& examples, const double* sum, int support, double scale,
                   int threads, double* moment, double* residuals) {
  const int T = examples.T, d = examples.d, p = examples.p;
  RowSource source{examples.rows, 1, d + p, fit_flops(examples), {}};
  const int team = gram_threads(source, threads);
  std::vector<RowFit> fits(team, RowFit(examples, sum, support));
  std::vector<std::vector<double>> weights(team, std::vector<double>(T));
  source.fill = [&](std::int64_t i, int member, double* out, std::ptrdiff_t) {
    const std::int64_t row = examples.row(i);
    double* const weight = weights[member].data();
    const double residual = residuals[i] = fits[member].fit(row, weight);
    // The square root of the weight of the row.
    const double counts = 1 / (1 + residual / scale * (residual / scale));
    multiply(weight, examples.X + row / T * T * d, 1, T, d, out);
    for (int f = 0; f < d; ++f) out[f] *= counts;
    for (int o = 0; o < p; ++o) out[d + o] = counts * examples.Y[row * p + o];
  };
  gram_matrix(source, threads, moment);
}

void fact_moment(const Examples& examples, const Facts& facts, int threads, double* moment) {
  const int T = examples.T, d = examples.d;
  RowSource source{facts.count, 1, d * d + 1, double(d) * d, {}};
  source.fill = [&](std::int64_t i, int, double* out, std::ptrdiff_t) {
    const double* tokens = examples.X + facts.rows[i] / T * T * d;
    const double *x = tokens + facts.rows[i] % T * d, *first = tokens + facts.first[i] * d,
                 *second = tokens + facts.second[i] * d;
    const double root = std::sqrt(facts.weight[i]);
    for (int f = 0; f < d; ++f)
      for (int g = 0; g < d; ++g) out[f * d + g] = root * x[f] * (first[g] - second[g]);
    out[d * d] = root * facts.value[i];
  };
  gram_matrix(source, threads, moment);
}

}  // namespace mhfast
