// The strategy of linear attention with products of tokens in their place: a slab of blocks of
// samples, which are the lanes, at a time.
//
//   M = sum over pairs of K G,  F = Z M  ->  loss and dL/dF  ->  dL/dM = Z^T dL/dF
//
// and the gradient by K is the sum over samples of dL/dM G^T, with pairs of features as the lanes.
// K and what becomes of its gradient are head_tensor.hpp's. It serves training, so that outputs are
// written nowhere.
#pragma once

#include "head_tensor.hpp"
#include "lane_losses.hpp"

namespace mhfast {

template <class real>
class ProductPass final : public ChunkPass<real> {
 public:
  explicit ProductPass(PassState<real>& state);

  void lay_out(Arena& layout) override;
  void load(const Parameters<real>& parameters, const Member& member) override;
  void run(Pass pass, const Member& member) override;
  std::shared_ptr<Packed<real>> make_packed() const override;
  void use_packed(const std::shared_ptr<Packed<real>>& packed) override { packed_ = packed; }
  void pack_all(const Member& member) override;

 private:
  using ChunkPass<real>::state_;

  /// One thread's scratch for a slab.
  struct Workspace {
    real *products, *z,
        *y;  // as lanes: [unit][pair, padded][L], [unit][row][feature][L], (targets)
    real *m, *dm, *dm_rows;  // M and the derivatives by it: [unit][a][o][L]; [sample][a, o, padded]
    LaneOutputs<real> outputs;
    double* log_derivative;  // of entries
    real *gaps, *factors;    // gaps are zeros, for each head
    real* scaled_g;
    OwnLossNumbers own;  // of a block
    const real* tensor;  // this thread's copy
  };

  void pack(std::ptrdiff_t first, std::ptrdiff_t last, real* z, real* y) const;
  void run_units(Pass pass, int chunk, std::ptrdiff_t first, std::ptrdiff_t last,
                 int thread) override;
  Slab<real> open_slab(std::ptrdiff_t first, std::ptrdiff_t last, const Workspace& of) const;
  void run_slab(Pass pass, int chunk, const Slab<real>& slab, Workspace& of);
  void run_outputs(const Slab<real>& slab, const Workspace& of) const;
  void mark_rows(const Slab<real>& slab, real* f) const;
  void gather_scales(int chunk, const Slab<real>& slab, const Workspace& of) const;
  const real* scale(const Slab<real>& slab, const Workspace& of) const;
  void differentiate(int chunk, const Slab<real>& slab, const real* g, const Workspace& of) const;

  const ProductSizes sizes_;
  const std::ptrdiff_t z_size_, y_size_, f_size_;  // of a unit
  const LaneLosses<real> losses_;
  Parameters<real> given_{};  // as the caller holds them
  HeadTensor<real> tensor_;
  std::shared_ptr<Packed<real>> packed_;
  std::vector<Workspace> workspaces_;  // by thread
  int block_ = 1;                      // slabs of a block, see own_loss.hpp
};

}  // namespace mhfast
