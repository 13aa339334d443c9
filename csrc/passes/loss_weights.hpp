// How samples enter the loss: what the loss of a run is divided by, and a classifier's labels and
// weights in the form that its kernel takes.
#pragma once

#include <optional>
#include <vector>

#include "../problem/readout.hpp"
#include "own_loss.hpp"
#include "pass.hpp"

namespace mhfast {

/// One number for each run of an engine, and for each lane the share of a run's derivative.
struct LossShares {
  std::vector<double> weights, labels;  // (width) what the loss and the accuracy are divided by
  std::vector<double> of_lane;          // (lanes) of a derivative in that of the run's loss

  /// For `samples` samples drawn from those of `whole`, or all of them: sums over them are divided
  /// by the same part of what sums over `whole` are divided by.
  template <class real>
  void weigh(const Data<real>& whole, std::ptrdiff_t samples, Loss loss, int width, int lanes) {
    const double part = samples == whole.shape.n ? 1.0 : double(samples) / double(whole.shape.n);
    weights.resize(width);
    labels.resize(width);
    of_lane.resize(lanes);
    for (int lane = 0; lane < width; ++lane) {
      const int run = std::min(lane, whole.runs - 1);
      weights[lane] = part * whole.total_weight(run, loss);
      labels[lane] = part * whole.total_labels(run, loss);
    }
    for (int l = 0; l < lanes; ++l)
      of_lane[l] = 1.0 / (weights[width > 1 ? l : 0] * readout_of(whole.shape).divisor);
  }

  /// For a part of the samples of one run, which are of this weight and have so many labels.
  void weigh_by(const Shape& shape, double weight, double label_count) {
    weights = {weight};
    labels = {label_count};
    std::fill(of_lane.begin(), of_lane.end(), 1.0 / (weight * readout_of(shape).divisor));
  }
};

/// The losses of a classifier's samples. Entries are pairs of a sample and a lane of runs.
template <class real>
class ClassifierLoss {
 public:
  ClassifierLoss(const Kernels<real>& kernels, const Data<real>& data, std::optional<Loss> loss,
                 int width, bool gaps)
      : kernels_(kernels), data_(data), loss_(loss), width_(width), gaps_(gaps) {
    if (!loss_) return;
    const std::size_t held = data.shape.n * width + kernels.lanes;  // whole vectors are read
    labels_.resize(held);
    weights_.resize(held);
    if (data.weight && gaps) log_weights_.resize(held);
    read(0, data.shape.n);
  }

  /// Labels and weights of samples `first` to `last`.
  void read(std::ptrdiff_t first, std::ptrdiff_t last) {
    if (!loss_) return;
    for (std::ptrdiff_t e = first * width_; e < last * width_; ++e) {
      const std::ptrdiff_t sample = e / width_;
      const int run = std::min(int(e % width_), data_.runs - 1);
      labels_[e] = double(data_.y[run * data_.run.y + sample]);
      weights_[e] = data_.weight_of(run, sample, 0);
      if (!log_weights_.empty()) log_weights_[e] = std::log(weights_[e]);
    }
  }

  /// Loss and derivative of `count` entries from their outputs, from `first_sample` on; `values`:
  /// see LossTerm.
  void measure(bool values, const LossShares& shares, std::ptrdiff_t first_sample, int count,
               const double* outputs, LaneTotals& totals, real* derivative,
               double* log_derivative) const {
    const std::ptrdiff_t at = first_sample * width_;
    LossArguments<real> in{};
    in.kind = *loss_;
    in.values = values;
    in.count = count;
    in.f = outputs;
    in.y = labels_.data() + at;
    in.w = weights_.data() + at;
    in.log_w = log_weights_.empty() ? nullptr : log_weights_.data() + at;
    in.shares = shares.of_lane.data();
    in.derivative = derivative;
    in.log_derivative = gaps_ ? log_derivative : nullptr;
    in.loss = totals.loss;
    in.correct = totals.correct;
    in.margin = totals.margin;
    kernels_.classifier_loss(in);
  }

  /// The same of the caller's own loss, whose values and derivatives are known.
  void measure_own(const OwnLossNumbers& own, const LossShares& shares, std::ptrdiff_t first_sample,
                   int count, LaneTotals& totals, real* derivative, double* log_derivative) const {
    const std::ptrdiff_t at = first_sample * width_;
    for (int e = 0; e < int(round_up(count, kernels_.lanes)); ++e) {
      const int l = e % kernels_.lanes;
      const double w = e < count ? weights_[at + e] : 0.0;
      const bool counts = w != 0;  // the others are left out, whatever the output is
      derivative[e] = counts ? real(own.derivatives[e] * (w * shares.of_lane[l])) : real(0);
      if (gaps_)
        log_derivative[e] = counts ? std::log(w * std::fabs(own.derivatives[e])) : -kInfinity;
      if (!counts) continue;
      const double margin = own.targets[e] * own.outputs[e];
      totals.loss[l] += w * own.values[e];
      totals.correct[l] += margin > 0 ? w : 0.0;
      totals.margin[l] = std::min(totals.margin[l], margin);
    }
  }

  /// Of a sample and those after it.
  const double* labels(std::ptrdiff_t sample) const { return labels_.data() + sample * width_; }

 private:
  const Kernels<real>& kernels_;
  const Data<real>& data_;
  const std::optional<Loss> loss_;
  const int width_;
  const bool gaps_;
  std::vector<double> labels_, weights_, log_weights_;
};

}  // namespace mhfast
