// The gradients that chunks leave, and their sum.
//
// A chunk's gradient, and the rows D X of its samples where these are kept, are written by the
// member that works on the chunk, and read when the pass is complete: head by head, each by the
// member that sums it; rows by all members, each for some rows of the gradient by W.
#pragma once

#include "embedding_gradient.hpp"
#include "head_tensor.hpp"

namespace mhfast {

/// Where gradients go, in the layout of the parameters; each may be null. Those by the words of a
/// dictionary (words, d), which PassOptions must request, are parts of one.
template <class real>
struct GradientOut {
  real *W, *readout, *prompt;
  real *Q = nullptr, *K = nullptr;  // where kernels multiply with these; Q of tied factors: of both
  real *words_by_scores = nullptr, *words_by_values = nullptr;

  bool by_w() const { return W || Q || K; }
};

template <class real>
class PartialGradients {
 public:
  PartialGradients(const Kernels<real>& kernels, const Shape& shape, const Plan& plan,
                   const PassOptions& options, int width);

  void lay_out(Arena& layout);

  /// A row of the part by W has `weight_row` numbers; where the query is shared it is one of D X.
  std::ptrdiff_t weight_row() const { return part_.weight_row; }
  real* weight(int chunk, int head, real* laned = nullptr) const {
    const std::ptrdiff_t at = head * part_.weight_head;
    return laned ? laned + at * kernels_.lanes : partial_ + chunk * part_.size + at;
  }
  bool has_factors() const { return has_factors_; }
  /// Whether all parts are transposed: those by Q and K are (r, dL), and that by V (p, dL).
  bool of_projections() const { return of_projections_; }
  /// From the gradient by Q to that by K, which follows; of tied factors both are added to the
  /// same.
  std::ptrdiff_t to_k(bool tied) const { return tied ? 0 : part_.weight_head / 2; }
  real* readout(int chunk, int head, real* laned = nullptr) const {
    const std::ptrdiff_t at = part_.readout_at + head * part_.readout_head;
    return laned ? laned + (at - laned_.begin) * kernels_.lanes
                 : partial_ + chunk * part_.size + at;
  }

  /// What samples that are lanes leave of a chunk of several slabs is added up in `laned`,
  /// registers in the place of numbers; the sums over lanes are taken at the end.
  std::ptrdiff_t laned_size() const { return laned_.size * kernels_.lanes; }
  void sum_lanes(int chunk, const real* laned) const {
    kernels_.sum_lanes(laned, laned_.size, partial_ + chunk * part_.size + laned_.begin);
  }

  /// Whether D X of all rows is kept in place of a gradient by W of each chunk; that of a head from
  /// `row` on, of the rows of all samples, and the numbers from row to row.
  bool has_rows() const { return has_rows_; }
  real* rows(int head, std::ptrdiff_t row) const {
    return rows_ + (head * shape_.n * shape_.q + row) * rows_row_;
  }
  std::ptrdiff_t rows_row() const { return rows_row_; }

  /// Numbers of a head's part by W, and by U or V.
  std::ptrdiff_t weight_size() const { return part_.weight_head; }
  std::ptrdiff_t readout_size() const { return part_.readout_head; }

  /// A member's heads of the sums; of a prompt and of words all heads, by the first member.
  /// `words`: (words, d), or null. `z`: the query rows of all samples (n, q, d), needed with rows.
  void reduce(const LoadedModel<real>& model, const real* words, const real* z,
              const GradientOut<real>& to, const Member& member) const;

 private:
  void multiply_rows(const LoadedModel<real>& model, const real* z, real* gW,
                     const Member& member) const;
  void reduce_words(const LoadedModel<real>& model, const real* words, const GradientOut<real>& to,
                    int head) const;
  void reduce_prompt(const LoadedModel<real>& model, real* to) const;
  void reduce_attended(real* to, const Member& member) const;
  real* sum_table(const real* partial, int columns, real* scratch) const;
  void reduce_factors(const LoadedModel<real>& model, const GradientOut<real>& to, int head) const;
  void sum_chunks(const real* partial, int rows, int columns, bool features, real* out) const;
  void sum_transposed(const real* partial, int head, int columns, real* out) const;

  const Kernels<real>& kernels_;
  const Shape shape_;
  const Readout of_;
  const PassOptions options_;
  const int chunks_, width_;
  const bool features_are_lanes_, of_projections_, readout_by_features_, has_factors_, has_rows_;
  const PartialGradient part_;
  struct {
    std::ptrdiff_t begin = 0, size = 0;
  } laned_;  // the part of a partial gradient that has samples as lanes
  const std::ptrdiff_t rows_row_;
  real* rows_ = nullptr;  // D X of all samples, where it is kept: (H, n, q, rows_row)
  real* partial_ = nullptr;
  real* dense_ = nullptr;       // by W, where only its factors have gradients to go to: (H, d, d)
  real* shared_ = nullptr;      // D X summed over samples, where the query is shared: (H, q, d)
  real* shared_k_ = nullptr;    // that times K: (H, q, r)
  real* transposed_ = nullptr;  // of a layer's attended tokens, by V: (H, p, d); of projections
                                // also by a factor (H, r, d)
  std::ptrdiff_t transposed_size_ = 0;
  /// Of words, for each head: a sum of tables, words in rows of whole vectors, products of the two.
  struct {
    real *sum = nullptr, *words = nullptr, *product = nullptr;
    std::ptrdiff_t sum_size = 0, words_size = 0, product_size = 0;
  } table_;
  EmbeddingGradient<real> embedding_;
  HeadTensorGradient<real> tensor_;
};

}  // namespace mhfast
