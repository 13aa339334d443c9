// What a pass does for one head of a slab, whatever the readout: scores, the factors of a scaled
// pass, gradients. Tiles of a classifier alone have steps of their own.
#pragma once

#include "gradient_lanes.hpp"
#include "scores.hpp"

namespace mhfast {

/// Scratch of one thread for the heads of a slab.
template <class real>
struct HeadMemory {
  real* limits;              // (units, rows)
  ScoreMemory<real> scores;  // s and c: (heads that are kept, units, weights)
  real* gap;                 // (heads, entries)
  double* log_derivative;    // (entries) of the loss, without the share
  real* factors;             // (entries)
  real *keys, *e;            // keys times factors; D X, see scratch_size
};

template <class real>
class HeadSteps {
 public:
  /// `rows` query rows go together.
  HeadSteps(PassState<real>& state, int rows);

  /// Numbers of a unit's row of query rows, and of its A (or D) for one head.
  std::ptrdiff_t rows_size() const { return rows_size_; }
  std::ptrdiff_t weights_size() const { return weights_size_; }
  std::ptrdiff_t row_size(std::ptrdiff_t units) const { return gradient_->row_size(units); }
  std::ptrdiff_t scratch_size(std::ptrdiff_t units, int rows) const {
    return gradient_->scratch_size(units, rows);
  }

  /// Arguments of the scores of one head, with `to` being the head's part of the memory.
  ScoreArguments<real> scores(RowMode mode, int head, const Slab<real>& slab,
                              const HeadMemory<real>& memory, const ScoreMemory<real>& to,
                              real* gap) const;
  void run_scores(const ScoreArguments<real>& arguments) const { run_scores_(arguments); }

  void gather_scales(int chunk, const Slab<real>& slab, const HeadMemory<real>& memory) const;

  /// Factors of a scaled pass for the slab's entries, see FactorArguments.
  const real* scaled_factors(const Slab<real>& slab, const real* gaps, const double* log_scale,
                             const real* signs, const HeadMemory<real>& memory) const;

  const real* scale_keys(const Slab<real>& slab, const real* factors,
                         const HeadMemory<real>& memory) const {
    return gradient_->scale_keys(slab, factors, memory.keys);
  }
  void accumulate(int chunk, int head, const Slab<real>& slab, const real* a, const real* dd,
                  const real* keys, const HeadMemory<real>& memory) const {
    gradient_->accumulate(chunk, head, slab, a, dd, keys, memory.e);
  }

 private:
  PassState<real>& state_;
  const std::ptrdiff_t rows_size_, weights_size_, transposed_row_;
  void (*const run_scores_)(const ScoreArguments<real>&);
  const std::unique_ptr<GradientLanes<real>> gradient_;
};

}  // namespace mhfast
