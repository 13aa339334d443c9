// Gradients by inputs with rows as lanes, and the walk over all samples.
#include "input_gradients.hpp"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "../problem/readout.hpp"
#include "../runtime/float_mode.hpp"
#include "../runtime/team.hpp"
#include "../runtime/tuning.hpp"
#include "row_gradients.hpp"
#include "scores.hpp"

namespace mhfast {

template <class real>
InputGradients<real>::InputGradients(const Data<real>& data, const Parameters<real>& parameters,
                                     Loss loss, real* gx, real* gz, const ByParameters<real>& by)
    : data_(data),
      parameters_(parameters),
      loss_(loss),
      gx_(gx),
      gz_(gz),
      values_first_(has_values_first(data.shape, sizeof(real), kernels_.lanes)),
      keys_first_(has_keys_first(data.shape)),
      L_(kernels_.lanes),
      TL_(int(odd_vectors(data.shape.T, L_))),
      dL_(int(round_up(data.shape.d, L_))),
      wL_(int(row_gradient_size(data.shape, L_))),
      total_(data.total_weight(0, loss)),
      by_(by),
      wants_z_(gz || (data.self && gx)) {
  choose_batches();
  block_heads_ = goes_by_heads() || by_.any() ? 0 : count_block_heads();
  load_weights();
  take_kept();
}

/// Rows (t, h) whose A and D fit the cache.
template <class real>
int InputGradients<real>::fitting_rows(const Shape& s) {
  const std::size_t row = 4 * std::size_t(s.T) * sizeof(real);
  return int(
      round_up(std::max<std::size_t>(kInputTileBytes / row, 1), active_kernels<real>().lanes));
}

/// Where Z W takes much of the time, rows are lanes, all of a sample go together and fit the
/// memory.
template <class real>
bool InputGradients<real>::finds_parameters(const Data<real>& data, bool wants_z) {
  const Shape& s = data.shape;
  const int lanes = active_kernels<real>().lanes;
  if (s.identity_w || s.identity_v || s.rank > 0 || s.shared_query || s.words > 0) return false;
  if (!wants_z || !data.row_map.is_softmax()) return false;
  if (double(s.d) * s.d * sizeof(real) <= kSecondLevelBytes) return false;
  if (has_values_first(s, sizeof(real), lanes)) return false;
  return has_row_gradients(s, PlanKind::kRows) && double(s.H) * s.q <= fitting_rows(s);
}

/// All heads if possible, then rows, then samples.
template <class real>
void InputGradients<real>::choose_batches() {
  const Shape& s = data_.shape;
  const int fit = fitting_rows(s);
  heads_ = goes_by_heads() ? 1 : std::min(int(s.H), fit);
  rows_ = std::min(int(s.q), std::max(fit / heads_, 1));
  samples_ = rows_ < s.q ? 1 : std::max(kInputRows / rows_, 1);
}

template <class real>
void InputGradients<real>::load_weights() {
  const Shape& s = data_.shape;
  const std::ptrdiff_t H = s.H, dd = std::ptrdiff_t(s.d) * s.d, ddL = std::ptrdiff_t(s.d) * wL_;
  if (s.identity_w) return;
  if (s.rank > 0) return load_factors();
  const bool in_place = reads_in_place<real>(s.d, L_) && parameters_.scale == real(1) &&
                        block_heads_ == 0 && !goes_by_heads();
  real* copy = nullptr;
  const auto lay_out = [&](Arena layout) {
    copy = layout.template take<real>(in_place ? 0 : H * ddL);
    wt_ = layout.template take<real>(wants_z_ ? H * ddL : 0);
    return layout.size();
  };
  lay_out(Arena(block_.reserve(lay_out(Arena()))));
  w_ = in_place ? parameters_.W : copy;
  w_row_ = in_place ? s.d : wL_;
  if (!in_place)
    kernels_.scale_rows(parameters_.W, parameters_.scale, int(H * s.d), s.d, wL_, copy);
  if (!wants_z_) return;
  for (std::ptrdiff_t h = 0; h < H; ++h) {
    real* const wt = wt_ + h * ddL;
    kernels_.pack_rows(parameters_.W + h * dd, s.d, s.d, wL_, wt);
    if (parameters_.scale != real(1))
      std::transform(wt, wt + ddL, wt, [this](real entry) { return parameters_.scale * entry; });
  }
}

template <class real>
void InputGradients<real>::load_factors() {
  const Shape& s = data_.shape;
  const std::ptrdiff_t H = s.H, r = s.rank, factor = s.d * r, transposed = r * dL_;
  real* q = nullptr;
  const auto lay_out = [&](Arena layout) {
    q = layout.template take<real>(H * factor);
    kt_ = layout.template take<real>(H * transposed);
    wt_ = layout.template take<real>(wants_z_ ? H * transposed : 0);
    return layout.size();
  };
  lay_out(Arena(block_.reserve(lay_out(Arena()))));
  kernels_.scale_rows(parameters_.Q, parameters_.scale, int(H * s.d), s.rank, s.rank, q);
  w_ = q;
  for (std::ptrdiff_t h = 0; h < H; ++h) {
    kernels_.pack_rows(parameters_.right() + h * factor, s.d, s.rank, dL_, kt_ + h * transposed);
    if (wants_z_) kernels_.pack_rows(w_ + h * factor, s.d, s.rank, dL_, wt_ + h * transposed);
  }
}

template <class real>
void InputGradients<real>::take_kept() {
  const Shape& s = data_.shape;
  const std::ptrdiff_t rows = s.n * s.q, size = s.H * rows * wL_;
  const auto lay_out = [&](Arena layout) {
    kept_e_ = layout.template take<real>(by_.W ? size : 0);
    kept_ax_ = layout.template take<real>(by_.readout ? size : 0);
    kept_g_ = layout.template take<real>(by_.readout ? rows * s.p : 0);
    return layout.size();
  };
  if (by_.any()) lay_out(Arena(kept_.reserve(lay_out(Arena()))));
}

/// What gradients by parameters take of a sample, whose losses are known.
template <class real>
void InputGradients<real>::keep(std::ptrdiff_t sample, int place,
                                const Workspace& workspace) const {
  const Shape& s = data_.shape;
  const real* const g = workspace.g + std::ptrdiff_t(place) * derivatives();
  const real factor = matters(g) ? this->factor(g) : real(0);
  const std::ptrdiff_t first = std::ptrdiff_t(place) * s.q * s.H;
  const auto copy = [&](const real* from, real by, real* to) {
    from += first * dL_;
    for (int t = 0; t < s.q; ++t)
      for (int h = 0; h < s.H; ++h, from += dL_) {
        real* const row = to + ((h * s.n + sample) * s.q + t) * wL_;
        if (factor == 0)  // whatever the tokens are
          std::fill_n(row, dL_, real(0));
        else
          kernels_.scale_rows(from, by, 1, dL_, dL_, row);
      }
  };
  if (by_.W) copy(workspace.e, factor * parameters_.scale, kept_e_);
  if (!by_.readout) return;
  copy(workspace.ax_rows, factor, kept_ax_);
  if (s.is_layer()) std::copy_n(g, derivatives(), kept_g_ + sample * derivatives());
}

/// From all rows, each part by one member.
template <class real>
void InputGradients<real>::store_parameters(int members) const {
  const Shape& s = data_.shape;
  const std::ptrdiff_t count = s.n * s.q, dd = std::ptrdiff_t(s.d) * s.d;
  const int pieces = by_.W ? RowGradients<real>::pieces(s.d) : 0, parts = s.H * (pieces + 1);
  run_team(members, [&](const Member& member) {
    const FlushToZero flush;
    for (int part = member.index; part < parts; part += member.count) {
      const int h = part / (pieces + 1), piece = part % (pieces + 1);
      if (piece < pieces)
        RowGradients<real>{s.d, int(count), data_.z, kept_e_ + h * count * wL_, wL_}.multiply(
            kernels_, piece, by_.W + h * dd);
      else if (by_.readout)
        store_readout(h);
    }
  });
}

template <class real>
typename InputGradients<real>::Workspace InputGradients<real>::take_workspace(Arena& layout) const {
  const std::size_t d = data_.shape.d, T = data_.shape.T, dL = dL_, TL = TL_;
  const std::size_t M = std::size_t(samples_) * rows_, ML = round_up(M, L_), of_heads = M * heads_;
  const std::size_t RL = round_up(std::size_t(rows_) * heads_, L_);
  Workspace workspace{};
  workspace.xt = layout.take<real>(samples_ * d * TL);
  const bool weights_first = finds_weights_first();
  workspace.x_rows = layout.take<real>(wants_z_ || weights_first ? samples_ * T * dL : 0);
  workspace.zt = layout.take<real>(d * ML);
  workspace.p = has_keys_as_queries() ? workspace.x_rows : layout.take<real>(of_heads * dL);
  workspace.u = layout.take<real>(of_heads * dL);
  workspace.p_lanes = layout.take<real>(dL * RL);
  workspace.u_lanes = layout.take<real>(dL * RL);
  workspace.s = layout.take<real>((weights_first ? samples_ : 1) * T * RL);
  workspace.c = layout.take<real>(T * RL);
  workspace.limits = layout.take<real>(RL);
  workspace.row_readouts = layout.take<real>(RL);
  workspace.readout = layout.take<real>(1);
  workspace.found = layout.take<double>(samples_);
  workspace.transposed = layout.take<real>(gx_ ? 2 * RL * TL : 0);
  workspace.e = layout.take<real>(wants_z_ ? of_heads * dL : 0);
  workspace.et = layout.take<real>((wants_z_ && w_) || weights_first ? heads_ * dL * ML : 0);
  workspace.ax_rows = layout.take<real>(weights_first || by_.readout ? of_heads * dL : 0);
  workspace.f = layout.take<real>(weights_first ? ML * round_up(data_.shape.p, L_) : 0);
  workspace.projected = layout.take<real>(heads_ * data_.shape.rank * ML);
  workspace.gx = layout.take<real>(gx_ ? samples_ * T * dL : 0);
  workspace.gz = layout.take<real>(wants_z_ ? M * dL : 0);
  take_readout(layout, workspace);
  return workspace;
}

template <class real>
void InputGradients<real>::load_samples(std::ptrdiff_t first, int count,
                                        const Workspace& workspace) const {
  const Shape& s = data_.shape;
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    const real* x = data_.x + (first + i) * s.T * s.d;
    kernels_.pack_rows(x, s.T, s.d, TL_, workspace.xt + i * s.d * TL_);
    if (wants_z_ || finds_weights_first())
      kernels_.scale_rows(x, real(1), s.T, s.d, dL_, workspace.x_rows + i * s.T * dL_);
  }
}

/// P = Z W of a batch; a prompt is the same for all samples.
template <class real>
void InputGradients<real>::load_queries(const Batch& batch, Workspace& workspace) const {
  if (has_keys_as_queries()) return;
  const Shape& s = data_.shape;
  const std::ptrdiff_t d = s.d, row = std::ptrdiff_t(batch.heads) * dL_;
  const real* z = s.shared_query ? parameters_.prompt : data_.z + batch.sample * s.q * d;
  z += batch.first * d;
  const int rows = s.shared_query ? batch.rows : batch.all_rows(), ML = int(round_up(rows, L_));
  if (!w_) {
    for (int m = 0; m < rows; ++m)
      for (int h = 0; h < batch.heads; ++h)
        kernels_.scale_rows(z + m * d, parameters_.scale, 1, s.d, dL_,
                            workspace.p + m * row + h * std::ptrdiff_t(dL_));
    return;
  }
  kernels_.pack_rows(z, rows, s.d, ML, workspace.zt);
  if (s.rank > 0) {
    const std::ptrdiff_t r = s.rank, projected = r * ML;
    kernels_.product({{s.rank, ML / L_, s.d, 1, batch.heads},
                      {w_ + batch.head * d * r, r, 0, d * r},
                      {workspace.zt, ML, L_},
                      {workspace.projected, ML, L_, projected}});
    kernels_.product({{rows, dL_ / L_, s.rank, 1, batch.heads},
                      {workspace.projected, ML, 0, projected},
                      {kt_ + batch.head * r * dL_, dL_, L_, 0, r * dL_},
                      {workspace.p, row, L_, dL_}});
    return;
  }
  for (int h = 0; h < batch.heads; ++h)
    kernels_.product({{rows, dL_ / L_, s.d},
                      {workspace.zt, ML},
                      {w_ + (batch.head + h) * d * w_row_, w_row_, L_},
                      {workspace.p + h * std::ptrdiff_t(dL_), row, L_},
                      false});
}

/// P of one sample of a batch as the rows of its scores, and their arguments.
template <class real>
ScoreArguments<real> InputGradients<real>::load_scores(const Batch& batch, int sample, RowMode mode,
                                                       const Workspace& workspace) const {
  const Shape& s = data_.shape;
  const int R = batch.of_sample(), RL = int(round_up(R, L_));
  const real* p =
      workspace.p + (s.shared_query ? 0 : sample * std::ptrdiff_t(R) * std::ptrdiff_t(dL_));
  const real* const xt = workspace.xt + sample * std::ptrdiff_t(s.d) * TL_;
  const bool packed = has_keys_as_queries() && RL == TL_;
  if (!packed) kernels_.pack_rows(p, R, dL_, RL, workspace.p_lanes);
  int keys = s.T;  // later ones no row sees
  if (data_.is_limited()) {
    real* const limits = workspace.limits;
    for (int r = 0; r < RL; ++r)
      limits[r] =
          real(r < R ? data_.limit(batch.sample + sample, 0, batch.first + r / batch.heads) : s.T);
    if (std::none_of(limits, limits + R, [](real x) { return std::isnan(x); }))
      keys = seen_keys(limits, R);
  }
  const ScoreOperands<real> operands{
      nullptr,           xt, nullptr, data_.is_limited() ? workspace.limits : nullptr,
      workspace.u_lanes, RL, false,   data_.row_map};
  const std::ptrdiff_t kept = finds_weights_first() ? sample * std::ptrdiff_t(s.T) * RL : 0;
  const ScoreMemory<real> memory{nullptr,           workspace.s + kept,     workspace.c,
                                 workspace.readout, workspace.row_readouts, nullptr};
  auto scores = score_arguments(mode, s.d, {keys, R, 1}, operands, memory, 0);
  scores.x_row = TL_;
  scores.shared_p = packed ? xt : workspace.p_lanes;
  return scores;
}

/// A of a batch with all rows and heads of its samples, and from A X their outputs and losses.
template <class real>
void InputGradients<real>::find_outputs(const Batch& batch, Workspace& workspace) const {
  const std::ptrdiff_t rows = std::ptrdiff_t(batch.of_sample()) * dL_;
  for (int i = 0; i < batch.samples; ++i) {
    real* const to = workspace.ax_rows + i * rows;
    if (!matters(workspace.g + std::ptrdiff_t(i) * derivatives())) {
      std::fill_n(to, rows, real(0));
      continue;
    }
    const auto scores = load_scores(batch, i, RowMode::kWeights, workspace);
    kernels_.scores_rows(scores);
    kernels_.product({{batch.of_sample(), dL_ / L_, scores.T},
                      {scores.s, round_up(batch.of_sample(), L_)},
                      {workspace.x_rows + i * std::ptrdiff_t(data_.shape.T) * dL_, dL_, L_},
                      {to, dL_, L_}});
  }
  find_derivatives(batch, workspace);
}

/// A and D of one sample of a batch, and what they add to the gradients by X and by Z W.
template <class real>
void InputGradients<real>::add_sample(const Batch& batch, int sample, Workspace& workspace) const {
  const Shape& s = data_.shape;
  const int R = batch.of_sample(), RL = int(round_up(R, L_)), N = dL_ / L_;
  const std::ptrdiff_t rows = std::ptrdiff_t(R) * dL_;
  const real* p = workspace.p + (s.shared_query ? 0 : sample * rows);
  const real* u = workspace.u + sample * readout_stride(batch);
  if (readout_stride(batch) > 0) kernels_.pack_rows(u, R, dL_, RL, workspace.u_lanes);
  const auto scores = load_scores(batch, sample, RowMode::kDerivative, workspace);
  const int keys = scores.T;
  if (workspace.has_weights) {
    kernels_.derivative_rows(scores);
  } else {
    kernels_.scores_rows(scores);
    for (int h = 0; h < batch.heads; ++h) {
      real of_head = 0;
      for (int r = h; r < R; r += batch.heads) of_head += workspace.row_readouts[r];
      workspace.found[sample] += double(of_head);
    }
  }
  if (gx_) {
    const std::ptrdiff_t weights = std::ptrdiff_t(RL) * TL_;
    const bool add = batch.head > 0 || batch.first > 0;
    real* const gx = workspace.gx + sample * std::ptrdiff_t(s.T) * dL_;
    kernels_.pack_rows(scores.s, keys, RL, TL_, workspace.transposed);
    kernels_.pack_rows(workspace.c, keys, RL, TL_, workspace.transposed + weights);
    kernels_.product({{keys, N, R, 2},
                      {workspace.transposed, TL_, weights},
                      {u, dL_, L_, p - u},
                      {gx, dL_, L_},
                      add});
    if (!add)
      std::fill_n(gx + std::ptrdiff_t(keys) * dL_, std::ptrdiff_t(s.T - keys) * dL_, real(0));
  }
  const real* const x_rows = workspace.x_rows + sample * std::ptrdiff_t(s.T) * dL_;
  if (wants_z_)
    kernels_.product({{R, N, keys},
                      {workspace.c, RL},
                      {x_rows, dL_, L_},
                      {workspace.e + sample * rows, dL_, L_},
                      false});
  if (by_.readout && !workspace.has_weights)
    kernels_.product({{R, N, keys},
                      {scores.s, RL},
                      {x_rows, dL_, L_},
                      {workspace.ax_rows + sample * rows, dL_, L_}});
}

/// The gradient by Z of a batch, from D X.
template <class real>
void InputGradients<real>::add_queries(const Batch& batch, Workspace& workspace) const {
  const Shape& s = data_.shape;
  const int M = batch.all_rows(), ML = int(round_up(M, L_));
  const std::ptrdiff_t row = std::ptrdiff_t(batch.heads) * dL_, d = s.d;
  if (has_products_as_queries()) return;
  if (!w_) {  // the scale is left to the end
    const std::vector<real> ones(batch.heads, real(1));
    for (int m = 0; m < M; ++m)
      kernels_.combine(workspace.e + m * row, dL_, ones.data(), batch.heads, dL_,
                       workspace.gz + m * std::ptrdiff_t(dL_), batch.head > 0);
    return;
  }
  kernels_.pack_rows(workspace.e, M, int(row), ML, workspace.et);
  if (s.rank > 0) {
    const std::ptrdiff_t r = s.rank, projected = r * ML;
    kernels_.product({{s.rank, ML / L_, s.d, 1, batch.heads},
                      {parameters_.right() + batch.head * d * r, r, 0, d * r},
                      {workspace.et, ML, L_, 0, std::ptrdiff_t(dL_) * ML},
                      {workspace.projected, ML, L_, projected}});
    kernels_.product({{M, dL_ / L_, s.rank, batch.heads},
                      {workspace.projected, ML, projected},
                      {wt_ + batch.head * r * dL_, dL_, L_, r * dL_},
                      {workspace.gz, dL_, L_},
                      batch.head > 0});
    return;
  }
  kernels_.product({{M, dL_ / L_, s.d, batch.heads},
                    {workspace.et, ML, std::ptrdiff_t(dL_) * ML},
                    {wt_ + batch.head * d * wL_, wL_, L_, d * wL_},
                    {workspace.gz, dL_, L_},
                    batch.head > 0});
}

template <class real>
void InputGradients<real>::add_batch(const Batch& batch, Workspace& workspace) const {
  load_queries(batch, workspace);
  if (workspace.has_weights) find_outputs(batch, workspace);
  load_readout(batch, workspace);
  const int R = batch.of_sample();
  if (readout_stride(batch) == 0)
    kernels_.pack_rows(workspace.u, R, dL_, int(round_up(R, L_)), workspace.u_lanes);
  const std::ptrdiff_t rows = std::ptrdiff_t(R) * dL_;
  for (int i = 0; i < batch.samples; ++i)
    if (matters(workspace.g + std::ptrdiff_t(i) * derivatives()))
      add_sample(batch, i, workspace);
    else if (wants_z_)
      std::fill_n(workspace.e + i * rows, rows, real(0));
  if (wants_z_) add_queries(batch, workspace);
}

/// Samples from `first`. One whose derivatives are all 0 gets zeros, whatever its tokens are.
template <class real>
void InputGradients<real>::differentiate(std::ptrdiff_t first, int count,
                                         Workspace& workspace) const {
  const Shape& s = data_.shape;
  const std::ptrdiff_t d = s.d;
  const real of_z = w_ ? real(1) : parameters_.scale;
  real* const gz = gz_ ? gz_ : gx_;
  const real* const by_z = has_products_as_queries() ? workspace.e : workspace.gz;
  load_samples(first, count, workspace);
  const auto for_samples = [&](const auto& body) {
    for (int i = 0; i < count; ++i) {
      const real* g = workspace.g + std::ptrdiff_t(i) * derivatives();
      body(first + i, i, g, matters(g));
    }
  };
  for (int row = 0; row < s.q; row += rows_) {
    const int rows = std::min(rows_, s.q - row);
    for (int h = 0; h < s.H; h += heads_)
      add_batch({first, count, row, rows, h, std::min(heads_, s.H - h)}, workspace);
    if (!wants_z_) continue;
    for_samples([&](std::ptrdiff_t sample, int i, const real* g, bool matters) {
      real* to = gz + (sample * s.q + row) * d;
      if (matters)
        kernels_.unpad_rows(by_z + i * std::ptrdiff_t(rows) * dL_, dL_, of_z * factor(g), rows, s.d,
                            false, to);
      else
        std::fill_n(to, rows * d, real(0));
    });
  }
  if (!gx_) return;
  for_samples([&](std::ptrdiff_t sample, int i, const real* g, bool matters) {
    real* to = gx_ + sample * s.T * d;
    if (matters)
      kernels_.unpad_rows(workspace.gx + i * std::ptrdiff_t(s.T) * dL_, dL_, factor(g), s.T, s.d,
                          data_.self, to);
    else
      std::fill_n(to, s.T * d, real(0));
  });
}

/// One long sample.
template <class real>
void InputGradients<real>::differentiate_long(std::ptrdiff_t sample,
                                              LongWorkspace& workspace) const {
  const Shape& s = data_.shape;
  const std::ptrdiff_t rows = std::ptrdiff_t(s.q) * s.d, tokens = std::ptrdiff_t(s.T) * s.d;
  real* const gz = wants_z_ ? (gz_ ? gz_ : gx_) + sample * rows : nullptr;
  real* const gx = gx_ ? gx_ + sample * tokens : nullptr;
  if (!matters(workspace.g)) {
    if (gz) std::fill_n(gz, rows, real(0));
    if (gx) std::fill_n(gx, tokens, real(0));
    return;
  }
  load_samples(sample, 1, workspace);
  const int keys = keys_of(sample);
  if (gx) std::fill_n(workspace.gx, std::ptrdiff_t(s.T) * dL_, real(0));
  for (int h = 0; h < s.H; ++h) add_long_head(sample, h, keys, workspace);
  const real factor = this->factor(workspace.g), of_z = w_ ? real(1) : parameters_.scale;
  if (gz) kernels_.unpad_rows(workspace.gz_rows, dL_, of_z * factor, s.q, s.d, false, gz);
  if (gx) kernels_.unpad_rows(workspace.gx, dL_, factor, s.T, s.d, data_.self, gx);
}

/// Batches of so many samples, each with its losses first, or last if the outputs are not known.
template <class real>
template <class Arrays, class Take, class Differentiate>
double InputGradients<real>::run_batches(const real* outputs, std::ptrdiff_t samples, int members,
                                         double seconds, const Take& take,
                                         const Differentiate& differentiate) const {
  const std::ptrdiff_t n = data_.shape.n;
  std::vector<Arrays> arrays(members);
  AlignedBuffer block;
  const auto lay_out = [&](Arena layout) {
    for (Arrays& of_member : arrays) of_member = take(layout);
    return layout.size();
  };
  lay_out(Arena(block.reserve(lay_out(Arena()))));
  std::vector<double> values(n);
  std::atomic<std::ptrdiff_t> next{0};
  run_short_team(members, seconds, [&](const Member& member) {
    const FlushToZero flush;
    Arrays& of_member = arrays[member.index];
    for (std::ptrdiff_t i; (i = next.fetch_add(samples, std::memory_order_relaxed)) < n;) {
      const int count = int(std::min(samples, n - i));
      const auto for_samples = [&](const auto& body) {
        for (int k = 0; k < count; ++k)
          body(i + k, of_member.found[k], of_member.g + std::ptrdiff_t(k) * derivatives());
      };
      for_samples([&](std::ptrdiff_t sample, double& found, real* g) {
        found = 0;
        if (outputs)
          values[sample] = measure(sample, outputs + sample * data_.shape.outputs(), g);
        else  // what is left out is, whatever it holds
          std::fill_n(g, derivatives(), real(has_weight(sample)));
      });
      differentiate(i, count, of_member);
      if (outputs) continue;
      for_samples([&](std::ptrdiff_t sample, double found, real* g) {
        values[sample] = finish_sample(sample, found, g);
      });
      if constexpr (std::is_same_v<Arrays, Workspace>)
        for (int k = 0; by_.any() && k < count; ++k) keep(i + k, k, of_member);
    }
  });
  if (by_.any()) store_parameters(members);
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / total_;
}

template <class real>
double InputGradients<real>::run(const real* outputs, int threads) {
  const Shape& s = data_.shape;
  const double flops = double(s.n) * s.H * s.q * (s.flops_of_w() + 10.0 * s.T * s.d);
  const double seconds = flops / 1e9;
  if (block_heads_ > 0) {
    const int members = useful_threads(threads, (s.n + L_ - 1) / L_, flops);
    return run_batches<BlockWorkspace>(
        outputs, L_, members, seconds,
        [this](Arena& layout) { return take_block_workspace(layout); },
        [this](std::ptrdiff_t first, int count, BlockWorkspace& workspace) {
          differentiate_block(first, count, workspace);
        });
  }
  const int members = useful_threads(threads, s.n, flops);
  if (goes_by_heads())
    return run_batches<LongWorkspace>(
        outputs, 1, members, seconds,
        [this](Arena& layout) {
          LongWorkspace workspace(take_workspace(layout));
          take_long_arrays(layout, workspace);
          return workspace;
        },
        [this](std::ptrdiff_t sample, int, LongWorkspace& workspace) {
          differentiate_long(sample, workspace);
        });
  // Every member has a batch.
  samples_ = int(std::min<std::ptrdiff_t>(samples_, (s.n + members - 1) / members));
  return run_batches<Workspace>(
      outputs, samples_, members, seconds,
      [&](Arena& layout) {
        Workspace workspace = take_workspace(layout);
        workspace.has_weights = !outputs && finds_weights_first();
        return workspace;
      },
      [this](std::ptrdiff_t first, int count, Workspace& workspace) {
        differentiate(first, count, workspace);
      });
}

template class InputGradients<float>;
template class InputGradients<double>;

}  // namespace mhfast
