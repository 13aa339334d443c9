// Of one sample and head, with U = derivative of the loss times U_h for a classifier and G V_h^T
// for a layer:
//
//   dL/dX += A^T U + D^T (Z W),   dL/dZ += D X W^T
//
// With an identity in the place of W or V the product with it is left out. Query rows of all heads
// go together, (t, h) being row t H + h, as many as fit the cache: A and D come from scores_rows
// with these rows as lanes, so that a single query row fills a vector with its heads. Products with
// W and V take the rows of several samples at once, with features as lanes; factors of W go one by
// one, (Z Q) K^T and (D X K) Q^T. A classifier's gradient is linear in the derivative of its loss,
// which is multiplied in at the end.
#include "inputs.hpp"

#include <algorithm>
#include <cmath>
#include <optional>

#include "../dispatch/dispatch.hpp"
#include "../problem/loss.hpp"
#include "../problem/readout.hpp"
#include "../runtime/float_mode.hpp"
#include "../runtime/scratch.hpp"
#include "../runtime/team.hpp"
#include "../runtime/tuning.hpp"
#include "own_loss.hpp"
#include "scores.hpp"

namespace mhfast {
namespace {

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
template <class real>
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
  real* gt;                                       // those of a layer transposed: (p, ML)
};

/// What a classifier and a layer share; the two below add their readouts.
template <class real>
class InputGradients {
 public:
  InputGradients(const Data<real>& data, const Parameters<real>& parameters, Loss loss, real* gx,
                 real* gz);
  virtual ~InputGradients() = default;

  double run(const real* outputs, int threads);

 protected:
  /// The arrays of a workspace that the readout needs: g and others.
  virtual void take_readout(Arena& layout, Workspace<real>& workspace) const = 0;
  /// Weighted loss of a sample from its outputs; writes their derivatives to g.
  virtual double measure(std::ptrdiff_t i, const real* f, real* g) const = 0;
  virtual int derivatives() const = 0;  // of a sample
  /// Writes U of a batch to workspace.u.
  virtual void load_readout(const Batch& batch, Workspace<real>& workspace) const = 0;
  /// From one sample's U to the next one's.
  virtual std::ptrdiff_t readout_stride(const Batch& batch) const = 0;
  /// What a sample's gradients are multiplied by at the end.
  virtual real factor(const real* g) const = 0;

  const Kernels<real>& kernels_ = active_kernels<real>();
  const Data<real>& data_;
  const Parameters<real>& parameters_;
  const Loss loss_;
  real *const gx_, *const gz_;
  const int L_, TL_, dL_, wL_;  // wL: from row to row of W, see row_gradient_size
  int rows_, heads_, samples_;  // of a batch, at most
  const double total_;

 private:
  void choose_batches();
  void load_weights();
  void load_factors();
  Workspace<real> take_workspace(Arena& layout) const;
  void load_samples(std::ptrdiff_t first, int count, const Workspace<real>& workspace) const;
  void differentiate(std::ptrdiff_t first, int count, Workspace<real>& workspace) const;
  void add_batch(const Batch& batch, Workspace<real>& workspace) const;
  void load_queries(const Batch& batch, Workspace<real>& workspace) const;
  void add_sample(const Batch& batch, int sample, Workspace<real>& workspace) const;
  void add_queries(const Batch& batch, Workspace<real>& workspace) const;
  bool matters(const real* g) const {
    return !std::all_of(g, g + derivatives(), [](real derivative) { return derivative == 0; });
  }
  void store(const real* from, int rows, real factor, bool add, real* to) const;

  const bool wants_z_;  // by an external query, or as part of gx
  AlignedBuffer block_;
  // W scaled, and its transpose: (H, d, wL). Of a rank Q scaled (H, d, r), and Q^T so, and K^T:
  // (H, r, dL).
  real *w_ = nullptr, *wt_ = nullptr, *kt_ = nullptr;
};

template <class real>
InputGradients<real>::InputGradients(const Data<real>& data, const Parameters<real>& parameters,
                                     Loss loss, real* gx, real* gz)
    : data_(data),
      parameters_(parameters),
      loss_(loss),
      gx_(gx),
      gz_(gz),
      L_(kernels_.lanes),
      TL_(int(round_up(data.shape.T, L_))),
      dL_(int(round_up(data.shape.d, L_))),
      wL_(int(row_gradient_size(data.shape, L_))),
      total_(data.total_weight(0, loss)),
      wants_z_(gz || (data.self && gx)) {
  choose_batches();
  load_weights();
}

/// Rows (t, h) whose A and D fit the cache: all heads if possible, then rows, then samples.
template <class real>
void InputGradients<real>::choose_batches() {
  const Shape& s = data_.shape;
  const std::size_t row = 4 * std::size_t(s.T) * sizeof(real);
  const int fit = int(round_up(std::max<std::size_t>(kInputTileBytes / row, 1), L_));
  heads_ = std::min(int(s.H), fit);
  rows_ = std::min(int(s.q), std::max(fit / heads_, 1));
  samples_ = rows_ < s.q ? 1 : std::max(kInputRows / rows_, 1);
}

template <class real>
void InputGradients<real>::load_weights() {
  const Shape& s = data_.shape;
  const std::ptrdiff_t H = s.H, dd = std::ptrdiff_t(s.d) * s.d, ddL = std::ptrdiff_t(s.d) * wL_;
  if (s.identity_w) return;
  if (s.rank > 0) return load_factors();
  const auto lay_out = [&](Arena layout) {
    w_ = layout.template take<real>(H * ddL);
    wt_ = layout.template take<real>(wants_z_ ? H * ddL : 0);
    return layout.size();
  };
  lay_out(Arena(block_.reserve(lay_out(Arena()))));
  kernels_.scale_rows(parameters_.W, parameters_.scale, int(H * s.d), s.d, wL_, w_);
  if (!wants_z_) return;
  for (std::ptrdiff_t h = 0; h < H; ++h) {
    real* const wt = wt_ + h * ddL;
    kernels_.pack_rows(parameters_.W + h * dd, s.d, s.d, wL_, wt);
    std::transform(wt, wt + ddL, wt, [this](real entry) { return parameters_.scale * entry; });
  }
}

template <class real>
void InputGradients<real>::load_factors() {
  const Shape& s = data_.shape;
  const std::ptrdiff_t H = s.H, r = s.rank, factor = s.d * r, transposed = r * dL_;
  const auto lay_out = [&](Arena layout) {
    w_ = layout.template take<real>(H * factor);
    kt_ = layout.template take<real>(H * transposed);
    wt_ = layout.template take<real>(wants_z_ ? H * transposed : 0);
    return layout.size();
  };
  lay_out(Arena(block_.reserve(lay_out(Arena()))));
  kernels_.scale_rows(parameters_.Q, parameters_.scale, int(H * s.d), s.rank, s.rank, w_);
  for (std::ptrdiff_t h = 0; h < H; ++h) {
    kernels_.pack_rows(parameters_.right() + h * factor, s.d, s.rank, dL_, kt_ + h * transposed);
    if (wants_z_) kernels_.pack_rows(w_ + h * factor, s.d, s.rank, dL_, wt_ + h * transposed);
  }
}

template <class real>
Workspace<real> InputGradients<real>::take_workspace(Arena& layout) const {
  const std::size_t d = data_.shape.d, T = data_.shape.T, dL = dL_, TL = TL_;
  const std::size_t M = std::size_t(samples_) * rows_, ML = round_up(M, L_), of_heads = M * heads_;
  const std::size_t RL = round_up(std::size_t(rows_) * heads_, L_);
  Workspace<real> workspace{};
  workspace.xt = layout.take<real>(samples_ * d * TL);
  workspace.x_rows = layout.take<real>(wants_z_ ? samples_ * T * dL : 0);
  workspace.zt = layout.take<real>(d * ML);
  workspace.p = layout.take<real>(of_heads * dL);
  workspace.u = layout.take<real>(of_heads * dL);
  workspace.p_lanes = layout.take<real>(dL * RL);
  workspace.u_lanes = layout.take<real>(dL * RL);
  workspace.s = layout.take<real>(T * RL);
  workspace.c = layout.take<real>(T * RL);
  workspace.limits = layout.take<real>(RL);
  workspace.row_readouts = layout.take<real>(RL);
  workspace.readout = layout.take<real>(1);
  workspace.transposed = layout.take<real>(gx_ ? 2 * RL * TL : 0);
  workspace.e = layout.take<real>(wants_z_ ? of_heads * dL : 0);
  workspace.et = layout.take<real>(wants_z_ && w_ ? heads_ * dL * ML : 0);
  workspace.projected = layout.take<real>(heads_ * data_.shape.rank * ML);
  workspace.gx = layout.take<real>(gx_ ? samples_ * T * dL : 0);
  workspace.gz = layout.take<real>(wants_z_ ? M * dL : 0);
  take_readout(layout, workspace);
  return workspace;
}

template <class real>
void InputGradients<real>::load_samples(std::ptrdiff_t first, int count,
                                        const Workspace<real>& workspace) const {
  const Shape& s = data_.shape;
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    const real* x = data_.x + (first + i) * s.T * s.d;
    kernels_.pack_rows(x, s.T, s.d, TL_, workspace.xt + i * s.d * TL_);
    if (wants_z_) kernels_.scale_rows(x, real(1), s.T, s.d, dL_, workspace.x_rows + i * s.T * dL_);
  }
}

/// P = Z W of a batch; a prompt is the same for all samples.
template <class real>
void InputGradients<real>::load_queries(const Batch& batch, Workspace<real>& workspace) const {
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
                      {w_ + (batch.head + h) * d * wL_, wL_, L_},
                      {workspace.p + h * std::ptrdiff_t(dL_), row, L_},
                      false});
}

/// A and D of one sample of a batch, and what they add to the gradients by X and by Z W.
template <class real>
void InputGradients<real>::add_sample(const Batch& batch, int sample,
                                      Workspace<real>& workspace) const {
  const Shape& s = data_.shape;
  const int R = batch.of_sample(), RL = int(round_up(R, L_)), N = dL_ / L_;
  const std::ptrdiff_t rows = std::ptrdiff_t(R) * dL_;
  const real* p = workspace.p + (s.shared_query ? 0 : sample * rows);
  const real* u = workspace.u + sample * readout_stride(batch);
  kernels_.pack_rows(p, R, dL_, RL, workspace.p_lanes);
  if (readout_stride(batch) > 0) kernels_.pack_rows(u, R, dL_, RL, workspace.u_lanes);
  if (data_.is_limited())
    for (int r = 0; r < RL; ++r)
      workspace.limits[r] =
          real(r < R ? data_.limit(batch.sample + sample, 0, batch.first + r / batch.heads) : s.T);
  const ScoreOperands<real> operands{nullptr,
                                     workspace.xt + sample * std::ptrdiff_t(s.d) * TL_,
                                     nullptr,
                                     data_.is_limited() ? workspace.limits : nullptr,
                                     workspace.u_lanes,
                                     RL,
                                     false,
                                     data_.row_map};
  const ScoreMemory<real> memory{
      nullptr, workspace.s, workspace.c, workspace.readout, workspace.row_readouts, nullptr};
  auto scores = score_arguments(RowMode::kDerivative, s.d, {s.T, R, 1}, operands, memory, 0);
  scores.shared_p = workspace.p_lanes;
  kernels_.scores_rows(scores);
  if (gx_) {
    const std::ptrdiff_t weights = std::ptrdiff_t(RL) * TL_;
    kernels_.pack_rows(workspace.s, s.T, RL, TL_, workspace.transposed);
    kernels_.pack_rows(workspace.c, s.T, RL, TL_, workspace.transposed + weights);
    kernels_.product({{s.T, N, R, 2},
                      {workspace.transposed, TL_, weights},
                      {u, dL_, L_, p - u},
                      {workspace.gx + sample * std::ptrdiff_t(s.T) * dL_, dL_, L_},
                      batch.head > 0 || batch.first > 0});
  }
  if (wants_z_)
    kernels_.product({{R, N, s.T},
                      {workspace.c, RL},
                      {workspace.x_rows + sample * std::ptrdiff_t(s.T) * dL_, dL_, L_},
                      {workspace.e + sample * rows, dL_, L_},
                      false});
}

/// The gradient by Z of a batch, from D X.
template <class real>
void InputGradients<real>::add_queries(const Batch& batch, Workspace<real>& workspace) const {
  const Shape& s = data_.shape;
  const int M = batch.all_rows(), ML = int(round_up(M, L_));
  const std::ptrdiff_t row = std::ptrdiff_t(batch.heads) * dL_, d = s.d;
  if (!w_) {  // the scale is left to the end
    for (int m = 0; m < M; ++m)
      for (int h = 0; h < batch.heads; ++h) {
        const real* from = workspace.e + m * row + h * std::ptrdiff_t(dL_);
        real* to = workspace.gz + m * std::ptrdiff_t(dL_);
        const bool add = batch.head + h > 0;
        for (int k = 0; k < dL_; ++k) to[k] = (add ? to[k] : real(0)) + from[k];
      }
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
void InputGradients<real>::add_batch(const Batch& batch, Workspace<real>& workspace) const {
  load_queries(batch, workspace);
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

/// Rows of dL numbers times a factor, to rows of d.
template <class real>
void InputGradients<real>::store(const real* from, int rows, real factor, bool add,
                                 real* to) const {
  const int d = data_.shape.d;
  for (int t = 0; t < rows; ++t, from += dL_, to += d)
    for (int k = 0; k < d; ++k) to[k] = (add ? to[k] : real(0)) + factor * from[k];
}

/// Samples from `first`. One whose derivatives are all 0 gets zeros, whatever its tokens are.
template <class real>
void InputGradients<real>::differentiate(std::ptrdiff_t first, int count,
                                         Workspace<real>& workspace) const {
  const Shape& s = data_.shape;
  const std::ptrdiff_t d = s.d;
  const real of_z = w_ ? real(1) : parameters_.scale;
  real* const gz = gz_ ? gz_ : gx_;
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
        store(workspace.gz + i * std::ptrdiff_t(rows) * dL_, rows, of_z * factor(g), false, to);
      else
        std::fill_n(to, rows * d, real(0));
    });
  }
  if (!gx_) return;
  for_samples([&](std::ptrdiff_t sample, int i, const real* g, bool matters) {
    real* to = gx_ + sample * s.T * d;
    if (matters)
      store(workspace.gx + i * std::ptrdiff_t(s.T) * dL_, s.T, factor(g), data_.self, to);
    else
      std::fill_n(to, s.T * d, real(0));
  });
}

template <class real>
double InputGradients<real>::run(const real* outputs, int threads) {
  const Shape& s = data_.shape;
  const double flops = double(s.n) * s.H * s.q * (s.flops_of_w() + 10.0 * s.T * s.d);
  const int members = useful_threads(threads, s.n, flops);
  // Every member has a batch.
  samples_ = int(std::min<std::ptrdiff_t>(samples_, (s.n + members - 1) / members));
  std::vector<Workspace<real>> workspaces(members);
  AlignedBuffer block;
  const auto lay_out = [&](Arena layout) {
    for (Workspace<real>& workspace : workspaces) workspace = take_workspace(layout);
    return layout.size();
  };
  lay_out(Arena(block.reserve(lay_out(Arena()))));
  std::vector<double> values(s.n);
  std::atomic<std::ptrdiff_t> next{0};
  run_short_team(members, flops / 1e9, [&](const Member& member) {
    const FlushToZero flush;
    Workspace<real>& workspace = workspaces[member.index];
    for (std::ptrdiff_t i; (i = next.fetch_add(samples_, std::memory_order_relaxed)) < s.n;) {
      const int count = int(std::min<std::ptrdiff_t>(samples_, s.n - i));
      for (int k = 0; k < count; ++k)
        values[i + k] = measure(i + k, outputs, workspace.g + std::ptrdiff_t(k) * derivatives());
      differentiate(i, count, workspace);
    }
  });
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / total_;
}

/// U is the same for all samples. Gradients are linear in the derivative of a sample's loss, which
/// is multiplied in at the end.
template <class real>
class ClassifierInputs final : public InputGradients<real> {
 public:
  using InputGradients<real>::InputGradients;

 private:
  using Base = InputGradients<real>;
  using Base::data_, Base::dL_, Base::kernels_, Base::loss_, Base::parameters_, Base::samples_,
      Base::total_;

  void take_readout(Arena& layout, Workspace<real>& workspace) const override {
    workspace.g = layout.take<real>(samples_);
  }

  double measure(std::ptrdiff_t i, const real* f, real* g) const override {
    const double w = data_.weight_of(0, i, 0);
    *g = 0;
    if (w == 0) return 0;  // left out, whatever the output is
    const OwnLossResults* const own = loss_.results;
    const auto term = own ? LossTerm<double>{own->value(i), own->derivative(i), 0}
                          : loss_term(loss_, double(f[i]), double(data_.y[i]));
    *g = real(term.derivative * w / (total_ * readout_of(data_.shape).divisor));
    return w * term.value;
  }

  int derivatives() const override { return 1; }

  void load_readout(const Batch& batch, Workspace<real>& workspace) const override {
    const Shape& s = data_.shape;
    real* to = workspace.u;
    for (int t = batch.first; t < batch.first + batch.rows; ++t)
      for (int h = batch.head; h < batch.head + batch.heads; ++h, to += dL_)
        kernels_.scale_rows(parameters_.U + (std::ptrdiff_t(h) * s.q + t) * s.d, real(1), 1, s.d,
                            dL_, to);
  }

  std::ptrdiff_t readout_stride(const Batch&) const override { return 0; }

  real factor(const real* g) const override { return *g; }
};

/// U of a sample is G V^T, which has the derivatives in it.
template <class real>
class LayerInputs final : public InputGradients<real> {
 public:
  LayerInputs(const Data<real>& data, const Parameters<real>& parameters, Loss loss, real* gx,
              real* gz)
      : InputGradients<real>(data, parameters, loss, gx, gz) {
    const Shape& s = data.shape;
    const std::ptrdiff_t head = std::ptrdiff_t(s.p) * dL_;
    if (s.identity_v) return;
    vt_ = Arena(block_.reserve(s.H * head * sizeof(real))).template take<real>(s.H * head);
    for (std::ptrdiff_t h = 0; h < s.H; ++h)
      kernels_.pack_rows(parameters.V + h * s.d * s.p, s.d, s.p, dL_, vt_ + h * head);
  }

 private:
  using Base = InputGradients<real>;
  using Base::data_, Base::dL_, Base::kernels_, Base::L_, Base::loss_, Base::rows_, Base::samples_,
      Base::total_;

  void take_readout(Arena& layout, Workspace<real>& workspace) const override {
    const std::size_t p = data_.shape.p, rows = std::size_t(samples_) * rows_;
    workspace.g = layout.take<real>(std::size_t(samples_) * derivatives());
    workspace.gt = layout.take<real>(p * round_up(rows, L_));
  }

  double measure(std::ptrdiff_t i, const real* f, real* derivatives_of) const override {
    const Shape& s = data_.shape;
    double value = 0;
    const std::ptrdiff_t row_targets = data_.targets / s.q;
    for (int t = 0; t < s.q; ++t) {
      const double w = data_.weight_of(0, i, t);
      real* g = derivatives_of + std::ptrdiff_t(t) * s.p;
      if (w == 0) {
        std::fill_n(g, s.p, real(0));
        continue;
      }
      const auto emit = [&](int o, double derivative) { g[o] = real(derivative * w / total_); };
      const RowLoss row = loss_.results ? loss_.results->row(i, t, emit)
                                        : row_loss(loss_, f + (i * s.q + t) * s.p,
                                                   data_.y + i * data_.targets + t * row_targets, 1,
                                                   s.p, true, emit);
      value += w * row.value;
    }
    return value;
  }

  int derivatives() const override { return data_.shape.q * data_.shape.p; }

  void load_readout(const Batch& batch, Workspace<real>& workspace) const override {
    const Shape& s = data_.shape;
    const int rows = batch.all_rows(), ML = int(round_up(rows, L_));
    const std::ptrdiff_t row = std::ptrdiff_t(batch.heads) * dL_;
    const real* g = workspace.g + std::ptrdiff_t(batch.first) * s.p;
    if (s.identity_v) {
      for (int m = 0; m < rows; ++m)
        for (int h = 0; h < batch.heads; ++h)
          kernels_.scale_rows(g + std::ptrdiff_t(m) * s.p, real(1), 1, s.p, dL_,
                              workspace.u + m * row + h * std::ptrdiff_t(dL_));
      return;
    }
    kernels_.pack_rows(g, rows, s.p, ML, workspace.gt);
    for (int h = 0; h < batch.heads; ++h)
      kernels_.product({{rows, dL_ / L_, s.p},
                        {workspace.gt, ML},
                        {vt_ + (batch.head + h) * std::ptrdiff_t(s.p) * dL_, dL_, L_},
                        {workspace.u + h * std::ptrdiff_t(dL_), row, L_},
                        false});
  }

  std::ptrdiff_t readout_stride(const Batch& batch) const override {
    return std::ptrdiff_t(batch.of_sample()) * dL_;
  }

  real factor(const real*) const override { return 1; }

  AlignedBuffer block_;
  real* vt_ = nullptr;  // V^T with features as lanes: (H, p, dL)
};

}  // namespace

template <class real>
double input_gradients(const Data<real>& data, const Parameters<real>& parameters, Loss loss,
                       const real* outputs, int threads, real* gx, real* gz) {
  std::optional<OwnLossResults> own;
  if (loss.own) {
    own.emplace(data, *loss.own, outputs, false);
    if (!own->succeeded()) return 0;
    loss.results = &*own;
  }
  if (data.shape.is_layer())
    return LayerInputs<real>(data, parameters, loss, gx, gz).run(outputs, threads);
  return ClassifierInputs<real>(data, parameters, loss, gx, gz).run(outputs, threads);
}

template double input_gradients<float>(const Data<float>&, const Parameters<float>&, Loss,
                                       const float*, int, float*, float*);
template double input_gradients<double>(const Data<double>&, const Parameters<double>&, Loss,
                                        const double*, int, double*, double*);

}  // namespace mhfast
