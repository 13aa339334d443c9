// Gradients of the loss by tokens and query rows: what classifiers and layers share.
//
// Of one sample and head, with U = derivative of the loss times U_h for a classifier and G V_h^T
// for a layer:
//
//   dL/dX += A^T U + D^T (Z W),   dL/dZ += D X W^T
//
// With an identity in the place of W or V the product with it is left out; factors of W go one by
// one, (Z Q) K^T and (D X K) Q^T. A classifier's gradient is linear in the derivative of its loss,
// which is multiplied in at the end; where its outputs are not known, they are found on the way.
// Query rows of all heads go together, (t, h) being row t H + h, in one of two ways:
//
//   rows are lanes     A and D come from scores_rows, as many rows at a time as fit the cache.
//                      Products with W and V take the rows of several samples at once, with
//                      features as lanes. input_gradients.cpp
//   samples are lanes  A block of samples at a time, of few rows (t, h). input_blocks.cpp
//
// Long samples whose keys meet few numbers of a value or a factor go a head at a time:
//
//   values first       C = G (X V)^T,        A^T U = (A^T G) V^T      see has_values_first
//   keys first         S = (Z Q) (X K)^T,    D^T (Z W) = (D^T (Z Q)) K^T,
//                      D X W^T = (D (X K)) Q^T                   see factored_keys.hpp
//
// input_tiles.cpp
//
// Where W is large and rows are lanes, the gradients by W and by the readout come from the same Z
// W: D X and A X of all rows are kept, times what a sample's gradients are multiplied by.
#pragma once

#include <algorithm>
#include <vector>

#include "../dispatch/dispatch.hpp"
#include "../problem/data.hpp"
#include "../problem/loss.hpp"
#include "../runtime/scratch.hpp"
#include "factored_keys.hpp"

namespace mhfast {

/// Gradients by parameters that are found on the way; null: not wanted.
template <class real>
struct ByParameters {
  real *W = nullptr, *readout = nullptr;

  bool any() const { return W || readout; }
};

/// What a classifier and a layer share; the two below add their readouts.
template <class real>
class InputGradients {
 public:
  InputGradients(const Data<real>& data, const Parameters<real>& parameters, Loss loss, real* gx,
                 real* gz, const ByParameters<real>& by);
  virtual ~InputGradients() = default;

  /// Whether outputs are found on the way if they are not given.
  virtual bool finds_outputs() const = 0;

  /// Whether gradients by parameters can be found on the way; `wants_z`: those by query rows are.
  static bool finds_parameters(const Data<real>& data, bool wants_z);

  /// The loss; outputs may be null if they are found.
  double run(const real* outputs, int threads);

 protected:
  /// What goes together: query rows of some heads, of samples that follow each other. There are
  /// several samples only where all their rows fit.
  struct Batch {
    std::ptrdiff_t sample;
    int samples;
    int first, rows;
    int head, heads;

    int all_rows() const { return samples * rows; }
    int of_sample() const { return rows * heads; }  // rows (t, h) of a sample
  };

  /// One thread's arrays for a batch. Rows of features have dL numbers; RL are the rows (t, h) of a
  /// sample, and ML the rows of all samples, padded to whole vectors.
  struct Workspace {
    real* xt;                 // of each sample: X transposed (d, TL)
    real* x_rows;             // of each sample: X (T, dL)
    real* zt;                 // Z of all samples transposed (d, ML)
    real* p;                  // Z W: (rows, h)
    real* u;                  // U: (rows, h), one for all samples of a classifier
    real *p_lanes, *u_lanes;  // of one sample: transposed (dL, RL)
    real *s, *c, *limits, *row_readouts, *readout;  // of one sample, as scores_rows takes them
    real* transposed;                               // A, then D: (RL, TL)
    real *e, *et;                                   // D X: (rows, h); transposed (h, dL, ML)
    real* projected;                                // (Z Q)^T or (D X K)^T: (h, r, ML)
    real *gx, *gz;                                  // of each sample: (T, dL), (rows, dL)
    real* g;                                        // of each sample: derivatives of the outputs
    double* found;                                  // of each sample: see finish_sample
    bool has_weights;                               // A comes before U, see find_outputs
    real *ax_rows, *f;                              // a layer's A X: (rows, h); outputs (ML, pL)
    real* gt;                                       // those of a layer transposed: (p, ML)
  };

  /// The same for a tile of rows of a head of a long sample, with what all tiles share.
  struct LongWorkspace : Workspace {
    LongWorkspace() = default;
    explicit LongWorkspace(const Workspace& workspace) : Workspace(workspace) {}

    FactoredKeys<real> factored;  // where keys come first
    real *values, *by_values;     // (X V)^T (p, TL) and A^T G (T, pL), where values do
    real* g_rows;                 // derivatives of the tile's outputs (rows, pL)
    real* turned;                 // sums over rows (T, rL) or (T, pL), transposed
    real* gz_rows;                // (q, dL)
  };

  /// Heads of a block of samples that go together.
  struct HeadGroup {
    int head, heads;
  };
  /// One thread's arrays for a block of samples, which are the lanes, and a group of heads: of
  /// vectors, but for g.
  struct BlockWorkspace {
    real *x, *z;                                    // (T, d); (q, d)
    real *p, *p_transposed;                         // Z W: (rows, h, d); transposed (d, rows, h)
    real *u, *u_transposed;                         // a layer's U, likewise
    real *s, *c, *limits, *row_readouts, *readout;  // as scores_samples takes them
    real* row_limits;                               // (q)
    real* e;                                        // D X: (rows, h, d)
    real* projected;                                // Z Q or D X K of a head: (rows, r)
    real *gx, *gz;                                  // (T, d); (q, d)
    real* g;                                        // of each sample: derivatives of the outputs
    double* found;                                  // of each sample: see finish_sample
    real* g_lanes;                                  // the same of a layer: (q, p)
  };
  /// U of a block, rows (t, h), and transposed: a number or, if laned, a vector for each entry.
  struct BlockReadout {
    const real *rows, *transposed;
    bool laned;
  };

  /// The arrays of a workspace that the readout needs: g and others.
  virtual void take_readout(Arena& layout, Workspace& workspace) const = 0;
  /// Weighted loss of sample i from its outputs f; writes their derivatives to g.
  virtual double measure(std::ptrdiff_t i, const real* f, real* g) const = 0;
  virtual int derivatives() const = 0;  // of a sample
  bool goes_by_heads() const { return values_first_ || keys_first_; }
  /// Writes U of a batch to workspace.u.
  virtual void load_readout(const Batch& batch, Workspace& workspace) const = 0;
  /// From one sample's U to the next one's.
  virtual std::ptrdiff_t readout_stride(const Batch& batch) const = 0;
  /// The same where samples are lanes.
  virtual void take_block_readout(Arena& layout, BlockWorkspace& workspace) const = 0;
  virtual void load_block_targets(const BlockWorkspace&, int /*samples*/) const {}
  virtual BlockReadout load_block_readout(const HeadGroup& group,
                                          const BlockWorkspace& workspace) const = 0;
  /// V^T of a layer's head (p, dL).
  virtual const real* transposed_values(int /*head*/) const { return nullptr; }
  /// Where outputs are found: the weighted loss, from the sum of the sample's readouts, with which
  /// its gradients are there but for the derivative of the loss. Of a layer from the loss itself.
  virtual double finish_sample(std::ptrdiff_t i, double found, real* g) const = 0;
  /// Then, of a layer, losses and derivatives of a batch from A X, in workspace.ax_rows.
  virtual void find_derivatives(const Batch&, Workspace&) const {}
  virtual bool finds_weights_first() const { return false; }
  bool matters(const real* g) const {
    return !std::all_of(g, g + derivatives(), [](real derivative) { return derivative == 0; });
  }
  /// The gradient by a head's readout, from kept_ax_ and, of a layer, kept_g_.
  virtual void store_readout(int head) const = 0;
  /// What a sample's gradients are multiplied by at the end.
  virtual real factor(const real* g) const = 0;

  const Kernels<real>& kernels_ = active_kernels<real>();
  const Data<real>& data_;
  const Parameters<real>& parameters_;
  const Loss loss_;
  real *const gx_, *const gz_;
  const bool values_first_, keys_first_;
  const int L_, TL_, dL_, wL_;  // from row to row of X^T and, wL, of W an odd number of vectors
  int rows_, heads_, samples_;  // of a batch, at most
  int block_heads_ = 0;         // of a group where samples are lanes; 0: rows are
  const double total_;
  const ByParameters<real> by_;
  // Where these are found D X, A X and, of a layer, derivatives of outputs: (H, n q, wL), (n q, p).
  real *kept_e_ = nullptr, *kept_ax_ = nullptr, *kept_g_ = nullptr;

 private:
  bool has_weight(std::ptrdiff_t sample) const {
    for (int t = 0; t < data_.shape.output_rows(); ++t)
      if (data_.weight_of(0, sample, t) != 0) return true;
    return false;
  }
  ScoreArguments<real> load_scores(const Batch& batch, int sample, RowMode mode,
                                   const Workspace& workspace) const;
  /// Of one head of identities: whether the rows Z W are the tokens, and whether D X are the
  /// gradients by them.
  bool has_keys_as_queries() const {
    const Shape& s = data_.shape;
    return has_products_as_queries() && data_.self && wants_z_ && rows_ == s.q &&
           parameters_.scale == real(1) && !goes_by_heads();
  }
  bool has_products_as_queries() const { return !w_ && data_.shape.H == 1; }
  void find_outputs(const Batch& batch, Workspace& workspace) const;
  static int fitting_rows(const Shape& s);
  void choose_batches();
  void take_kept();
  void keep(std::ptrdiff_t sample, int place, const Workspace& workspace) const;
  void store_parameters(int members) const;
  void load_weights();
  void load_factors();
  Workspace take_workspace(Arena& layout) const;
  void load_samples(std::ptrdiff_t first, int count, const Workspace& workspace) const;
  void differentiate(std::ptrdiff_t first, int count, Workspace& workspace) const;
  void add_batch(const Batch& batch, Workspace& workspace) const;
  void load_queries(const Batch& batch, Workspace& workspace) const;
  void add_sample(const Batch& batch, int sample, Workspace& workspace) const;
  void add_queries(const Batch& batch, Workspace& workspace) const;

  template <class Arrays, class Take, class Differentiate>
  double run_batches(const real* outputs, std::ptrdiff_t samples, int members, double seconds,
                     const Take& take, const Differentiate& differentiate) const;

  void take_long_arrays(Arena& layout, LongWorkspace& workspace) const;
  void add_long_head(std::ptrdiff_t sample, int head, int keys, LongWorkspace& workspace) const;
  void differentiate_long(std::ptrdiff_t sample, LongWorkspace& workspace) const;
  int find_limits(const Batch& batch, const LongWorkspace& workspace) const;
  int keys_of(std::ptrdiff_t sample) const;
  void load_keys(int head, int keys, const LongWorkspace& workspace) const;
  void add_tile(const Batch& batch, LongWorkspace& workspace) const;
  ScoreArguments<real> load_tile_queries(const Batch& batch, int keys,
                                         const LongWorkspace& workspace) const;
  void load_tile_readout(const Batch& batch, int keys, LongWorkspace& workspace) const;
  void add_tile_keys(const Batch& batch, int keys, const LongWorkspace& workspace) const;
  void add_tile_queries(const Batch& batch, int keys, const real* projected,
                        const LongWorkspace& workspace) const;
  void add_sums(int head, int keys, const LongWorkspace& workspace) const;

  int count_block_heads() const;
  int balanced_heads(double most) const;
  BlockWorkspace take_block_workspace(Arena& layout) const;
  void differentiate_block(std::ptrdiff_t first, int count, const BlockWorkspace& workspace) const;
  void load_block_samples(std::ptrdiff_t first, int count, const BlockWorkspace& workspace) const;
  void load_block_queries(const HeadGroup& group, const BlockWorkspace& workspace) const;
  void score_block(const HeadGroup& group, const BlockReadout& readout,
                   const BlockWorkspace& workspace) const;
  void add_block_keys(const HeadGroup& group, const BlockReadout& readout,
                      const BlockWorkspace& workspace) const;
  void add_block_queries(const HeadGroup& group, const BlockWorkspace& workspace) const;
  void store_block(const real* from, int rows, int count, real factor, bool add, const real* g,
                   real* to) const;

  const bool wants_z_;  // by an external query, or as part of gx
  AlignedBuffer block_, kept_;
  // W scaled (H, d, w_row_), and its transpose (H, d, wL). Of a rank Q scaled (H, d, r), and Q^T
  // so, and K^T: (H, r, dL).
  const real* w_ = nullptr;
  std::ptrdiff_t w_row_ = 0;
  real *wt_ = nullptr, *kt_ = nullptr;
};

}  // namespace mhfast
