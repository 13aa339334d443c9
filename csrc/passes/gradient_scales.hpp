// The logarithms of the largest factors of a gradient, gathered chunk by chunk, and what a scaled
// pass leaves out because of them.
#pragma once

#include <vector>

#include "pass.hpp"

namespace mhfast {

/// Of H heads and of the readout: the maximum over samples of log |derivative| + gap, and of
/// log |derivative|, one number for each lane.
class GradientScales {
 public:
  GradientScales(int heads, int lanes, int chunks, bool gathered);

  /// A chunk's (H + 1, lanes), those of the readout last; `begin_chunk` sets them to -inf.
  void begin_chunk(int chunk);
  double* of_chunk(int chunk) { return &by_chunk_[chunk * size_]; }

  /// After a pass that gathered: whether the largest factors are so small that the gradient takes a
  /// scaled pass, which leaves them out. `runs` lanes hold a run each, 0: lanes are samples.
  /// `together`: one scale for all heads. `underflow`: the least logarithm that is harmless.
  bool needs_scaling(const PassOptions& options, int runs, bool together, double underflow);

  /// What the scaled pass leaves out besides the share of the loss, as whole numbers (lanes).
  const double* log_of_W(int head) const { return &scales_[std::size_t(head) * lanes_]; }
  const double* log_of_readout() const { return log_of_W(heads_); }

 private:
  const int heads_, lanes_, chunks_;
  const std::ptrdiff_t size_;
  std::vector<double> by_chunk_, scales_;
};

}  // namespace mhfast
