#include <algorithm>
#include <cmath>
#include <vector>

#include "layer_sums.hpp"
#include "products.hpp"

namespace mhfast {
namespace {

/// Moments of the rows of which LayerSums are made.
struct QuerySums {
  std::vector<double> squares, pairs, moves;
};

/// Rows for queries. With the covariance C_h = Σ_b a_b (x_b - x̄)ᵀ (x_b - x̄) of the tokens under the
/// weights of head h, m = C_h V_h. Where V_h has many columns C_h has fewer numbers than m, and the
/// sums of x x̄ᵀ times C_h are multiplied by V_h afterwards.
///
/// An item is a group of samples if they are short, so that products are of many queries; those of
/// long samples are written a few at a time.
class QueryRows {
 public:
  QueryRows(const Examples& examples, const LayerView& layer);

  /// The number of columns of a row.
  int width() const { return moved_.begin + moved_.width; }
  /// Of an item.
  int samples() const { return samples_; }

  /// The moments of the rows, which fill `queries` and the averages in `sums`.
  std::vector<CrossMoment> moments(QuerySums& queries, LayerSums& sums) const;

  /// Completes `sums` from these moments.
  void complete(const QuerySums& queries, LayerSums& sums) const;

  void write(std::int64_t group, double* rows, std::ptrdiff_t stride) {
    const int T = examples_.T;
    const std::int64_t begin = group * samples_;
    const int count = int(std::min<std::int64_t>(samples_, examples_.n - begin));
    for (int i = count * T; i < samples_ * T; ++i) std::fill_n(rows + i * stride, width(), 0.0);
    read(begin, count * T);
    for (int first = 0; first < T; first += kQueries) {
      const Part part{begin, count, first, std::min(kQueries, T - first)};
      attend(part);
      write_part(part, rows + first * stride, stride);
    }
  }

 private:
  static constexpr int kQueries = 16;

  /// Some queries of each sample of a group: all of them, unless it is a single sample.
  struct Part {
    std::int64_t begin;
    int samples, first, queries;

    int rows() const { return samples * queries; }
  };

  const double* sample(std::int64_t number) const {
    return examples_.X + number * examples_.T * examples_.d;
  }

  /// The tokens of a group, and their products with W.
  void read(std::int64_t begin, int tokens) {
    const int d = examples_.d;
    const double* x = sample(begin);
    for (int b = 0; b < tokens; ++b, x += d)
      for (int f = 0; f < d; ++f) transposed_[f * keys_ + b] = x[f];
    multiply_transposed({weights_.data(), all_}, all_, d, {transposed_.data(), keys_}, tokens,
                        {images_.data(), keys_});
  }

  /// attention_ = softmax(x W Xᵀ) for all queries and heads of a part.
  void attend(const Part& part) {
    const int T = examples_.T, d = examples_.d, H = layer_.H;
    for (int h = 0; h < H; ++h)
      multiply_transposed({&transposed_[part.first], keys_, T}, part.queries, d,
                          {&images_[h * d * keys_], keys_, T}, T,
                          {&attention_[h * key_], H * key_, part.queries * H * key_}, part.samples);
    const int count = part.rows() * H;
    for (int i = 0; i < count; ++i) {
      double* const logits = &attention_[i * key_];
      const double largest = *std::max_element(logits, logits + T);
      for (int b = 0; b < T; ++b) logits[b] -= largest;
      std::fill(logits + T, logits + key_, 0.0);
    }
    active_kernels<double>().exponentials(attention_.data(), count * key_, attention_.data());
    for (int i = 0; i < count; ++i) {
      double* const weights = &attention_[i * key_];
      double total = 0;
      for (int b = 0; b < T; ++b) total += weights[b];
      for (int b = 0; b < T; ++b) weights[b] /= total;
    }
  }

  /// x, x xᵀ and x̄ of query number `i` of a part, and its C_h also in `covariances_`.
  void write_row(const Part& part, int i, double* row);

  /// m of all heads, in the row if m is there.
  Matrices<double> moves(double* rows, std::ptrdiff_t stride) {
    if (covariant_) return {moves_.data(), token_, layer_.H * examples_.p * token_};
    return {rows + slopes_.begin, token_, stride};
  }

  void write_part(const Part& part, double* rows, std::ptrdiff_t stride);

  const Examples& examples_;
  const LayerView& layer_;
  const int all_;  // H d
  const int samples_;
  const bool covariant_;  // C_h stands in a row, not m
  // In whole vectors: numbers of a token, of x̄ of all heads, of an output, of weights; all tokens.
  const std::ptrdiff_t token_, mean_, output_, key_, keys_;
  const Columns squares_, products_, pairs_, slopes_, averages_, queries_, moved_;
  std::vector<double> weights_, values_;
  std::vector<double> transposed_, images_, attention_, centred_, scaled_, covariances_, moves_,
      outputs_;
};

QueryRows::QueryRows(const Examples& examples, const LayerView& layer)
    : examples_(examples),
      layer_(layer),
      all_(layer.H * examples.d),
      samples_(std::max(1, kQueries / examples.T)),
      covariant_(2 * examples.p > examples.d),
      token_(in_vectors(examples.d)),
      mean_(in_vectors(all_)),
      output_(in_vectors(examples.p)),
      key_(in_vectors(examples.T)),
      keys_(in_vectors(samples_ * examples.T) + key_),
      squares_{0, packed(examples.d)},
      products_(after(squares_, int(packed(layer.H) * examples.d * token_))),
      pairs_(after(products_, int(examples.d * mean_))),
      slopes_(
          after(pairs_, int(layer.H * (covariant_ ? packed(examples.d) : examples.p * token_)))),
      averages_(after(slopes_, all_ + examples.p)),
      queries_(after(averages_, examples.d)),
      moved_(after(queries_, int(layer.H * token_))),
      weights_(examples.d * all_),
      values_(all_ * output_),
      transposed_(examples.d * keys_),
      images_(all_ * keys_),
      attention_(kQueries * layer.H * key_),
      centred_(examples.T * token_),
      scaled_(examples.T * examples.d),
      covariances_(kQueries * layer.H * examples.d * token_),
      moves_(covariant_ ? kQueries * layer.H * examples.p * token_ : 0),
      outputs_(kQueries * output_) {
  const int d = examples.d, p = examples.p;
  for (int i = 0; i < all_; ++i) {
    for (int g = 0; g < d; ++g) weights_[g * all_ + i] = layer.W[i * d + g];
    std::copy_n(layer.V + i * p, p, &values_[i * output_]);
  }
}

void QueryRows::write_row(const Part& part, int i, double* row) {
  const int T = examples_.T, d = examples_.d, H = layer_.H;
  const double* const X = sample(part.begin + i / part.queries);
  const double* const x = X + (part.first + i % part.queries) * d;
  std::copy_n(x, d, row + queries_.begin);
  write_square(x, d, row + squares_.begin);
  for (int h = 0; h < H; ++h) {
    const double* const weights = &attention_[(i * H + h) * key_];
    double* const mean = row + averages_.begin + h * d;
    multiply(weights, X, 1, T, d, mean);
    for (int b = 0; b < T; ++b)
      for (int f = 0; f < d; ++f) {
        const double centred = X[b * d + f] - mean[f];
        centred_[b * token_ + f] = centred;
        scaled_[b * d + f] = weights[b] * centred;
      }
    double* const covariance = &covariances_[(i * H + h) * d * token_];
    multiply_transposed({scaled_.data(), d}, d, T, {centred_.data(), token_}, d,
                        {covariance, token_});
    if (!covariant_) continue;
    double* to = row + slopes_.begin + h * packed(d);
    for (int f = 0; f < d; to += ++f) std::copy_n(covariance + f * token_, f + 1, to);
  }
}

void QueryRows::write_part(const Part& part, double* rows, std::ptrdiff_t stride) {
  const int T = examples_.T, d = examples_.d, p = examples_.p, H = layer_.H, count = part.rows();
  for (int i = 0; i < count; ++i) write_row(part, i, rows + i * stride);
  double* const means = rows + averages_.begin;
  multiply_transposed({means, 1, stride}, 1, all_, {values_.data(), output_}, p,
                      {outputs_.data(), output_, output_}, count);
  for (int i = 0; i < count; ++i) {
    const std::int64_t row = (part.begin + i / part.queries) * T + part.first + i % part.queries;
    for (int o = 0; o < p; ++o)
      means[i * stride + all_ + o] = outputs_[i * output_ + o] - examples_.Y[row * p + o];
  }
  multiply_transposed({rows + queries_.begin, 1, stride}, d, 1, {means, 1, stride}, all_,
                      {rows + pairs_.begin, mean_, stride}, count);
  const Matrices<double> all = moves(rows, stride);
  for (int h = 0; h < H; ++h) {
    double* const of_head = all.at + h * p * token_;
    multiply_transposed({layer_.V + h * d * p, p}, p, d,
                        {&covariances_[h * d * token_], token_, H * d * token_}, d,
                        {of_head, token_, all.next}, count);
    multiply_transposed({means + all_, 1, stride}, 1, p, {of_head, token_, all.next}, d,
                        {rows + moved_.begin + h * token_, token_, stride}, count);
    for (int k = 0; k <= h; ++k)
      multiply_transposed(
          {of_head, token_, all.next}, d, p, {all.at + k * p * token_, token_, all.next}, d,
          {rows + products_.begin + place(h, k) * d * token_, token_, stride}, count);
  }
}

std::vector<CrossMoment> QueryRows::moments(QuerySums& queries, LayerSums& sums) const {
  return {moment(squares_, products_, queries.squares),
          moment(pairs_, slopes_, queries.pairs),
          moment(queries_, moved_, queries.moves),
          {averages_, averages_, sums.averages.data()}};
}

void QueryRows::complete(const QuerySums& queries, LayerSums& sums) const {
  const int d = examples_.d, p = examples_.p;
  for (int f = 0; f < packed(d); ++f)
    for (int i = 0; i < all_; ++i)
      for (int j = 0; j <= i; ++j)
        sums.squares[std::size_t(f) * packed(all_) + place(i, j)] =
            queries.squares[std::size_t(f) * products_.width +
                            (place(i / d, j / d) * d + i % d) * token_ + j % d];
  for (int f = 0; f < d; ++f)
    for (int h = 0; h < layer_.H; ++h) {
      const double* const moved = &queries.moves[f * moved_.width + h * token_];
      std::copy_n(moved, d, &sums.moves[f * all_ + h * d]);
      for (int j = 0; j < all_; ++j) {
        const double* const from = &queries.pairs[(f * mean_ + j) * slopes_.width];
        if (covariant_) {
          sums.set_pairs(f, j, h, from + h * packed(d), layer_.V + h * d * p);
          continue;
        }
        for (int o = 0; o < p; ++o)
          std::copy_n(from + (h * p + o) * token_, d,
                      &sums.pairs[(std::size_t(f * all_ + j) * p + o) * all_ + h * d]);
      }
    }
}

}  // namespace

LayerSums sums_of_queries(const Examples& examples, const LayerView& layer, int threads) {
  const int T = examples.T, d = examples.d, p = examples.p, all = layer.H * d;
  const QueryRows rows(examples, layer);
  LayerSums sums(examples, layer);
  QuerySums queries;
  const std::vector<CrossMoment> moments = rows.moments(queries, sums);
  const RowSource source{(examples.n + rows.samples() - 1) / rows.samples(),
                         rows.samples() * T,
                         rows.width(),
                         2.0 * rows.samples() * T * all * p * (T + d + 0.5 * all),
                         {}};
  take_moments(rows, source, moments, threads);
  rows.complete(queries, sums);
  return sums;
}

}  // namespace mhfast
