// One pass over the data of a classifier: outputs, loss and gradients.
//
//   scores and readout of every head  ->  loss and its slope  ->  gradients        (by slab)
//
// Samples are cut into chunks that depend on the shape alone. A chunk is worked on by one thread, a
// slab of samples at a time, all heads of a slab before the next, and leaves a partial gradient of
// its own; these are summed in the order of the chunks. So any thread may take any chunk.
#pragma once

#include <vector>

#include "../dispatch/dispatch.hpp"
#include "loss.hpp"
#include "plan.hpp"
#include "scratch.hpp"
#include "team.hpp"

namespace mhfast {

/// A data set as the caller holds it: x (n, T, d), z (n, q, d), y and weight (n,) or null. For
/// self-attention z is x; an external z may begin at the same address.
template <class real>
struct Data {
  Shape shape;
  bool self;
  const real* x;
  const real* z;
  const real* y;
  const real* weight;
};

template <class real>
struct Parameters {
  const real* W;  // (H, d, d)
  const real* U;  // (H, q, d)
  real scale;     // of the logits
};

/// What a pass computes beyond the readouts.
enum class Pass { kOutputs, kLoss, kGradient, kScaledGradient };

/// Sums over samples, in the order of the chunks.
struct Totals {
  double loss = 0, correct = 0, margin = 0;
};

/// Logarithms of the largest factors of a gradient: by head max over samples of
/// log |weight slope| + gap, and max of log |weight slope| alone; rounded to whole numbers, so that
/// differences from them are exact.
struct LogScales {
  std::vector<double> heads;
  double slope;
};

/// exp(gap - log_scale + log_slope), 0 where either is -inf. The difference is taken first: both
/// may be large, and it is exact.
inline double relative(double gap, double log_scale, double log_slope) {
  return std::isinf(gap) || std::isinf(log_slope) ? 0.0 : std::exp((gap - log_scale) + log_slope);
}

template <class real>
class Engine {
 public:
  struct Options {
    bool gradient = false, wrt_W = true, wrt_U = true;
    bool gaps = false;         // gather what needs_scaling asks for
    bool keep_packed = false;  // pack the data once, for many passes
  };

  /// Scratch comes from `block`, which must outlive the engine and serve nothing else meanwhile.
  Engine(const Data<real>& data, Loss loss, const Options& options, int threads, Block& block);

  int threads() const { return threads_; }
  double leisurely_seconds() const { return leisurely_seconds_; }  // of a pass, see run_team
  bool gathers_gaps() const { return options_.gaps; }

  /// The parts of a pass, each called by every member of a team with a barrier after it.
  void load_parameters(const Parameters<real>& parameters, const Member& member);
  void run_chunks(Pass pass, const Member& member);
  void reduce_gradient(real* gW, real* gU, const Member& member);

  /// One member's call before a further pass, when the last one is complete.
  void restart() { next_chunk_.store(0, std::memory_order_relaxed); }

  /// Called by the first member after each of its chunks; returning true ends the pass early.
  void on_chunk(std::function<bool()> interrupted) { interrupted_ = std::move(interrupted); }

  /// After a pass.
  Totals totals() const;

  /// After a gradient pass with Options::gaps: whether its largest factors are so small that it
  /// must be computed again by a scaled pass, which leaves them out. `together`: one scale for all
  /// heads.
  bool needs_scaling(bool together);
  /// What the scaled pass leaves out: share() and, as whole numbers, the logarithms of the rest.
  double log_scale_W(int head) const { return scales_.heads[head]; }
  double log_scale_U() const { return scales_.slope; }
  double share() const { return 1.0 / (total_weight_ * std::sqrt(double(data_.shape.H))); }

  /// Where outputs go, or null.
  void write_outputs(real* outputs) { outputs_ = outputs; }

 private:
  /// Scratch of one thread, for one slab.
  struct Room {
    real *x, *z;  // packed slab, where the data are not kept packed
    real* p;      // Z W
    real *s, *c;  // A and D: (heads, units, weights)
    real *readout, *row_readouts, *row_gaps;
    real* gap;     // (heads, samples)
    real *gx, *e;  // keys times the loss derivative; D X
    real* factors;
    double *phi, *slope, *log_slope;  // (samples)
    real *pu, *sc, *axdx, *x_rows;    // tiles
    std::ptrdiff_t packed_sample;     // tiles: whose keys are in x and x_rows
  };
  /// What the threads of a team share for one slab of long sequences.
  struct TileSlab {
    std::ptrdiff_t first;
    int samples;
    real* gradients;  // (samples, heads, parts) units: W (d, dL), then U (rows of the part, dL)
    real* readouts;   // (samples, heads, q)
    real* gaps;       // (samples, heads, parts)
    double *phi, *slope, *log_slope;
  };
  struct Slab {
    std::ptrdiff_t first_sample;
    int units, samples;
    const real* x;
    const real* z;
  };

  /// Samples for which a slab has room, those of lanes without one included.
  int samples_held(const Slab& slab) const {
    return slab.units * (plan_.samples_are_lanes() ? kernels_.lanes : 1);
  }
  /// Numbers of one row of a partial gradient.
  std::ptrdiff_t gradient_row() const {
    const Shape& s = data_.shape;
    return partial_size_ / (std::ptrdiff_t(s.H) * (s.d + s.q));
  }

  void lay_out(Layout& layout);
  void lay_out_tiles(Layout& layout);
  void run_chunk(Pass pass, int chunk, Room& room);
  void run_tiles(Pass pass, const Member& member);
  void run_tile_unit(Pass pass, int unit, Room& room);
  void finish_tile_slab(Pass pass);
  void combine_tiles(Pass pass, int head);
  std::ptrdiff_t part_begin(int part) const {
    return std::ptrdiff_t(data_.shape.q) * part / plan_.parts;
  }
  Slab open_slab(int chunk, std::ptrdiff_t first, std::ptrdiff_t last, Room& room) const;
  void pack(const real* from, int rows, const Slab& slab, real* to) const;
  void score(RowMode mode, int head, const Slab& slab, Room& room, real* gap) const;
  void measure_loss(Totals& totals, std::ptrdiff_t first, int samples, const double* phi,
                    double* slope, double* log_slope) const;
  void gather_scales(int chunk, const Slab& slab, const Room& room);
  void differentiate(Pass pass, int chunk, const Slab& slab, Room& room, bool add);
  void scale_keys(const Slab& slab, const double* factors, Room& room) const;
  void accumulate(int chunk, int head, const Slab& slab, const real* a, const real* dd, Room& room,
                  bool add) const;

  const Kernels<real>& kernels_;
  const Data<real> data_;
  const Loss loss_;
  const Options options_;
  const Plan plan_;
  const double leisurely_seconds_;
  const int threads_;
  double total_weight_;

  // Layouts, in numbers.
  std::ptrdiff_t key_size_, query_size_;  // a unit's packed keys and queries
  std::ptrdiff_t weights_size_;           // a unit's A (or D) for one head
  std::ptrdiff_t ut_size_;                // U transposed, one head
  std::ptrdiff_t rows_size_;              // a unit's query rows, whole vectors
  std::ptrdiff_t partial_size_;           // a chunk's gradient

  const real* w_ = nullptr;  // scaled
  real* w_scaled_ = nullptr;
  real* ut_ = nullptr;
  real scale_ = 1;
  real* packed_x_ = nullptr;
  real* packed_z_ = nullptr;
  real* partial_ = nullptr;
  std::vector<Room> rooms_;
  TileSlab tile_slab_{};
  std::ptrdiff_t tile_gradient_size_ = 0;  // of one unit
  std::vector<char> packed_chunks_;
  std::vector<Totals> chunk_totals_;
  std::vector<double> chunk_scales_;  // (chunks, H + 1)
  LogScales scales_;
  real* outputs_ = nullptr;
  std::function<bool()> interrupted_;
  bool stopped_ = false;  // by interrupted_, in the middle of a pass over tiles
  std::atomic<int> next_chunk_{0};
};

}  // namespace mhfast
