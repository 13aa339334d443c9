// The steps of one run that is trained in coefficients of the samples, on one thread: a loop as in
// loop.hpp, of what such a training may have.
//
//   f = f_0 + G c  ->  loss and g = dL/df  ->  what ends, is recorded  ->  step of c by g
//
// It serves beside others that share the threads; its own passes are too small for several.
#pragma once

#include <chrono>
#include <vector>

#include "../passes/loss_weights.hpp"
#include "../runtime/float_mode.hpp"
#include "coefficients.hpp"
#include "loop.hpp"

namespace mhfast {

template <class real>
class CoefficientLoop {
 public:
  CoefficientLoop(TrainingTask<real>& task, const Coefficients<real>& coefficients,
                  std::ptrdiff_t run);

  // See Loop, whose contract these are.

  int threads() const { return 1; }
  bool ended() const { return ended_; }
  std::int64_t step() const { return step_; }
  StopReason reason(int) const { return reason_; }
  void bind(Workspace&) {}
  void take_fresh(const Data<real>&) {}  // there are none
  void advance(std::int64_t until, bool interruptible, const Member& member);
  void finish(StopReason reason) { finish_ = reason; }
  void write_back() const { coefficients_.write_back(run_); }
  void repeat_rows(std::int64_t reached);

 private:
  void take_memory();
  void advance_step();
  void evaluate(bool values);
  bool is_finite() const;
  bool wants_totals() const;
  void decide();
  void record();
  void update();
  bool is_due(const Record& r) const {
    return step_ % r.every == 0 || (ended_ && finish_ != StopReason::kAborted);
  }
  bool is_interrupted(const FlushToZero& flush);

  TrainingTask<real>& task_;
  const Coefficients<real>& coefficients_;
  const std::ptrdiff_t run_, n_;
  const Kernels<double>& kernels_;
  const Data<double> data_;
  ClassifierLoss<double> loss_;
  LossShares shares_;
  AlignedBuffer block_;
  double *lanes_, *f_, *g_;  // (n, L); (n) and (n + 1) in whole vectors
  Totals totals_;

  std::int64_t step_;
  bool frozen_, ended_ = false;
  StopReason reason_ = StopReason::kNone, finish_ = StopReason::kNone;
  std::chrono::steady_clock::time_point last_progress_ = std::chrono::steady_clock::now();
  int steps_since_look_ = 0;
};

}  // namespace mhfast
