// The attended tokens of all samples, computed once for a training that changes the readout alone:
// see problem/attended.hpp.
#pragma once

#include "../problem/attended.hpp"
#include "../runtime/scratch.hpp"
#include "attention_weights.hpp"

namespace mhfast {

/// Data with rows of attended tokens in the place of the tokens.
template <class real>
class AttendedTokens {
 public:
  /// Of so many runs; `apart`: each has its own. `data` must stay.
  AttendedTokens(const Data<real>& data, std::ptrdiff_t runs, bool apart);
  AttendedTokens(const AttendedTokens&) = delete;
  AttendedTokens& operator=(const AttendedTokens&) = delete;

  /// What that takes.
  static double bytes(const Data<real>& data, std::ptrdiff_t runs, bool apart);

  /// Of one run.
  double flops() const { return flops_of(given_.shape.n * given_.shape.q); }

  /// Computes those of one run, whose model this is.
  void compute(std::ptrdiff_t run, const Model<const real*>& model, real scale, int threads);

  const Data<real>& operator*() const { return data_; }

 private:
  double flops_of(std::ptrdiff_t rows) const {
    const Shape& s = given_.shape;
    return double(rows) * computed_heads(s) * (s.flops_of_w() / 2 + 4.0 * s.T * s.d);
  }
  void attend(const AttentionBlock<real>& block, int i, const real* x, real* to, real* rest) const;

  const Data<real> given_;
  const AttendedRows rows_;
  Data<real> data_;
  AlignedBuffer block_;
  real* x_;
};

}  // namespace mhfast
