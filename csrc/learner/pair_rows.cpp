#include <algorithm>
#include <cmath>
#include <vector>

#include "layer_sums.hpp"
#include "products.hpp"

namespace mhfast {
namespace {

/// Moments of the rows of which LayerSums are made.
struct PairSums {
  std::vector<double> slopes, moved, second;
};

/// Rows for samples of two tokens. With δ = x_1 - x_2, the weight a of the first token and w = a (1
/// - a), head h of a query has x̄ = x_2 + a δ and m_o = w (δ V_h)_o δ. Of all sums over the queries
/// of a sample therefore one factor is δ or δ δᵀ, and the other can be summed over both queries
/// before the product:
///
///     x x̄ᵀ times m       (Σ w_h x x̄ᵀ) times (δ δᵀ), and times V_h afterwards
///     x xᵀ times m mᵀ    (Σ w_h w_k (δ V_h)·(δ V_k) x xᵀ) times (δ δᵀ)
///     x times r m        (Σ w_h (δ V_h)·r x) times δ
///
/// An item is a group of samples, so that products are of many of them.
class PairRows {
 public:
  static constexpr int kSamples = 8;

  PairRows(const Examples& examples, const LayerView& layer);

  /// The number of columns of a row.
  int width() const { return averages_[1].begin + averages_[1].width; }

  /// The moments of the rows, which fill `pairs` and the averages of the first queries in `sums`.
  std::vector<CrossMoment> moments(PairSums& pairs, LayerSums& sums) const;

  /// Completes `sums` from these moments.
  void complete(const PairSums& pairs, LayerSums& sums) const;

  void write(std::int64_t group, double* rows, std::ptrdiff_t stride) {
    const std::int64_t begin = group * kSamples;
    const int count = int(std::min<std::int64_t>(kSamples, examples_.n - begin));
    for (int i = count; i < kSamples; ++i) std::fill_n(rows + i * stride, width(), 0.0);
    read(begin, count);
    attend(count);
    for (int i = 0; i < count; ++i) write_row(begin + i, i, rows + i * stride);
    multiply_rows(count, rows, stride);
  }

 private:
  const double* sample(std::int64_t number) const { return examples_.X + number * 2 * examples_.d; }
  int pairs_of_heads() const { return packed(layer_.H); }

  /// δ and the second tokens of a group, and their products with W and V.
  void read(std::int64_t begin, int count) {
    const int d = examples_.d;
    for (int i = 0; i < count; ++i) {
      const double *first = sample(begin + i), *second = first + d;
      for (int f = 0; f < d; ++f) {
        difference_[f * kSamples + i] = first[f] - second[f];
        second_token_[f * kSamples + i] = second[f];
      }
    }
    multiply_transposed({difference_.data(), kSamples}, count, d, {factors_.data(), factor_},
                        int(factor_), {images_.data(), factor_});
    multiply_transposed({second_token_.data(), kSamples}, count, d, {sum_.data(), output_},
                        examples_.p, {outputs_.data(), output_});
    for (int i = 0; i < count; ++i)
      for (int a = 0; a < 2; ++a)
        for (int h = 0; h < layer_.H; ++h)
          logits_[(i * 2 + a) * layer_.H + h] =
              dot(sample(begin + i) + a * d, &images_[i * factor_ + h * d], d);
  }

  /// The weights of both tokens for all queries and heads of a group.
  void attend(int count) {
    const int size = count * 2 * layer_.H;
    for (int i = 0; i < size; ++i) exps_[i] = -std::abs(logits_[i]);
    active_kernels<double>().exponentials(exps_.data(), size, exps_.data());
    for (int i = 0; i < size; ++i) {
      const double larger = 1 / (1 + exps_[i]), smaller = exps_[i] * larger;
      weights_[0][i] = logits_[i] > 0 ? larger : smaller;
      weights_[1][i] = logits_[i] > 0 ? smaller : larger;
    }
  }

  /// All that is no product of the sample which is number i of its group.
  void write_row(std::int64_t number, int i, double* row);

  void multiply_rows(int count, double* rows, std::ptrdiff_t stride) {
    const int H = layer_.H, d = examples_.d;
    multiply_transposed(
        {scaled_.data(), all_, 2 * all_}, all_, 2,
        {rows + averages_[0].begin, averages_[1].begin - averages_[0].begin, stride}, all_,
        {rows + slopes_.begin, mean_, stride}, count);
    multiply_transposed({joint_.data(), pairs_of_heads(), 2 * pairs_of_heads()}, pairs_of_heads(),
                        2, {of_tokens_.data(), square_, 2 * square_}, packed(d),
                        {rows + slopes_.begin + all_ * mean_, square_, stride}, count);
    multiply_transposed({pulls_.data(), H, 2 * H}, H, 2, {tokens_.data(), token_, 2 * token_}, d,
                        {rows + moved_.begin, token_, stride}, count);
  }

  const Examples& examples_;
  const LayerView& layer_;
  const int all_;  // H d
  // In whole vectors: numbers of a token, of x̄, of x xᵀ, of an output, of δ W and δ V of all heads.
  const std::ptrdiff_t token_, mean_, square_, output_, factor_;
  const Columns slopes_, squares_, moved_, differences_, averages_[2];
  std::vector<double> factors_, sum_;
  std::vector<double> difference_, second_token_, images_, outputs_, logits_, exps_, weights_[2];
  // Of each query of the group: x, w x by head, x xᵀ, factors of x xᵀ and of x.
  std::vector<double> tokens_, scaled_, of_tokens_, joint_, pulls_;
};

PairRows::PairRows(const Examples& examples, const LayerView& layer)
    : examples_(examples),
      layer_(layer),
      all_(layer.H * examples.d),
      token_(in_vectors(examples.d)),
      mean_(in_vectors(all_)),
      square_(in_vectors(packed(examples.d))),
      output_(in_vectors(examples.p)),
      factor_(in_vectors(all_ + layer.H * examples.p)),
      slopes_{0, int(all_ * mean_ + pairs_of_heads() * square_)},
      squares_(after(slopes_, packed(examples.d))),
      moved_(after(squares_, int(layer.H * token_))),
      differences_(after(moved_, examples.d)),
      averages_{after(differences_, all_ + examples.p),
                after(after(differences_, all_ + examples.p), all_ + examples.p)},
      factors_(examples.d * factor_),
      sum_(examples.d * output_),
      difference_(examples.d * kSamples),
      second_token_(examples.d * kSamples),
      images_(kSamples * factor_),
      outputs_(kSamples * output_),
      logits_(kSamples * 2 * layer.H),
      exps_(logits_.size()),
      weights_{logits_, logits_},
      tokens_(kSamples * 2 * token_),
      scaled_(kSamples * 2 * all_),
      of_tokens_(kSamples * 2 * square_),
      joint_(kSamples * 2 * pairs_of_heads()),
      pulls_(kSamples * 2 * layer.H) {
  const int H = layer.H, d = examples.d, p = examples.p;
  for (int h = 0; h < H; ++h)
    for (int f = 0; f < d; ++f) {
      for (int g = 0; g < d; ++g) factors_[g * factor_ + h * d + f] = layer.W[(h * d + f) * d + g];
      for (int o = 0; o < p; ++o) {
        factors_[f * factor_ + all_ + h * p + o] = layer.V[(h * d + f) * p + o];
        sum_[f * output_ + o] += layer.V[(h * d + f) * p + o];
      }
    }
}

void PairRows::write_row(std::int64_t number, int i, double* row) {
  const int H = layer_.H, d = examples_.d, p = examples_.p;
  const double *const X = sample(number), *const values = images_.data() + i * factor_ + all_;
  double* const difference = row + differences_.begin;
  for (int f = 0; f < d; ++f) difference[f] = X[f] - X[d + f];
  write_square(difference, d, row + squares_.begin);
  for (int a = 0; a < 2; ++a) {
    const int query = i * 2 + a;
    const double* const x = X + a * d;
    double *const mean = row + averages_[a].begin, *const error = mean + all_;
    std::copy_n(x, d, &tokens_[query * token_]);
    write_square(x, d, &of_tokens_[query * square_]);
    for (int o = 0; o < p; ++o)
      error[o] = outputs_[i * output_ + o] - examples_.Y[(number * 2 + a) * p + o];
    for (int h = 0; h < H; ++h) {
      const double first = weights_[0][query * H + h], second = weights_[1][query * H + h];
      for (int f = 0; f < d; ++f) {
        mean[h * d + f] = first * X[f] + second * X[d + f];
        scaled_[query * all_ + h * d + f] = first * second * x[f];
      }
      for (int o = 0; o < p; ++o) error[o] += first * values[h * p + o];
    }
    for (int h = 0; h < H; ++h)
      pulls_[query * H + h] =
          weights_[0][query * H + h] * weights_[1][query * H + h] * dot(error, values + h * p, p);
  }
  for (int h = 0; h < H; ++h)
    for (int k = 0; k <= h; ++k) {
      const double product = dot(values + h * p, values + k * p, p);
      for (int query = 2 * i; query < 2 * i + 2; ++query)
        joint_[query * pairs_of_heads() + place(h, k)] =
            weights_[0][query * H + h] * weights_[1][query * H + h] * weights_[0][query * H + k] *
            weights_[1][query * H + k] * product;
    }
}

std::vector<CrossMoment> PairRows::moments(PairSums& pairs, LayerSums& sums) const {
  return {moment(slopes_, squares_, pairs.slopes),
          moment(moved_, differences_, pairs.moved),
          moment(averages_[1], averages_[1], pairs.second),
          {averages_[0], averages_[0], sums.averages.data()}};
}

void PairRows::complete(const PairSums& pairs, LayerSums& sums) const {
  const int H = layer_.H, d = examples_.d, p = examples_.p, packed_d = packed(d);
  for (std::size_t i = 0; i < pairs.second.size(); ++i) sums.averages[i] += pairs.second[i];
  for (int h = 0; h < H; ++h)
    for (int f = 0; f < d; ++f)
      for (int g = 0; g < d; ++g)
        sums.moves[f * all_ + h * d + g] = pairs.moved[(h * token_ + f) * d + g];
  for (int h = 0; h < H; ++h)
    for (int f = 0; f < d; ++f)
      for (int j = 0; j < all_; ++j)
        sums.set_pairs(f, j, h, &pairs.slopes[((h * d + f) * mean_ + j) * packed_d],
                       layer_.V + h * d * p);
  const double* const of_joint = pairs.slopes.data() + all_ * mean_ * packed_d;
  for (int i = 0; i < all_; ++i)
    for (int j = 0; j <= i; ++j)
      for (int f = 0; f < packed_d; ++f)
        sums.squares[std::size_t(f) * packed(all_) + place(i, j)] =
            of_joint[(place(i / d, j / d) * square_ + f) * packed_d + place(i % d, j % d)];
}

}  // namespace

LayerSums sums_of_pairs(const Examples& examples, const LayerView& layer, int threads) {
  const PairRows rows(examples, layer);
  LayerSums sums(examples, layer);
  PairSums pairs;
  const std::vector<CrossMoment> moments = rows.moments(pairs, sums);
  const double all = layer.H * examples.d;
  const RowSource source{(examples.n + PairRows::kSamples - 1) / PairRows::kSamples,
                         PairRows::kSamples,
                         rows.width(),
                         PairRows::kSamples * 4 * all * (examples.d + examples.p + all),
                         {}};
  take_moments(rows, source, moments, threads);
  rows.complete(pairs, sums);
  return sums;
}

}  // namespace mhfast
