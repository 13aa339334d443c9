// Tokens multiplied with the factors and the readout first, of wide tokens: with X the tokens of a
// slab and Z its query rows, e = X V of a layer, or X U^T of a classifier,
//
//   S = (Z Q) (X K)^T,   F = A e,   C = G e^T          by Q  Z^T (D (X K))
//                        C^T = e of a classifier       by K  X^T (D^T (Z Q))
//                                                      by V  X^T (A^T G),   by U  A X
//
// so that d, which is large, is met by two products alone, whose rows are those of all samples:
// what comes before the scores, and the gradients, with features as lanes. In between samples are
// the lanes, and a sample has r, p or q numbers for a token.
//
// The former has samples as lanes too or, where these would leave lanes empty, tokens: those of a
// unit are packed as (d, rows) then, row s T + t being token t of sample s.
#pragma once

#include <vector>

#include "strategy.hpp"

namespace mhfast {

template <class real>
class Projections {
 public:
  explicit Projections(const PassState<real>& state);

  bool exist() const { return exist_; }
  bool packs_rows() const { return exist_ && by_rows_; }
  /// One thread's arrays, for slabs of `units` units.
  void lay_out(Arena& layout, int thread, std::size_t units);

  /// A member's heads of what gradients by inputs are multiplied with.
  void load_parameters(const Parameters<real>& parameters, const Member& member);

  /// Packs the samples of a unit, of `rows` tokens each, to (d, rows L).
  void pack(const real* x, int samples, int rows, real* to) const;

  /// What comes before the scores of a slab, of all heads, and before its gradients if there are.
  void load(const Slab<real>& slab, bool gradient, int thread);
  /// Makes a head's scores those of its factors. C is to be there.
  void take_factors(int head, int thread, ScoreArguments<real>& scores) const;
  /// Of a classifier, C of a head, unit after unit.
  void load_readout(int head, const Slab<real>& slab, int thread, real* c) const;
  /// Of a layer: e of a head [unit][key][output][L].
  const real* values(int head, int thread) const {
    return workspaces_[thread].values + head * workspaces_[thread].values_head;
  }

  /// Adds the gradients of a head by its factors, from D times a factor for each entry; `inputs`:
  /// and writes or adds its part of those by inputs.
  void add_factors(int chunk, int head, const Slab<real>& slab, int thread, const real* dd,
                   const real* factors, bool inputs) const;
  /// That by U, from A; or by V, from A and g [unit][row][output][L].
  void add_readout(int chunk, int head, const Slab<real>& slab, int thread, const real* a,
                   const real* g, const real* factors, bool inputs) const;

 private:
  struct Workspace {
    real *queries, *keys, *values;  // (heads, units, rows, columns, L)
    std::ptrdiff_t queries_head, keys_head, values_head;
    real* product;              // of a unit, columns by rows
    real *laned, *numbers;      // of the slab's tokens: what they meet in a gradient
    real *turned, *input_rows;  // numbers transposed; part of a gradient by inputs
    real *x_rows, *z_rows;      // tokens with zeros up to whole vectors, where they are not whole
  };

  void multiply(const real* packed, int rows, const Slab<real>& slab, const real* by, int columns,
                real* to, const Workspace& workspace) const;
  void multiply_rows(const real* packed, int rows, int samples, const real* by, int columns,
                     real* to, const Workspace& workspace) const;
  void unpack(const real* laned, int columns, int rows, const real* factors, const Slab<real>& slab,
              const Workspace& workspace) const;
  void add_rows(int columns, int rows, const real* tokens, const Slab<real>& slab, bool add,
                const Workspace& workspace, real* to) const;
  void add_inputs(int columns, int rows, const real* by, const Slab<real>& slab, bool add,
                  const Workspace& workspace, real* to) const;
  int valid(const Slab<real>& slab, int unit) const {
    return std::min(state_.lanes.lanes, slab.samples - unit * state_.lanes.lanes);
  }
  void pad(const real* from, int rows, const Slab<real>& slab, real* to) const;
  /// Tokens by rows, of dL numbers.
  const real* keys_of(const Slab<real>& slab, const Workspace& workspace) const {
    return whole_ ? state_.data.key(slab.first_sample, 0, 0) : workspace.x_rows;
  }
  const real* queries_of(const Slab<real>& slab, const Workspace& workspace) const {
    return whole_ ? state_.data.query(slab.first_sample, 0, 0) : workspace.z_rows;
  }

  const PassState<real>& state_;
  const bool exist_, by_rows_, whole_;  // whole: d is whole vectors
  const int dL_, columns_;              // of e of a head
  std::vector<Workspace> workspaces_;
  // By head Q^T and K^T times the scale of the logits, and V^T or U: (2 r + columns, dL).
  real* transposed_ = nullptr;
};

}  // namespace mhfast
