// Populations that new samples of training are drawn from, as functions of the seed, the number of
// the block of samples and that of the sample: any member of a team may draw any of them.
//
// Numbers are those of Philox with the key (seed, 2), from the counter (1, block, sample, part) on;
// words are its 64-bit numbers w_0, w_1, ..., integers are `below` of words, and normals come from
// 16 words each 16 (kernels/normal.hpp). A sign is -1 where the highest bit of w_0 is set. Sums run
// from the first to the last term, in double, each operation rounded by itself, and results are
// rounded to the type of the samples at the end. Parts:
//
//   sphere_tokens      0 tokens, z / |z| of normals z   1 label, a sign   2 query, as tokens
//   tokenized_mixture  0 noise of each slot, noise z / sqrt(d), or noise z / |z| if bounded
//                      1 label, a sign   2 context of slot t, an integer from w_t
//                      3 positions: from the identity on, entry i changes places with entry
//                        i + j, j an integer below T - i from w_i; position p holds slot entry p.
//                      The first slots hold the class token, without noise.
//   icl_regression     0 task   1 features before the root of the covariance   2 noise
//   planted_attention  0 tokens; the label is the sign of what a classifier returns for them as
//                      they are rounded, in double, -1 where that is 0
//   markov_chain       0 words: the first are integers from w_t; after these word t is how many
//                      sums of the probabilities, given the words before it, are at most
//                      2^-53 floor(w_t / 2^11). The target of a position is the next word.
#pragma once

#include <memory>
#include <vector>

#include "../kernels/philox.hpp"
#include "../problem/data.hpp"

namespace mhfast {

/// Random numbers of one sample.
class SampleNumbers {
 public:
  SampleNumbers(std::uint64_t seed, std::int64_t block, std::int64_t sample)
      : key_{seed, 2}, block_(std::uint64_t(block)), sample_(std::uint64_t(sample)) {}

  /// Words 4 m to 4 m + 3.
  Philox::Block words(int part, std::uint64_t m) const {
    return Philox::block(counter(part, m), key_);
  }
  double sign(int part) const { return words(part, 0)[0] >> 63 ? -1.0 : 1.0; }
  /// Integers below count(t) from word t, t = 0, ..., times - 1, to take(t, integer).
  template <class Count, class Take>
  void integers(int part, int times, const Count& count, const Take& take) const {
    Philox::Block block{};
    for (int t = 0; t < times; ++t) {
      if (t % 4 == 0) block = words(part, std::uint64_t(t / 4));
      take(t, int(below(std::uint64_t(count(t)), block[t % 4])));
    }
  }
  /// `count` standard normals, into memory for `rounded(count)`.
  void normals(int part, std::ptrdiff_t count, double* out) const;
  static std::ptrdiff_t rounded(std::ptrdiff_t count) { return (count + 15) / 16 * 16; }

 private:
  Philox::Block counter(int part, std::uint64_t m) const {
    return {1 + m, block_, sample_, std::uint64_t(part)};
  }

  const Philox::Key key_;
  const std::uint64_t block_, sample_;
};

template <class real>
class Population {
 public:
  virtual ~Population() = default;
  /// Numbers of scratch that a draw takes.
  virtual std::ptrdiff_t scratch(const Shape& s) const = 0;
  /// Targets of a sample.
  virtual std::ptrdiff_t targets(const Shape&) const { return 1; }
  /// Writes x (T, d), y (targets), and z (q, d) where it is not null.
  virtual void draw(const SampleNumbers& numbers, const Shape& s, double* scratch, real* x, real* z,
                    real* y) const = 0;
  /// Writes y (n) of samples x (n, T, d) together, where one by one would take longer.
  virtual void label(std::ptrdiff_t, const Shape&, const real*, real*) const {}
};

template <class real>
std::shared_ptr<Population<real>> sphere_tokens();

/// table: tokens of label -1, of label 1, and contexts (contexts + 2, d).
struct Mixture {
  std::vector<double> table;
  int contexts, relevant;
  double noise;
  bool bounded, random_positions;
};
template <class real>
std::shared_ptr<Population<real>> tokenized_mixture(Mixture mixture);

/// root (d - 1, d - 1): lower triangular, times its transpose the covariance of the features.
template <class real>
std::shared_ptr<Population<real>> icl_regression(std::vector<double> root, double noise);

/// W (H, d, d) and U (H, T, d) of the classifier.
template <class real>
std::shared_ptr<Population<real>> planted_attention(std::vector<double> W, std::vector<double> U,
                                                    int heads);

/// embedding (words, d); sums of probabilities (words^order, words - 1), the rows in the order of
/// the words before, the last of them fastest.
struct MarkovChain {
  std::vector<double> embedding, sums;
  int words, order;
};
template <class real>
std::shared_ptr<Population<real>> markov_chain(MarkovChain chain);

}  // namespace mhfast
