// The parameters of one run, or of the runs that are lanes of one engine, as its steps take them,
// with their gradients and what the optimizer keeps.
//
//   the caller's arrays  ->  lanes  ->  times powers of two, products of factors  ->  an engine
//
// Where a run is alone its parameters are the caller's arrays, stepped in place.
#pragma once

#include <cstdint>
#include <vector>

#include "../passes/engine.hpp"
#include "train.hpp"
#include "trained.hpp"

namespace mhfast {

template <class real>
class State {
 public:
  /// Of `count` runs from `run` on, in `width` lanes. `multiplies`: some engine takes W of factors
  /// multiplied out.
  State(TrainingTask<real>& task, std::ptrdiff_t run, int count, int width, bool multiplies);

  /// What an engine loads: the parameters themselves, or copies.
  Parameters<real> parameters() const;
  /// The exponent of the power of two that the copy of a tensor has been multiplied by.
  int exponent(TensorName name) const {
    return task_.exponents.of(name, task_.rank > 0 && !task_.model.at[kK]);
  }
  Trained<real> trained(TensorName name) const;

  // A member's heads, by index modulo the size of its team.

  /// Brings copies and products up to date, but for the prompt.
  void compose(const Member& member);
  /// The gradient that a pass has left, by the copies; of factors too.
  void differentiate(Engine<real>& engine, const Member& member);
  /// Turns gradients by the copies into those by the parameters.
  void restore_gradients(std::vector<Trained<real>>& tensors, const Member& member) const;
  /// Adds the parameters to the means; by run how many iterates these then have, 0: not this run.
  void add_to_averages(const std::vector<std::int64_t>& counts, const Member& member) const;

  // One member's.

  void rescale_prompt();
  /// Copies parameters and the optimizer's state from lanes to the caller's arrays.
  void write_back() const;

 private:
  Extent extent_of(int name) const {
    return extent(TensorName(name), task_.data.shape, task_.rank);
  }
  void take_memory();
  void take_lanes();
  void rescale_heads(const Member& member);
  void multiply_factors(int head);

  TrainingTask<real>& task_;
  const std::ptrdiff_t run_;
  const int count_, width_;
  bool multiplies_;  // also: at every step
  AlignedBuffer block_;
  Tensors<real*> theta_, first_, second_;
  Tensors<real*> gradient_{};
  Tensors<real*> loaded_{};  // as an engine takes them: theta_ itself, or copies
};

}  // namespace mhfast
