// A pass over the data of a model: its kinds, its options and its sums.
#pragma once

#include <algorithm>

#include "../kernels/table.hpp"
#include "../problem/loss.hpp"
#include "../problem/plan.hpp"

namespace mhfast {

/// What a pass computes beyond the readouts.
enum class Pass {
  kOutputs,
  kOwnOutputs,  // the first phase of a block with the caller's own loss, see own_loss.hpp
  kLoss,
  kScales,  // the loss, and what GradientScales::needs_scaling needs
  kGradient,
  kScaledGradient,
};

inline bool is_gradient(Pass pass) {
  return pass == Pass::kGradient || pass == Pass::kScaledGradient;
}

struct PassOptions {
  bool gradient = false, wrt_W = true, wrt_readout = true;  // W serves a prompt as well
  bool wrt_embedding = false;                               // of words, with the two before
  bool wrt_inputs = false;                                  // only where there are projections
  bool gaps = false;                                        // gather what needs_scaling needs
  bool runs_are_lanes = false;  // parameters have a number for each lane
  int members = 1;              // of a team that may be larger than the engine's own

  bool gathers_scales(Pass pass) const {
    return gaps && (pass == Pass::kScales || pass == Pass::kGradient);
  }
  bool finds_gaps(Pass pass) const {
    return gathers_scales(pass) || (gaps && pass == Pass::kScaledGradient);
  }
};

/// Sums over samples, in the order of the chunks.
struct Totals {
  double loss = 0, correct = 0, margin = 0;
};

/// The same of a chunk, before division: the samples, or the run, of each lane.
struct LaneTotals {
  double loss[kMaxLanes] = {}, correct[kMaxLanes] = {}, margin[kMaxLanes];
  LaneTotals() { std::fill_n(margin, kMaxLanes, kInfinity); }
};

/// Where the samples and rows of a unit lie, whatever the plan.
struct LaneLayout {
  int lanes;
  bool laned;             // each lane has a problem of its own: a sample or a run
  int samples_in_unit;    // where samples are the lanes, as many as there are; else 1
  int entries_in_sample;  // where runs are the lanes, as many as there are; else 1

  LaneLayout(const Plan& plan, int count)
      : lanes(count),
        laned(plan.problems_are_lanes()),
        samples_in_unit(plan.samples_are_lanes() ? count : 1),
        entries_in_sample(plan.runs_are_lanes() ? count : 1) {}

  /// Numbers of a unit's `count` rows of one feature: vectors of problems, or whole vectors of
  /// rows.
  std::ptrdiff_t rows(int count) const {
    return laned ? std::ptrdiff_t(count) * lanes : round_up(count, lanes);
  }
};

/// A part of a chunk that is worked on at a time.
template <class real>
struct Slab {
  std::ptrdiff_t first_sample;
  int units, samples;
  const real *x, *z, *y;   // packed; y: a layer's
  WordsOfUnits words;      // in the place of x and z
  int first_row, rows;     // of the query; all, but for layers of long sequences
  int keys;                // that any of these rows sees; all, but for layers by rows
  bool first;              // of its chunk
  int place = 0;           // in its block, see own_loss.hpp
  std::ptrdiff_t row = 0;  // the first of its rows in the block
  bool follows = false;    // other rows of its samples have been added to the chunk's gradient
  int heads = 1;           // whose scores and gradients go together, see ScoreArguments
  real* laned = nullptr;   // where gradients with samples as lanes are added up; see sum_lanes
};

}  // namespace mhfast
