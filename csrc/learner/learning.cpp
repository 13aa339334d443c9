#include "learning.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "../dispatch/dispatch.hpp"
#include "../runtime/team.hpp"
#include "../runtime/tuning.hpp"
#include "gram.hpp"
#include "simplex.hpp"

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

/// Numbers in as many whole vectors as hold `size` numbers.
int in_vectors(int size) {
  const int lanes = active_kernels<double>().lanes;
  return (size + lanes - 1) / lanes * lanes;
}

/// out (M, columns) = aᵀ b for a (depth, M) and b (depth, columns), by the kernels: of b and out
/// whole vectors are read and written. Rows are `a_row`, `b_row` and `out_row` apart.
void multiply_transposed(const double* a, std::ptrdiff_t a_row, int M, int depth, const double* b,
                         std::ptrdiff_t b_row, int columns, double* out, std::ptrdiff_t out_row) {
  const Kernels<double>& kernels = active_kernels<double>();
  Product<double> product{};
  product.size.M = M;
  product.size.N = in_vectors(columns) / kernels.lanes;
  product.size.K1 = depth;
  product.a.at = a;
  product.a.k1 = a_row;
  product.b.at = b;
  product.b.k1 = b_row;
  product.c.m = out_row;
  product.b.n = product.c.n = kernels.lanes;
  product.c.at = out;
  kernels.product(product);
}

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
    multiply_transposed(a, a_row, M, depth, b.data(), stride_, examples_.T, out.data(), stride_);
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

namespace {

/// What the normal equations of a layer are made of, a row for each query x of a sample. With the
/// weights a of head h, x̄ = Σ_b a_b x_b and m_o = Σ_b a_b (c_bo - c̄_o) x_b for c = X V_h, output o
/// has the derivative x m_oᵀ by W_h and x̄ by column o of V_h. The sums over rows therefore factor:
///
///     W, W:  (x xᵀ) times (Σ_o m_o m_oᵀ)        both symmetric
///     W, V:  (x x̄ᵀ) times m
///     V, V:  x̄ x̄ᵀ for equal outputs, else 0
///
/// and with r = F - Y the right-hand sides are x (Σ_o r_o m_o)ᵀ and x̄ rᵀ. That takes about d (H d)²
/// (p + d / 4) products a row, where derivatives side by side would take p (H d (d + p))² / 2.
class LayerRows {
 public:
  LayerRows(const Examples& examples, const LayerView& layer)
      : examples_(examples),
        layer_(layer),
        all_(layer.H * examples.d),
        squares_{0, packed(examples.d)},
        products_{after(squares_), packed(all_)},
        pairs_{after(products_), examples.d * all_},
        moves_{after(pairs_), all_ * examples.p},
        rest_{after(moves_), 2 * all_ + examples.d + examples.p},
        token_(in_vectors(examples.d)),
        square_(in_vectors(all_)),
        tokens_(examples.T * token_),
        values_(std::size_t(layer.H) * examples.T * examples.p),
        query_(examples.d),
        attention_(examples.T),
        output_(examples.p),
        derivative_(std::size_t(examples.T) * examples.p),
        moves_of_head_(examples.p * token_),
        products_of_moves_(all_ * square_) {}

  /// The number of columns of a row.
  int width() const { return rest_.begin + rest_.width; }

  /// The moments of the rows that layer_equations needs, in `sums`, which they fill.
  std::vector<CrossMoment> moments(std::vector<double>& sums) const;

  /// The equations (P + 1, P + 1) from these sums.
  void assemble(const std::vector<double>& sums, double* out) const;

  void write(std::int64_t sample, double* out, std::ptrdiff_t stride) {
    const int T = examples_.T, d = examples_.d, p = examples_.p, H = layer_.H;
    const double* X = examples_.X + sample * T * d;
    for (int h = 0; h < H; ++h)
      multiply(X, layer_.V + h * d * p, T, d, p, &values_[std::size_t(h) * T * p]);
    for (int b = 0; b < T; ++b) std::copy_n(X + b * d, d, &tokens_[b * token_]);
    for (int a = 0; a < T; ++a, out += stride)
      write_row(X, X + a * d, examples_.Y + (sample * T + a) * p, out);
  }

 private:
  static int packed(int size) { return size * (size + 1) / 2; }
  static int after(const Columns& columns) {
    return (columns.begin + columns.width + kGramColumns - 1) / kGramColumns * kGramColumns;
  }
  /// The place of an entry of a symmetric matrix of which the lower triangle is held by rows.
  static int place(int i, int j) { return i < j ? packed(j) + i : packed(i) + j; }

  /// The columns `rest_` hold x̄ of all heads, r, x, and Σ_o r_o m_o of all heads.
  void write_row(const double* X, const double* x, const double* y, double* row) {
    const int T = examples_.T, d = examples_.d, p = examples_.p, H = layer_.H;
    double* const average = row + rest_.begin;
    double *const error = average + all_, *const moved = error + p + d;
    double* const moves = row + moves_.begin;
    for (int o = 0; o < p; ++o) error[o] = -y[o];
    std::copy_n(x, d, error + p);
    for (int h = 0; h < H; ++h) {
      attend(X, x, layer_.W + h * d * d);
      multiply(attention_.data(), X, 1, T, d, average + h * d);
      move(&values_[std::size_t(h) * T * p], moves + h * d, error);
    }
    for (int f = 0; f < d; ++f)
      for (int i = 0; i < all_; ++i) row[pairs_.begin + f * all_ + i] = x[f] * average[i];
    multiply(error, moves, 1, p, all_, moved);
    double* square = row + squares_.begin;
    for (int f = 0; f < d; ++f)
      for (int g = 0; g <= f; ++g) *square++ = x[f] * x[g];
    write_products(moves, row + products_.begin);
  }

  /// Writes the lower triangle of Σ_o m_o m_oᵀ. The last vector of the last m_o ends in the columns
  /// that come next, and what they give is not read.
  void write_products(const double* moves, double* out) {
    for (int i = 0; i < all_; i += kRowsOfProducts) {
      const int rows = std::min(kRowsOfProducts, all_ - i);
      multiply_transposed(moves + i, all_, rows, examples_.p, moves, all_, i + rows,
                          &products_of_moves_[i * square_], square_);
    }
    for (int i = 0; i < all_; out += ++i) std::copy_n(&products_of_moves_[i * square_], i + 1, out);
  }

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

  /// Writes m_o of a head for all outputs, H d apart, for the values c (T, p); adds the outputs of
  /// the head to `error`.
  void move(const double* c, double* moves, double* error) {
    const int T = examples_.T, d = examples_.d, p = examples_.p;
    multiply(attention_.data(), c, 1, T, p, output_.data());
    for (int b = 0; b < T; ++b)
      for (int o = 0; o < p; ++o)
        derivative_[b * p + o] = attention_[b] * (c[b * p + o] - output_[o]);
    multiply_transposed(derivative_.data(), p, p, T, tokens_.data(), token_, d,
                        moves_of_head_.data(), token_);
    for (int o = 0; o < p; ++o, moves += all_) {
      std::copy_n(&moves_of_head_[o * token_], d, moves);
      error[o] += output_[o];
    }
  }

  static constexpr int kRowsOfProducts = 16;  // of a square of which half is needed

  const Examples& examples_;
  const LayerView& layer_;
  const int all_;  // H d
  const Columns squares_, products_, pairs_, moves_, rest_;
  const std::ptrdiff_t token_, square_;  // numbers of a row, in whole vectors
  std::vector<double> tokens_, values_, query_, attention_, output_, derivative_, moves_of_head_,
      products_of_moves_;
};

std::vector<CrossMoment> LayerRows::moments(std::vector<double>& sums) const {
  std::vector<CrossMoment> found{
      {squares_, products_, nullptr}, {pairs_, moves_, nullptr}, {rest_, rest_, nullptr}};
  std::size_t size = 0;
  for (const CrossMoment& m : found) size += std::size_t(m.left.width) * m.right.width;
  sums.resize(size);
  double* at = sums.data();
  for (CrossMoment& m : found) {
    m.out = at;
    at += std::size_t(m.left.width) * m.right.width;
  }
  return found;
}

void LayerRows::assemble(const std::vector<double>& sums, double* out) const {
  const int d = examples_.d, p = examples_.p;
  const std::ptrdiff_t values_at = std::ptrdiff_t(all_) * d, error_at = values_at + all_ * p;
  const double* const of_squares = sums.data();
  const double* const of_pairs = of_squares + std::ptrdiff_t(squares_.width) * products_.width;
  const double* const of_rest = of_pairs + std::ptrdiff_t(pairs_.width) * moves_.width;
  const auto put = [&](std::ptrdiff_t i, std::ptrdiff_t j, double value) {
    out[i * (error_at + 1) + j] = out[j * (error_at + 1) + i] = value;
  };
  const auto rest = [&](int i, int j) { return of_rest[std::ptrdiff_t(i) * rest_.width + j]; };
  // Number g of head h is i = h d + g; W_h[f, g] is at h d² + f d + g, V_h[g, o] at i p + o.
  const auto weight = [&](int i, int f) { return (i / d * d + f) * d + i % d; };
  for (int i = 0; i < all_; ++i)
    for (int f = 0; f < d; ++f) {
      for (int j = 0; j <= i; ++j)
        for (int e = 0; e < d; ++e)
          put(weight(i, f), weight(j, e),
              of_squares[std::ptrdiff_t(place(f, e)) * products_.width + place(i, j)]);
      for (int j = 0; j < all_; ++j)
        for (int o = 0; o < p; ++o)
          put(weight(i, f), values_at + j * p + o,
              of_pairs[std::ptrdiff_t(f * all_ + j) * moves_.width + o * all_ + i]);
      put(weight(i, f), error_at, rest(all_ + p + f, all_ + p + d + i));
    }
  for (int i = 0; i < all_; ++i)
    for (int o = 0; o < p; ++o) {
      for (int j = 0; j < all_; ++j)
        for (int u = 0; u < p; ++u)
          put(values_at + i * p + o, values_at + j * p + u, o == u ? rest(i, j) : 0.0);
      put(values_at + i * p + o, error_at, rest(i, all_ + o));
    }
  double square = 0;
  for (int o = 0; o < p; ++o) square += rest(all_ + o, all_ + o);
  put(error_at, error_at, square);
}

}  // namespace

void layer_equations(const Examples& examples, const LayerView& layer, int threads,
                     double* moment) {
  const int T = examples.T, d = examples.d, p = examples.p, all = layer.H * d;
  const LayerRows rows(examples, layer);
  std::vector<double> sums;
  const std::vector<CrossMoment> moments = rows.moments(sums);
  RowSource source{examples.n, T, rows.width(), 2.0 * T * all * p * (T + d + 0.5 * all), {}};
  std::vector<LayerRows> members(gram_threads(source, moments, threads), rows);
  source.fill = [&](std::int64_t sample, int member, double* out, std::ptrdiff_t stride) {
    members[member].write(sample, out, stride);
  };
  cross_moments(source, moments, threads);
  rows.assemble(sums, moment);
}

}  // namespace mhfast
