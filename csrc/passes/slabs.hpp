// The strategy of samples, hybrid, rows and runs: a chunk is worked on a slab of samples at a time,
// all heads of a slab before the next slab. What a slab's readouts become is the subclass's.
#pragma once

#include "head_steps.hpp"
#include "projections.hpp"
#include "word_lists.hpp"

namespace mhfast {

template <class real>
class SlabPass : public ChunkPass<real> {
 public:
  void lay_out(Arena& layout) final;
  void load(const Parameters<real>& parameters, const Member& member) final {
    if (projections_.exist()) projections_.load_parameters(parameters, member);
  }
  std::shared_ptr<Packed<real>> make_packed() const final;
  void use_packed(const std::shared_ptr<Packed<real>>& packed) final { packed_ = packed; }
  void pack_all(const Member& member) final;

 protected:
  /// How much of a slab the readout needs at a time.
  struct Sizes {
    int rows;                     // query rows
    std::ptrdiff_t unit_targets;  // numbers of a unit's packed targets, 0: not packed
    int derivatives, readouts;    // heads whose D, and whose readouts, are held
    int heads = 1;                // that go together, but in scaled passes
  };
  /// One thread's scratch: the packed slab, where the data are not kept packed, and its heads.
  struct Workspace {
    explicit Workspace(const WordLists<real>& lists) : words(lists) {}

    real *x, *z, *y;
    real* laned;  // see PartialGradients, or null
    HeadMemory<real> heads;
    OwnLossNumbers own;  // of a block, or of a slab where the function is called for each
    WordLists<real> words;
  };

  SlabPass(PassState<real>& state, const Sizes& sizes);

  /// Takes what the readout needs of each thread, for slabs of `units` units.
  virtual void lay_out_readout(Arena& layout, int thread, std::size_t units) = 0;
  virtual void run_slab(Pass pass, int chunk, const Slab<real>& slab, int thread) = 0;

  /// Whether the first phase of a block has left what this pass of its second phase needs: weights
  /// for a gradient that takes them as they are, and outputs for a loss.
  bool finds_weights(Pass pass) const {
    return keeps_weights() && (pass == Pass::kScales || pass == Pass::kGradient);
  }
  bool keeps_weights() const {
    return state_.own.takes_blocks() && state_.options.gradient && state_.plan.keep;
  }
  bool knows_outputs(Pass pass) const {
    return finds_weights(pass) || (state_.own.takes_blocks() && pass == Pass::kLoss);
  }
  /// What the slab's rows are in the block.
  OwnLossNumbers own_numbers(const Slab<real>& slab, int thread) const {
    return workspaces_[thread].own.from(slab.row * state_.data.shape.row_outputs());
  }
  /// Writes the weights `a` of all heads of the slab to where the caller wants them, if so; those
  /// of a scaled pass are rounded otherwise.
  void write_attention(Pass pass, const Slab<real>& slab, const real* a) const;
  /// Bytes that a slab keeps from one phase of a block to the other.
  virtual double kept_bytes(std::size_t units) const = 0;

  /// Units of a whole slab, and its entries with those of lanes without a sample.
  std::ptrdiff_t slab_units() const {
    return std::min<std::ptrdiff_t>(state_.plan.slab, state_.plan.units);
  }
  std::ptrdiff_t held() const {
    const int L = state_.lanes.lanes;
    return round_up(slab_units() * (state_.lanes.laned ? L : 1), L);
  }

  /// Heads whose A is kept from the loss to the gradient, or that go together; 1: none is.
  int heads_kept() const {
    const bool keeps = state_.options.gradient && state_.plan.keep;
    return keeps || sizes_.heads > 1 ? state_.data.shape.H : 1;
  }

  using ChunkPass<real>::state_;
  const Sizes sizes_;
  const HeadSteps<real> steps_;
  Projections<real> projections_;
  std::vector<Workspace> workspaces_;
  int block_ = 1;  // slabs of a block

 private:
  int tiles() const { return (state_.data.shape.q + sizes_.rows - 1) / sizes_.rows; }
  void choose_block();
  /// Slabs of a chunk of so many units, tiles of rows counted.
  std::ptrdiff_t slabs(std::ptrdiff_t units) const {
    return (units + state_.plan.slab - 1) / state_.plan.slab * tiles();
  }
  /// Rows of an entry with outputs of their own, where `rows` query rows go at a time.
  int output_rows(int rows) const { return state_.data.shape.rows_have_outputs() ? rows : 1; }
  std::ptrdiff_t run_slabs(Pass pass, int chunk, std::ptrdiff_t first, std::ptrdiff_t last,
                           std::ptrdiff_t begin, std::ptrdiff_t end, int thread);
  void run_units(Pass pass, int chunk, std::ptrdiff_t first, std::ptrdiff_t last, int thread) final;
  Slab<real> open_slab(std::ptrdiff_t first, std::ptrdiff_t last, const Workspace& workspace) const;
  void pack(const real* from, std::ptrdiff_t run, int rows, int columns, std::ptrdiff_t first,
            std::ptrdiff_t last, real* to) const;
  void pack_tokens(const real* from, std::ptrdiff_t run, int rows, std::ptrdiff_t first,
                   std::ptrdiff_t last, real* to) const;
  void find_limits(const Slab<real>& slab, real* to) const;

  const std::ptrdiff_t key_size_, query_size_;  // a unit's packed keys and queries
  std::shared_ptr<Packed<real>> packed_;
};

}  // namespace mhfast
