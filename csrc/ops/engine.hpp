// One pass over the data of a model: outputs, loss and gradients.
//
//   scores and readout of every head  ->  loss and its slope  ->  gradients        (by slab)
//
// Samples are cut into chunks that depend on the shape alone. A chunk is worked on by one thread, a
// slab of samples at a time, all heads of a slab before the next, and leaves a partial gradient of
// its own; these are summed in the order of the chunks. So any thread may take any chunk.
//
// An engine has one run, or as many as there are lanes: then parameters, losses and gradients are
// vectors, one number for each run.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "../dispatch/dispatch.hpp"
#include "data.hpp"
#include "loss.hpp"
#include "scores.hpp"
#include "scratch.hpp"
#include "team.hpp"

namespace mhfast {

/// What a pass computes beyond the readouts.
enum class Pass {
  kOutputs,
  kLoss,
  kScales,  // the loss, and what needs_scaling asks for
  kGradient,
  kScaledGradient,
};

/// Sums over samples, in the order of the chunks.
struct Totals {
  double loss = 0, correct = 0, margin = 0;
};

/// The same of a chunk, before division: the samples, or the run, of each lane.
struct LaneTotals {
  double loss[kMostLanes] = {}, correct[kMostLanes] = {}, margin[kMostLanes];
  LaneTotals() { std::fill_n(margin, kMostLanes, kInfinity); }
};

/// A data set in the layout that an engine reads; engines of one plan and data share one.
template <class real>
struct Packed {
  Block block;
  real *x, *z, *y;
};

template <class real>
class Engine {
 public:
  struct Options {
    bool gradient = false, wrt_W = true, wrt_readout = true;  // W serves a prompt as well
    bool gaps = false;                                        // gather what needs_scaling asks for
    bool runs_are_lanes = false;  // parameters have a number for each lane
    int members = 1;              // of a team that may be larger than this engine's own
  };
  /// Where gradients go, in the layout of the parameters; each may be null.
  struct Gradient {
    real *W, *readout, *prompt;
  };

  Engine(const Data<real>& data, std::optional<Loss> loss, const Options& options, int threads);

  /// Takes scratch from `block`, which must serve nothing else until the next call; the parameters
  /// must be loaded again.
  void bind(Block& block);

  int threads() const { return threads_; }
  int width() const { return width_; }  // runs of this engine: one, or as many as lanes
  double expected_seconds() const {
    return expected_seconds_;
  }  // of a pass, at most, see run_short_team
  bool gathers_gaps() const { return options_.gaps; }

  /// Keeps the data packed for many passes, or takes another engine's.
  std::shared_ptr<Packed<real>> make_packed() const;
  void use_packed(std::shared_ptr<Packed<real>> packed) { packed_ = std::move(packed); }

  /// For samples drawn from those of `whole`: a sum over them is divided by the part of what sums
  /// over `whole` are divided by that is their part of its samples. So the mean over draws of their
  /// loss is the loss of `whole`.
  void weigh_as_part_of(const Data<real>& whole);
  /// Reads labels and weights of samples `first` to `last` again.
  void read_samples(std::ptrdiff_t first, std::ptrdiff_t last);

  /// The parts of a pass, each called by every member of a team with a barrier after it.
  void pack_all(const Member& member);
  void load_parameters(const Parameters<real>& parameters, const Member& member);
  void run_chunks(Pass pass, const Member& member);
  void reduce_gradient(const Gradient& gradient, const Member& member);

  /// One member's call before a further pass, when the last one is complete.
  void restart() { next_chunk_.store(0, std::memory_order_relaxed); }

  /// Called by the first member after each of its chunks; returning true ends the pass early.
  void on_chunk(std::function<bool()> interrupted) { interrupted_ = std::move(interrupted); }

  /// Whether the totals of the next passes are wanted; without, loss only tells whether it is
  /// finite.
  void want_totals(bool wanted) { totals_wanted_ = wanted; }

  /// After a pass.
  Totals totals(int lane = 0) const;

  /// After a pass for scales or the gradient, with Options::gaps: whether the largest factors of
  /// the gradient are so small that it takes a scaled pass, which leaves them out. `together`: one
  /// scale for all heads.
  bool needs_scaling(bool together);
  /// What the scaled pass leaves out: share() and, as whole numbers, the logarithms of the rest.
  double log_scale_W(int head, int lane = 0) const { return log_scales_W(head)[lane]; }
  double log_scale_readout(int lane = 0) const { return log_scales_readout()[lane]; }
  double share(int lane = 0) const { return shares_[lane]; }

  /// Where outputs go, or null: (n,) or (n, q, p).
  void write_outputs(real* outputs) { outputs_ = outputs; }

 private:
  /// Scratch of one thread, for one slab.
  struct Room {
    real *x, *z, *y;  // packed slab, where the data are not kept packed
    real* limits;     // (units, rows)
    real* p;          // Z W
    real *s, *c;      // A and D: (heads, units, weights)
    real *row_readouts, *row_gaps;
    real *readout, *gap;  // (heads, entries)
    real *gx, *e;         // keys times the loss derivative; D X
    double *phi, *log_slope;
    real *slope, *factors;             // (entries), 0 for lanes without a sample
    double* largest;                   // layers: largest slope of each entry
    real *ax, *f, *g, *scaled_g, *ut;  // layers: A X (heads), outputs, their slopes, G V^T
    real *pu, *sc, *axdx, *x_rows;     // tiles
    real *g_transposed, *ax_rows;      // layers by rows: (pL, rows), (rows, dL)
    std::ptrdiff_t packed_sample;      // tiles: whose keys are in x and x_rows
  };
  /// What the threads of a team share for one slab of long sequences.
  struct TileScratch {
    real* gradients;  // (samples, heads, parts) units: W (d, dL), then U (rows of the part, dL)
    real* readouts;   // (samples, heads, q)
    real* gaps;       // (samples, heads, parts)
    double *phi, *log_slope;
    real* slope;
  };
  struct Slab {
    std::ptrdiff_t first_sample;
    int units, samples;
    const real *x, *z, *y;
    int first_row, rows;  // of the query; all, but for layers of long sequences
    int keys;             // that any of these rows sees; all, but for layers by rows
    bool first;           // of its chunk
  };

  /// Entries of a slab: pairs of a sample and a lane, those of lanes without a sample included, in
  /// whole vectors.
  int entries_held(const Slab& slab) const {
    return plan_.problems_are_lanes() ? slab.units * kernels_.lanes
                                      : int(round_up(slab.units, kernels_.lanes));
  }
  int entries(const Slab& slab) const {
    return plan_.runs_are_lanes() ? entries_held(slab) : slab.samples;
  }
  std::ptrdiff_t sample_of(const Slab& slab, int entry) const {
    return slab.first_sample + (plan_.runs_are_lanes() ? entry / kernels_.lanes : entry);
  }
  /// Lanes beyond the last run repeat it.
  int run_of(int entry) const {
    return plan_.runs_are_lanes() ? std::min(entry % kernels_.lanes, data_.runs - 1) : 0;
  }
  const double* log_scales_W(int head) const {
    return &scales_[std::size_t(head) * kernels_.lanes];
  }
  const double* log_scales_readout() const { return log_scales_W(data_.shape.H); }
  bool gathers_scales(Pass pass) const {
    return options_.gaps && (pass == Pass::kScales || pass == Pass::kGradient);
  }
  bool finds_gaps(Pass pass) const {
    return gathers_scales(pass) || (options_.gaps && pass == Pass::kScaledGradient);
  }
  bool is_gradient(Pass pass) const {
    return pass == Pass::kGradient || pass == Pass::kScaledGradient;
  }

  void lay_out(Layout& layout);
  void lay_out_layer(Layout& layout, Room& room);
  void lay_out_tiles(Layout& layout);
  void run_chunk(Pass pass, int chunk, Room& room);
  void run_tiles(Pass pass, const Member& member);
  void run_tile_unit(Pass pass, const Slab& slab, int unit, Room& room);
  void finish_tile_slab(Pass pass, const Slab& slab);
  void combine_tiles(Pass pass, const Slab& slab, int head);
  std::ptrdiff_t part_begin(int part) const {
    return std::ptrdiff_t(data_.shape.q) * part / plan_.parts;
  }
  Slab open_slab(std::ptrdiff_t first, std::ptrdiff_t last, Room& room) const;
  void pack(const real* from, std::ptrdiff_t run, int rows, int columns, std::ptrdiff_t first,
            std::ptrdiff_t last, real* to) const;
  void load_shared_product(const Parameters<real>& parameters, int head);
  void find_limits(const Slab& slab, Room& room) const;
  ScoreArguments<real> scores(RowMode mode, int head, const Slab& slab, Room& room, real* gap,
                              bool kept) const;
  void run_scores(const ScoreArguments<real>& arguments) const;
  void run_classifier_slab(Pass pass, int chunk, const Slab& slab, Room& room);
  void measure_loss(Pass pass, LaneTotals& totals, const Slab& slab, const double* phi, real* slope,
                    double* log_slope) const;
  void gather_scales(int chunk, const Slab& slab, const Room& room);
  void differentiate(Pass pass, int chunk, const Slab& slab, Room& room);
  bool scales_weights(bool scaled) const;
  const real* scaled_factors(const Slab& slab, const real* gaps, const double* log_scale,
                             const real* signs, Room& room) const;
  const real* scale_keys(const Slab& slab, const real* factors, Room& room) const;
  void scale_weights(const Slab& slab, const real* factors, real* weights) const;
  void accumulate(int chunk, int head, const Slab& slab, const real* a, const real* dd,
                  const real* gx, Room& room) const;

  bool is_layer_by_rows() const { return data_.shape.is_layer() && plan_.kind == PlanKind::kRows; }
  void lay_out_layer_rows(Layout& layout);
  Slab open_layer_tile(std::ptrdiff_t unit, Room& room) const;
  void run_layer_tile(Pass pass, int chunk, const Slab& slab, Room& room);
  void run_layer_tile_outputs(bool gaps, const Slab& slab, Room& room) const;
  template <class Emit>
  void measure_layer_tile(LaneTotals& totals, const Slab& slab, const Room& room,
                          const Emit& emit) const;
  void differentiate_layer_tile(Pass pass, int chunk, const Slab& slab, Room& room);

  void run_layer_slab(Pass pass, int chunk, const Slab& slab, Room& room);
  LayerArguments<real> layer(int head, const Slab& slab, Room& room) const;
  void write_layer_outputs(const Slab& slab, const Room& room) const;
  void load_row_weights(const Slab& slab, int unit, int row, double* w) const;
  template <class Body>
  void for_layer_rows(const Slab& slab, const Body& body) const;
  void add_totals(LaneTotals& totals, const double* w, const RowLoss* rows) const;
  template <class Emit>
  void measure_layer(LaneTotals& totals, const Slab& slab, const Room& room,
                     const Emit& emit) const;
  void measure_squares(LaneTotals& totals, const Slab& slab, const Room& room, const double* shares,
                       double* largest) const;
  void measure_relative(LaneTotals& totals, const Slab& slab, Room& room) const;
  void differentiate_layer(int chunk, const Slab& slab, Room& room);
  void differentiate_layer_scaled(int chunk, const Slab& slab, Room& room);
  void add_layer_gradient(int chunk, int head, const Slab& slab, Room& room, const real* g) const;

  const Kernels<real>& kernels_;
  const Data<real> data_;
  const std::optional<Loss> loss_;  // none where only outputs are asked for
  const Options options_;
  const Plan plan_;
  const int width_;
  const double expected_seconds_;
  const int threads_;
  std::vector<double> total_weights_, total_labels_;    // (width)
  std::vector<double> shares_;                          // (lanes)
  std::vector<double> labels_, weights_, log_weights_;  // of a classifier's entries

  // Layouts, in numbers.
  std::ptrdiff_t key_size_, query_size_, target_size_;  // a unit's packed keys, queries, targets
  std::ptrdiff_t weights_size_;                         // a unit's A (or D) for one head
  std::ptrdiff_t parameter_;  // one number of a parameter: 1, or a vector for runs
  std::ptrdiff_t ut_size_;    // U (or V) transposed, one head
  std::ptrdiff_t rows_size_;  // a unit's query rows, whole vectors
  PartialGradient part_;      // a chunk's gradient

  const real* w_ = nullptr;  // scaled
  const real* v_ = nullptr;
  const real* prompt_ = nullptr;
  real* w_scaled_ = nullptr;
  real* ut_ = nullptr;
  real* v_rows_ = nullptr;  // layers by rows: V, its rows padded to whole vectors
  real *shared_product_ = nullptr, *shared_p_ = nullptr;  // shared Z times W: (q, d), as packed
  real* shared_e_ = nullptr;  // D X summed over samples, where the query is shared: (H, q, d)
  real scale_ = 1;
  std::shared_ptr<Packed<real>> packed_;
  real* partial_ = nullptr;
  std::vector<Room> rooms_;
  TileScratch tile_scratch_{};
  std::ptrdiff_t tile_gradient_size_ = 0;  // of one unit
  std::vector<LaneTotals> chunk_totals_;
  std::vector<double> chunk_scales_;  // (chunks, H + 1, lanes)
  // (H + 1, lanes): max over samples of log |slope| + gap, and of log |slope|; in whole numbers.
  std::vector<double> scales_;
  bool totals_wanted_ = true;
  real* outputs_ = nullptr;
  std::function<bool()> interrupted_;
  bool stopped_ = false;  // by interrupted_, in the middle of a pass over tiles
  std::atomic<int> next_chunk_{0};
};

}  // namespace mhfast
