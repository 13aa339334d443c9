#include "hessian_product.hpp"

#include <atomic>
#include <cmath>

#include "../problem/factors.hpp"
#include "../problem/readout.hpp"
#include "../runtime/float_mode.hpp"
#include "../runtime/team.hpp"
#include "../runtime/tuning.hpp"
#include "row_gradients.hpp"

namespace mhfast {

template <class real>
HessianProduct<real>::HessianProduct(const HessianCall<real>& call, int sum_rows, bool row_by_row)
    : data_(call.data),
      model_(call.model),
      tangent_(call.tangent),
      scale_(call.scale),
      loss_(call.loss),
      out_(call.out),
      by_V_(call.by_V),
      s_(call.data.shape),
      total_(call.data.total_weight(0, call.loss)),
      wants_W_(out_[kW] || out_[kQ] || out_[kK] || out_[kPrompt]),
      wants_readout_(out_[kU] || out_[kV]),
      wants_plain_(wants_W_ && (model_.is_factored() || s_.shared_query)),
      moves_(tangent_[kW] || tangent_[kQ] || tangent_[kK] || tangent_[kPrompt]),
      readout_only_(!wants_W_ && !moves_) {
  choose_sizes(sum_rows, row_by_row);
  const double flops = double(s_.n) * s_.H * s_.q * (8.0 * s_.d * s_.d + 16.0 * s_.T * s_.d);
  members_ = useful_threads(call.threads, chunks_, flops);
  if (blocks_)
    of_members_.resize(members_);
  else
    workspaces_.resize(members_);
  sums_.resize(chunks_);
  if (s_.shared_query) {
    const auto pack = [&](const real* from, std::vector<real>& to) -> const real* {
      if (!from) return nullptr;
      to.resize(std::size_t(s_.d) * padded(s_.q));
      kernels_.pack_rows(from, s_.q, s_.d, padded(s_.q), to.data());
      return to.data();
    };
    queries_ = {pack(model_.at[kPrompt], prompt_value_), pack(tangent_[kPrompt], prompt_tangent_)};
  }
  Arena measure;
  lay_out(measure);
  Arena layout(call.block.reserve(measure.size()));
  lay_out(layout);
  load_weights();
}

template <class real>
void HessianProduct<real>::choose_sizes(int sum_rows, bool row_by_row) {
  const int L = kernels_.lanes, dL = padded(s_.d), qL = padded(s_.q);
  const double of_row = 4.0 * s_.T * sizeof(real);  // A, D and their tangents
  const auto rows_within = [&](double bytes) {
    return std::clamp<std::ptrdiff_t>(std::ptrdiff_t(bytes / of_row) / L * L, L, qL);
  };
  const bool all_fit = kTangentTileBytes >= of_row * s_.H * qL;
  heads_kept_ = all_fit || row_by_row ? s_.H : 1;
  tile_rows_ = rows_within(kTangentTileBytes / heads_kept_);
  blocks_ = prefers_blocks();
  values_first_ = !blocks_ && prefers_values_first();
  of_keys_ = values_first_ ? round_up(std::ptrdiff_t(s_.H) * s_.T, L) : 0;
  // Of few rows and keys A X takes less time than its transpose.
  const double rows_of_tile = double(std::min<std::ptrdiff_t>(tile_rows_, s_.q));
  if (s_.is_layer() && !values_first_ &&
      kTransposeCycles * tile_rows_ < kSharedProductCycles * s_.T * rows_of_tile)
    attended_size_ = s_.d * tile_rows_;
  rows_row_ = row_gradient_size(s_, L);
  const double rows = double(s_.n) * s_.q, of_rows = s_.H * rows * double(rows_row_) * sizeof(real);
  has_rows_ = !blocks_ && wants_W_ && !s_.shared_query && !s_.identity_w &&
              rows <= kRowGradients * s_.d && of_rows * (1 + wants_plain_) <= kTangentPartialBytes;
  weight_size_ = has_rows_ ? 0 : std::ptrdiff_t(s_.shared_query ? s_.q : s_.d) * dL;
  readout_size_ = std::ptrdiff_t(sum_rows) * dL;
  const double sums = double(s_.H) * (2 * weight_size_ + readout_size_) * sizeof(real);
  const double units = blocks_ ? std::ceil(double(s_.n) / L) : double(s_.n);
  chunks_ =
      int(std::max(1.0, std::min({kTangentPartialBytes / sums, double(kTangentChunks), units})));
  group_samples();
  if (values_first_) values_row_ = data_.self ? queries_row_ : std::ptrdiff_t(padded(s_.T));
}

/// By the multiply-adds of what takes X V in the place of A X and G V^T, of a sample and head.
template <class real>
bool HessianProduct<real>::prefers_values_first() const {
  if (!s_.is_layer() || s_.identity_v) return false;
  const double T = s_.T, q = s_.q, d = s_.d, p = s_.p;
  return T * p * (3 * d + 9 * q) < q * d * (6 * T + 9 * p);
}

/// How many samples go through W together: as many as leave their products in the second-level
/// cache. Where W does not fit it as well, there are no more chunks than such groups.
template <class real>
void HessianProduct<real>::group_samples() {
  const int qL = padded(s_.q);
  together_ = !blocks_ && !s_.identity_w && tile_rows_ >= qL;
  queries_row_ = qL;
  w_row_ = s_.d;
  if (!together_ || s_.shared_query) return;
  factors_ =
      model_.is_factored() && kFactorColumns * model_.rank <= s_.d && (has_rows_ || !wants_W_);
  const bool is_large = double(s_.d) * s_.d * sizeof(real) > kSecondLevelBytes;
  by_features_ = is_large && !model_.is_factored();
  if (by_features_ && !reads_in_place<real>(s_.d, kernels_.lanes)) w_row_ = rows_row_;
  const double of_row = 2.0 * s_.H * s_.d * sizeof(real);
  const double rows = std::min<double>(kTangentRows, kTangentTileBytes / of_row);
  const std::ptrdiff_t most = std::max<std::ptrdiff_t>(1, std::ptrdiff_t(rows) / s_.q);
  if (!factors_ && is_large)
    chunks_ = int(std::min<std::ptrdiff_t>(chunks_, (s_.n + most - 1) / most));
  const std::ptrdiff_t of_chunk = (s_.n + chunks_ - 1) / chunks_,
                       groups = (of_chunk + most - 1) / most;
  group_ = int((of_chunk + groups - 1) / groups);
  queries_row_ = padded((group_ - 1) * s_.q + qL);
}

template <class real>
void HessianProduct<real>::lay_out(Arena& layout) {
  const std::size_t d = s_.d, T = s_.T, p = s_.p, H = s_.H, R = tile_rows_;
  const std::size_t dL = padded(s_.d), TL = padded(s_.T);
  const auto take = [&](std::size_t size, std::initializer_list<real**> arrays) {
    for (real** array : arrays) *array = layout.take<real>(size);
  };
  for (Sums& sums : sums_) {
    take(wants_W_ ? H * weight_size_ : 0, {&sums.of_W});
    take(wants_plain_ ? H * weight_size_ : 0, {&sums.plain});
    take(wants_readout_ ? H * readout_size_ : 0, {&sums.of_readout});
    take(by_V_ ? H * readout_size_ : 0, {&sums.by_V});
  }
  const std::size_t rows = has_rows_ ? H * s_.n * s_.q * rows_row_ : 0;
  const std::size_t of_W = s_.identity_w || factors_ ? 0 : d * d;
  const std::size_t W = of_W > 0 && copies_W() ? H * d * w_row_ : 0;
  take(W, {&w_value_});
  take(has_tangent_of_W() ? W : 0, {&w_tangent_});
  take(out_[kW] ? 0 : of_W, {&of_W_});
  take(wants_plain_ ? of_W : 0, {&plain_W_});
  take(rows, {&rows_moved_});
  take(wants_plain_ ? rows : 0, {&rows_plain_});
  for (Block& block : of_members_) block = take_block(layout);
  for (Workspace& workspace : workspaces_) {
    take(d * TL, {&workspace.xt});
    take(T * dL, {&workspace.x});
    take(s_.shared_query ? 0 : d * queries_row_, {&workspace.zt});
    take(together_ ? H * dL * queries_row_ : d * R, {&workspace.p, &workspace.dp});
    take(by_features_ ? queries_row_ * dL : 0, {&workspace.p_rows});
    take(factors_ ? model_.rank * queries_row_ : 0, {&workspace.zq, &workspace.dzq});
    take(d * R, {&workspace.ut, &workspace.dut});
    take(attended_size_ > 0 ? H * d * R : d * R, {&workspace.yt, &workspace.dyt});
    take(s_.is_layer() || !readout_only_ ? 0 : H * s_.q * dL, {&workspace.ax});
    take(heads_kept_ * T * R, {&workspace.s, &workspace.ds});
    take(readout_only_ ? 0 : heads_kept_ * T * R, {&workspace.c, &workspace.dc});
    take(T * R, {&workspace.m});
    const bool is_softmax = data_.row_map.is_softmax();
    take(is_softmax ? 0 : (values_first_ ? H : 1) * T * R, {&workspace.a});
    take(values_first_ ? H * T * R : is_softmax ? 0 : T * R, {&workspace.da});
    const std::size_t values = values_first_ ? H * p * values_row_ : 0;
    take(values, {&workspace.values, &workspace.value_rows});
    take(tangent_[kV] ? values : 0, {&workspace.dvalues, &workspace.dvalue_rows});
    take(R * of_keys_, {&workspace.turned});
    take(p * of_keys_, {&workspace.by_values, &workspace.by_V, &workspace.by_value_rows});
    take(R, {&workspace.limits, &workspace.readouts, &workspace.readout_tangents});
    take(p * R, {&workspace.f, &workspace.df, &workspace.g, &workspace.dg, &workspace.y,
                 &workspace.g_rows, &workspace.dg_rows});
    take(R * dL, {&workspace.e});
  }
}

/// scale W and its tangent, from factors where there are; of an identity neither.
template <class real>
void HessianProduct<real>::load_weights() {
  if (s_.identity_w) return;
  if (factors_) return load_factors();
  const int d = s_.d, r = model_.rank, rows = s_.H * d;
  const Tensors<const real*>&at = model_.at, &tangent = tangent_;
  if (!copies_W()) {
    w_ = {at[kW], tangent[kW]};
    return;
  }
  w_ = {w_value_, has_tangent_of_W() ? w_tangent_ : nullptr};
  if (!model_.is_factored()) {
    kernels_.scale_rows(at[kW], scale_, rows, d, int(w_row_), w_value_);
    if (w_.tangent) kernels_.scale_rows(tangent[kW], scale_, rows, d, int(w_row_), w_tangent_);
    return;
  }
  const TensorName right = model_.is_tied() ? kQ : kK;
  for (int h = 0; h < s_.H; ++h) {
    const std::ptrdiff_t of_head = std::ptrdiff_t(h) * d * r;
    const auto multiply_factors = [&](const real* Q, const real* K, real* to, bool add) {
      kernels_.batched_gemm({d, d, r, 1, Q + of_head, r, 1, K + of_head, 1, r, to + h * d * w_row_,
                             d, 1, scale_, add});
    };
    multiply_factors(at[kQ], at[right], w_value_, false);
    if (tangent[kQ]) multiply_factors(tangent[kQ], at[right], w_tangent_, false);
    if (tangent[right]) multiply_factors(at[kQ], tangent[right], w_tangent_, tangent[kQ]);
  }
}

template <class real>
void HessianProduct<real>::load_factors() {
  const int d = s_.d, r = model_.rank;
  const std::ptrdiff_t factor = std::ptrdiff_t(d) * r, size = s_.H * factor;
  const auto scale = [&](const real* from, std::vector<real>& to) -> const real* {
    if (!from) return nullptr;
    to.resize(size);
    std::transform(from, from + size, to.begin(), [this](real x) { return scale_ * x; });
    return to.data();
  };
  const auto turn = [&](const real* from, std::vector<real>& to) -> const real* {
    if (!from) return nullptr;
    to.resize(size);
    for (int h = 0; h < s_.H; ++h)
      kernels_.pack_rows(from + h * factor, d, r, d, to.data() + h * factor);
    return to.data();
  };
  const TensorName right = model_.is_tied() ? kQ : kK;
  q_ = {scale(model_.at[kQ], q_value_), scale(tangent_[kQ], q_tangent_)};
  kt_ = {turn(model_.at[right], kt_value_), turn(tangent_[right], kt_tangent_)};
}

template <class real>
void HessianProduct<real>::load_readout(int rows, int columns, int row) {
  const TensorName name = readout_of(s_).name;
  const auto pack = [&](const real* from, std::vector<real>& to) -> const real* {
    if (!from) return nullptr;
    to.resize(std::size_t(s_.H) * columns * row);
    for (std::ptrdiff_t h = 0; h < s_.H; ++h)
      kernels_.pack_rows(from + h * rows * columns, rows, columns, row,
                         to.data() + h * columns * row);
    return to.data();
  };
  readout_ = {pack(model_.at[name], readout_value_), pack(tangent_[name], readout_tangent_)};
}

template <class real>
void HessianProduct<real>::find_limits(std::ptrdiff_t i, const Tile& tile,
                                       Workspace& workspace) const {
  if (data_.is_limited())
    data_.write_limits(i, tile.first, tile.rows, tile.padded, workspace.limits);
}

/// P = z W, S = P X^T and their tangents, then A and its relative tangent; other row maps keep the
/// logits.
template <class real>
void HessianProduct<real>::score(int h, const Tile& tile, Workspace& workspace) const {
  const int d = s_.d, T = s_.T, TL = padded(T);
  const std::ptrdiff_t R = tile_rows_, dd = std::ptrdiff_t(d) * d, qL = queries_row_;
  const TangentArguments<real> in = rows_of(h, tile, workspace);
  WithTangent<real> p{workspace.p, workspace.dp};
  const std::ptrdiff_t p_row = together_ ? queries_row_ : R;
  const WithTangent<real> z{(s_.shared_query ? queries_.value : workspace.zt) + tile.first,
                            queries_.tangent ? queries_.tangent + tile.first : nullptr};
  bool has_tangent = z.tangent || w_.tangent || q_.tangent || kt_.tangent;
  if (together_) {
    const std::ptrdiff_t at = h * d * queries_row_ + workspace.row;
    p = {workspace.p + at, workspace.dp + at};
  } else if (s_.identity_w) {
    const auto scale = [&](const real* from, real* to) {
      for (int k = 0; from && k < d; ++k, from += qL, to += R)
        for (int t = 0; t < tile.padded; ++t) to[t] = scale_ * from[t];
    };
    scale(z.value, workspace.p);
    scale(z.tangent, workspace.dp);
  } else {
    const WithTangent<real> w{w_.value + h * dd, w_.tangent ? w_.tangent + h * dd : nullptr};
    multiply(d, tile.padded, d, w.value, d, z.value, qL, workspace.p, R, false);
    has_tangent = multiply_tangents(d, tile.padded, d, w, d, z, qL, workspace.dp, R, false);
  }
  multiply(T, tile.padded, d, workspace.xt, TL, p.value, p_row, in.s, R, false);
  if (has_tangent)
    multiply(T, tile.padded, d, workspace.xt, TL, p.tangent, p_row, in.ds, R, false);
  else if (!readout_only_ || !data_.row_map.is_softmax())
    std::fill_n(in.ds, T * R, real(0));
  find_weights(in);
}

/// Of softmax; other row maps keep the logits until their weights are needed.
template <class real>
void HessianProduct<real>::find_weights(TangentArguments<real> in) const {
  if (!data_.row_map.is_softmax()) return;
  if (readout_only_) in.ds = nullptr;
  kernels_.tangent_weights(in);
}

/// C = U X^T and its tangent, then D, its tangent and the readouts; U (d, rows) by its rows.
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

/// z^T e. and z.^T e, or for a prompt e. and e by row.
template <class real>
void HessianProduct<real>::add_weight_terms(std::ptrdiff_t i, int h, const Tile& tile,
                                            double derivative, double tangent, Workspace& workspace,
                                            const Sums& sums, bool fresh) const {
  if (!wants_W_) return;
  const int d = s_.d, T = s_.T;
  const std::ptrdiff_t R = tile_rows_, dL = padded(d), size = T * R;
  const TangentArguments<real> in = rows_of(h, tile, workspace);
  const auto add_term = [&](real* sum, real* rows) {
    if (has_rows_) {
      rows += (h * s_.n * s_.q + i * s_.q + tile.first) * rows_row_;
      multiply(tile.rows, int(dL), T, workspace.m, R, workspace.x, dL, rows, rows_row_, false);
      return;
    }
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
  const real a = real(tangent), b = real(derivative);
  for (std::ptrdiff_t k = 0; k < size; ++k) workspace.m[k] = a * in.c[k] + b * in.dc[k];
  add_term(sums.of_W, rows_moved_);
  if (!wants_plain_) return;
  for (std::ptrdiff_t k = 0; k < size; ++k) workspace.m[k] = b * in.c[k];
  add_term(sums.plain, rows_plain_);
}

/// The queries of `count` samples from i on, and z W of all heads with its tangent. Lanes beyond a
/// sample's rows hold those of the next, or what no result depends on.
template <class real>
void HessianProduct<real>::load_queries(std::ptrdiff_t i, int count, Workspace& workspace) const {
  const int d = s_.d, row = int(queries_row_);
  const int rows = padded(s_.shared_query ? s_.q : count * s_.q);
  const std::ptrdiff_t dd = std::ptrdiff_t(d) * d;
  if (!s_.shared_query)
    kernels_.pack_rows(data_.z + i * s_.q * d, count * s_.q, d, row, workspace.zt);
  if (!together_) return;
  const WithTangent<real> z{s_.shared_query ? queries_.value : workspace.zt, queries_.tangent};
  for (int h = 0; h < s_.H; ++h) {
    const std::ptrdiff_t at = std::ptrdiff_t(h) * d * row;
    if (by_features_) {
      multiply_features(h, w_.value, count * s_.q, workspace, workspace.p + at);
      if (w_.tangent) multiply_features(h, w_.tangent, count * s_.q, workspace, workspace.dp + at);
      continue;
    }
    if (factors_) {
      const int r = model_.rank;
      const auto of_head = [&](const real* x) {
        return x ? x + std::ptrdiff_t(h) * d * r : nullptr;
      };
      const WithTangent<real> kt{of_head(kt_.value), of_head(kt_.tangent)};
      const WithTangent<real> zq{workspace.zq, q_.tangent ? workspace.dzq : nullptr};
      multiply(r, rows, d, of_head(q_.value), r, z.value, row, workspace.zq, row, false);
      if (q_.tangent)
        multiply(r, rows, d, of_head(q_.tangent), r, z.value, row, workspace.dzq, row, false);
      multiply(d, rows, r, kt.value, d, zq.value, row, workspace.p + at, row, false);
      multiply_tangents(d, rows, r, kt, d, zq, row, workspace.dp + at, row, false);
      continue;
    }
    const WithTangent<real> w{w_.value + h * dd, w_.tangent ? w_.tangent + h * dd : nullptr};
    multiply(d, rows, d, w.value, d, z.value, row, workspace.p + at, row, false);
    multiply_tangents(d, rows, d, w, d, z, row, workspace.dp + at, row, false);
  }
}

/// P = z W of a head, (d, rows): with features as lanes, then transposed.
template <class real>
void HessianProduct<real>::multiply_features(int h, const real* w, int rows,
                                             const Workspace& workspace, real* to) const {
  const int dL = padded(s_.d);
  multiply(rows, dL, s_.d, workspace.zt, queries_row_, w + h * s_.d * w_row_, w_row_,
           workspace.p_rows, dL, false);
  kernels_.pack_rows(workspace.p_rows, rows, dL, int(queries_row_), to);
}

template <class real>
void HessianProduct<real>::run_chunk(int chunk, Workspace& workspace) {
  const std::ptrdiff_t begin = s_.n * chunk / chunks_, end = s_.n * (chunk + 1) / chunks_;
  const std::ptrdiff_t keys = std::ptrdiff_t(s_.T) * s_.d;
  // The last sample of a group may read beyond its rows.
  for (std::ptrdiff_t k = 0; together_ && k < std::ptrdiff_t(s_.H) * s_.d; ++k)
    for (real* p : {workspace.p, workspace.dp})
      std::fill(p + k * queries_row_ + group_ * s_.q, p + (k + 1) * queries_row_, real(0));
  for (std::ptrdiff_t i = begin; i < end; ++i) {
    const int place = int((i - begin) % group_);
    // A prompt is the same for all samples.
    if (place == 0 && (i == begin || !s_.shared_query))
      load_queries(i, int(std::min<std::ptrdiff_t>(group_, end - i)), workspace);
    workspace.row = s_.shared_query ? 0 : place * s_.q;
    kernels_.pack_rows(data_.x + i * keys, s_.T, s_.d, padded(s_.T), workspace.xt);
    kernels_.scale_rows(data_.x + i * keys, real(1), s_.T, s_.d, padded(s_.d), workspace.x);
    run_sample(i, workspace, sums_[chunk], i == begin);
  }
}

template <class real>
void HessianProduct<real>::run() {
  std::atomic<int> next{0};
  run_team(members_, [&](const Member& member) {
    const FlushToZero flush;
    for (int chunk; (chunk = next.fetch_add(1, std::memory_order_relaxed)) < chunks_;)
      if (blocks_)
        run_blocks(chunk, of_members_[member.index]);
      else
        run_chunk(chunk, workspaces_[member.index]);
  });
  reduce();
}

template <class real>
void HessianProduct<real>::sum_chunks(real* Sums::* part, std::ptrdiff_t at, int rows,
                                      real* out) const {
  const std::ptrdiff_t stride = chunks_ > 1 ? sums_[1].*part - sums_[0].*part : 0;
  kernels_.reduce_features({sums_[0].*part + at, stride, chunks_, rows, s_.d, out});
}

/// The sum of a part by W over all samples, for a head.
template <class real>
void HessianProduct<real>::sum_weights(real* Sums::* part, const real* rows, int h,
                                       real* out) const {
  if (!has_rows_) return sum_chunks(part, h * weight_size_, s_.d, out);
  const std::ptrdiff_t count = s_.n * s_.q;
  const RowGradients<real> of{s_.d, int(count), data_.z, rows + h * count * rows_row_, rows_row_};
  run_team(members_, [&](const Member& member) {
    const FlushToZero flush;
    for (int piece = member.index; piece < of.pieces(s_.d); piece += member.count)
      of.multiply(kernels_, piece, out);
  });
}

/// By Q: z^T (e. K + e K.), by K: e.^T (z Q) + e^T (z Q.), of a head; tied: the sum of both.
template <class real>
void HessianProduct<real>::reduce_factors(int h) const {
  const int d = s_.d, r = model_.rank, count = int(s_.n * s_.q);
  const int nL = padded(count), rL = padded(r), row = int(rows_row_);
  const std::ptrdiff_t of_head = std::ptrdiff_t(h) * d * r, at_rows = h * s_.n * s_.q * rows_row_;
  const bool tied = model_.is_tied();
  const auto factor = [&](const Tensors<const real*>& tensors, TensorName name) {
    return tensors[name] ? tensors[name] + of_head : nullptr;
  };
  const real *const moved = rows_moved_ + at_rows, *const plain = rows_plain_ + at_rows;
  std::vector<real> turned(std::size_t(row) * nL), narrow(std::size_t(r) * nL);
  std::vector<real> projected(std::size_t(nL) * rL), sum(std::size_t(d) * rL);
  // sum (+)= left^T (right other), over all rows; rows of `right` in `turned`.
  const auto add = [&](const real* left, int left_row, const real* other, bool more) {
    multiply(r, nL, d, other, r, turned.data(), nL, narrow.data(), nL, false);
    kernels_.pack_rows(narrow.data(), r, nL, rL, projected.data());
    multiply(d, rL, count, left, left_row, projected.data(), rL, sum.data(), rL, more);
  };
  const auto turn = [&](const real* from, int from_row) {
    kernels_.pack_rows(from, count, from_row, nL, turned.data());
  };
  const auto store = [&](real* to) {
    for (int k = 0; k < d; ++k)
      for (int j = 0; j < r; ++j)
        to[of_head + std::ptrdiff_t(k) * r + j] = scale_ * sum[std::size_t(k) * rL + j];
  };
  const TensorName right = tied ? kQ : kK;
  if (out_[kQ]) {
    turn(moved, row);
    add(data_.z, d, factor(model_.at, right), false);
    if (tangent_[right]) {
      turn(plain, row);
      add(data_.z, d, factor(tangent_, right), true);
    }
    if (!tied) store(out_[kQ]);
  }
  if (!out_[right]) return;
  turn(data_.z, d);
  add(moved, row, factor(model_.at, kQ), tied);
  if (tangent_[kQ]) add(plain, row, factor(tangent_, kQ), true);
  store(out_[right]);
}

template <class real>
void HessianProduct<real>::reduce() const {
  const int d = s_.d, q = s_.q, r = model_.rank;
  const std::ptrdiff_t dd = std::ptrdiff_t(d) * d, qd = std::ptrdiff_t(q) * d;
  const auto product = [&](int M, int N, int K, const real* a, std::ptrdiff_t a_row,
                           std::ptrdiff_t a_column, const real* b, std::ptrdiff_t b_row,
                           std::ptrdiff_t b_column, real* c, real factor, bool add) {
    kernels_.batched_gemm(
        {M, N, K, 1, a, a_row, a_column, b, b_row, b_column, c, N, 1, factor, add});
  };
  std::vector<real> e(qd), e_plain(qd);
  const Tensors<const real*>& at = model_.at;
  if (out_[kPrompt]) std::fill_n(out_[kPrompt], qd, real(0));
  for (int h = 0; h < s_.H; ++h) {
    if (wants_readout_) store_readout(h);
    if (!wants_W_) continue;
    if (factors_) {
      reduce_factors(h);
      continue;
    }
    real *const of_W = out_[kW] ? out_[kW] + h * dd : of_W_, *const plain_W = plain_W_;
    if (s_.shared_query) {
      sum_chunks(&Sums::of_W, h * weight_size_, q, e.data());
      sum_chunks(&Sums::plain, h * weight_size_, q, e_plain.data());
      if (!s_.identity_w) {
        product(d, d, q, at[kPrompt], 1, d, e.data(), d, 1, of_W, scale_, false);
        product(d, d, q, at[kPrompt], 1, d, e_plain.data(), d, 1, plain_W, scale_, false);
        if (tangent_[kPrompt])
          product(d, d, q, tangent_[kPrompt], 1, d, e_plain.data(), d, 1, of_W, scale_, true);
      }
      if (out_[kPrompt] && s_.identity_w) {
        for (std::ptrdiff_t i = 0; i < qd; ++i) out_[kPrompt][i] += scale_ * e[i];
      } else if (out_[kPrompt]) {
        product(q, d, d, e.data(), d, 1, w_.value + h * dd, 1, d, out_[kPrompt], real(1), true);
        if (w_.tangent)
          product(q, d, d, e_plain.data(), d, 1, w_.tangent + h * dd, 1, d, out_[kPrompt], real(1),
                  true);
      }
    } else {
      sum_weights(&Sums::of_W, rows_moved_, h, of_W);
      if (wants_plain_) sum_weights(&Sums::plain, rows_plain_, h, plain_W);
      for (std::ptrdiff_t i = 0; scale_ != real(1) && i < dd; ++i) {
        of_W[i] *= scale_;
        if (wants_plain_) plain_W[i] *= scale_;
      }
    }
    if (!model_.is_factored()) continue;
    // By Q: W. K + W K., by K: W.^T Q + W^T Q., W standing for the gradient by it; tied: both.
    const std::ptrdiff_t of_head = std::ptrdiff_t(h) * d * r;
    const bool tied = model_.is_tied();
    const real *Q = at[kQ] + of_head, *K = tied ? Q : at[kK] + of_head;
    const real* dQ = tangent_[kQ] ? tangent_[kQ] + of_head : nullptr;
    const real* dK = tied ? dQ : tangent_[kK] ? tangent_[kK] + of_head : nullptr;
    const auto by_factor = [&](bool transposed, const real* other, const real* other_tangent,
                               real* out, bool add) {
      const std::ptrdiff_t row = transposed ? 1 : d, column = transposed ? d : 1;
      product(d, r, d, of_W, row, column, other, r, 1, out, real(1), add);
      if (other_tangent)
        product(d, r, d, plain_W, row, column, other_tangent, r, 1, out, real(1), true);
    };
    if (out_[kQ]) by_factor(false, K, dK, out_[kQ] + of_head, false);
    if (out_[kQ] && tied) by_factor(true, Q, dQ, out_[kQ] + of_head, true);
    if (out_[kK]) by_factor(true, Q, dQ, out_[kK] + of_head, false);
  }
}

template class HessianProduct<float>;
template class HessianProduct<double>;

}  // namespace mhfast
