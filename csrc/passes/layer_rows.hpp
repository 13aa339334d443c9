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
// Where W has few columns keys go through its factors: factored_keys.hpp.
//
// What is the same for all rows of a sample - packed keys, X V, X K - is computed once for the
// tiles of a chunk.
//
// Keys that no row of the tile sees are left out. Of all heads A is kept if that is little
// (Plan::keep), else it is computed again for D.
#pragma once

#include "factored_keys.hpp"
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
    Workspace(const WordLists<real>& lists, const FactoredKeys<real>& keys)
        : words(lists), factored(keys) {}

    real *x, *z;           // packed keys and queries
    real* x_rows;          // keys (T, dL)
    real *f_lanes, *by_v;  // where values come first: outputs (p, rows), gV transposed (p, dL)
    real* by_values;       // then A^T G (T, pL)
    HeadMemory<real> heads;
    double* largest;          // the largest derivative
    real *ax, *f;             // (A X)^T (heads, d, rows); outputs (rows, pL)
    real *g, *scaled_g;       // their derivatives (rows, pL), and with a factor
    real *g_transposed, *ut;  // (pL, rows), (d, rows)
    real* ax_rows;            // (rows, dL)
    WordLists<real> words;
    FactoredKeys<real> factored;
    real *values,
        *packed;  // X V (heads, T, pL) or, of words, the rows of E V of the keys; packed (p, keys)
    OwnLossNumbers own;  // of a block, or of a tile where the function is called for each
  };

  void run_units(Pass pass, int chunk, std::ptrdiff_t first, std::ptrdiff_t last,
                 int thread) override;
  /// Keys of the sample that a thread has at hand; -1: none.
  struct Sample {
    std::ptrdiff_t last;  // of the chunk's units, which is not one of them
    std::ptrdiff_t index = -1;
    int keys = 0;               // that a row sees
    bool has_gradient = false;  // by factors, in sums over its rows
  };

  Slab<real> open_tile(std::ptrdiff_t unit, const Workspace& workspace) const;
  void load_sample(const Sample& sample, const Workspace& workspace) const;
  void finish_sample(int chunk, const Sample& sample, const Workspace& workspace) const;
  int keys_of(std::ptrdiff_t sample, std::ptrdiff_t last) const;
  void choose_block();
  std::ptrdiff_t run_tiles(Pass pass, int chunk, std::ptrdiff_t first, std::ptrdiff_t begin,
                           std::ptrdiff_t end, Sample& sample, const Workspace& workspace) const;
  Workspace at_place(int place, const Workspace& of_thread) const;
  void load_own(const Slab<real>& slab, const Workspace& workspace,
                const OwnLossNumbers& own) const;
  void run_tile(Pass pass, int chunk, const Slab<real>& slab, const Workspace& of_thread) const;
  ScoreMemory<real> of_head(int head, const Workspace& workspace) const;
  ScoreArguments<real> scores(RowMode mode, int head, const Slab<real>& slab,
                              const Workspace& workspace, real* gap) const;
  void load_values(int head, const Slab<real>& slab, const Workspace& workspace) const;
  void multiply_values(int head, int keys, const Workspace& workspace) const;
  void differentiate_factors(int chunk, int head, const Slab<real>& slab, real factor,
                             const ScoreArguments<real>& scores, const Workspace& workspace) const;
  void differentiate_readout(int chunk, int head, const Slab<real>& slab, const real* g,
                             const Workspace& workspace) const;
  ScoreArguments<real> upstream(const ScoreArguments<real>& scores, int head,
                                const Slab<real>& slab, bool kept,
                                const Workspace& workspace) const;
  void write_attention(int head, const Slab<real>& slab, const real* a) const;
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
  /// X V of a head, and packed; of words, those of the head at work.
  real* values(int head, const Workspace& workspace) const {
    return workspace.values + (values_first_ ? std::ptrdiff_t(head) * TL_ * pL_ : 0);
  }
  real* packed_values(int head, const Workspace& workspace) const {
    return workspace.packed + (values_first_ ? std::ptrdiff_t(head) * TL_ * pL_ : 0);
  }
  /// From feature to feature of packed keys.
  int key_row(const Slab<real>& slab) const {
    return state_.data.has_words() ? int(round_up(slab.keys, state_.lanes.lanes)) : TL_;
  }

  using ChunkPass<real>::state_;
  const HeadSteps<real> steps_;
  const int dL_, pL_, TL_;  // d and p in whole vectors, T in an odd number of these
  const bool values_first_, keys_first_, gradients_of_keys_;
  std::vector<Workspace> workspaces_;
  int block_ = 1;           // units of a block
  real* v_rows_ = nullptr;  // V, its rows padded to whole vectors
};

}  // namespace mhfast
