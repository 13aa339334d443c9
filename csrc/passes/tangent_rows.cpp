#include "tangent_rows.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "../problem/alike_heads.hpp"
#include "../problem/rescale.hpp"
#include "../runtime/team.hpp"
#include "loadable_model.hpp"
#include "scores.hpp"

namespace mhfast {
namespace {

// Exponents of the largest number: of tokens, query rows and a prompt, which enter twice or more;
// of parameters and the scale; and of D X, up to which it is left as it is.
template <class real>
inline constexpr int kTokenExponent = sizeof(real) == 4 ? 12 : 96;
template <class real>
inline constexpr int kParameterExponent = 2 * kTokenExponent<real>;
template <class real>
inline constexpr int kRowExponent = sizeof(real) == 4 ? 16 : 128;

/// Largest |x|, NaN or infinite where an entry is.
template <class real>
double largest(const real* x, std::ptrdiff_t size) {
  double of_lanes[kMaxLanes], unused[kMaxLanes], most = 0;
  const Kernels<real>& kernels = active_kernels<real>();
  kernels.measure({size, x, of_lanes, unused, 0});
  for (int l = 0; l < kernels.lanes && !std::isnan(most); ++l)
    if (!(of_lanes[l] <= most)) most = of_lanes[l];
  return most;
}

/// All query rows of a few samples, or of a prompt, go through W together; then a sample at a time,
/// in tiles of rows that are the lanes of its weights. There is a row for each query row, output
/// and head, in this order, so that few query rows fill the lanes too. Where they fill less than
/// half of them, samples are the lanes.
template <class real>
class RowsOfTangents {
 public:
  /// The model's heads are those of `out`.
  RowsOfTangents(const Data<real>& data, const Model<const real*>& model, real scale, int threads,
                 const TangentRows<real>& out)
      : data_(data),
        model_(model),
        scale_(scale),
        out_(out),
        s_(data.shape),
        heads_(out.last_head - out.first_head),
        outputs_(s_.is_layer() && out.moved ? s_.p : 1),
        rows_(s_.q * outputs_ * heads_),
        dL_(padded(s_.d)),
        rows_row_(padded(rows_)) {
    const double of_row = 2.0 * s_.T * sizeof(real);
    const auto fitting = std::ptrdiff_t(kTangentTileBytes / of_row) / L() * L();
    tile_ = int(std::clamp<std::ptrdiff_t>(fitting, L(), rows_row_));
    const double of_query = 1.0 * heads_ * dL_ * sizeof(real);
    const double most = std::min<double>(kTangentRows, kTangentTileBytes / of_query);
    const std::ptrdiff_t group = std::max<std::ptrdiff_t>(1, std::ptrdiff_t(most) / s_.q);
    const double of_samples = double(s_.T) * (s_.d * L() + dL_ * L()) * sizeof(real);
    by_samples_ = outputs_ == 1 && !s_.shared_query && 2 * rows_ <= L() && s_.n >= L() &&
                  of_samples <= kTangentTileBytes;
    group_ = s_.shared_query ? 1 : int(std::min(group, s_.n));
    if (by_samples_) group_ = L();
    groups_ = (s_.n + group_ - 1) / group_;
    const double flops = double(s_.n) * heads_ * s_.q *
                         (s_.flops_of_w() / 2 + outputs_ * (out.moved ? 8.0 : 4.0) * s_.T * s_.d);
    members_ = useful_threads(threads, groups_, flops);
    seconds_ = flops / 1e9;
  }

  void run() {
    workspaces_.resize(members_);
    CallScratch scratch;
    lay_out(Arena(scratch.engine().reserve(lay_out(Arena()))));
    load_model();
    const real* const of_prompt = workspaces_[0].p;
    if (s_.shared_query) load_queries(model_.at[kPrompt], s_.q, workspaces_[0]);
    std::atomic<std::ptrdiff_t> next{0};
    run_short_team(members_, seconds_, [&](const Member& member) {
      const Workspace& workspace = workspaces_[member.index];
      for (std::ptrdiff_t g; (g = next.fetch_add(1, std::memory_order_relaxed)) < groups_;) {
        const std::ptrdiff_t first = g * group_, last = std::min(first + group_, s_.n);
        if (by_samples_) {
          run_block(first, int(last - first), workspace);
          continue;
        }
        if (!s_.shared_query)
          load_queries(data_.z + first * s_.q * s_.d, int(last - first) * s_.q, workspace);
        for (std::ptrdiff_t i = first; i < last; ++i)
          run_sample(i,
                     s_.shared_query ? of_prompt : workspace.p + (i - first) * s_.q * heads_ * dL_,
                     workspace);
      }
    });
  }

 private:
  struct Workspace {
    real *zt, *zq, *p;   // Z (d, rows); Z Q (r, rows); Z W (rows, H, dL)
    real *xt, *x;        // keys (d, TL), (T, dL)
    real *tile, *lanes;  // a tile's rows of Z W, and as lanes
    real *s, *c, *limits, *row_readouts, *row_gaps;  // (T, tile); (tile)
    real *rows, *readout;                            // (tile, dL); (1)
  };

  int L() const { return kernels_.lanes; }
  int padded(int size) const { return int(round_up(size, L())); }
  int queries() const { return s_.q * group_; }

  std::size_t lay_out(Arena layout) {
    const std::ptrdiff_t d = s_.d, dL = dL_, r = model_.rank, T = s_.T;
    const auto take = [&](std::ptrdiff_t size, std::initializer_list<real**> arrays) {
      for (real** array : arrays) *array = layout.take<real>(size);
    };
    take(s_.identity_w ? 0 : heads_ * (r > 0 ? r : d) * dL, {&w_});
    take(out_.moved ? d * rows_row_ : 0, {&ut_});
    for (Workspace& workspace : workspaces_) {
      if (by_samples_) {
        const std::ptrdiff_t keys = d * T * L(), queries = d * s_.q * L(), row = s_.q * L();
        take(keys, {&workspace.xt});
        take(T * dL * L(), {&workspace.x});
        take(queries, {&workspace.zt});
        take(queries * (r > 0 ? 2 : 1), {&workspace.p});
        take(T * row, {&workspace.s});
        take(out_.moved ? T * row : 0, {&workspace.c});
        take(row, {&workspace.limits, &workspace.row_readouts, &workspace.row_gaps});
        take(row * dL, {&workspace.rows});
        take(L(), {&workspace.readout});
        continue;
      }
      take(s_.identity_w ? 0 : d * padded(queries()), {&workspace.zt});
      take(r * padded(queries()), {&workspace.zq});
      take(queries() * heads_ * dL, {&workspace.p});
      take(d * padded(s_.T), {&workspace.xt});
      take(T * dL, {&workspace.x});
      take(outputs_ > 1 ? tile_ * dL : 0, {&workspace.tile});
      take(T * tile_, {&workspace.s});
      take(out_.moved ? T * tile_ : 0, {&workspace.c});
      take(tile_ * dL, {&workspace.lanes, &workspace.rows});
      take(tile_, {&workspace.limits, &workspace.row_readouts, &workspace.row_gaps});
      take(1, {&workspace.readout});
    }
    return layout.size();
  }

  /// W or K^T with whole vectors in a row, and what each row is read out with, (d, rows). Samples
  /// as lanes: K^T (r, d), and the latter of each head by itself, (H, d, q).
  void load_model() {
    const int d = s_.d, r = model_.rank;
    const real* const K = model_.at[kK] ? model_.at[kK] : model_.at[kQ];
    for (int h = 0; h < heads_ && !s_.identity_w; ++h)
      if (r > 0)
        kernels_.pack_rows(K + std::ptrdiff_t(h) * d * r, d, r, by_samples_ ? d : dL_, w_of(h));
      else if (d != dL_ && !by_samples_)
        kernels_.scale_rows(model_.at[kW] + std::ptrdiff_t(h) * d * d, real(1), d, d, dL_, w_of(h));
    if (!out_.moved) return;
    std::fill_n(ut_, std::ptrdiff_t(d) * rows_row_, real(0));
    const real* const readout = s_.is_layer() ? model_.at[kV] : model_.at[kU];
    const auto of_row = [&](int h, int t, int o, int k) {
      if (!s_.is_layer()) return readout[(std::ptrdiff_t(h) * s_.q + t) * d + k];
      return s_.identity_v ? real(k == o) : readout[(std::ptrdiff_t(h) * d + k) * s_.p + o];
    };
    for (std::ptrdiff_t k = 0; k < d; ++k)
      for (int h = 0; h < (s_.identity_w ? s_.H : heads_); ++h)
        for (int t = 0; t < s_.q; ++t)
          for (int o = 0; o < outputs_; ++o)
            ut_[by_samples_ ? (h % heads_ * d + k) * s_.q + t
                            : k * rows_row_ + (t * outputs_ + o) * heads_ + h % heads_] +=
                of_row(h, t, o, int(k));
  }
  real* w_of(int h) const {
    return w_ + std::ptrdiff_t(h) * (model_.rank > 0 ? model_.rank : s_.d) * dL_;
  }

  /// scale Z W of `count` rows of queries, of all heads.
  void load_queries(const real* z, int count, const Workspace& of) const {
    const int d = s_.d, r = model_.rank, row = padded(count), N = dL_ / L();
    if (s_.identity_w) return kernels_.scale_rows(z, scale_, count, d, dL_, of.p);
    kernels_.pack_rows(z, count, d, row, of.zt);
    if (scale_ != real(1))
      std::transform(of.zt, of.zt + std::ptrdiff_t(d) * row, of.zt,
                     [this](real x) { return scale_ * x; });
    const std::ptrdiff_t apart = std::ptrdiff_t(heads_) * dL_;
    for (int h = 0; h < heads_; ++h) {
      real* const p = of.p + std::ptrdiff_t(h) * dL_;
      if (r > 0) {
        const real* const Q = model_.at[kQ] + std::ptrdiff_t(h) * d * r;
        kernels_.product({{r, row / L(), d}, {Q, r}, {of.zt, row, L()}, {of.zq, row, L()}});
        kernels_.product({{count, N, r}, {of.zq, row}, {w_of(h), dL_, L()}, {p, apart, L()}});
      } else {
        const real* const W = d == dL_ ? model_.at[kW] + std::ptrdiff_t(h) * d * d : w_of(h);
        kernels_.product({{count, N, d}, {of.zt, row}, {W, dL_, L()}, {p, apart, L()}});
      }
    }
  }

  /// `p`: the sample's rows of Z W.
  void run_sample(std::ptrdiff_t i, const real* p, const Workspace& of) const {
    const int d = s_.d, of_query = outputs_ * heads_;
    const real* const x = data_.x + i * s_.T * d;
    kernels_.pack_rows(x, s_.T, d, padded(s_.T), of.xt);
    kernels_.scale_rows(x, real(1), s_.T, d, dL_, of.x);
    for (int first = 0; first < rows_; first += tile_) {
      const int rows = std::min(tile_, rows_ - first), row = padded(rows);
      const real* of_tile = p + std::ptrdiff_t(first) * dL_;
      if (outputs_ > 1) {
        for (int t = 0; t < rows; ++t) {
          const int at = (first + t) / of_query * heads_ + (first + t) % heads_;
          std::copy_n(p + std::ptrdiff_t(at) * dL_, dL_, of.tile + std::ptrdiff_t(t) * dL_);
        }
        of_tile = of.tile;
      }
      kernels_.pack_rows(of_tile, rows, dL_, row, of.lanes);
      for (int t = 0; t < row && data_.is_limited(); ++t)
        of.limits[t] = real(t < rows ? data_.limit(i, 0, (first + t) / of_query) : s_.T);
      const ScoreOperands<real> operands{nullptr,
                                         of.xt,
                                         nullptr,
                                         data_.is_limited() ? of.limits : nullptr,
                                         out_.moved ? ut_ + first : nullptr,
                                         rows_row_};
      const ScoreMemory<real> memory{nullptr, of.s, of.c, of.readout, of.row_readouts, of.row_gaps};
      const RowMode mode = out_.moved ? RowMode::kDerivative : RowMode::kWeights;
      ScoreArguments<real> scores = score_arguments(mode, d, {s_.T, rows, 1}, operands, memory, 0);
      scores.shared_p = of.lanes;
      scores.shared_p_k = row;
      kernels_.scores_rows(scores);
      multiply(of.s, rows, of, of.rows);
      real* to = out_.pooled + i * s_.q * heads_ * d;
      for (int t = 0; t < rows; ++t)  // an output's rows of A X are those of the others
        if ((first + t) / heads_ % outputs_ == 0)
          std::copy_n(of.rows + std::ptrdiff_t(t) * dL_, d,
                      to + ((first + t) / of_query * heads_ + (first + t) % heads_) * d);
      if (!out_.moved) continue;
      to = out_.moved + (i * rows_ + first) * d;
      multiply(of.c, rows, of, d == dL_ ? to : of.rows);
      for (int t = 0; t < rows && d != dL_; ++t, to += d)
        std::copy_n(of.rows + std::ptrdiff_t(t) * dL_, d, to);
    }
  }

  /// `count` samples from `i` on, as lanes.
  void run_block(std::ptrdiff_t i, int count, const Workspace& of) const {
    const int T = s_.T, q = s_.q, d = s_.d, r = model_.rank;
    const std::ptrdiff_t keys = std::ptrdiff_t(T) * d, queries = std::ptrdiff_t(q) * d;
    const real* const x = data_.x + i * keys;
    kernels_.pack_lanes(x, keys, count, keys, of.xt);
    kernels_.scale_rows(x, real(1), count * T, d, dL_, of.x);
    const real* z = of.xt;
    if (!data_.self || scale_ != real(1)) {
      kernels_.pack_lanes(data_.z + i * queries, queries, count, queries, of.zt);
      std::transform(of.zt, of.zt + queries * L(), of.zt,
                     [this](real entry) { return scale_ * entry; });
      z = of.zt;
    }
    for (int t = 0; t < q && data_.is_limited(); ++t)
      for (int l = 0; l < L(); ++l)
        of.limits[t * L() + l] = real(l < count ? data_.limit(i + l, 0, t) : T);
    const ScoreMemory<real> memory{of.p, of.s, of.c, of.readout, of.row_readouts, of.row_gaps};
    const RowMode mode = out_.moved ? RowMode::kDerivative : RowMode::kWeights;
    const std::ptrdiff_t apart = std::ptrdiff_t(heads_) * d;
    for (int h = 0; h < heads_; ++h) {
      ScoreOperands<real> operands{nullptr, of.xt, z, data_.is_limited() ? of.limits : nullptr};
      if (!s_.identity_w)
        operands.w = model_.at[r > 0 ? kQ : kW] + std::ptrdiff_t(h) * d * (r > 0 ? r : d);
      operands.rank = r;
      operands.kt = r > 0 ? w_of(h) : nullptr;
      operands.ut = out_.moved ? ut_ + h * queries : nullptr;
      operands.ut_k = q;
      kernels_.scores_samples(score_arguments(mode, d, {T, q, 1}, operands, memory, 0));
      const auto write = [&](const real* weights, real* out) {
        const bool directly = d == dL_;
        real* to = out + (i * q * heads_ + h) * d;
        GradientArguments<real> in{};
        in.T = T;
        in.q = q;
        in.d = d;
        in.units = count;
        in.dd = weights;
        in.gx = of.x;
        in.e = directly ? to : of.rows;
        in.e_row = directly ? apart : dL_;
        kernels_.gradients_features_of_samples(in);
        for (int t = 0; t < count * q && !directly; ++t, to += apart)
          std::copy_n(of.rows + std::ptrdiff_t(t) * dL_, d, to);
      };
      write(of.s, out_.pooled);
      if (out_.moved) write(of.c, out_.moved);
    }
  }

  /// Rows of weights times the keys.
  void multiply(const real* weights, int rows, const Workspace& of, real* to) const {
    kernels_.product(
        {{rows, dL_ / L(), s_.T}, {weights, padded(rows)}, {of.x, dL_, L()}, {to, dL_, L()}});
  }

  const Data<real>& data_;
  const Model<const real*> model_;
  const real scale_;
  const TangentRows<real> out_;
  const Shape& s_;
  const Kernels<real>& kernels_ = active_kernels<real>();
  const int heads_, outputs_, rows_;  // rows: of a sample
  const int dL_, rows_row_;
  bool by_samples_ = false;
  int tile_, group_, members_;
  std::ptrdiff_t groups_;
  double seconds_;
  real *w_ = nullptr, *ut_ = nullptr;
  std::vector<Workspace> workspaces_;
};

/// The model of a range of heads; those of an identity stay together.
template <class real>
Model<const real*> of_heads(const Model<const real*>& model, const Shape& s, int first) {
  Model<const real*> out = model;
  for (int name = 0; name < kTensors && !s.identity_w; ++name)
    if (out.at[name] && name != kPrompt)
      out.at[name] += first * extent(TensorName(name), s, model.rank).size();
  return out;
}

}  // namespace

template <class real>
bool is_ordinary(const Data<real>& data, const Model<const real*>& model, real scale) {
  const Shape& s = data.shape;
  const auto within = [](double x, int exponent) {
    return x == 0 || (x <= std::ldexp(1.0, exponent) && x >= std::ldexp(1.0, -exponent));
  };
  const auto tokens = [&](const real* x, std::ptrdiff_t size) {
    return within(largest(x, size), kTokenExponent<real>);
  };
  if (!within(std::fabs(double(scale)), kParameterExponent<real>)) return false;
  if (!tokens(data.x, s.n * s.T * s.d)) return false;
  if (data.has_z() && !tokens(data.z, s.n * s.q * s.d)) return false;
  for (int name = 0; name < kTensors; ++name) {
    const real* const x = model.at[name];
    if (!x) continue;
    const std::ptrdiff_t size = extent(TensorName(name), s, model.rank).all();
    if (name == kPrompt ? !tokens(x, size) : !within(largest(x, size), kParameterExponent<real>))
      return false;
  }
  return true;
}

template <class real>
int tangent_rows(const Data<real>& data, const Model<const real*>& model, real scale, int threads,
                 const TangentRows<real>& out) {
  const Shape& s = data.shape;
  if (s.n == 0) return 0;
  RowsOfTangents<real>(data, of_heads(model, s, out.first_head), scale, threads, out).run();
  if (!out.moved) return 0;
  const std::ptrdiff_t size =
      s.n * s.q * (s.is_layer() ? s.p : 1) * (out.last_head - out.first_head) * s.d;
  if (scale != real(1))
    std::transform(out.moved, out.moved + size, out.moved, [scale](real x) { return scale * x; });
  const int exponent = exponent_of(largest(out.moved, size));
  if (std::abs(exponent) <= kRowExponent<real>) return 0;
  scale_by_power(out.moved, size, -exponent, out.moved);
  return exponent;
}

template <class real>
void join_outputs(std::ptrdiff_t rows, std::ptrdiff_t columns, int outputs, const real* alike,
                  const real* of_rows, real* K) {
  std::vector<real> repeated(columns * outputs);  // a row's factors, for each output
  for (std::ptrdiff_t i = 0; i < rows; ++i) {
    for (std::ptrdiff_t j = 0; alike && j < columns; ++j)
      std::fill_n(repeated.begin() + j * outputs, outputs, alike[i * columns + j]);
    for (int o = 0; o < outputs; ++o, K += columns * outputs) {
      for (std::ptrdiff_t j = 0; alike && j < columns * outputs; ++j) K[j] *= repeated[j];
      for (std::ptrdiff_t j = 0; of_rows && j < columns; ++j)
        K[j * outputs + o] += of_rows[i * columns + j];
    }
  }
}

#define MHFAST_INSTANTIATE(real)                                                                  \
  template void join_outputs<real>(std::ptrdiff_t, std::ptrdiff_t, int, const real*, const real*, \
                                   real*);                                                        \
  template bool is_ordinary<real>(const Data<real>&, const Model<const real*>&, real);            \
  template int tangent_rows<real>(const Data<real>&, const Model<const real*>&, real, int,        \
                                  const TangentRows<real>&);
MHFAST_INSTANTIATE(float)
MHFAST_INSTANTIATE(double)
#undef MHFAST_INSTANTIATE

}  // namespace mhfast
