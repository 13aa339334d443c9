// The strategy where attention stays as it is: a slab of rows of attended tokens at a time.
//
//   outputs F = X B  ->  loss and G = dL/dF  ->  gradient by B^T, G^T X
//
// X are the rows of problem/attended.hpp, B the readout as one matrix. It serves training, so that
// outputs are written nowhere.
#pragma once

#include "../problem/attended.hpp"
#include "row_losses.hpp"

namespace mhfast {

template <class real>
class AttendedPass final : public ChunkPass<real> {
 public:
  explicit AttendedPass(PassState<real>& state);

  void lay_out(Arena& layout) override;
  void load(const Parameters<real>& parameters, const Member& member) override;
  void run(Pass pass, const Member& member) override;

 private:
  using ChunkPass<real>::state_;

  /// A slab: its first row, counted over all samples, their number, and the first in its block.
  struct Rows {
    std::ptrdiff_t first;
    int count;
    std::ptrdiff_t place;
    bool begins;  // its chunk
  };
  /// One thread's scratch for a slab.
  struct Workspace {
    real *sums, *f, *g;                           // see AttendedArguments; (rows, p)
    double *value, *derivative, *log_derivative;  // (rows) of a classifier; (rows, p); (rows)
    real* factors;                                // (rows)
    OwnLossNumbers own;                           // of a block
  };

  void load_readout(const Member& member);
  void run_units(Pass pass, int chunk, std::ptrdiff_t first, std::ptrdiff_t last,
                 int thread) override;
  void run_rows(Pass pass, int chunk, const Rows& rows, const Workspace& of) const;
  void run_outputs(const Rows& rows, const Workspace& of) const;
  void load_own(const Rows& rows, const Workspace& of, const OwnLossNumbers& own) const;
  void measure_classifier(Pass pass, LaneTotals& totals, const Rows& rows, const Workspace& of,
                          const OwnLossNumbers& own) const;
  void measure_layer(Pass pass, LaneTotals& totals, const Rows& rows, const Workspace& of,
                     const OwnLossNumbers& own) const;
  void gather_scales(int chunk, const Rows& rows, const Workspace& of) const;
  const real* scaled_factors(const Rows& rows, const Workspace& of, const real* signs) const;
  std::ptrdiff_t held(int rows) const { return round_up(rows, state_.kernels.lanes); }

  const AttendedRows rows_;
  const int p_;      // outputs of a row
  const int heads_;  // whose readouts are added
  ClassifierLoss<real> loss_;
  std::vector<Workspace> workspaces_;  // by thread
  int block_ = 1;                      // slabs of a block, see own_loss.hpp
  const real* given_ = nullptr;        // the readout as the caller holds it
  real* summed_ = nullptr;             // the sum of heads that attend alike: (features, p)
  real* readout_ = nullptr;            // as the kernel takes it
  std::vector<real> ones_;             // (heads)
};

}  // namespace mhfast
