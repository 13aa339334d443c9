// A loss of the caller's own: a function from outputs and their targets to a value and a
// derivative, and perhaps a second derivative, for each output.
#pragma once

#include <cstddef>

namespace mhfast {

/// Outputs and targets (rows,) of a classifier's samples or, with p above 0, (rows, p) of a layer's
/// query rows, and where the results go; null: second derivatives are not requested.
struct OwnLossCall {
  std::ptrdiff_t rows, p;
  bool is_double;  // the dtype of the model; numbers come and go as double
  const double *outputs, *targets;
  double *values, *derivatives, *curvatures;

  std::ptrdiff_t count() const { return rows * (p > 0 ? p : 1); }
};

class OwnLoss {
 public:
  OwnLoss() = default;
  OwnLoss(const OwnLoss&) = delete;
  OwnLoss& operator=(const OwnLoss&) = delete;
  virtual ~OwnLoss() = default;

  /// Whether a call takes so long that it should be for many slabs. Others are called for each.
  virtual bool is_slow() const = 0;

  /// For any rows, in any thread. False where the function failed, which ends the pass.
  virtual bool call(const OwnLossCall& call) noexcept = 0;
};

}  // namespace mhfast
