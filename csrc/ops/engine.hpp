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

/// A data set as the caller holds it: x (n, T, d), z (n, q, d) or x itself, y and weight (n,) or
/// null.
template <class real>
struct Data {
  Shape shape;
  const real* x;
  const real* z;
  const real* y;
  const real* weight;
  bool self() const { return x == z; }
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
/// log |weight slope| + gap, and max of log |weight slope| alone.
struct LogScales {
  std::vector<double> heads;
  double slope;
};

template <class real>
class Engine {
 public:
  struct Options {
    bool gradient = false, wrt_W = true, wrt_U = true;
    bool gaps = false;         // gather LogScales
    bool keep_packed = false;  // pack the data once, for many passes
  };

  /// Scratch comes from `block`, which must outlive the engine and serve nothing else meanwhile.
  Engine(const Data<real>& data, Loss loss, const Options& options, int threads, Block& block);

  int threads() const { return threads_; }
  bool gathers_gaps() const { return options_.gaps; }
  /// log of 1 / (sum of weights * sqrt(H)): with slope and gap, the factors of a gradient.
  double log_share() const;

  /// The parts of a pass, each called by every member of a team with a barrier after it.
  void load_parameters(const Parameters<real>& parameters, const Member& member);
  void run_chunks(Pass pass, const Member& member);
  void reduce_gradient(real* gW, real* gU, const Member& member);

  /// One member's call before a further pass, when the last one is complete.
  void restart() { next_chunk_.store(0, std::memory_order_relaxed); }

  /// Called by the first member after each of its chunks; returning true ends the pass early.
  void on_chunk(std::function<bool()> interrupted) { interrupted_ = std::move(interrupted); }

  /// After a pass. `scales` needs Options::gaps.
  Totals totals() const;
  LogScales& find_scales();  // what the next scaled pass divides by; may be changed

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
  };
  struct Slab {
    std::ptrdiff_t first_sample;
    int units, samples;
    const real* x;
    const real* z;
  };

  void lay_out(Layout& layout);
  void run_chunk(Pass pass, int chunk, Room& room);
  Slab open_slab(int chunk, std::ptrdiff_t first, std::ptrdiff_t last, Room& room) const;
  void pack(const real* from, int rows, const Slab& slab, real* to) const;
  void score(RowMode mode, int head, const Slab& slab, Room& room, real* gap) const;
  void measure_loss(Pass pass, int chunk, const Slab& slab, Room& room);
  void differentiate(Pass pass, int chunk, const Slab& slab, Room& room, bool add);
  void scale_keys(const Slab& slab, const double* factors, Room& room) const;
  void accumulate(int chunk, int head, const Slab& slab, const real* a, const real* dd, Room& room,
                  bool add) const;

  const Kernels<real>& kernels_;
  const Data<real> data_;
  const Loss loss_;
  const Options options_;
  const Plan plan_;
  const int threads_;
  double total_weight_;

  // Layouts, in numbers.
  std::ptrdiff_t key_size_, query_size_;  // a unit's packed keys and queries
  std::ptrdiff_t weights_size_;           // a unit's A (or D) for one head
  std::ptrdiff_t ut_size_;                // U transposed, one head
  std::ptrdiff_t rows_size_;              // a unit's query rows, whole vectors
  std::ptrdiff_t partial_size_;

  const real* w_ = nullptr;  // scaled
  real* w_scaled_ = nullptr;
  real* ut_ = nullptr;
  real scale_ = 1;
  real* packed_x_ = nullptr;
  real* packed_z_ = nullptr;
  real* partial_ = nullptr;
  std::vector<Room> rooms_;
  std::vector<char> packed_chunks_;
  std::vector<Totals> chunk_totals_;
  std::vector<double> chunk_scales_;  // (chunks, H + 1)
  LogScales scales_;
  real* outputs_ = nullptr;
  std::function<bool()> interrupted_;
  std::atomic<int> next_chunk_{0};
};

}  // namespace mhfast
