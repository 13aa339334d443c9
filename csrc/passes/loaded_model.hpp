// The parameters of one pass, as kernels take them: W times the scale, U or V transposed, and the
// product of a shared query with W. Identities are null.
//
// Written in the phase of loading, each head by the member that loads it, and only read in a pass.
#pragma once

#include "../problem/readout.hpp"
#include "../runtime/scratch.hpp"
#include "../runtime/team.hpp"
#include "pass.hpp"

namespace mhfast {

template <class real>
class LoadedModel {
 public:
  /// `width` numbers belong to each entry of a parameter.
  LoadedModel(const Kernels<real>& kernels, const Shape& shape, const Plan& plan, int width);

  void lay_out(Arena& layout);

  /// A member's heads; the caller's arrays must stay until the pass is over.
  void load(const Parameters<real>& parameters, const Member& member);

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
  /// Z W of a query that all samples share: (q, d), packed; null: each has its own.
  const real* shared_product(int head) const {
    return shape_.shared_query ? packed_product_ + head * query_size_ : nullptr;
  }

 private:
  void load_shared_product(const Parameters<real>& parameters, int head);

  const Kernels<real>& kernels_;
  const Shape shape_;
  const Readout of_;
  const LaneLayout lanes_;
  const int width_;
  const std::ptrdiff_t query_size_, transposed_size_;
  const real *w_ = nullptr, *readout_ = nullptr, *prompt_ = nullptr;
  real scale_ = 1;
  real *w_scaled_ = nullptr, *transposed_ = nullptr;
  real *product_ = nullptr, *packed_product_ = nullptr;
};

}  // namespace mhfast
