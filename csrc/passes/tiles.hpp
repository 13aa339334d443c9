// The strategy of a classifier's long sequences. Few samples must occupy all threads, so a unit of
// work is one sample, one head and one part of its query rows; it goes through its rows a tile at a
// time and leaves the gradient of its readout. The loss of a slab's samples is known when all their
// units are done; the units' gradients are then combined with its derivatives, in a fixed order.
// With W of low rank keys go through its factors, see factored_keys.hpp.
#pragma once

#include "factored_keys.hpp"
#include "strategy.hpp"

namespace mhfast {

template <class real>
class TilePass final : public Strategy<real> {
 public:
  explicit TilePass(PassState<real>& state);

  void lay_out(Arena& layout) override;
  void read_samples(std::ptrdiff_t first, std::ptrdiff_t last) override { loss_.read(first, last); }
  void restart() override { next_unit_.store(0, std::memory_order_relaxed); }
  void run(Pass pass, const Member& member) override;

 private:
  /// One thread's scratch, see TileArguments.
  struct Workspace {
    explicit Workspace(const FactoredKeys<real>& keys) : factored(keys) {}

    FactoredKeys<real> factored;    // of a head
    real *x, *z, *x_rows, *limits;  // a packed sample
    real *pu, *sc, *axdx, *row_readouts, *row_gaps;
    std::ptrdiff_t packed_sample;  // whose keys are in x and x_rows
  };
  /// What the threads of a team share for one slab: written by unit, then read by head.
  struct Shared {
    real* gradients;  // (samples, heads, parts) units: W (d, dL), or Q and K (d, rL), unless it is
                      // an identity or still, then U (rows of the part, dL)
    real* readouts;   // (samples, heads, q)
    real* gaps;       // (samples, heads, parts)
    double *outputs, *log_derivative;
    real* derivative;
    OwnLossNumbers own;
  };

  std::ptrdiff_t part_begin(int part) const {
    return std::ptrdiff_t(state_.data.shape.q) * part / state_.plan.parts;
  }
  void pack_sample(std::ptrdiff_t sample, bool gradient, Workspace& workspace) const;
  /// A unit of work, and the keys that its rows see.
  struct Unit {
    std::ptrdiff_t sample;
    int head, keys;
  };
  int keys_of(int part, const Workspace& workspace) const;
  void add_factors(const Unit& unit, const TileArguments<real>& tile, Workspace& workspace) const;
  void run_unit(Pass pass, std::ptrdiff_t first_sample, int unit, Workspace& workspace) const;
  void finish_slab(Pass pass, std::ptrdiff_t first_sample, int samples);
  void measure(Pass pass, std::ptrdiff_t first_sample, int samples);
  void combine(Pass pass, std::ptrdiff_t first_sample, int samples, int head) const;

  PassState<real>& state_;
  ClassifierLoss<real> loss_;
  const int dL_, TL_, qL_;  // d in whole vectors, T and q in an odd number of these
  const bool keys_first_, gradients_of_keys_, wants_W_;
  const std::ptrdiff_t weight_size_;    // of the gradient by W or its factors, 0 without
  const std::ptrdiff_t gradient_size_;  // of one unit
  std::vector<Workspace> workspaces_;   // by thread
  Shared shared_{};
  std::atomic<int> next_unit_{0};
  bool stopped_ = false;  // in the middle of a pass, by the caller
};

}  // namespace mhfast
