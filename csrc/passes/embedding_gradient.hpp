// The gradient by the words of a dictionary E, from those of the tables of each head:
//
//   scores    S[a][b] = e_b W e_a, derivatives G:   E gets G^T E W^T + G E W
//             S[a][t] = P_t e_a of a shared query:  E gets G P
//   values    C[a][t] = U_t e_a, derivatives G:     E gets G U;   of a layer, e_a V: E gets G V^T
//
// W and P contain the scale. The two parts are apart, because scaled passes leave out other
// factors.
#pragma once

#include "loaded_model.hpp"

namespace mhfast {

template <class real>
class EmbeddingGradient {
 public:
  EmbeddingGradient(const Kernels<real>& kernels, const Shape& shape);

  void lay_out(Arena& layout);

  /// One head's part, from derivatives by its table of scores, (words, query words or rows).
  void add_scores(const LoadedModel<real>& model, const real* words, const real* derivatives,
                  int head) const;
  /// The same of values: (words, rows), or of a layer (words, outputs up to pL).
  void add_values(const LoadedModel<real>& model, const real* derivatives, int head) const;

  /// The sum over heads, when all are there: (words, d).
  void sum_scores(real* to) const { sum(by_scores_, to); }
  void sum_values(real* to) const { sum(by_values_, to); }

 private:
  void multiply(const real* left, int rows, const real* right, bool add, real* to) const;
  void sum(const real* heads, real* to) const;

  const Kernels<real>& kernels_;
  const Shape shape_;
  const int dL_, pL_, padded_;                          // d, p and words in whole vectors
  const std::ptrdiff_t left_size_, right_size_, size_;  // of a head
  real *left_ = nullptr, *right_ = nullptr, *words_ = nullptr, *product_ = nullptr;
  real *by_scores_ = nullptr, *by_values_ = nullptr;  // (H, words, dL)
};

}  // namespace mhfast
