// A layer's readout where samples or runs are lanes: a slab of them and all heads at a time.
//
//   F = sum over heads of A X V  ->  loss and G = dL/dF  ->  by head: U = G V^T, D, gradients
//
// The loss is a sum over query rows, so that rows of a long sequence are worked on a few at a time,
// and nothing of the size of rows times keys is held.
#pragma once

#include "lane_losses.hpp"
#include "slabs.hpp"

namespace mhfast {

template <class real>
class LayerSlabs final : public SlabPass<real> {
 public:
  explicit LayerSlabs(PassState<real>& state);

 private:
  using typename SlabPass<real>::Workspace;
  using SlabPass<real>::state_;
  using SlabPass<real>::sizes_;
  using SlabPass<real>::steps_;

  /// What a thread holds besides its Workspace.
  struct Outputs : LaneOutputs<real> {
    real* ax;             // A X (heads)
    real *scaled_g, *ut;  // g with factors; G V^T
  };
  /// The memory of a slab, at its place in its block.
  struct Memory {
    HeadMemory<real> heads;
    real* ax;
  };

  void lay_out_readout(Arena& layout, int thread, std::size_t units) override;
  double kept_bytes(std::size_t units) const override;
  Memory memory_of(const Slab<real>& slab, int thread) const;
  void run_outputs(bool gaps, const Slab<real>& slab, int thread, const Memory& memory) const;
  void run_slab(Pass pass, int chunk, const Slab<real>& slab, int thread) override;
  ScoreArguments<real> scores_of(RowMode mode, int head, const Slab<real>& slab, int thread,
                                 const Memory& memory, real* gap) const;
  void add_weight_gradient(int chunk, int head, const Slab<real>& slab, int thread,
                           const Memory& memory, const real* keys, const real* factors,
                           bool inputs) const;
  ScoreArguments<real> scores_of_upstream(RowMode mode, int head, const Slab<real>& slab,
                                          int thread, const Memory& memory, real* gap) const;
  LayerArguments<real> layer(int head, const Slab<real>& slab, int thread,
                             const Memory& memory) const;
  ScoreMemory<real> of_head(int head, const Slab<real>& slab, const Memory& memory) const;
  void write_outputs(const Slab<real>& slab, const real* f) const;
  void differentiate(int chunk, const Slab<real>& slab, int thread, const Memory& memory) const;
  void differentiate_scaled(int chunk, const Slab<real>& slab, int thread,
                            const Memory& memory) const;
  void add_readout_gradient(int chunk, int head, const Slab<real>& slab, int thread,
                            const Memory& memory, const real* g, bool inputs) const;

  const LaneLosses<real> losses_;
  std::vector<Outputs> outputs_;  // by thread
  void (*const layer_outputs_)(const LayerArguments<real>&);
  void (*const layer_upstream_)(const LayerArguments<real>&);
};

}  // namespace mhfast
