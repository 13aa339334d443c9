// Heads of an identity W attend alike, so that all of them together are one head with
//
//   U = H^(-1/2) Σ_h U_h     Φ = H^(-1/2) Σ_h <U_h, A X> = <U, A X>     ∂Φ/∂U_h = H^(-1/2) ∂Φ/∂U
//   V = Σ_h V_h              F = Σ_h A X V_h = A X V                    ∂F/∂V_h = ∂F/∂V
//
// and a Hessian-vector product is that of the one head along the sum of the tangents.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "readout.hpp"

namespace mhfast {

/// How many heads a call for a single model computes.
inline int computed_heads(const Shape& s) { return s.identity_w ? 1 : s.H; }

/// The problem of the one head where heads attend alike, and otherwise, or if their readouts are
/// products of factors, the problem as it was given.
template <class real>
class AlikeHeads {
 public:
  /// What is given must stay.
  AlikeHeads(const Data<real>& data, const Model<const real*>& model)
      : data_(data), model_(model), heads_(data.shape.H), of_(readout_of(data.shape)) {
    if (computed_heads(data.shape) == heads_ || !model.at[of_.name]) return;
    const real* const summed = sum(model.at[of_.name], readout_);
    // A sum out of range says nothing about the outputs, to which tokens may bring it back.
    if (!std::all_of(readout_.begin(), readout_.end(), [](real x) { return std::isfinite(x); }))
      return;
    model_.at[of_.name] = summed;
    data_.shape.H = 1;
  }
  AlikeHeads(const AlikeHeads&) = delete;
  AlikeHeads& operator=(const AlikeHeads&) = delete;

  const Data<real>& data() const { return data_; }
  const Model<const real*>& model() const { return model_; }

  /// The tangent of the one head; called once.
  Tensors<const real*> merged(Tensors<const real*> tangent) {
    if (merges() && tangent[of_.name]) tangent[of_.name] = sum(tangent[of_.name], tangent_);
    return tangent;
  }

  /// From a result by the one head's readout, in the place of the first head, to those by all.
  void spread(const Tensors<real*>& of) const {
    real* const first = of[of_.name];
    if (!merges() || !first) return;
    const std::ptrdiff_t size = extent(of_.name, data_.shape, model_.rank).size();
    for (std::ptrdiff_t i = 0; i < size; ++i) first[i] *= factor();
    for (int h = 1; h < heads_; ++h) std::copy_n(first, size, first + h * size);
  }

 private:
  bool merges() const { return data_.shape.H != heads_; }
  real factor() const { return real(1 / of_.divisor); }

  const real* sum(const real* readout, std::vector<real>& to) const {
    const std::ptrdiff_t size = extent(of_.name, data_.shape, model_.rank).size();
    to.assign(size, real(0));
    for (int h = 0; h < heads_; ++h, readout += size)
      for (std::ptrdiff_t i = 0; i < size; ++i) to[i] += readout[i];
    for (real& x : to) x *= factor();
    return to.data();
  }

  Data<real> data_;
  Model<const real*> model_;
  const int heads_;
  const Readout of_;  // of all heads
  std::vector<real> readout_, tangent_;
};

}  // namespace mhfast
