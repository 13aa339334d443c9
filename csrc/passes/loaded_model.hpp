// The parameters of one pass, as kernels take them: W times the scale, U or V transposed, and the
// product of a shared query with W. Identities are null. Where tokens are words of a dictionary E
// there are tables too:
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
  const real* w(int head) const {
    return w_ ? w_ + std::ptrdiff_t(head) * shape_.d * shape_.d * width_ : nullptr;
  }
  /// U or V as the caller holds it, and transposed.
  const real* readout(int head) const {
    return readout_ ? readout_ + std::ptrdiff_t(head) * of_.rows * of_.columns * width_ : nullptr;
  }
  const real* transposed(int head) const {
    return readout_ ? transposed_ + head * transposed_size_ : nullptr;
  }
  const real* scores_table(int head) const { return scores_table_ + head * tables_.scores; }
  const real* values_table(int head) const { return values_table_ + head * tables_.values; }
  /// Null if weights are not looked up.
  const real* exps_table(int head) const {
    return has_exps_ ? exps_table_ + head * tables_.scores : nullptr;
  }
  const Tables& tables() const { return tables_; }

  /// Z W of a query that all samples share: (q, d), packed; null: each has its own.
  const real* shared_product(int head) const {
    return shape_.shared_query ? packed_product_ + head * query_size_ : nullptr;
  }
  /// The same as (q, d), where one run has the engine to itself.
  const real* shared_rows(int head) const {
    return product_ + head * (std::ptrdiff_t(shape_.q) * shape_.d);
  }

 private:
  void load_shared_product(const Parameters<real>& parameters, int head);
  void load_tables(const Parameters<real>& parameters, const real* words, int head);

  const Kernels<real>& kernels_;
  const Shape shape_;
  const Readout of_;
  const LaneLayout lanes_;
  const int width_;
  const bool has_exps_;
  const Tables tables_;
  const std::ptrdiff_t query_size_, transposed_size_;
  const real *w_ = nullptr, *readout_ = nullptr, *prompt_ = nullptr;
  real scale_ = 1;
  real *w_scaled_ = nullptr, *transposed_ = nullptr;
  real *product_ = nullptr, *packed_product_ = nullptr;
  real *scores_table_ = nullptr, *values_table_ = nullptr, *exps_table_ = nullptr;
  real *packed_words_ = nullptr, *queries_ = nullptr;  // of each head, as heads have members apart
};

}  // namespace mhfast
