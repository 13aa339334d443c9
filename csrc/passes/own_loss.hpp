// The caller's own loss in a pass over the data. A compiled function is called for each slab, where
// a formula would be. A Python function is called for a block of slabs, in two phases:
//
//   outputs of the block's slabs, A and D kept  ->  call  ->  their losses and gradients
//
// A block is a part of a chunk, so that neither depends on the number of threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <optional>

#include "../problem/data.hpp"
#include "../problem/own_loss.hpp"
#include "../runtime/scratch.hpp"
#include "../runtime/tuning.hpp"
#include "pass.hpp"

namespace mhfast {

/// Some outputs with their targets, and the function's results for each.
struct OwnLossNumbers {
  double *outputs, *targets, *values, *derivatives;

  void lay_out(Arena& layout, std::size_t count) {
    for (double** array : {&outputs, &targets, &values, &derivatives})
      *array = layout.take<double>(count);
  }
  OwnLossNumbers from(std::ptrdiff_t at) const {
    return {outputs + at, targets + at, values + at, derivatives + at};
  }

  /// As row_loss, of the row of p outputs at `at`.
  template <class Emit>
  RowLoss row(std::ptrdiff_t at, int p, const Emit& emit) const {
    RowLoss row;
    for (int o = 0; o < p; ++o) {
      const double margin = outputs[at + o] * targets[at + o];
      row.value += values[at + o];
      row.correct += margin > 0 ? 1.0 : 0.0;
      row.margin = std::min(row.margin, margin);
      emit(o, derivatives[at + o]);
    }
    return row;
  }
};

/// The function's results for all outputs that are known; `curvatures`: with second derivatives.
class OwnLossResults {
 public:
  template <class real>
  OwnLossResults(const Data<real>& data, OwnLoss& function, const real* outputs, bool curvatures)
      : outputs_(data.shape.row_outputs()), rows_(data.shape.output_rows()) {
    const Shape& s = data.shape;
    const std::ptrdiff_t count = s.n * s.outputs();
    const auto lay_out = [&](Arena layout) {
      of_.lay_out(layout, count);
      curvatures_ = layout.take<double>(curvatures ? count : 0);
      return layout.size();
    };
    lay_out(Arena(block_.reserve(std::max<std::size_t>(1, lay_out(Arena())))));
    if (!curvatures) curvatures_ = nullptr;
    std::copy_n(outputs, count, of_.outputs);
    std::copy_n(data.y, count, of_.targets);
    succeeded_ = function.call({s.n * rows_, s.p, sizeof(real) == sizeof(double), of_.outputs,
                                of_.targets, of_.values, of_.derivatives, curvatures_});
  }

  bool succeeded() const { return succeeded_; }
  double value(std::ptrdiff_t sample) const { return of_.values[sample]; }
  double derivative(std::ptrdiff_t sample) const { return of_.derivatives[sample]; }
  double curvature(std::ptrdiff_t sample) const { return curvatures_[sample]; }

  /// Of a layer's row; the second as derivative_tangents.
  template <class Emit>
  RowLoss row(std::ptrdiff_t sample, int row, const Emit& emit) const {
    return of_.row((sample * rows_ + row) * outputs_, outputs_, emit);
  }
  template <class real, class Emit>
  void derivative_tangents(std::ptrdiff_t sample, int row, const real* df, std::ptrdiff_t stride,
                           const Emit& emit) const {
    const double* curvatures = curvatures_ + (sample * rows_ + row) * outputs_;
    for (int o = 0; o < outputs_; ++o) emit(o, curvatures[o] * double(df[o * stride]));
  }

 private:
  const int outputs_, rows_;  // of a row, of a sample
  OwnLossNumbers of_{};
  double* curvatures_ = nullptr;
  AlignedBuffer block_;
  bool succeeded_ = false;
};

/// The function in the passes of an engine.
class OwnLossPass {
 public:
  OwnLossPass(const Shape& shape, std::optional<Loss> loss, bool is_double)
      : p_(shape.p), is_double_(is_double), function_(loss ? loss->own : nullptr) {}

  bool exists() const { return function_; }
  bool takes_blocks() const { return function_ && function_->is_slow(); }
  bool takes_blocks(Pass pass) const { return takes_blocks() && pass != Pass::kOutputs; }

  /// The size of a block: slabs of so many outputs and bytes of weights that are kept, as
  /// tuning.hpp has them, at most those of a chunk.
  int slabs_of_block(double of_chunk, double outputs, double kept_bytes) const {
    if (!takes_blocks()) return 1;
    double slabs = kOwnLossOutputs / outputs;
    if (kept_bytes > 0) slabs = std::min(slabs, kOwnLossBytes / kept_bytes);
    return int(std::min(of_chunk, std::max(1.0, slabs)));
  }

  /// Calls work(pass, begin, end), which returns the number of rows, for the slabs of a chunk:
  /// once, or for blocks of `size` slabs twice, with the function called in between for the outputs
  /// that the first phase has left in `of`.
  template <class Work>
  void run(Pass pass, std::ptrdiff_t begin, std::ptrdiff_t end, std::ptrdiff_t size,
           const OwnLossNumbers& of, const Work& work) {
    if (!takes_blocks(pass)) {
      work(pass, begin, end);
      return;
    }
    for (; begin < end && !failed(); begin += size) {
      const std::ptrdiff_t next = std::min(begin + size, end);
      call(work(Pass::kOwnOutputs, begin, next), of);
      if (!failed()) work(pass, begin, next);
    }
  }

  /// The same for slabs of `slab` units, from unit `first` to `last`: work(pass, begin, end, place,
  /// is_first) for each slab returns its rows, of which `place` come before it in its block.
  template <class Work>
  void run_slabs(Pass pass, std::ptrdiff_t first, std::ptrdiff_t last, std::ptrdiff_t slab,
                 std::ptrdiff_t size, const OwnLossNumbers& of, const Work& work) {
    const bool in_block = takes_blocks(pass);
    const auto for_slabs = [&](Pass phase, std::ptrdiff_t begin, std::ptrdiff_t end) {
      std::ptrdiff_t rows = 0;
      for (std::ptrdiff_t i = begin; i < end; ++i) {
        const std::ptrdiff_t unit = first + i * slab;
        rows += work(phase, unit, std::min(unit + slab, last), in_block ? rows : 0, i == 0);
      }
      return rows;
    };
    run(pass, 0, (last - first + slab - 1) / slab, size, of, for_slabs);
  }

  /// Calls the function for `rows` rows, whose results it fills in.
  void call(std::ptrdiff_t rows, const OwnLossNumbers& of) {
    if (!function_->call(
            {rows, p_, is_double_, of.outputs, of.targets, of.values, of.derivatives, nullptr}))
      failed_.store(true, std::memory_order_relaxed);
  }
  /// Whether a call has failed: read in the pass, to end it, and behind the barrier after it.
  bool failed() const { return failed_.load(std::memory_order_relaxed); }

 private:
  const int p_;
  const bool is_double_;
  OwnLoss* const function_;
  std::atomic<bool> failed_{false};
};

}  // namespace mhfast
