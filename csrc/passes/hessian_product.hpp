// The gradient of one sample and head is, with e = D X (z: queries, G: derivatives of the outputs),
//
//   by W  z^T e        by U  derivative A X        by V  (A X)^T G        by the prompt  e W^T
//
// and the Hessian's product its derivative along the direction, term by term (a dot stands for it):
// z^T e. + z.^T e, and so on. Softmax and its derivatives along the direction: kernels/tangent.hpp.
//
// Query rows are lanes for scores, features for sums over rows. Works on a sample at a time, whose
// product with W is one with that of the next samples, and in a long sequence on a few rows at a
// time, or with its factors one by one. Features are the lanes of a product with a W beyond the
// cache, whose rows are then read across. Of few rows with many features e. and e are kept, and z^T
// e. is one product over all; a classifier's loss is known after all its rows, so if there are
// many, their scores are computed twice.
//
// Where neither the direction nor the result has anything but readouts, A stays as it is and has no
// derivative: then A X is all that is needed, of a classifier <U, A X> and <U., A X>.
//
// Where query rows would leave many lanes empty, as with one row, samples are lanes instead
// (hessian_blocks.cpp): a block of them at a time, all rows (t, h) of a sample being the rows of
// one product with its keys.
//
// With few outputs the values X V of a layer come first, of which each of A (X V), C = G (X V)^T
// and (A^T G)^T X meets only so many numbers of a token as there are outputs.
//
// What classifiers and layers share; curvature.cpp adds their readouts.
#pragma once

#include <algorithm>
#include <vector>

#include "../dispatch/dispatch.hpp"
#include "../problem/data.hpp"
#include "../runtime/scratch.hpp"

namespace mhfast {

/// Pointers to a tensor and to its tangent, the derivative along the direction; null: zero.
template <class real>
struct WithTangent {
  const real *value = nullptr, *tangent = nullptr;
};

/// The arguments of `hessian_product`, see there; the data are clean, all are rescaled.
template <class real>
struct HessianCall {
  const Data<real>& data;
  const Model<const real*>& model;
  const Tensors<const real*>& tangent;
  real scale;
  Loss loss;
  int threads;
  const Tensors<real*>& out;
  real* by_V;            // the gradient by V of a layer, or null
  AlignedBuffer& block;  // all arrays
};

template <class real>
class HessianProduct {
 public:
  virtual ~HessianProduct() = default;
  void run();

 protected:
  /// `sum_rows`: rows of a head's sum for the readout, whose features are lanes. `row_by_row`: the
  /// loss of a row is known from all heads of this row.
  HessianProduct(const HessianCall<real>& call, int sum_rows, bool row_by_row);

  struct Workspace {                             // a thread's arrays; R: rows of a tile
    real *xt, *x, *zt;                           // keys (d, TL), (T, dL); queries (d, queries_row_)
    real *p, *dp;                                // z W: (H, d, queries_row_), or of a tile (d, R)
    real *zq, *dzq;                              // z Q: (r, queries_row_)
    real* p_rows;                                // z W of a head: (rows, dL)
    int row;                                     // of the queries: the first one of the sample
    real *ut, *dut;                              // (d, R): G V^T
    real *yt, *dyt;                              // A X: (d, R), of a layer, or of each head
    real* ax;                                    // of a classifier (H, q, dL), if that is all
    real *s, *ds, *c, *dc;                       // (heads, T, R)
    real* m;                                     // (T, R)
    real *a, *da;                                // (T, R), of a row map that is not softmax
    real *limits, *readouts, *readout_tangents;  // (R)
    real *f, *df, *g, *dg, *y, *g_rows,
        *dg_rows;  // outputs: (p, R), their y and derivatives (R, p)
    real* e;       // (R, dL)
    // Of a layer whose values come first; of all heads.
    real *values, *dvalues;          // (X V)^T: (H, p, values_row_)
    real *value_rows, *dvalue_rows;  // X V: (values_row_, H, p)
    real* turned;                    // A or A., transposed: (R, of_keys_)
    real *by_values, *by_V;          // that by X V, transposed: (p, of_keys_)
    real* by_value_rows;             // (of_keys_, p)
  };
  /// A thread's arrays where samples are lanes; vectors, but for *_rows and sums.
  struct Block {
    real *x, *z, *dz;                                // (T, d); (q, d)
    real *p, *dp;                                    // z W: (d, rows)
    real *s, *ds, *c, *dc, *m, *a, *da;              // (T, rows), as in Workspace
    real *row_limits, *readouts, *readout_tangents;  // (rows)
    real *e, *e_rows, *sums;                         // (rows, d); (L q, dL); (rows, d)
    real *ax, *dax, *u, *du;                         // of a layer: (rows, d); (d, rows)
    real *f, *df, *g, *dg, *y, *g_rows, *dg_rows;    // (q, p); (L q, p)
    real derivative[kMaxLanes], tangent[kMaxLanes];  // of a classifier's loss; else 1, 0
  };
  struct Sums {          // of a chunk
    real *of_W, *plain;  // (H, d, dL), or of a prompt D X (H, q, dL): moved and as it is
    real* of_readout;    // (H, q, dL), of a layer transposed (H, p, dL)
    real* by_V;          // as this, of the gradient
  };
  struct Tile {
    int first, rows, padded;
  };

  /// Adds the terms of a sample. `fresh`: it is the first of its chunk, whose sums are not set yet.
  virtual void run_sample(std::ptrdiff_t i, Workspace& workspace, const Sums& sums,
                          bool fresh) const = 0;
  /// The same of a block of `count` samples from `first` on, which have been scored.
  virtual void run_block(std::ptrdiff_t first, int count, Block& block, const Sums& sums,
                         bool fresh) const = 0;
  /// The product by a head's readout, from the sums of all chunks.
  virtual void store_readout(int h) const = 0;

  void find_limits(std::ptrdiff_t i, const Tile& tile, Workspace& workspace) const;
  void score(int h, const Tile& tile, Workspace& workspace) const;
  void derive(int h, const Tile& tile, const WithTangent<real>& readout, std::ptrdiff_t row,
              Workspace& workspace) const;
  void add_weight_terms(std::ptrdiff_t i, int h, const Tile& tile, double derivative,
                        double tangent, Workspace& workspace, const Sums& sums, bool fresh) const;
  TangentArguments<real> rows_of(const Block& block) const;
  WithTangent<real> weights_of(const TangentArguments<real>& in, const Block& block) const;
  void multiply_keys(const Block& block, const real* weights, real* to) const;
  void multiply_queries(const Block& block, const real* rows, bool laned, real* to) const;
  void derive(const WithTangent<real>& readout, bool laned, const Block& block) const;
  void add_weight_terms(std::ptrdiff_t first, int count, const Block& block, const Sums& sums,
                        bool fresh) const;
  void add_rows(const Block& block, const real* rows, real* sums, std::ptrdiff_t of_head,
                bool fresh) const;
  const real* unpack_rows(const Block& block, const real* rows, int h) const;

  /// U or V of all heads, each (rows, columns) transposed and padded to rows of `row` numbers.
  void load_readout(int rows, int columns, int row);
  void find_weights(TangentArguments<real> in) const;
  /// The sums of all chunks for a head, without what pads them.
  void sum_chunks(real* Sums::* part, std::ptrdiff_t at, int rows, real* out) const;

  /// A of what has been scored, with its derivative if it has one.
  template <class Memory>
  WithTangent<real> moved_weights(const TangentArguments<real>& in, Memory& memory) const {
    if (moves_) return weights_of(in, memory);
    return {still_weights(in), nullptr};
  }
  /// A of what has been scored, where its derivative is not needed.
  const real* still_weights(const TangentArguments<real>& in) const {
    if (data_.row_map.is_softmax()) return in.s;
    kernels_.tangent_weights(in);
    return in.a;
  }

  int block_rows() const { return s_.q * s_.H; }
  int padded(int size) const { return int(round_up(size, kernels_.lanes)); }
  std::ptrdiff_t slot(int h) const { return heads_kept_ > 1 ? h * s_.T * tile_rows_ : 0; }
  TangentArguments<real> rows_of(int h, const Tile& tile, Workspace& workspace) const {
    const std::ptrdiff_t at = slot(h);
    return {s_.T,
            tile.padded / kernels_.lanes,
            tile_rows_,
            data_.is_limited() ? workspace.limits : nullptr,
            workspace.s + at,
            workspace.ds + at,
            workspace.c + at,
            workspace.dc + at,
            workspace.readouts,
            workspace.readout_tangents,
            data_.row_map,
            workspace.a + (values_first_ ? at : 0),
            workspace.da + (values_first_ ? at : 0)};
  }
  /// A of a tile that has been scored and its derivative, (T, R) each.
  WithTangent<real> weights_of(const TangentArguments<real>& in, Workspace& workspace) const {
    if (!data_.row_map.is_softmax()) {
      kernels_.tangent_weights(in);
      return {in.a, in.da};
    }
    for (std::ptrdiff_t k = 0; k < s_.T * tile_rows_; ++k) workspace.m[k] = in.s[k] * in.ds[k];
    return {in.s, workspace.m};
  }
  /// out (M, N numbers) (+)= left^T right over K: left (K, M), right (K, N), by their rows.
  void multiply(int M, int N, int K, const real* left, std::ptrdiff_t left_row, const real* right,
                std::ptrdiff_t right_row, real* out, std::ptrdiff_t out_row, bool add) const {
    const int L = kernels_.lanes;
    Product<real> p{{M, N / L, K}, {left, left_row}, {right, right_row, L}, {out, out_row, L}};
    p.add = add;
    kernels_.product(p);
  }
  /// The tangent of such a product; constants have none. Returns whether it is not zero.
  bool multiply_tangents(int M, int N, int K, const WithTangent<real>& left,
                         std::ptrdiff_t left_row, const WithTangent<real>& right,
                         std::ptrdiff_t right_row, real* out, std::ptrdiff_t out_row,
                         bool add) const {
    if (left.tangent)
      multiply(M, N, K, left.tangent, left_row, right.value, right_row, out, out_row, add);
    if (right.tangent)
      multiply(M, N, K, left.value, left_row, right.tangent, right_row, out, out_row,
               add || left.tangent);
    return left.tangent || right.tangent;
  }

  const Kernels<real>& kernels_ = active_kernels<real>();
  const Data<real>& data_;
  const Model<const real*>& model_;
  const Tensors<const real*>& tangent_;
  const real scale_;
  const Loss loss_;
  const Tensors<real*>& out_;
  real* const by_V_;
  const Shape s_;
  const double total_;
  const bool wants_W_, wants_readout_, wants_plain_;
  const bool moves_;           // the scores, along the direction
  const bool readout_only_;    // nor is there a product by what they depend on
  bool blocks_ = false;        // samples are lanes
  bool values_first_ = false;  // X V of a layer comes before A
  int heads_kept_ = 1;
  std::ptrdiff_t tile_rows_ = 0, readout_size_ = 0;
  std::ptrdiff_t attended_size_ = 0;  // from head to head in yt and dyt; 0: they are not kept
  WithTangent<real> readout_;         // U (H, d, qL) or V (H, p, d), transposed
  std::ptrdiff_t queries_row_ = 0;    // from feature to feature of the queries of several samples
  std::ptrdiff_t values_row_ = 0, of_keys_ = 0;  // see Workspace

 private:
  void choose_sizes(int sum_rows, bool row_by_row);
  bool prefers_values_first() const;
  void group_samples();
  void lay_out(Arena& layout);
  void load_weights();
  void run_chunk(int chunk, Workspace& workspace);
  bool has_tangent_of_W() const { return tangent_[kW] || tangent_[kQ] || tangent_[kK]; }
  bool copies_W() const { return model_.is_factored() || scale_ != real(1) || w_row_ != s_.d; }
  bool prefers_blocks() const;
  Block take_block(Arena& layout) const;
  void run_blocks(int chunk, Block& block);
  void load_block(std::ptrdiff_t first, int count, const Block& block) const;
  void load_block_queries(std::ptrdiff_t first, int count, const Block& block) const;
  void score(const Block& block) const;
  void load_queries(std::ptrdiff_t i, int count, Workspace& workspace) const;
  void multiply_features(int h, const real* w, int rows, const Workspace& workspace,
                         real* to) const;
  void sum_weights(real* Sums::* part, const real* rows, int h, real* out) const;
  void load_factors();
  void reduce_factors(int h) const;
  void reduce() const;

  int members_ = 1, chunks_ = 1;
  std::ptrdiff_t weight_size_ = 0;
  bool together_ = false, has_rows_ = false;  // z W of several samples; e. and e of all rows
  int group_ = 1;                             // samples whose queries are packed together
  std::ptrdiff_t rows_row_ = 0;
  bool factors_ = false;      // W is not multiplied out
  WithTangent<real> q_, kt_;  // then Q, scaled, and K^T
  std::vector<real> q_value_, q_tangent_, kt_value_, kt_tangent_;
  bool by_features_ = false;                            // z W has features as lanes
  std::ptrdiff_t w_row_ = 0;                            // from row to row of W
  real *w_value_ = nullptr, *w_tangent_ = nullptr;      // W and its tangent scaled, unless as given
  real *of_W_ = nullptr, *plain_W_ = nullptr;           // of a head
  real *rows_moved_ = nullptr, *rows_plain_ = nullptr;  // e. and e: (H, n, q, rows_row_)
  std::vector<real> readout_value_, readout_tangent_;
  std::vector<real> prompt_value_, prompt_tangent_;  // (d, qL)
  WithTangent<real> w_, queries_;                    // W: (H, d, w_row_)
  std::vector<Workspace> workspaces_;
  std::vector<Block> of_members_;  // in the place of workspaces
  std::vector<Sums> sums_;
};

}  // namespace mhfast
