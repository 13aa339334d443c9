#include "coefficient_loop.hpp"

#include <algorithm>
#include <cmath>

#include "../runtime/tuning.hpp"
#include "records.hpp"

namespace mhfast {

template <class real>
CoefficientLoop<real>::CoefficientLoop(TrainingTask<real>& task,
                                       const Coefficients<real>& coefficients, std::ptrdiff_t run)
    : task_(task),
      coefficients_(coefficients),
      run_(run),
      n_(task.data.shape.n),
      kernels_(active_kernels<double>()),
      data_(coefficients.data(run)),
      loss_(kernels_, data_, task.loss, 1, false),
      step_(task.first_step),
      frozen_(task.stopped[run] >= 0) {
  shares_.weigh(data_, n_, task.loss, 1, kernels_.lanes);
  take_memory();
}

template <class real>
void CoefficientLoop<real>::take_memory() {
  const std::ptrdiff_t held = coefficients_.row();
  const auto lay_out = [&](Arena layout) {
    lanes_ = layout.take<double>(n_ * kernels_.lanes);
    f_ = layout.take<double>(held);
    g_ = layout.take<double>(held);
    return layout.size();
  };
  lay_out(Arena(block_.reserve(lay_out(Arena()))));
  std::fill_n(f_, held, 0.0);
  std::fill_n(g_, held, 0.0);  // that by the last coefficient stays so
}

template <class real>
void CoefficientLoop<real>::advance(std::int64_t until, bool interruptible, const Member&) {
  const FlushToZero flush;
  while (!ended_ && (step_ < until || until == task_.last_step || finish_ != StopReason::kNone)) {
    if (interruptible && is_interrupted(flush)) {
      reason_ = StopReason::kAborted;
      ended_ = true;
      return;
    }
    advance_step();
  }
}

template <class real>
void CoefficientLoop<real>::advance_step() {
  const bool values = wants_totals();
  evaluate(values);
  if (!frozen_ && !values && !is_finite()) evaluate(true);  // a run that ends has its loss recorded
  decide();
  record();
  if (ended_) return;
  update();
  ++step_;
}

/// Outputs, losses and derivatives; without `values` see LossTerm.
template <class real>
void CoefficientLoop<real>::evaluate(bool values) {
  const int L = kernels_.lanes;
  const AttendedArguments<double> product{
      int(n_), 1, int(coefficients_.row() / L), data_.x, coefficients_.theta(run_), lanes_, f_};
  kernels_.attended_outputs(product);
  LaneTotals lanes;
  loss_.measure(values, shares_, 0, int(n_), f_, lanes, g_, nullptr);
  totals_ = {0, 0, kInfinity};
  for (int l = 0; l < L; ++l) {
    totals_.loss += lanes.loss[l];
    totals_.correct += lanes.correct[l];
    totals_.margin = std::min(totals_.margin, lanes.margin[l]);
  }
  totals_.loss /= shares_.weights[0];
  totals_.correct /= shares_.labels[0];
}

/// Whether the loss and, but for the last step, derivatives are.
template <class real>
bool CoefficientLoop<real>::is_finite() const {
  if (!std::isfinite(totals_.loss)) return false;
  if (step_ == task_.last_step) return true;
  double largest[kMaxLanes], unused[kMaxLanes];
  kernels_.measure({n_, g_, largest, unused, 0});
  const auto finite = [](double x) { return std::isfinite(x); };
  return std::all_of(largest, largest + kernels_.lanes, finite);
}

template <class real>
bool CoefficientLoop<real>::wants_totals() const {
  if (step_ == task_.last_step || finish_ != StopReason::kNone || frozen_) return true;
  if (task_.thresholds.ask_for_totals()) return true;
  const auto asks = [&](const Record& r) {
    return !is_of_parameters(r.quantity) && step_ % r.every == 0;
  };
  return std::any_of(task_.records.begin(), task_.records.end(), asks);
}

template <class real>
void CoefficientLoop<real>::decide() {
  if (!frozen_) {
    const auto norm = [] { return kInfinity; };  // which no threshold is about
    if (!is_finite())
      reason_ = StopReason::kNonfinite;
    else if (task_.thresholds.any())
      reason_ = task_.thresholds.reached(Now<decltype(norm)>{totals_, norm});
    frozen_ = reason_ != StopReason::kNone;
    if (frozen_) {
      task_.stopped[run_] = step_;
      task_.reasons[run_] = reason_;
    }
  }
  const bool finishes = finish_ != StopReason::kNone;
  ended_ = step_ == task_.last_step || finishes || frozen_;
  if (ended_ && !frozen_) reason_ = finishes ? finish_ : StopReason::kSteps;
}

template <class real>
void CoefficientLoop<real>::record() {
  const std::int64_t stopped = task_.stopped[run_];
  for (const Record& r : task_.records) {
    if (!is_due(r)) continue;
    const std::int64_t row = r.row(task_.first_step, step_);
    if (row >= r.capacity) continue;
    const bool is_constant = row > 0 && is_of(r.quantity) == QuantityOf::kAttentionWeights;
    const bool is_frozen =
        stopped >= 0 && row > std::max<std::int64_t>(0, r.row(task_.first_step, stopped));
    if (is_constant || is_frozen) {
      repeat_row<real>(r, run_, row - 1, row);
      continue;
    }
    if (is_of_parameters(r.quantity)) {
      coefficients_.record(r, run_, row, stopped >= 0 ? stopped : step_);
      continue;
    }
    static_cast<double*>(r.buffer)[run_ * r.capacity + row] =
        r.quantity == Quantity::kLoss       ? totals_.loss
        : r.quantity == Quantity::kAccuracy ? totals_.correct
                                            : totals_.margin;
  }
}

template <class real>
void CoefficientLoop<real>::update() {
  double rate[kMaxLanes], ones[kMaxLanes], zeros[kMaxLanes] = {};
  std::fill_n(ones, kernels_.lanes, 1.0);
  task_.optimizer.with_rule([&](const auto& rule) {
    const double* const schedule = task_.optimizer.schedule[kU];
    AtStep at{};
    at.schedule = schedule ? schedule[step_] : 1.0;
    at.lr = task_.optimizer.lr[kU][run_] * at.schedule;
    at.kept = 1;
    std::fill_n(rate, kernels_.lanes, rule.rate(at));
    const StepArguments<double> in{coefficients_.row(),
                                   coefficients_.theta(run_),
                                   g_,
                                   coefficients_.velocity(run_),
                                   nullptr,
                                   rate,
                                   ones,
                                   zeros,
                                   zeros,
                                   ones};
    step_of(kernels_, rule)(in, rule);
  });
}

template <class real>
void CoefficientLoop<real>::repeat_rows(std::int64_t reached) {
  for (const Record& r : task_.records) {
    const std::int64_t from = r.row(task_.first_step, step_);
    const std::int64_t to = std::min(r.row(task_.first_step, reached), r.capacity - 1);
    for (std::int64_t row = from + 1; row <= to; ++row) repeat_row<real>(r, run_, from, row);
  }
}

/// Whether the caller asks for the end, who is called from time to time.
template <class real>
bool CoefficientLoop<real>::is_interrupted(const FlushToZero& flush) {
  if (!task_.on_progress || ++steps_since_look_ < kMostCallsOfLook) return false;
  steps_since_look_ = 0;
  const auto now = std::chrono::steady_clock::now();
  if (now < last_progress_ + std::chrono::milliseconds(kProgressInterval)) return false;
  last_progress_ = now;
  CallbackResult result{};
  flush.suspended([&] { result = task_.on_progress(step_); });
  return result == CallbackResult::kAbort;
}

template class CoefficientLoop<float>;
template class CoefficientLoop<double>;

}  // namespace mhfast
