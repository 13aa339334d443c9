// The gradient of one sample and head is, with e = D X (z: queries, G: slopes of the outputs),
//
//   by W  z^T e        by U  slope A X        by V  (A X)^T G        by the prompt  e W^T
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
#include "clean.hpp"
#include "factors.hpp"
#include "float_mode.hpp"
#include "rescale.hpp"
#include "scratch.hpp"
#include "team.hpp"
#include "tuning.hpp"

namespace mhfast {
namespace {

/// Pointers to a tensor and to its tangent, the derivative along the direction; null: zero.
template <class real>
struct Moving {
  const real *value = nullptr, *move = nullptr;
};

template <class real>
class HessianProduct {
 public:
  HessianProduct(const Data<real>& data, const Model<const real*>& model,
                 const Tensors<const real*>& tangent, real scale, Loss loss, int threads,
                 const Tensors<real*>& out);
  void run();

 private:
  struct Room {                                    // a thread's arrays; R: rows of a tile
    real *xt, *x, *zt;                             // keys (d, TL), (T, dL); queries (d, qL)
    real *p, *dp, *ut, *dut, *yt, *dyt;            // (d, R): z W, G V^T, A X
    real *s, *ds, *c, *dc;                         // (heads, T, R)
    real* m;                                       // (T, R)
    real *limits, *readouts, *moves;               // (R)
    real *f, *df, *g, *dg, *y, *g_rows, *dg_rows;  // outputs: (p, R), their y and slopes (R, p)
    real* e;                                       // (R, dL)
  };
  struct Sums {          // of a chunk
    real *of_W, *plain;  // (H, d, dL), or of a prompt D X (H, q, dL): moved and as it is
    real* of_readout;    // (H, q, dL), of a layer transposed (H, p, dL)
  };
  struct Tile {
    int first, rows, padded;
  };

  void choose_sizes();
  void lay_out(Layout& layout);
  void load_weights();
  void load_readout(std::vector<real>& value, std::vector<real>& move);
  void run_chunk(int chunk, Room& room);
  void run_classifier(std::ptrdiff_t i, Room& room, const Sums& sums, bool fresh);
  void run_layer(std::ptrdiff_t i, Room& room, const Sums& sums, bool fresh);
  void find_limits(std::ptrdiff_t i, const Tile& tile, Room& room) const;
  void score(int h, const Tile& tile, Room& room) const;
  void derive(int h, const Tile& tile, const Moving<real>& readout, std::ptrdiff_t row,
              Room& room) const;
  void add_outputs(int h, const Tile& tile, Room& room) const;
  void find_slopes(std::ptrdiff_t i, const Tile& tile, Room& room) const;
  // `fresh`: a sample is the first of its chunk, whose sums are not set yet.
  void add_weight_terms(std::ptrdiff_t i, int h, const Tile& tile, double slope, double move,
                        Room& room, const Sums& sums, bool fresh) const;
  void add_readout_terms(int h, const Tile& tile, double slope, double move, Room& room,
                         const Sums& sums, bool fresh) const;
  void reduce() const;

  int padded(int size) const { return int(round_up(size, kernels_.lanes)); }
  std::ptrdiff_t slot(int h) const { return heads_kept_ > 1 ? h * s_.T * tile_rows_ : 0; }
  TangentArguments<real> rows_of(int h, const Tile& tile, Room& room) const {
    const std::ptrdiff_t at = slot(h);
    return {s_.T,          tile.padded / kernels_.lanes,
            tile_rows_,    data_.is_limited() ? room.limits : nullptr,
            room.s + at,   room.ds + at,
            room.c + at,   room.dc + at,
            room.readouts, room.moves};
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
  bool multiply_moves(int M, int N, int K, const Moving<real>& left, std::ptrdiff_t left_row,
                      const Moving<real>& right, std::ptrdiff_t right_row, real* out,
                      std::ptrdiff_t out_row, bool add) const {
    if (left.move)
      multiply(M, N, K, left.move, left_row, right.value, right_row, out, out_row, add);
    if (right.move)
      multiply(M, N, K, left.value, left_row, right.move, right_row, out, out_row,
               add || left.move);
    return left.move || right.move;
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
  Moving<real> w_, readout_, queries_;
  std::vector<Room> rooms_;
  std::vector<Sums> sums_;
  Block block_;
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
  rooms_.resize(members_);
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
  Layout measure;
  lay_out(measure);
  Layout layout(block_.reserve(measure.size()));
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
void HessianProduct<real>::lay_out(Layout& layout) {
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
  for (Room& room : rooms_) {
    take(d * TL, {&room.xt});
    take(T * dL, {&room.x});
    take(d * qL, {&room.zt});
    take(d * R, {&room.p, &room.dp, &room.ut, &room.dut, &room.yt, &room.dyt});
    take(heads_kept_ * T * R, {&room.s, &room.ds, &room.c, &room.dc});
    take(T * R, {&room.m});
    take(R, {&room.limits, &room.readouts, &room.moves});
    take(p * R, {&room.f, &room.df, &room.g, &room.dg, &room.y, &room.g_rows, &room.dg_rows});
    take(R * dL, {&room.e});
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
      kernels_.small_product(
          {s_.d, s_.d, r, 1, move[kQ] + of_head, r, 1, K, 1, r, to, s_.d, 1, real(1), true});
    if (dK)
      kernels_.small_product({s_.d, s_.d, r, 1, at[kQ] + of_head, r, 1, dK + of_head, 1, r, to,
                              s_.d, 1, real(1), true});
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
void HessianProduct<real>::find_limits(std::ptrdiff_t i, const Tile& tile, Room& room) const {
  if (data_.is_limited()) data_.write_limits(i, tile.first, tile.rows, tile.padded, room.limits);
}

/// P = z W, S = P X^T and their moves, then A and its relative move.
template <class real>
void HessianProduct<real>::score(int h, const Tile& tile, Room& room) const {
  const int d = s_.d, T = s_.T, TL = padded(T), qL = padded(s_.q);
  const std::ptrdiff_t R = tile_rows_, dd = std::ptrdiff_t(d) * d;
  const TangentArguments<real> in = rows_of(h, tile, room);
  const Moving<real> w{w_.value + h * dd, w_.move ? w_.move + h * dd : nullptr};
  const Moving<real> z{(s_.shared_query ? queries_.value : room.zt) + tile.first,
                       queries_.move ? queries_.move + tile.first : nullptr};
  multiply(d, tile.padded, d, w.value, d, z.value, qL, room.p, R, false);
  const bool moves = multiply_moves(d, tile.padded, d, w, d, z, qL, room.dp, R, false);
  multiply(T, tile.padded, d, room.xt, TL, room.p, R, in.s, R, false);
  if (moves)
    multiply(T, tile.padded, d, room.xt, TL, room.dp, R, in.ds, R, false);
  else
    std::fill_n(in.ds, T * R, real(0));
  kernels_.tangent_weights(in);
}

/// C = U X^T and its move, then D, its move and the readouts; U (d, rows) by its rows.
template <class real>
void HessianProduct<real>::derive(int h, const Tile& tile, const Moving<real>& u,
                                  std::ptrdiff_t row, Room& room) const {
  const int d = s_.d, T = s_.T, TL = padded(T);
  const std::ptrdiff_t R = tile_rows_;
  const TangentArguments<real> in = rows_of(h, tile, room);
  multiply(T, tile.padded, d, room.xt, TL, u.value, row, in.c, R, false);
  if (u.move)
    multiply(T, tile.padded, d, room.xt, TL, u.move, row, in.dc, R, false);
  else
    std::fill_n(in.dc, T * R, real(0));
  kernels_.tangent_derivative(in);
}

template <class real>
void HessianProduct<real>::run_classifier(std::ptrdiff_t i, Room& room, const Sums& sums,
                                          bool fresh) {
  const int qL = padded(s_.q);
  const bool kept = heads_kept_ == s_.H && tile_rows_ >= qL;
  const std::ptrdiff_t of_head = std::ptrdiff_t(s_.d) * qL;
  const auto for_heads = [&](const auto& body) {
    for (int first = 0; first < s_.q; first += int(tile_rows_)) {
      const int rows = std::min(int(tile_rows_), s_.q - first);
      const Tile tile{first, rows, padded(rows)};
      find_limits(i, tile, room);
      for (int h = 0; h < s_.H; ++h) body(h, tile);
    }
  };
  const auto evaluate = [&](int h, const Tile& tile) {
    score(h, tile, room);
    const std::ptrdiff_t at = h * of_head + tile.first;
    derive(h, tile, {readout_.value + at, readout_.move ? readout_.move + at : nullptr}, qL, room);
  };
  double phi = 0, phi_move = 0;
  for_heads([&](int h, const Tile& tile) {
    evaluate(h, tile);
    for (int t = 0; t < tile.rows; ++t) {
      phi += double(room.readouts[t]);
      phi_move += double(room.moves[t]);
    }
  });
  const double by_heads = 1 / std::sqrt(double(s_.H)), w = data_.weight_of(0, i, 0);
  const double y = double(data_.y[i]), share = w / total_ * by_heads;
  const double slope = w == 0 ? 0.0 : loss_term(loss_, phi * by_heads, y).slope * share;
  const double move =
      w == 0 ? 0.0 : curvature(loss_, phi * by_heads, y) * (phi_move * by_heads) * share;
  for_heads([&](int h, const Tile& tile) {
    if (!kept) evaluate(h, tile);
    add_weight_terms(i, h, tile, slope, move, room, sums, fresh);
    add_readout_terms(h, tile, slope, move, room, sums, fresh);
  });
}

/// Adds one head's outputs F = A X V and their moves, outputs by rows as (p, R).
template <class real>
void HessianProduct<real>::add_outputs(int h, const Tile& tile, Room& room) const {
  const int d = s_.d, T = s_.T, p = s_.p, N = tile.padded;
  const std::ptrdiff_t R = tile_rows_, dL = padded(d), of_head = std::ptrdiff_t(h) * d * p;
  const TangentArguments<real> in = rows_of(h, tile, room);
  for (std::ptrdiff_t k = 0; k < T * R; ++k) room.m[k] = in.s[k] * in.ds[k];
  multiply(d, N, T, room.x, dL, in.s, R, room.yt, R, false);
  multiply(d, N, T, room.x, dL, room.m, R, room.dyt, R, false);
  const Moving<real> v{model_.at[kV] + of_head, tangent_[kV] ? tangent_[kV] + of_head : nullptr};
  multiply(p, N, d, v.value, p, room.yt, R, room.f, R, h > 0);
  multiply_moves(p, N, d, v, p, {room.yt, room.dyt}, R, room.df, R, h > 0);
}

/// Slopes of the outputs of a tile and their moves, both ways round.
template <class real>
void HessianProduct<real>::find_slopes(std::ptrdiff_t i, const Tile& tile, Room& room) const {
  const int p = s_.p;
  const std::ptrdiff_t R = tile_rows_, row_targets = data_.targets / s_.q;
  std::fill_n(room.g, p * R, real(0));
  std::fill_n(room.dg, p * R, real(0));
  for (int t = 0; t < tile.rows; ++t) {
    const double w = data_.weight_of(0, i, tile.first + t), share = w / total_;
    const real* given = data_.y + i * data_.targets + (tile.first + t) * row_targets;
    // Targets beside the outputs, whose numbers are R apart.
    for (int o = 0; o < row_targets; ++o) room.y[o * R + t] = given[o];
    if (w != 0) {
      row_loss(loss_, room.f + t, room.y + t, R, p, true,
               [&](int o, double slope) { room.g[o * R + t] = real(slope * share); });
      move_slopes(loss_, room.f + t, room.df + t, room.y + t, R, p,
                  [&](int o, double move) { room.dg[o * R + t] = real(move * share); });
    }
    for (int o = 0; o < p; ++o) {
      room.g_rows[t * p + o] = room.g[o * R + t];
      room.dg_rows[t * p + o] = room.dg[o * R + t];
    }
  }
}

template <class real>
void HessianProduct<real>::run_layer(std::ptrdiff_t i, Room& room, const Sums& sums, bool fresh) {
  const std::ptrdiff_t R = tile_rows_;
  for (int first = 0; first < s_.q; first += int(R)) {
    const int rows = std::min(int(R), s_.q - first);
    const Tile tile{first, rows, padded(rows)};
    find_limits(i, tile, room);
    for (int h = 0; h < s_.H; ++h) {
      score(h, tile, room);
      add_outputs(h, tile, room);
    }
    find_slopes(i, tile, room);
    const Moving<real> g{room.g, room.dg};
    for (int h = 0; h < s_.H; ++h) {
      const std::ptrdiff_t of_head = std::ptrdiff_t(h) * s_.d * s_.p;
      const Moving<real> vt{readout_.value + of_head,
                            readout_.move ? readout_.move + of_head : nullptr};
      multiply(s_.d, tile.padded, s_.p, vt.value, s_.d, g.value, R, room.ut, R, false);
      multiply_moves(s_.d, tile.padded, s_.p, vt, s_.d, g, R, room.dut, R, false);
      derive(h, tile, {room.ut, room.dut}, R, room);
      add_weight_terms(i, h, tile, 1, 0, room, sums, fresh);
      add_readout_terms(h, tile, 1, 0, room, sums, fresh);
    }
  }
}

/// z^T e. and z.^T e, or for a prompt e. and e by row.
template <class real>
void HessianProduct<real>::add_weight_terms(std::ptrdiff_t i, int h, const Tile& tile, double slope,
                                            double move, Room& room, const Sums& sums,
                                            bool fresh) const {
  if (!wants_W_) return;
  const int d = s_.d, T = s_.T;
  const std::ptrdiff_t R = tile_rows_, dL = padded(d), size = T * R;
  const TangentArguments<real> in = rows_of(h, tile, room);
  const auto add_term = [&](real* sum) {
    sum += h * weight_size_;
    if (s_.shared_query) {  // a tile's rows are its own: only samples add to them
      multiply(tile.rows, int(dL), T, room.m, R, room.x, dL, sum + tile.first * dL, dL, !fresh);
      return;
    }
    multiply(tile.rows, int(dL), T, room.m, R, room.x, dL, room.e, dL, false);
    const real* z = data_.z + (i * s_.q + tile.first) * d;
    multiply(d, int(dL), tile.rows, z, d, room.e, dL, sum, dL, !fresh || tile.first > 0);
  };
  const real a = real(move), b = real(slope);
  for (std::ptrdiff_t k = 0; k < size; ++k) room.m[k] = a * in.c[k] + b * in.dc[k];
  add_term(sums.of_W);
  if (!wants_plain_) return;
  for (std::ptrdiff_t k = 0; k < size; ++k) room.m[k] = b * in.c[k];
  add_term(sums.plain);
}

/// slope. A X + slope A. X of a classifier, by row; (A. X)^T G + (A X)^T G. of a layer, transposed.
template <class real>
void HessianProduct<real>::add_readout_terms(int h, const Tile& tile, double slope, double move,
                                             Room& room, const Sums& sums, bool fresh) const {
  if (!wants_readout_) return;
  const int T = s_.T, dL = padded(s_.d);
  const std::ptrdiff_t R = tile_rows_, size = T * R;
  const TangentArguments<real> in = rows_of(h, tile, room);
  real* sum = sums.of_readout + h * readout_size_;
  const real a = real(move), b = real(slope);
  if (!s_.is_layer()) {
    for (std::ptrdiff_t k = 0; k < size; ++k) room.m[k] = in.s[k] * (a + b * in.ds[k]);
    multiply(tile.rows, dL, T, room.m, R, room.x, dL, sum + std::ptrdiff_t(tile.first) * dL, dL,
             !fresh);
    return;
  }
  const auto add_term = [&](const real* weights, const real* g, bool add) {
    multiply(tile.rows, dL, T, weights, R, room.x, dL, room.e, dL, false);
    multiply(s_.p, dL, tile.rows, g, s_.p, room.e, dL, sum, dL, add);
  };
  for (std::ptrdiff_t k = 0; k < size; ++k) room.m[k] = in.s[k] * in.ds[k];
  add_term(room.m, room.g_rows, !fresh || tile.first > 0);
  add_term(in.s, room.dg_rows, true);
}

template <class real>
void HessianProduct<real>::run_chunk(int chunk, Room& room) {
  const std::ptrdiff_t begin = s_.n * chunk / chunks_, end = s_.n * (chunk + 1) / chunks_;
  const std::ptrdiff_t keys = std::ptrdiff_t(s_.T) * s_.d, rows = std::ptrdiff_t(s_.q) * s_.d;
  for (std::ptrdiff_t i = begin; i < end; ++i) {
    kernels_.pack_rows(data_.x + i * keys, s_.T, s_.d, padded(s_.T), room.xt);
    kernels_.scale_rows(data_.x + i * keys, real(1), s_.T, s_.d, padded(s_.d), room.x);
    if (!s_.shared_query) kernels_.pack_rows(data_.z + i * rows, s_.q, s_.d, padded(s_.q), room.zt);
    if (s_.is_layer())
      run_layer(i, room, sums_[chunk], i == begin);
    else
      run_classifier(i, room, sums_[chunk], i == begin);
  }
}

template <class real>
void HessianProduct<real>::run() {
  std::atomic<int> next{0};
  run_team(members_, [&](const Member& member) {
    const FlushToZero flush;
    for (int chunk; (chunk = next.fetch_add(1, std::memory_order_relaxed)) < chunks_;)
      run_chunk(chunk, rooms_[member.index]);
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
    kernels_.small_product(
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
        if (w_.move)
          product(q, d, d, e_plain.data(), d, 1, w_.move + h * dd, 1, d, out_[kPrompt], real(1),
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
