// The gradient of one sample and head is, with e = D X (z: queries, G: derivatives of the outputs),
//
//   by W  z^T e        by U  derivative A X        by V  (A X)^T G        by the prompt  e W^T
//
// and the Hessian's product its derivative along the direction, term by term (a dot stands for it):
// z^T e. + z.^T e, and so on. Softmax and its derivatives along the direction: kernels/tangent.hpp.
//
// Query rows are lanes for scores, features for sums over rows. Works on a sample at a time, and in
// a long sequence on a few rows at a time; a classifier's loss is known after all its rows, so if
// there are many, their scores are computed twice.
#include "curvature.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "../dispatch/dispatch.hpp"
#include "../problem/clean.hpp"
#include "../problem/factors.hpp"
#include "../problem/rescale.hpp"
#include "../runtime/float_mode.hpp"
#include "../runtime/scratch.hpp"
#include "../runtime/team.hpp"
#include "../runtime/tuning.hpp"

namespace mhfast {
namespace {

/// Pointers to a tensor and to its tangent, the derivative along the direction; null: zero.
template <class real>
struct WithTangent {
  const real *value = nullptr, *tangent = nullptr;
};

template <class real>
class HessianProduct {
 public:
  HessianProduct(const Data<real>& data, const Model<const real*>& model,
                 const Tensors<const real*>& tangent, real scale, Loss loss, int threads,
                 const Tensors<real*>& out);
  void run();

 private:
  struct Workspace {                     // a thread's arrays; R: rows of a tile
    real *xt, *x, *zt;                   // keys (d, TL), (T, dL); queries (d, qL)
    real *p, *dp, *ut, *dut, *yt, *dyt;  // (d, R): z W, G V^T, A X
    real *s, *ds, *c, *dc;               // (heads, T, R)
    real* m;                             // (T, R)
    real *limits, *readouts, *moves;     // (R)
    real *f, *df, *g, *dg, *y, *g_rows,
        *dg_rows;  // outputs: (p, R), their y and derivatives (R, p)
    real* e;       // (R, dL)
  };
  struct Sums {          // of a chunk
    real *of_W, *plain;  // (H, d, dL), or of a prompt D X (H, q, dL): moved and as it is
    real* of_readout;    // (H, q, dL), of a layer transposed (H, p, dL)
  };
  struct Tile {
    int first, rows, padded;
  };

  void choose_sizes();
  void lay_out(Arena& layout);
  void load_weights();
  void load_readout(std::vector<real>& value, std::vector<real>& move);
  void run_chunk(int chunk, Workspace& workspace);
  void run_classifier(std::ptrdiff_t i, Workspace& workspace, const Sums& sums, bool fresh);
  void run_layer(std::ptrdiff_t i, Workspace& workspace, const Sums& sums, bool fresh);
  void find_limits(std::ptrdiff_t i, const Tile& tile, Workspace& workspace) const;
  void score(int h, const Tile& tile, Workspace& workspace) const;
  void derive(int h, const Tile& tile, const WithTangent<real>& readout, std::ptrdiff_t row,
              Workspace& workspace) const;
  void add_outputs(int h, const Tile& tile, Workspace& workspace) const;
  void find_derivatives(std::ptrdiff_t i, const Tile& tile, Workspace& workspace) const;
  // `fresh`: a sample is the first of its chunk, whose sums are not set yet.
  void add_weight_terms(std::ptrdiff_t i, int h, const Tile& tile, double derivative, double move,
                        Workspace& workspace, const Sums& sums, bool fresh) const;
  void add_readout_terms(int h, const Tile& tile, double derivative, double move,
                         Workspace& workspace, const Sums& sums, bool fresh) const;
  void reduce() const;

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
            workspace.moves};
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
  const Shape s_;
  const double total_;
  const bool wants_W_, wants_readout_, wants_plain_;
  int members_ = 1, chunks_ = 1, heads_kept_ = 1;
  std::ptrdiff_t tile_rows_ = 0, weight_size_ = 0, readout_size_ = 0;
  std::vector<real> w_value_, w_move_;              // (H, d, d), scaled
  std::vector<real> readout_value_, readout_move_;  // U (H, d, qL) or V (H, p, d), transposed
  std::vector<real> prompt_value_, prompt_move_;    // (d, qL)
  WithTangent<real> w_, readout_, queries_;
  std::vector<Workspace> workspaces_;
  std::vector<Sums> sums_;
  AlignedBuffer block_;
};

template <class real>
HessianProduct<real>::HessianProduct(const Data<real>& data, const Model<const real*>& model,
                                     const Tensors<const real*>& tangent, real scale, Loss loss,
                                     int threads, const Tensors<real*>& out)
    : data_(data),
      model_(model),
      tangent_(tangent),
      scale_(scale),
      loss_(loss),
      out_(out),
      s_(data.shape),
      total_(data.total_weight(0, loss)),
      wants_W_(out[kW] || out[kQ] || out[kK] || out[kPrompt]),
      wants_readout_(out[kU] || out[kV]),
      wants_plain_(wants_W_ && (model.is_factored() || s_.shared_query)) {
  choose_sizes();
  const double flops = double(s_.n) * s_.H * s_.q * (8.0 * s_.d * s_.d + 16.0 * s_.T * s_.d);
  members_ = useful_threads(threads, chunks_, flops);
  workspaces_.resize(members_);
  sums_.resize(chunks_);
  load_weights();
  load_readout(readout_value_, readout_move_);
  if (s_.shared_query) {
    const auto pack = [&](const real* from, std::vector<real>& to) -> const real* {
      if (!from) return nullptr;
      to.resize(std::size_t(s_.d) * padded(s_.q));
      kernels_.pack_rows(from, s_.q, s_.d, padded(s_.q), to.data());
      return to.data();
    };
    queries_ = {pack(model.at[kPrompt], prompt_value_), pack(tangent[kPrompt], prompt_move_)};
  }
  Arena measure;
  lay_out(measure);
  Arena layout(block_.reserve(measure.size()));
  lay_out(layout);
}

template <class real>
void HessianProduct<real>::choose_sizes() {
  const int L = kernels_.lanes, dL = padded(s_.d), qL = padded(s_.q);
  const double of_row = 4.0 * s_.T * sizeof(real);  // A, D and their moves
  const auto rows_within = [&](double bytes) {
    return std::clamp<std::ptrdiff_t>(std::ptrdiff_t(bytes / of_row) / L * L, L, qL);
  };
  // A layer needs all heads of a row before the loss of that row is known, a classifier all rows.
  const bool all_fit = kTangentTileBytes >= of_row * s_.H * qL;
  heads_kept_ = all_fit || s_.is_layer() ? s_.H : 1;
  tile_rows_ = rows_within(kTangentTileBytes / heads_kept_);
  weight_size_ = std::ptrdiff_t(s_.shared_query ? s_.q : s_.d) * dL;
  readout_size_ = std::ptrdiff_t(s_.is_layer() ? s_.p : s_.q) * dL;
  const double sums = double(s_.H) * (2 * weight_size_ + readout_size_) * sizeof(real);
  chunks_ = int(
      std::max(1.0, std::min({kTangentPartialBytes / sums, double(kTangentChunks), double(s_.n)})));
}

template <class real>
void HessianProduct<real>::lay_out(Arena& layout) {
  const std::size_t d = s_.d, T = s_.T, p = s_.p, H = s_.H, R = tile_rows_;
  const std::size_t dL = padded(s_.d), TL = padded(s_.T), qL = padded(s_.q);
  const auto take = [&](std::size_t size, std::initializer_list<real**> arrays) {
    for (real** array : arrays) *array = layout.take<real>(size);
  };
  for (Sums& sums : sums_) {
    take(wants_W_ ? H * weight_size_ : 0, {&sums.of_W});
    take(wants_plain_ ? H * weight_size_ : 0, {&sums.plain});
    take(wants_readout_ ? H * readout_size_ : 0, {&sums.of_readout});
  }
  for (Workspace& workspace : workspaces_) {
    take(d * TL, {&workspace.xt});
    take(T * dL, {&workspace.x});
    take(d * qL, {&workspace.zt});
    take(d * R, {&workspace.p, &workspace.dp, &workspace.ut, &workspace.dut, &workspace.yt,
                 &workspace.dyt});
    take(heads_kept_ * T * R, {&workspace.s, &workspace.ds, &workspace.c, &workspace.dc});
    take(T * R, {&workspace.m});
    take(R, {&workspace.limits, &workspace.readouts, &workspace.moves});
    take(p * R, {&workspace.f, &workspace.df, &workspace.g, &workspace.dg, &workspace.y,
                 &workspace.g_rows, &workspace.dg_rows});
    take(R * dL, {&workspace.e});
  }
}

/// scale W and its move, from factors where there are.
template <class real>
void HessianProduct<real>::load_weights() {
  const std::ptrdiff_t size = extent(kW, s_, 0).all(), dd = std::ptrdiff_t(s_.d) * s_.d;
  const Tensors<const real*>&at = model_.at, &move = tangent_;
  w_value_.resize(size);
  w_move_.assign(size, real(0));
  const int r = model_.rank;
  for (int h = 0; h < s_.H && model_.is_factored(); ++h) {
    compose(kernels_, s_, r, at[kQ], at[kK], h, 1, w_value_.data());
    const std::ptrdiff_t of_head = std::ptrdiff_t(h) * s_.d * r;
    const real* K = (at[kK] ? at[kK] : at[kQ]) + of_head;
    const real* dK = at[kK] ? move[kK] : move[kQ];
    real* to = w_move_.data() + h * dd;
    if (move[kQ])
      kernels_.batched_gemm(
          {s_.d, s_.d, r, 1, move[kQ] + of_head, r, 1, K, 1, r, to, s_.d, 1, real(1), true});
    if (dK)
      kernels_.batched_gemm({s_.d, s_.d, r, 1, at[kQ] + of_head, r, 1, dK + of_head, 1, r, to, s_.d,
                             1, real(1), true});
  }
  if (!model_.is_factored()) {
    std::copy_n(at[kW], size, w_value_.begin());
    if (move[kW]) std::copy_n(move[kW], size, w_move_.begin());
  }
  for (std::ptrdiff_t i = 0; i < size; ++i) {
    w_value_[i] *= scale_;
    w_move_[i] *= scale_;
  }
  w_ = {w_value_.data(), move[kW] || move[kQ] || move[kK] ? w_move_.data() : nullptr};
}

/// A classifier's U as (d, qL), a layer's V as (p, d), by head.
template <class real>
void HessianProduct<real>::load_readout(std::vector<real>& value, std::vector<real>& move) {
  const TensorName name = s_.is_layer() ? kV : kU;
  const Extent e = extent(name, s_, 0);
  const int rows = s_.is_layer() ? s_.d : padded(s_.q);
  const auto pack = [&](const real* from, std::vector<real>& to) -> const real* {
    if (!from) return nullptr;
    to.resize(std::size_t(s_.H) * e.columns * rows);
    for (int h = 0; h < s_.H; ++h)
      kernels_.pack_rows(from + h * e.size(), e.rows, e.columns, rows,
                         to.data() + std::ptrdiff_t(h) * e.columns * rows);
    return to.data();
  };
  readout_ = {pack(model_.at[name], value), pack(tangent_[name], move)};
}

template <class real>
void HessianProduct<real>::find_limits(std::ptrdiff_t i, const Tile& tile,
                                       Workspace& workspace) const {
  if (data_.is_limited())
    data_.write_limits(i, tile.first, tile.rows, tile.padded, workspace.limits);
}

/// P = z W, S = P X^T and their moves, then A and its relative move.
template <class real>
void HessianProduct<real>::score(int h, const Tile& tile, Workspace& workspace) const {
  const int d = s_.d, T = s_.T, TL = padded(T), qL = padded(s_.q);
  const std::ptrdiff_t R = tile_rows_, dd = std::ptrdiff_t(d) * d;
  const TangentArguments<real> in = rows_of(h, tile, workspace);
  const WithTangent<real> w{w_.value + h * dd, w_.tangent ? w_.tangent + h * dd : nullptr};
  const WithTangent<real> z{(s_.shared_query ? queries_.value : workspace.zt) + tile.first,
                            queries_.tangent ? queries_.tangent + tile.first : nullptr};
  multiply(d, tile.padded, d, w.value, d, z.value, qL, workspace.p, R, false);
  const bool moves = multiply_tangents(d, tile.padded, d, w, d, z, qL, workspace.dp, R, false);
  multiply(T, tile.padded, d, workspace.xt, TL, workspace.p, R, in.s, R, false);
  if (moves)
    multiply(T, tile.padded, d, workspace.xt, TL, workspace.dp, R, in.ds, R, false);
  else
    std::fill_n(in.ds, T * R, real(0));
  kernels_.tangent_weights(in);
}

/// C = U X^T and its move, then D, its move and the readouts; U (d, rows) by its rows.
template <class real>
void HessianProduct<real>::derive(int h, const Tile& tile, const WithTangent<real>& u,
                                  std::ptrdiff_t row, Workspace& workspace) const {
  const int d = s_.d, T = s_.T, TL = padded(T);
  const std::ptrdiff_t R = tile_rows_;
  const TangentArguments<real> in = rows_of(h, tile, workspace);
  multiply(T, tile.padded, d, workspace.xt, TL, u.value, row, in.c, R, false);
  if (u.tangent)
    multiply(T, tile.padded, d, workspace.xt, TL, u.tangent, row, in.dc, R, false);
  else
    std::fill_n(in.dc, T * R, real(0));
  kernels_.tangent_derivative(in);
}

template <class real>
void HessianProduct<real>::run_classifier(std::ptrdiff_t i, Workspace& workspace, const Sums& sums,
                                          bool fresh) {
  const int qL = padded(s_.q);
  const bool kept = heads_kept_ == s_.H && tile_rows_ >= qL;
  const std::ptrdiff_t of_head = std::ptrdiff_t(s_.d) * qL;
  const auto for_heads = [&](const auto& body) {
    for (int first = 0; first < s_.q; first += int(tile_rows_)) {
      const int rows = std::min(int(tile_rows_), s_.q - first);
      const Tile tile{first, rows, padded(rows)};
      find_limits(i, tile, workspace);
      for (int h = 0; h < s_.H; ++h) body(h, tile);
    }
  };
  const auto evaluate = [&](int h, const Tile& tile) {
    score(h, tile, workspace);
    const std::ptrdiff_t at = h * of_head + tile.first;
    derive(h, tile, {readout_.value + at, readout_.tangent ? readout_.tangent + at : nullptr}, qL,
           workspace);
  };
  double phi = 0, phi_move = 0;
  for_heads([&](int h, const Tile& tile) {
    evaluate(h, tile);
    for (int t = 0; t < tile.rows; ++t) {
      phi += double(workspace.readouts[t]);
      phi_move += double(workspace.moves[t]);
    }
  });
  const double by_heads = 1 / std::sqrt(double(s_.H)), w = data_.weight_of(0, i, 0);
  const double y = double(data_.y[i]), share = w / total_ * by_heads;
  const double derivative = w == 0 ? 0.0 : loss_term(loss_, phi * by_heads, y).derivative * share;
  const double move =
      w == 0 ? 0.0 : curvature(loss_, phi * by_heads, y) * (phi_move * by_heads) * share;
  for_heads([&](int h, const Tile& tile) {
    if (!kept) evaluate(h, tile);
    add_weight_terms(i, h, tile, derivative, move, workspace, sums, fresh);
    add_readout_terms(h, tile, derivative, move, workspace, sums, fresh);
  });
}

/// Adds one head's outputs F = A X V and their moves, outputs by rows as (p, R).
template <class real>
void HessianProduct<real>::add_outputs(int h, const Tile& tile, Workspace& workspace) const {
  const int d = s_.d, T = s_.T, p = s_.p, N = tile.padded;
  const std::ptrdiff_t R = tile_rows_, dL = padded(d), of_head = std::ptrdiff_t(h) * d * p;
  const TangentArguments<real> in = rows_of(h, tile, workspace);
  for (std::ptrdiff_t k = 0; k < T * R; ++k) workspace.m[k] = in.s[k] * in.ds[k];
  multiply(d, N, T, workspace.x, dL, in.s, R, workspace.yt, R, false);
  multiply(d, N, T, workspace.x, dL, workspace.m, R, workspace.dyt, R, false);
  const WithTangent<real> v{model_.at[kV] + of_head,
                            tangent_[kV] ? tangent_[kV] + of_head : nullptr};
  multiply(p, N, d, v.value, p, workspace.yt, R, workspace.f, R, h > 0);
  multiply_tangents(p, N, d, v, p, {workspace.yt, workspace.dyt}, R, workspace.df, R, h > 0);
}

/// Derivatives of the outputs of a tile and their moves, both ways round.
template <class real>
void HessianProduct<real>::find_derivatives(std::ptrdiff_t i, const Tile& tile,
                                            Workspace& workspace) const {
  const int p = s_.p;
  const std::ptrdiff_t R = tile_rows_, row_targets = data_.targets / s_.q;
  std::fill_n(workspace.g, p * R, real(0));
  std::fill_n(workspace.dg, p * R, real(0));
  for (int t = 0; t < tile.rows; ++t) {
    const double w = data_.weight_of(0, i, tile.first + t), share = w / total_;
    const real* given = data_.y + i * data_.targets + (tile.first + t) * row_targets;
    // Targets beside the outputs, whose numbers are R apart.
    for (int o = 0; o < row_targets; ++o) workspace.y[o * R + t] = given[o];
    if (w != 0) {
      row_loss(loss_, workspace.f + t, workspace.y + t, R, p, true, [&](int o, double derivative) {
        workspace.g[o * R + t] = real(derivative * share);
      });
      derivative_tangents(
          loss_, workspace.f + t, workspace.df + t, workspace.y + t, R, p,
          [&](int o, double move) { workspace.dg[o * R + t] = real(move * share); });
    }
    for (int o = 0; o < p; ++o) {
      workspace.g_rows[t * p + o] = workspace.g[o * R + t];
      workspace.dg_rows[t * p + o] = workspace.dg[o * R + t];
    }
  }
}

template <class real>
void HessianProduct<real>::run_layer(std::ptrdiff_t i, Workspace& workspace, const Sums& sums,
                                     bool fresh) {
  const std::ptrdiff_t R = tile_rows_;
  for (int first = 0; first < s_.q; first += int(R)) {
    const int rows = std::min(int(R), s_.q - first);
    const Tile tile{first, rows, padded(rows)};
    find_limits(i, tile, workspace);
    for (int h = 0; h < s_.H; ++h) {
      score(h, tile, workspace);
      add_outputs(h, tile, workspace);
    }
    find_derivatives(i, tile, workspace);
    const WithTangent<real> g{workspace.g, workspace.dg};
    for (int h = 0; h < s_.H; ++h) {
      const std::ptrdiff_t of_head = std::ptrdiff_t(h) * s_.d * s_.p;
      const WithTangent<real> vt{readout_.value + of_head,
                                 readout_.tangent ? readout_.tangent + of_head : nullptr};
      multiply(s_.d, tile.padded, s_.p, vt.value, s_.d, g.value, R, workspace.ut, R, false);
      multiply_tangents(s_.d, tile.padded, s_.p, vt, s_.d, g, R, workspace.dut, R, false);
      derive(h, tile, {workspace.ut, workspace.dut}, R, workspace);
      add_weight_terms(i, h, tile, 1, 0, workspace, sums, fresh);
      add_readout_terms(h, tile, 1, 0, workspace, sums, fresh);
    }
  }
}

/// z^T e. and z.^T e, or for a prompt e. and e by row.
template <class real>
void HessianProduct<real>::add_weight_terms(std::ptrdiff_t i, int h, const Tile& tile,
                                            double derivative, double move, Workspace& workspace,
                                            const Sums& sums, bool fresh) const {
  if (!wants_W_) return;
  const int d = s_.d, T = s_.T;
  const std::ptrdiff_t R = tile_rows_, dL = padded(d), size = T * R;
  const TangentArguments<real> in = rows_of(h, tile, workspace);
  const auto add_term = [&](real* sum) {
    sum += h * weight_size_;
    if (s_.shared_query) {  // a tile's rows are its own: only samples add to them
      multiply(tile.rows, int(dL), T, workspace.m, R, workspace.x, dL, sum + tile.first * dL, dL,
               !fresh);
      return;
    }
    multiply(tile.rows, int(dL), T, workspace.m, R, workspace.x, dL, workspace.e, dL, false);
    const real* z = data_.z + (i * s_.q + tile.first) * d;
    multiply(d, int(dL), tile.rows, z, d, workspace.e, dL, sum, dL, !fresh || tile.first > 0);
  };
  const real a = real(move), b = real(derivative);
  for (std::ptrdiff_t k = 0; k < size; ++k) workspace.m[k] = a * in.c[k] + b * in.dc[k];
  add_term(sums.of_W);
  if (!wants_plain_) return;
  for (std::ptrdiff_t k = 0; k < size; ++k) workspace.m[k] = b * in.c[k];
  add_term(sums.plain);
}

/// derivative. A X + derivative A. X of a classifier, by row; (A. X)^T G + (A X)^T G. of a layer,
/// transposed.
template <class real>
void HessianProduct<real>::add_readout_terms(int h, const Tile& tile, double derivative,
                                             double move, Workspace& workspace, const Sums& sums,
                                             bool fresh) const {
  if (!wants_readout_) return;
  const int T = s_.T, dL = padded(s_.d);
  const std::ptrdiff_t R = tile_rows_, size = T * R;
  const TangentArguments<real> in = rows_of(h, tile, workspace);
  real* sum = sums.of_readout + h * readout_size_;
  const real a = real(move), b = real(derivative);
  if (!s_.is_layer()) {
    for (std::ptrdiff_t k = 0; k < size; ++k) workspace.m[k] = in.s[k] * (a + b * in.ds[k]);
    multiply(tile.rows, dL, T, workspace.m, R, workspace.x, dL,
             sum + std::ptrdiff_t(tile.first) * dL, dL, !fresh);
    return;
  }
  const auto add_term = [&](const real* weights, const real* g, bool add) {
    multiply(tile.rows, dL, T, weights, R, workspace.x, dL, workspace.e, dL, false);
    multiply(s_.p, dL, tile.rows, g, s_.p, workspace.e, dL, sum, dL, add);
  };
  for (std::ptrdiff_t k = 0; k < size; ++k) workspace.m[k] = in.s[k] * in.ds[k];
  add_term(workspace.m, workspace.g_rows, !fresh || tile.first > 0);
  add_term(in.s, workspace.dg_rows, true);
}

template <class real>
void HessianProduct<real>::run_chunk(int chunk, Workspace& workspace) {
  const std::ptrdiff_t begin = s_.n * chunk / chunks_, end = s_.n * (chunk + 1) / chunks_;
  const std::ptrdiff_t keys = std::ptrdiff_t(s_.T) * s_.d, rows = std::ptrdiff_t(s_.q) * s_.d;
  for (std::ptrdiff_t i = begin; i < end; ++i) {
    kernels_.pack_rows(data_.x + i * keys, s_.T, s_.d, padded(s_.T), workspace.xt);
    kernels_.scale_rows(data_.x + i * keys, real(1), s_.T, s_.d, padded(s_.d), workspace.x);
    if (!s_.shared_query)
      kernels_.pack_rows(data_.z + i * rows, s_.q, s_.d, padded(s_.q), workspace.zt);
    if (s_.is_layer())
      run_layer(i, workspace, sums_[chunk], i == begin);
    else
      run_classifier(i, workspace, sums_[chunk], i == begin);
  }
}

template <class real>
void HessianProduct<real>::run() {
  std::atomic<int> next{0};
  run_team(members_, [&](const Member& member) {
    const FlushToZero flush;
    for (int chunk; (chunk = next.fetch_add(1, std::memory_order_relaxed)) < chunks_;)
      run_chunk(chunk, workspaces_[member.index]);
  });
  reduce();
}

template <class real>
void HessianProduct<real>::reduce() const {
  const int d = s_.d, q = s_.q, p = s_.p, r = model_.rank;
  const std::ptrdiff_t dd = std::ptrdiff_t(d) * d, qd = std::ptrdiff_t(q) * d;
  const auto sum_chunks = [&](real* Sums::* part, std::ptrdiff_t at, int rows, int columns,
                              real* out) {
    const std::ptrdiff_t stride = chunks_ > 1 ? sums_[1].*part - sums_[0].*part : 0;
    kernels_.reduce_features({sums_[0].*part + at, stride, chunks_, rows, columns, out});
  };
  const auto product = [&](int M, int N, int K, const real* a, std::ptrdiff_t a_row,
                           std::ptrdiff_t a_column, const real* b, std::ptrdiff_t b_row,
                           std::ptrdiff_t b_column, real* c, real factor, bool add) {
    kernels_.batched_gemm(
        {M, N, K, 1, a, a_row, a_column, b, b_row, b_column, c, N, 1, factor, add});
  };
  std::vector<real> of_W(dd), plain_W(dd), e(qd), e_plain(qd), vt(std::size_t(p) * d);
  const Tensors<const real*>& at = model_.at;
  if (out_[kPrompt]) std::fill_n(out_[kPrompt], qd, real(0));
  for (int h = 0; h < s_.H; ++h) {
    if (wants_readout_ && s_.is_layer()) {
      sum_chunks(&Sums::of_readout, h * readout_size_, p, d, vt.data());
      for (int k = 0; k < d; ++k)
        for (int o = 0; o < p; ++o) out_[kV][(std::ptrdiff_t(h) * d + k) * p + o] = vt[o * d + k];
    } else if (wants_readout_) {
      sum_chunks(&Sums::of_readout, h * readout_size_, q, d, out_[kU] + h * qd);
    }
    if (!wants_W_) continue;
    if (s_.shared_query) {
      sum_chunks(&Sums::of_W, h * weight_size_, q, d, e.data());
      sum_chunks(&Sums::plain, h * weight_size_, q, d, e_plain.data());
      product(d, d, q, at[kPrompt], 1, d, e.data(), d, 1, of_W.data(), scale_, false);
      product(d, d, q, at[kPrompt], 1, d, e_plain.data(), d, 1, plain_W.data(), scale_, false);
      if (tangent_[kPrompt])
        product(d, d, q, tangent_[kPrompt], 1, d, e_plain.data(), d, 1, of_W.data(), scale_, true);
      if (out_[kPrompt]) {
        product(q, d, d, e.data(), d, 1, w_.value + h * dd, 1, d, out_[kPrompt], real(1), true);
        if (w_.tangent)
          product(q, d, d, e_plain.data(), d, 1, w_.tangent + h * dd, 1, d, out_[kPrompt], real(1),
                  true);
      }
    } else {
      sum_chunks(&Sums::of_W, h * weight_size_, d, d, of_W.data());
      for (real& entry : of_W) entry *= scale_;
      if (wants_plain_) sum_chunks(&Sums::plain, h * weight_size_, d, d, plain_W.data());
      for (real& entry : plain_W) entry *= wants_plain_ ? scale_ : real(0);
    }
    if (out_[kW]) std::copy_n(of_W.data(), dd, out_[kW] + h * dd);
    if (!model_.is_factored()) continue;
    // By Q: W. K + W K., by K: W.^T Q + W^T Q., W standing for the gradient by it; tied: both.
    const std::ptrdiff_t of_head = std::ptrdiff_t(h) * d * r;
    const bool tied = model_.is_tied();
    const real *Q = at[kQ] + of_head, *K = tied ? Q : at[kK] + of_head;
    const real* dQ = tangent_[kQ] ? tangent_[kQ] + of_head : nullptr;
    const real* dK = tied ? dQ : tangent_[kK] ? tangent_[kK] + of_head : nullptr;
    const auto by_factor = [&](bool transposed, const real* other, const real* other_move,
                               real* out, bool add) {
      const std::ptrdiff_t row = transposed ? 1 : d, column = transposed ? d : 1;
      product(d, r, d, of_W.data(), row, column, other, r, 1, out, real(1), add);
      if (other_move)
        product(d, r, d, plain_W.data(), row, column, other_move, r, 1, out, real(1), true);
    };
    if (out_[kQ]) by_factor(false, K, dK, out_[kQ] + of_head, false);
    if (out_[kQ] && tied) by_factor(true, Q, dQ, out_[kQ] + of_head, true);
    if (out_[kK]) by_factor(true, Q, dQ, out_[kK] + of_head, false);
  }
}

}  // namespace

template <class real>
void hessian_product(const Data<real>& data, const Model<const real*>& model,
                     const Tensors<const real*>& tangent, real scale, Loss loss, int threads,
                     const Tensors<real*>& out) {
  const CleanData<real> clean(data, 1);
  const Shape& s = data.shape;
  const bool tied = model.is_tied();
  const Exponents exponents = exponents_of_call(*clean, model, true);
  const RescaledData<real> scaled_data(*clean, 1, exponents);
  const RescaledTensors<real> tensors(model.at, s, model.rank, tied, exponents);
  const RescaledTensors<real> moves(tangent, s, model.rank, tied, exponents);
  const Model<const real*> scaled_model{*tensors, model.rank};
  HessianProduct<real>(*scaled_data, scaled_model, *moves, scale, loss, threads, out).run();
  for (int name = 0; name < kTensors && exponents.any(); ++name)
    if (out[name])
      scale_by_power(out[name], extent(TensorName(name), s, model.rank).all(),
                     exponents.of(TensorName(name), tied), out[name]);
}

template void hessian_product<float>(const Data<float>&, const Model<const float*>&,
                                     const Tensors<const float*>&, float, Loss, int,
                                     const Tensors<float*>&);
template void hessian_product<double>(const Data<double>&, const Model<const double*>&,
                                      const Tensors<const double*>&, double, Loss, int,
                                      const Tensors<double*>&);

}  // namespace mhfast
