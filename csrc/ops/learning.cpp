#include "learning.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "../dispatch/dispatch.hpp"
#include "gram.hpp"
#include "simplex.hpp"
#include "team.hpp"

namespace mhfast {
namespace {

double dot(const double* a, const double* b, int size) {
  double sum = 0;
  for (int i = 0; i < size; ++i) sum += a[i] * b[i];
  return sum;
}

/// out (rows, columns) = a (rows, inner) b (inner, columns)
void multiply(const double* a, const double* b, int rows, int inner, int columns, double* out) {
  std::fill(out, out + rows * columns, 0.0);
  for (int i = 0; i < rows; ++i)
    for (int k = 0; k < inner; ++k)
      for (int j = 0; j < columns; ++j)
        out[i * columns + j] += a[i * inner + k] * b[k * columns + j];
}

/// Approximates one row after another; data of a sample is kept while rows belong to it. Tokens and
/// the values they have by `sum` are transposed, with tokens in whole vectors.
class RowFit {
 public:
  RowFit(const Examples& examples, const double* sum, int support)
      : examples_(examples),
        sum_(sum),
        kernels_(active_kernels<double>()),
        vectors_((examples.T + kernels_.lanes - 1) / kernels_.lanes),
        stride_(std::ptrdiff_t(vectors_) * kernels_.lanes),
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
    double square = spoilt_;
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
    spoilt_ = 0;
    for (int b = 0; b < T; ++b) spoilt_ += 0 * gram_[b * stride_ + b];
  }

  /// out (M, stride) = aᵀ b for a (depth, M), rows `a_row` apart, and b (depth, stride).
  void multiply(const double* a, std::ptrdiff_t a_row, int M, int depth,
                const std::vector<double>& b, std::vector<double>& out) const {
    Product<double> product{};
    product.size.M = M;
    product.size.N = vectors_;
    product.size.K1 = depth;
    product.a.at = a;
    product.a.k1 = a_row;
    product.b.at = b.data();
    product.b.k1 = product.c.m = stride_;
    product.b.n = product.c.n = kernels_.lanes;
    product.c.at = out.data();
    kernels_.product(product);
  }

  const Examples& examples_;
  const double* sum_;
  const Kernels<double>& kernels_;
  const int vectors_;
  const std::ptrdiff_t stride_;
  NearestInSimplex nearest_;
  std::int64_t sample_ = -1;
  double spoilt_ = 0;  // NaN if a token of the sample is not finite
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

namespace {

/// Derivatives of a sample's outputs by the parameters of a layer, a row for each output.
class LayerRows {
 public:
  LayerRows(const Examples& examples, const LayerView& layer)
      : examples_(examples),
        layer_(layer),
        values_(std::size_t(layer.H) * examples.T * examples.p),
        query_(examples.d),
        attention_(examples.T),
        average_(examples.d),
        derivative_(examples.T),
        moved_(examples.d) {}

  void write(std::int64_t sample, double* out, std::ptrdiff_t stride) {
    const int T = examples_.T, d = examples_.d, p = examples_.p, H = layer_.H;
    const int values_at = H * d * d, error_at = values_at + H * d * p;
    const double* X = examples_.X + sample * T * d;
    for (int h = 0; h < H; ++h)
      multiply(X, layer_.V + h * d * p, T, d, p, &values_[std::size_t(h) * T * p]);
    for (int a = 0; a < T; ++a, out += p * stride) {
      for (int o = 0; o < p; ++o) {
        std::fill(out + o * stride, out + o * stride + error_at, 0.0);
        out[o * stride + error_at] = -examples_.Y[(sample * T + a) * p + o];
      }
      for (int h = 0; h < H; ++h) {
        attend(X, X + a * d, layer_.W + h * d * d);
        multiply(attention_.data(), X, 1, T, d, average_.data());
        for (int o = 0; o < p; ++o) {
          double* const row = out + o * stride;
          row[error_at] +=
              write_head(X, X + a * d, &values_[std::size_t(h) * T * p] + o, row + h * d * d);
          for (int f = 0; f < d; ++f) row[values_at + (h * d + f) * p + o] = average_[f];
        }
      }
    }
  }

 private:
  /// attention_ = softmax(x W Xᵀ)
  void attend(const double* X, const double* x, const double* W) {
    const int T = examples_.T, d = examples_.d;
    multiply(x, W, 1, d, d, query_.data());
    for (int b = 0; b < T; ++b) attention_[b] = dot(query_.data(), X + b * d, d);
    const double largest = *std::max_element(attention_.begin(), attention_.end());
    double total = 0;
    for (double& a : attention_) total += a = std::exp(a - largest);
    for (double& a : attention_) a /= total;
  }

  /// Derivatives by the head's W of its output, of which c, p apart, is what the tokens say.
  /// Returns the output.
  double write_head(const double* X, const double* x, const double* c, double* out) {
    const int T = examples_.T, d = examples_.d, p = examples_.p;
    double output = 0;
    for (int b = 0; b < T; ++b) output += attention_[b] * c[b * p];
    for (int b = 0; b < T; ++b) derivative_[b] = attention_[b] * (c[b * p] - output);
    multiply(derivative_.data(), X, 1, T, d, moved_.data());
    for (int f = 0; f < d; ++f)
      for (int g = 0; g < d; ++g) out[f * d + g] = x[f] * moved_[g];
    return output;
  }

  const Examples& examples_;
  const LayerView& layer_;
  std::vector<double> values_, query_, attention_, average_, derivative_, moved_;
};

}  // namespace

void layer_equations(const Examples& examples, const LayerView& layer, int threads,
                     double* moment) {
  const int T = examples.T, d = examples.d, p = examples.p, H = layer.H;
  RowSource source{examples.n, T * p, H * d * (d + p) + 1, 4.0 * T * H * d * (d + p) * p, {}};
  std::vector<LayerRows> members(gram_threads(source, threads), LayerRows(examples, layer));
  source.fill = [&](std::int64_t sample, int member, double* out, std::ptrdiff_t stride) {
    members[member].write(sample, out, stride);
  };
  gram_matrix(source, threads, moment);
}

}  // namespace mhfast
