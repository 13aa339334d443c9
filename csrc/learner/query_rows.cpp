#include <algorithm>
#include <cmath>
#include <vector>

#include "layer_sums.hpp"
#include "products.hpp"

namespace mhfast {
namespace {

class QueryRows {
 public:
  QueryRows(const Examples& examples, const LayerView& layer)
      : examples_(examples),
        layer_(layer),
        all_(layer.H * examples.d),
        squares_{0, packed(examples.d)},
        products_(after(squares_, packed(all_))),
        pairs_(after(products_, examples.d * all_)),
        moves_(after(pairs_, all_ * examples.p)),
        averages_(after(moves_, all_ + examples.p)),
        queries_(after(averages_, examples.d)),
        moved_(after(queries_, all_)),
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
  int width() const { return moved_.begin + moved_.width; }

  /// The moments of the rows that fill `sums`.
  std::vector<CrossMoment> moments(LayerSums& sums) const {
    return {{squares_, products_, sums.squares.data()},
            {pairs_, moves_, sums.pairs.data()},
            {averages_, averages_, sums.averages.data()},
            {queries_, moved_, sums.moves.data()}};
  }

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
  /// The columns `averages_` hold x̄ of all heads and r, `moved_` Σ_o r_o m_o of all heads.
  void write_row(const double* X, const double* x, const double* y, double* row) {
    const int T = examples_.T, d = examples_.d, p = examples_.p, H = layer_.H;
    double *const average = row + averages_.begin, *const error = average + all_;
    double* const moves = row + moves_.begin;
    for (int o = 0; o < p; ++o) error[o] = -y[o];
    std::copy_n(x, d, row + queries_.begin);
    for (int h = 0; h < H; ++h) {
      attend(X, x, layer_.W + h * d * d);
      multiply(attention_.data(), X, 1, T, d, average + h * d);
      move(&values_[std::size_t(h) * T * p], moves + h * d, error);
    }
    for (int f = 0; f < d; ++f)
      for (int i = 0; i < all_; ++i) row[pairs_.begin + f * all_ + i] = x[f] * average[i];
    multiply(error, moves, 1, p, all_, row + moved_.begin);
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
      multiply_transposed({moves + i, all_}, rows, examples_.p, {moves, all_}, i + rows,
                          {&products_of_moves_[i * square_], square_});
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
    multiply_transposed({derivative_.data(), p}, p, T, {tokens_.data(), token_}, d,
                        {moves_of_head_.data(), token_});
    for (int o = 0; o < p; ++o, moves += all_) {
      std::copy_n(&moves_of_head_[o * token_], d, moves);
      error[o] += output_[o];
    }
  }

  static constexpr int kRowsOfProducts = 16;  // of a square of which half is needed

  const Examples& examples_;
  const LayerView& layer_;
  const int all_;  // H d
  const Columns squares_, products_, pairs_, moves_, averages_, queries_, moved_;
  const std::ptrdiff_t token_, square_;  // numbers of a row, in whole vectors
  std::vector<double> tokens_, values_, query_, attention_, output_, derivative_, moves_of_head_,
      products_of_moves_;
};

}  // namespace

LayerSums sums_of_queries(const Examples& examples, const LayerView& layer, int threads) {
  const int T = examples.T, d = examples.d, p = examples.p, all = layer.H * d;
  const QueryRows rows(examples, layer);
  LayerSums sums(examples, layer);
  const std::vector<CrossMoment> moments = rows.moments(sums);
  RowSource source{examples.n, T, rows.width(), 2.0 * T * all * p * (T + d + 0.5 * all), {}};
  std::vector<QueryRows> members(gram_threads(source, moments, threads), rows);
  source.fill = [&](std::int64_t sample, int member, double* out, std::ptrdiff_t stride) {
    members[member].write(sample, out, stride);
  };
  cross_moments(source, moments, threads);
  return sums;
}

}  // namespace mhfast
