// A classifier's readout: a slab of samples or runs and all heads at a time.
//
//   readouts of all heads  ->  output, loss and its derivative, by sample  ->  gradients, by head
#pragma once

#include "slabs.hpp"

namespace mhfast {

template <class real>
class ClassifierSlabs final : public SlabPass<real> {
 public:
  explicit ClassifierSlabs(PassState<real>& state);

  void read_samples(std::ptrdiff_t first, std::ptrdiff_t last) override { loss_.read(first, last); }

 private:
  using typename SlabPass<real>::Workspace;
  using SlabPass<real>::state_;
  using SlabPass<real>::steps_;

  /// What a thread holds for each entry besides its Workspace.
  struct Outputs {
    double* value;
    real* derivative;  // of the loss, 0 for lanes without a sample
  };

  void lay_out_readout(Arena& layout, int thread, std::size_t units) override;
  double kept_bytes(std::size_t units) const override;
  HeadMemory<real> memory_of(const Slab<real>& slab, int thread) const;
  void run_scores(Pass pass, const Slab<real>& slab, int thread,
                  const HeadMemory<real>& memory) const;
  void score_head(RowMode mode, int head, const Slab<real>& slab, int thread,
                  const HeadMemory<real>& memory, const ScoreMemory<real>& to, real* gap) const;
  void measure(Pass pass, int chunk, const Slab<real>& slab, int thread);
  void run_slab(Pass pass, int chunk, const Slab<real>& slab, int thread) override;
  ScoreMemory<real> of_head(const HeadMemory<real>& memory, int head, const Slab<real>& slab,
                            bool kept) const;
  void differentiate(Pass pass, int chunk, const Slab<real>& slab, int thread,
                     const HeadMemory<real>& memory, const real* derivative) const;
  void differentiate_projected(bool scaled, int chunk, int head, const Slab<real>& slab, int thread,
                               const HeadMemory<real>& memory, const ScoreMemory<real>& to,
                               const real* derivative) const;
  bool scales_weights(bool scaled) const;
  void scale_weights(const Slab<real>& slab, const real* factors, real* weights) const;

  std::vector<Outputs> outputs_;  // by thread
  ClassifierLoss<real> loss_;
};

}  // namespace mhfast
