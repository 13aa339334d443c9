// Training: descent on all samples or on batches of them, with its records, entirely in C++.
//
//   step k:  loss and gradient at theta_k  ->  decide, record  ->  theta_{k+1}
//
// Values recorded for k belong to theta_k. Independent runs go side by side: each on its own
// thread, or as many as there are lanes on one. The caller's code runs only through the hooks.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "../problem/data.hpp"
#include "../problem/rescale.hpp"
#include "batches.hpp"
#include "descent.hpp"
#include "processes.hpp"

namespace mhfast {

enum class Quantity {
#define MHFAST_QUANTITY(enumerator, ...) enumerator,
#include "../lists/quantities.inc"
#undef MHFAST_QUANTITY
  kParameter,  // a snapshot
  kAverage     // the mean of one over steps
};

enum class QuantityOf { kDataSet, kGradient, kParameters, kAttentionWeights };

inline QuantityOf is_of(Quantity quantity) {
  switch (quantity) {
#define MHFAST_QUANTITY(enumerator, name, of) \
  case Quantity::enumerator:                  \
    return QuantityOf::of;
#include "../lists/quantities.inc"
#undef MHFAST_QUANTITY
    case Quantity::kParameter:
    case Quantity::kAverage:
      break;
  }
  return QuantityOf::kParameters;
}

enum class StopReason : std::int64_t {
#define MHFAST_STOP(enumerator, name) enumerator,
#define MHFAST_THRESHOLD(enumerator, name, comparison) enumerator,
#include "../lists/stops.inc"
#undef MHFAST_STOP
#undef MHFAST_THRESHOLD
};

/// A row of the buffer for each due step: multiples of `every` from the first step on, and the end.
/// Runs have their rows one after another, `capacity` rows each.
struct Record {
  Quantity quantity;
  TensorName tensor;  // of kParameter and kAverage
  int set;            // -1: training data, else index of a test set
  std::int64_t every;
  void* buffer;  // double, or the model's type for kParameter and kAttention
  std::int64_t capacity, row_size;
  const std::int64_t *sample_groups = nullptr, *token_groups = nullptr;
  std::ptrdiff_t sample_run = 0, token_run = 0;  // run r's groups are r times this further
  int sample_group_count = 0, token_group_count = 0;

  /// The row that belongs to step k when recording began at `first`.
  std::int64_t row(std::int64_t first, std::int64_t k) const {
    return (k + every - 1) / every - (first + every - 1) / every;
  }
};

/// Numbers that end a run, NaN where there is none: then no comparison holds.
struct Thresholds {
  static constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
#define MHFAST_STOP(enumerator, name)
#define MHFAST_THRESHOLD(enumerator, name, comparison) double name = kNone;
#include "../lists/stops.inc"
#undef MHFAST_STOP
#undef MHFAST_THRESHOLD

  bool ask_for_totals() const {
    return !std::isnan(loss) || !std::isnan(accuracy) || !std::isnan(margin);
  }
  bool any() const { return ask_for_totals() || !std::isnan(grad_norm); }
  /// The first reason for which a run ends that is finite; loss, accuracy, margin and grad_norm by
  /// name in `now`.
  template <class Values>
  StopReason reached(const Values& now) const {
#define MHFAST_STOP(enumerator, name)
#define MHFAST_THRESHOLD(enumerator, name, comparison) \
  if (!std::isnan(name) && now.name() comparison name) return StopReason::enumerator;
#include "../lists/stops.inc"
#undef MHFAST_STOP
#undef MHFAST_THRESHOLD
    return StopReason::kNone;
  }
};

/// Tensors of all runs: run r's are `run` numbers further, 0 where all share one.
template <class Pointer>
struct OfRuns {
  Tensors<Pointer> at{};
  Tensors<std::ptrdiff_t> run{};

  Tensors<Pointer> of(std::ptrdiff_t r) const {
    Tensors<Pointer> tensors = at;
    for (int name = 0; name < kTensors; ++name)
      if (tensors[name]) tensors[name] += r * run[name];
    return tensors;
  }
};

/// Means of tensors over the iterates theta_j of a run, from step `first` on:
///
///   mean += (theta - mean) / count,   in double, which is the mean of `count` iterates.
///
/// They hold those that a step was taken from; a record at step k adds theta_k.
struct Averages {
  std::int64_t first = 0;
  std::int64_t* counts = nullptr;  // by run; null: there are no averages
  OfRuns<double*> mean;

  template <class real>
  static double added(double mean, real theta, std::int64_t count) {
    return mean + (double(theta) - mean) / double(count);
  }
};

/// Where a readout may be trained in coefficients of the samples, see coefficients.hpp: by run and
/// sample those of U, and of what the optimizer keeps, `taken` where they are what training starts
/// from, and ends with. Without `taken` they may not be.
struct GivenCoefficients {
  bool* taken = nullptr;
  double *theta = nullptr, *velocity = nullptr;
};

template <class real>
struct TrainingTask {
  std::ptrdiff_t runs;  // at least 1
  Data<real> data;      // of the first run, clean (see CleanData), like the test sets
  Data<real> given;     // the same as it came: what attention is recorded of
  std::vector<Data<real>> tests;
  Exponents exponents;          // of the powers by which data and tests were multiplied
  OfRuns<real*> model;          // trained tensors are stepped in place
  OfRuns<const real*> starts;   // where distance is measured from
  OfRuns<real*> first, second;  // what the optimizer keeps, where it keeps something
  std::vector<OfRuns<const real*>> directions;
  Averages averages;
  GivenCoefficients coefficients;
  int rank;
  real scale;
  Loss loss;
  std::array<bool, kTensors> wrt;
  Optimizer optimizer;
  Tensors<Constraint> constraints{};
  Batches batches;
  bool triangular_batches = false;  // see passes/triangular.hpp
  Data<real> fresh;                 // where batches.fresh is not 0: the samples of the first step
  Populations<real> populations;    // none: `draw` is called
  /// The samples of the steps from this one on, of the same shape; null when the caller aborts.
  std::function<const Data<real>*(std::int64_t)> draw;
  std::int64_t first_step, last_step;
  std::vector<Record> records;
  Thresholds thresholds;
  std::int64_t* stopped;                             // by run: where it was frozen, -1: it was not
  StopReason* reasons;                               // by run: why it was frozen, kNone: it was not
  std::int64_t hook_every = 0;                       // 0: no hook
  std::function<CallbackResult(std::int64_t)> hook;  // at due steps and at the end
  std::function<CallbackResult(std::int64_t)> on_progress;  // from time to time
  int threads;
  Processes processes;                        // in all of which steps are taken on all samples
  std::vector<double> weights, label_counts;  // there, of all samples, by run

  /// Numbers that processes add up at a step.
  Sums sums() const {
    std::ptrdiff_t gradient = 0;
    for (int name = 0; name < kTensors; ++name)
      if (wrt[name]) gradient += extent(TensorName(name), data.shape, rank).all();
    return Sums(processes, gradient, kScalesInSlot + data.shape.H + 1);
  }
  /// In a slot the margin, or the largest numbers of the data, then those of
  /// Engine::gathered_scale.
  static constexpr std::ptrdiff_t kMarginInSlot = 0, kLargestXInSlot = 0, kLargestZInSlot = 1,
                                  kScalesInSlot = 1;

  /// Whether training leaves attention as it is.
  bool keeps_attention() const {
    for (const TensorName name : kOfScores)
      if (wrt[name]) return false;
    return true;
  }

  /// Steps between the first ones of epochs; new samples have no epochs, but records of all samples
  /// then cost as much relative to their steps.
  std::int64_t epoch() const {
    return std::max<std::int64_t>(1, data.shape.n / std::max<std::int64_t>(1, batches.size));
  }

  /// The shape that a step is taken on.
  Shape step_shape() const {
    Shape shape = data.shape;
    if (batches.size > 0) shape.n = batches.size;
    if (triangular_batches) shape.T = shape.d;
    return shape;
  }
};

/// Which rows of the last step are written: none, those due by their `every`, all.
enum class LastRow { kNone, kDue, kAll };

struct TrainingEnd {
  std::int64_t reached;
  LastRow last_row;
  std::vector<StopReason> reasons;  // by run; of those frozen before the first step kNone
};

template <class real>
TrainingEnd train(TrainingTask<real>& task);

}  // namespace mhfast
