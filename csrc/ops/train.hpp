// The training loop: full-batch gradient descent with its records, wholly inside one team of
// threads.
//
//   step k:  loss and gradient at theta_k  ->  decide, record  ->  theta_{k+1}
//
// Values recorded for k belong to theta_k. The caller's code runs only through the hooks.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "engine.hpp"

namespace mhfast {

enum class Scope { kTensor, kHead, kAll };

struct Optimizer {
  bool normalized = false;
  double lr = 0, eps = 0, l2 = 0;
  double clip = std::numeric_limits<double>::infinity();
  Scope by = Scope::kTensor;
  const double* schedule = nullptr;  // factor of lr by step, or null
};

enum class Quantity {
  kLoss,
  kAccuracy,
  kMargin,  // of any data set
  kGradNorm,
  kParamNorm,
  kDistance,
  kCosine,  // of the parameters
  kW,
  kU,
  kAttention,
  kAttentionMax,
  kAttentionGroups
};

struct Record {
  Quantity quantity;
  int set;             // -1: training data, else index of a test set
  std::int64_t every;  // due at multiples of this and at the end
  void* buffer;        // double, or the model's type for kW, kU and kAttention; a row each time
  std::int64_t rows = 0, row = 0;  // capacity and rows written
  const std::int64_t *sample_groups = nullptr, *token_groups = nullptr;
  int sample_group_count = 0, token_group_count = 0;
};

struct Thresholds {  // NaN: none
  double loss = kNone, grad_norm = kNone, accuracy = kNone, margin = kNone;
  static constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
};

enum class HookAnswer { kGoOn, kStop, kAbort };

template <class real>
struct TrainingTask {
  Data<real> data;
  std::vector<Data<real>> tests;
  real *W, *U;          // trained in place
  const real *W0, *U0;  // where distance is measured from
  struct Direction {
    const real *W, *U;  // either may be null
  };
  std::vector<Direction> directions;
  real scale;
  Loss loss;
  bool wrt_W, wrt_U;
  Optimizer optimizer;
  std::int64_t first, last;
  std::vector<Record> records;
  Thresholds thresholds;
  std::int64_t hook_every = 0;                   // 0: no hook
  std::function<HookAnswer(std::int64_t)> hook;  // at due steps and at the end
  std::function<HookAnswer(std::int64_t)> tick;  // now and then
  int threads;
};

struct TrainingEnd {
  std::int64_t reached;
  std::string reason;  // steps, loss, grad_norm, accuracy, margin, hook, nonfinite, aborted
};

template <class real>
TrainingEnd train(TrainingTask<real>& task);

}  // namespace mhfast
