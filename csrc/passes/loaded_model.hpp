// The parameters of one pass, as kernels take them: W times the scale, or Q times it and K^T, U or
// V transposed, and the product of a shared query with W. Identities are null. Where tokens are
// words of a dictionary E there are tables too:
//
//   scores    E W Z^T for all pairs of words, [key word][query word], or [key word][row up to qL]
//             where the query rows are shared
//   values    E U^T, [key word][row up to qL], or of a layer E V, [key word][output up to pL]
//   exps      exp of the scores, if weights are looked up
//
// Written in the phase of loading, each head by the member that loads it, and only read in a pass.
#pragma once

#include "../problem/readout.hpp"
#include "../runtime/scratch.hpp"
#include "../runtime/team.hpp"
#include "pass.hpp"

namespace mhfast {

/// Sizes of the tables of one head; 0 without words.
struct Tables {
  std::ptrdiff_t row, value_row;  // from key word to key word
  std::ptrdiff_t scores, values;
  std::ptrdiff_t padded;  // words up to pairs of vectors

  Tables(const Shape& s, int lanes)
      : row(s.words == 0     ? 0
            : s.shared_query ? round_up(s.q, lanes)
                             : round_up(s.words, 2 * lanes)),
        value_row(s.words == 0 ? 0 : round_up(s.is_layer() ? s.p : s.q, lanes)),
        scores(s.words * row),
        values(s.words * value_row),
        padded(round_up(s.words, 2 * lanes)) {}
};

template <class real>
class LoadedModel {
 public:
  /// `width` numbers belong to each entry of a parameter.
  LoadedModel(const Kernels<real>& kernels, const Shape& shape, const Plan& plan, int width,
              bool has_exps);

  void lay_out(Arena& layout);

  /// A member's heads; the caller's arrays must stay until the pass is over. `words`: (words, d),
  /// or null.
  void load(const Parameters<real>& parameters, const real* words, const Member& member);

  real scale() const { return scale_; }  // of the logits, contained in W if that is not null
  const real* prompt() const { return prompt_; }
  /// W, or of a rank Q; then also K^T, Q and K as the caller holds them, and as gradients take
  /// them.
  const real* w(int head) const { return w_ ? w_ + head * w_size_ : nullptr; }
  const real* kt(int head) const { return kt_ + head * w_size_; }
  const real* factor_q(int head) const { return q_ + head * w_size_; }
  const real* factor_k(int head) const { return k_ + head * w_size_; }
  const real* gradient_q(int head) const { return gradient_q_ + head * gradient_factor_size_; }
  const real* gradient_k(int head) const { return gradient_k_ + head * gradient_factor_size_; }
  std::ptrdiff_t gradient_factor_size() const { return gradient_factor_size_; }
  bool is_tied() const { return is_tied_; }
  /// U or V as the caller holds it, and transposed.
  const real* readout(int head) const {
    return readout_ ? readout_ + std::ptrdiff_t(head) * of_.rows * of_.columns * width_ : nullptr;
  }
  const real* transposed(int head) const {
    return readout_ ? transposed_ + head * (heads_are_columns_ ? 1 : transposed_size_) : nullptr;
  }
  /// Whether U of one query row, transposed, has a column for each head: from row to row H numbers.
  bool heads_are_columns() const { return heads_are_columns_; }
  const real* scores_table(int head) const { return scores_table_ + head * tables_.scores; }
  const real* values_table(int head) const { return values_table_ + head * tables_.values; }
  /// Null if weights are not looked up.
  const real* exps_table(int head) const {
    return has_exps_ ? exps_table_ + head * tables_.scores : nullptr;
  }
  const Tables& tables() const { return tables_; }

  /// Z Q times the scale of a query that all samples share: (q, r).
  const real* shared_factor(int head) const {
    return shared_factor_ + head * (std::ptrdiff_t(shape_.q) * shape_.rank);
  }
  /// Z W of a query that all samples share: (q, d), packed; null: each has its own.
  const real* shared_product(int head) const {
    return shape_.shared_query ? packed_product_ + head * query_size_ : nullptr;
  }
  /// The same as (q, d), where one run has the engine to itself.
  const real* shared_rows(int head) const {
    return product_ + head * (std::ptrdiff_t(shape_.q) * shape_.d);
  }

 private:
  void load_factors(const Parameters<real>& parameters, int head);
  void load_shared_product(const Parameters<real>& parameters, int head);
  void load_tables(const Parameters<real>& parameters, const real* words, int head);

  const Kernels<real>& kernels_;
  const Shape shape_;
  const Readout of_;
  const LaneLayout lanes_;
  const int width_;
  const bool has_exps_, heads_are_columns_;
  const Tables tables_;
  const std::ptrdiff_t query_size_, transposed_size_;
  const bool has_factor_gradients_;
  const std::ptrdiff_t w_size_;                // of W, or of a factor
  const std::ptrdiff_t gradient_factor_size_;  // of one that gradients take
  bool is_tied_ = false;
  const real *w_ = nullptr, *q_ = nullptr, *k_ = nullptr, *readout_ = nullptr, *prompt_ = nullptr;
  real scale_ = 1;
  real *w_scaled_ = nullptr, *transposed_ = nullptr;
  real *kt_ = nullptr, *shared_factor_ = nullptr;  // the latter: a shared query times Q
  real *gradient_q_ = nullptr, *gradient_k_ = nullptr;
  real *product_ = nullptr, *packed_product_ = nullptr;
  real *scores_table_ = nullptr, *values_table_ = nullptr, *exps_table_ = nullptr;
  real *packed_words_ = nullptr, *queries_ = nullptr;  // of each head, as heads have members apart
};

}  // namespace mhfast
