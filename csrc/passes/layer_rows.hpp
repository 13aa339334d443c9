// The strategy of a layer whose query rows are the lanes of scores and softmax and whose
// features are those of outputs and gradients: few samples, or long ones. A unit of work is a tile
// of the query rows of one sample; threads share the tiles. Every head of a tile goes through
//
//   A = softmax,  (A X)^T,  F += A X V      then, with G = dL/dF of the tile,
//   U^T = (G V^T)^T,  D,  gV += (A X)^T G,  gW += Z^T D X
//
// Of long samples with few outputs X V comes first: with e_k its row of a key outputs are A e,
// C = G e^T, and gV += X^T (A^T G), so that A meets p numbers of a key, not d.
// Where tokens are words, V is in the tables: with e_k the row of E V that a key's word has,
// outputs are A e, C = G e^T, and the gradient of the table adds A^T G to the rows of the words.
//
// Keys that no row of the tile sees are left out. Of all heads A is kept if that is little
// (Plan::keep), else it is computed again for D.
#pragma once

#include "head_steps.hpp"
#include "word_lists.hpp"

namespace mhfast {

template <class real>
class LayerRowPass final : public ChunkPass<real> {
 public:
  explicit LayerRowPass(PassState<real>& state);

  void lay_out(Arena& layout) override;
  void load(const Parameters<real>& parameters, const Member& member) override;

 private:
  /// One thread's scratch for one tile; pL, dL: p and d in whole vectors.
  struct Workspace {
    explicit Workspace(const WordLists<real>& lists) : words(lists) {}

    real *x, *z;           // packed keys and queries
    real* x_rows;          // keys (T, dL), where V is an identity or values come first
    real *f_lanes, *by_v;  // where they do: outputs (p, rows), and gV transposed (p, dL)
    HeadMemory<real> heads;
    double* largest;          // the largest derivative
    real *ax, *f;             // (A X)^T (heads, d, rows); outputs (rows, pL)
    real *g, *scaled_g;       // their derivatives (rows, pL), and with a factor
    real *g_transposed, *ut;  // (pL, rows), (d, rows)
    real* ax_rows;            // (rows, dL)
    WordLists<real> words;
    real *values,
        *packed;         // X V or, of words, the rows of E V of the keys (T, pL); packed (p, keys)
    OwnLossNumbers own;  // of a block, or of a tile where the function is called for each
  };

  void run_units(Pass pass, int chunk, std::ptrdiff_t first, std::ptrdiff_t last,
                 int thread) override;
  Slab<real> open_tile(std::ptrdiff_t unit, const Workspace& workspace) const;
  void choose_block();
  std::ptrdiff_t run_tiles(Pass pass, int chunk, std::ptrdiff_t first, std::ptrdiff_t begin,
                           std::ptrdiff_t end, const Workspace& workspace) const;
  Workspace at_place(int place, const Workspace& of_thread) const;
  void load_own(const Slab<real>& slab, const Workspace& workspace,
                const OwnLossNumbers& own) const;
  void run_tile(Pass pass, int chunk, const Slab<real>& slab, const Workspace& of_thread) const;
  ScoreMemory<real> of_head(int head, const Workspace& workspace) const;
  void load_values(int head, const Slab<real>& slab, const Workspace& workspace) const;
  void differentiate_readout(int chunk, int head, const Slab<real>& slab, const real* g,
                             const Workspace& workspace) const;
  ScoreArguments<real> upstream(const ScoreArguments<real>& scores, int head,
                                const Slab<real>& slab, bool kept,
                                const Workspace& workspace) const;
  void run_outputs(bool gaps, const Slab<real>& slab, const Workspace& workspace) const;
  template <class Emit>
  void measure(LaneTotals& totals, const Slab<real>& slab, const real* f, const OwnLossNumbers& own,
               const Emit& emit) const;
  void differentiate(Pass pass, int chunk, const Slab<real>& slab,
                     const Workspace& workspace) const;

  const real* padded_readout(int head) const {
    return v_rows_ + std::ptrdiff_t(head) * state_.data.shape.d * pL_;
  }
  /// Whether a key's part of the outputs is known before A.
  bool has_values() const { return values_first_ || state_.data.has_words(); }
  std::ptrdiff_t of_head_size() const { return state_.data.shape.d * steps_.rows_size(); }

  using ChunkPass<real>::state_;
  const HeadSteps<real> steps_;
  const int dL_, pL_;
  const bool values_first_;
  std::vector<std::int32_t> all_keys_;  // 0 to T - 1, if they are
  std::vector<Workspace> workspaces_;
  int block_ = 1;           // units of a block
  real* v_rows_ = nullptr;  // V, its rows padded to whole vectors
};

}  // namespace mhfast
