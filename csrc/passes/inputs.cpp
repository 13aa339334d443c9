// Of one sample and head, with U = derivative of the loss times U_h for a classifier and G V_h^T
// for a layer:
//
//   dL/dX += A^T U + D^T (Z W),   dL/dZ += D X W^T
//
// With an identity in the place of W or V the product with it is left out. A sample at a time, some
// of its query rows at a time, a head at a time. A and D come from scores_rows with query rows as
// lanes; the sums over rows are products with features as lanes, for which A, D and Z W are
// transposed. A classifier's gradient is linear in the derivative of its loss, which is multiplied
// in at the end.
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

/// One thread's arrays for the query rows of one sample and one head.
template <class real>
struct Workspace {
  real *xt, *zt, *p, *s, *c, *limits, *row_readouts;  // as scores_rows takes them
  real* x_rows;                                       // keys (T, dL), where W is an identity
  real* readout;
  real* transposed;  // A, then D: (rows, T)
  real* right;       // U, then Z W: (rows, dL)
  real* e;           // (D X)^T: (d, qL)
  real *gx, *gz;     // (T, dL), (q, dL)
  real* g;           // derivatives of the outputs
  real *gt, *ut;     // of a layer: those of a tile transposed (p, qL), and G V^T (d, qL)
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
  /// The arrays of a workspace that the readout needs: g, of the classifier one number, and others.
  virtual void take_readout(Arena& layout, Workspace<real>& workspace) const = 0;
  /// Weighted loss of a sample from its outputs; writes their derivatives to workspace.g.
  virtual double measure(std::ptrdiff_t i, const real* f, Workspace<real>& workspace) const = 0;
  /// U of a tile of rows: returns (d, qL) as scores_rows takes it, and if X has a gradient writes
  /// (rows, dL) to workspace.right.
  virtual const real* load_readout(int h, int first, int rows,
                                   Workspace<real>& workspace) const = 0;
  /// What a sample's gradients are multiplied by at the end.
  virtual real factor(const Workspace<real>& workspace) const = 0;

  const Kernels<real>& kernels_ = active_kernels<real>();
  const Data<real>& data_;
  const Parameters<real>& parameters_;
  const Loss loss_;
  real *const gx_, *const gz_;
  const int L_, TL_, dL_, row_tile_;
  const double total_;

 private:
  const real* queries(std::ptrdiff_t i) const {
    const Shape& s = data_.shape;
    return s.shared_query ? parameters_.prompt : data_.z + i * s.q * s.d;
  }
  void load_weights();
  Workspace<real> take_workspace(Arena& layout) const;
  void differentiate(std::ptrdiff_t i, Workspace<real>& workspace) const;
  void add_head(std::ptrdiff_t i, int h, int first, int rows, Workspace<real>& workspace) const;
  void store(const real* from, int rows, real factor, bool add, real* to) const;

  const bool wants_z_;  // by an external query, or as part of gx
  AlignedBuffer block_;
  real *w_ = nullptr, *wt_ = nullptr;  // W scaled; its transpose with features as lanes
};

/// Query rows in whole vectors whose A and D fit the cache.
template <class real>
int tile_of_rows(const Shape& s, int lanes) {
  const std::size_t row = 4 * std::size_t(s.T) * sizeof(real);
  const int rows = int(std::max<std::size_t>(kInputTileBytes / row, 1));
  return std::min(int(round_up(rows, lanes)), int(round_up(s.q, lanes)));
}

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
      row_tile_(tile_of_rows<real>(data.shape, L_)),
      total_(data.total_weight(0, loss)),
      wants_z_(gz || (data.self && gx)) {
  load_weights();
}

template <class real>
void InputGradients<real>::load_weights() {
  const Shape& s = data_.shape;
  const std::ptrdiff_t H = s.H, dd = std::ptrdiff_t(s.d) * s.d, ddL = std::ptrdiff_t(s.d) * dL_;
  if (s.identity_w) return;
  const auto lay_out = [&](Arena layout) {
    w_ = layout.template take<real>(H * dd);
    wt_ = layout.template take<real>(wants_z_ ? H * ddL : 0);
    return layout.size();
  };
  lay_out(Arena(block_.reserve(lay_out(Arena()))));
  std::transform(parameters_.W, parameters_.W + H * dd, w_,
                 [this](real entry) { return parameters_.scale * entry; });
  for (std::ptrdiff_t h = 0; wants_z_ && h < H; ++h)
    kernels_.pack_rows(w_ + h * dd, s.d, s.d, dL_, wt_ + h * ddL);
}

template <class real>
Workspace<real> InputGradients<real>::take_workspace(Arena& layout) const {
  const std::size_t d = data_.shape.d, T = data_.shape.T, rows = row_tile_;
  Workspace<real> workspace{};
  workspace.xt = layout.take<real>(d * TL_);
  workspace.zt = layout.take<real>(d * rows);
  workspace.p = layout.take<real>(d * rows);
  workspace.s = layout.take<real>(T * rows);
  workspace.c = layout.take<real>(T * rows);
  workspace.limits = layout.take<real>(rows);
  workspace.row_readouts = layout.take<real>(rows);
  workspace.readout = layout.take<real>(1);
  workspace.transposed = layout.take<real>(gx_ ? 2 * rows * T : 0);
  workspace.right = layout.take<real>(gx_ ? 2 * rows * dL_ : 0);
  workspace.e = layout.take<real>(wants_z_ ? d * rows : 0);
  workspace.x_rows = layout.take<real>(wants_z_ && data_.shape.identity_w ? T * dL_ : 0);
  workspace.gx = layout.take<real>(gx_ ? T * dL_ : 0);
  workspace.gz = layout.take<real>(wants_z_ ? rows * dL_ : 0);
  take_readout(layout, workspace);
  return workspace;
}

template <class real>
void InputGradients<real>::add_head(std::ptrdiff_t i, int h, int first, int rows,
                                    Workspace<real>& workspace) const {
  const Shape& s = data_.shape;
  const std::ptrdiff_t dd = std::ptrdiff_t(s.d) * s.d;
  const int qL = int(round_up(rows, L_)), N = dL_ / L_;
  const real* ut = load_readout(h, first, rows, workspace);
  const ScoreOperands<real> operands{s.identity_w ? nullptr : w_ + h * dd,
                                     workspace.xt,
                                     workspace.zt,
                                     data_.is_limited() ? workspace.limits : nullptr,
                                     ut,
                                     qL,
                                     false,
                                     data_.row_map,
                                     parameters_.scale};
  const ScoreMemory<real> memory{
      workspace.p, workspace.s, workspace.c, workspace.readout, workspace.row_readouts, nullptr};
  kernels_.scores_rows(
      score_arguments(RowMode::kDerivative, s.d, {s.T, rows, 1}, operands, memory, 0));
  if (gx_) {
    const std::ptrdiff_t weights = std::ptrdiff_t(qL) * s.T, of_zw = std::ptrdiff_t(qL) * dL_;
    kernels_.pack_rows(workspace.s, s.T, qL, s.T, workspace.transposed);
    kernels_.pack_rows(workspace.c, s.T, qL, s.T, workspace.transposed + weights);
    kernels_.pack_rows(workspace.p, s.d, qL, dL_, workspace.right + of_zw);
    kernels_.product({{s.T, N, rows, 2},
                      {workspace.transposed, s.T, weights},
                      {workspace.right, dL_, L_, of_zw},
                      {workspace.gx, dL_, L_},
                      h > 0 || first > 0});
  }
  if (!wants_z_) return;
  if (s.identity_w) {  // the scale is left to the end
    kernels_.product({{rows, N, s.T},
                      {workspace.c, qL},
                      {workspace.x_rows, dL_, L_},
                      {workspace.gz, dL_, L_},
                      h > 0});
    return;
  }
  kernels_.product({{s.d, qL / L_, s.T},
                    {data_.x + i * s.T * s.d, s.d},
                    {workspace.c, qL, L_},
                    {workspace.e, qL, L_},
                    false});
  kernels_.product({{rows, N, s.d},
                    {workspace.e, qL},
                    {wt_ + h * std::ptrdiff_t(s.d) * dL_, dL_, L_},
                    {workspace.gz, dL_, L_},
                    h > 0});
}

/// Rows of dL numbers times a factor, to rows of d.
template <class real>
void InputGradients<real>::store(const real* from, int rows, real factor, bool add,
                                 real* to) const {
  const int d = data_.shape.d;
  for (int t = 0; t < rows; ++t, from += dL_, to += d)
    for (int k = 0; k < d; ++k) to[k] = (add ? to[k] : real(0)) + factor * from[k];
}

template <class real>
void InputGradients<real>::differentiate(std::ptrdiff_t i, Workspace<real>& workspace) const {
  const Shape& s = data_.shape;
  const std::ptrdiff_t d = s.d;
  real* gx = gx_ ? gx_ + i * s.T * d : nullptr;
  real* gz = gz_ ? gz_ + i * s.q * d : nullptr;
  if (std::all_of(workspace.g, workspace.g + s.outputs(), [](real g) { return g == 0; })) {
    if (gx) std::fill_n(gx, s.T * d, real(0));
    if (gz) std::fill_n(gz, s.q * d, real(0));
    return;
  }
  kernels_.pack_rows(data_.x + i * s.T * d, s.T, s.d, TL_, workspace.xt);
  if (wants_z_ && s.identity_w)
    kernels_.scale_rows(data_.x + i * s.T * d, real(1), s.T, s.d, dL_, workspace.x_rows);
  const real of_z = s.identity_w ? parameters_.scale : real(1);
  for (int first = 0; first < s.q; first += row_tile_) {
    const int rows = std::min(row_tile_, s.q - first), qL = int(round_up(rows, L_));
    kernels_.pack_rows(queries(i) + first * d, rows, s.d, qL, workspace.zt);
    if (data_.is_limited()) data_.write_limits(i, first, rows, qL, workspace.limits);
    for (int h = 0; h < s.H; ++h) add_head(i, h, first, rows, workspace);
    if (wants_z_)
      store(workspace.gz, rows, of_z * factor(workspace), false, (gz ? gz : gx) + first * d);
  }
  if (gx) store(workspace.gx, s.T, factor(workspace), data_.self, gx);
}

template <class real>
double InputGradients<real>::run(const real* outputs, int threads) {
  const Shape& s = data_.shape;
  const double by_w = s.identity_w ? 0.0 : 4.0 * s.d * s.d;
  const double flops = double(s.n) * s.H * s.q * (by_w + 10.0 * s.T * s.d);
  const int members = useful_threads(threads, s.n, flops);
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
    for (std::ptrdiff_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < s.n;) {
      values[i] = measure(i, outputs, workspace);
      differentiate(i, workspace);
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
  ClassifierInputs(const Data<real>& data, const Parameters<real>& parameters, Loss loss, real* gx,
                   real* gz)
      : InputGradients<real>(data, parameters, loss, gx, gz) {
    const Shape& s = data.shape;
    const std::ptrdiff_t H = s.H, head = std::ptrdiff_t(s.q) * dL_;
    tiles_ = (s.q + row_tile_ - 1) / row_tile_ * std::ptrdiff_t(row_tile_) * s.d;
    const auto lay_out = [&](Arena layout) {
      rows_ = layout.template take<real>(H * head);
      columns_ = layout.template take<real>(H * tiles_);
      return layout.size();
    };
    lay_out(Arena(block_.reserve(lay_out(Arena()))));
    for (std::ptrdiff_t h = 0; h < H; ++h) {
      const real* u = parameters.U + h * s.q * s.d;
      kernels_.scale_rows(u, real(1), s.q, s.d, dL_, rows_ + h * head);
      for (int first = 0; first < s.q; first += row_tile_) {
        const int tile = std::min(row_tile_, s.q - first);
        kernels_.pack_rows(u + std::ptrdiff_t(first) * s.d, tile, s.d, int(round_up(tile, L_)),
                           columns_ + h * tiles_ + std::ptrdiff_t(first) * s.d);
      }
    }
  }

 private:
  using Base = InputGradients<real>;
  using Base::data_, Base::dL_, Base::gx_, Base::kernels_, Base::L_, Base::loss_, Base::row_tile_,
      Base::total_;

  void take_readout(Arena& layout, Workspace<real>& workspace) const override {
    workspace.g = layout.take<real>(1);
  }

  double measure(std::ptrdiff_t i, const real* f, Workspace<real>& workspace) const override {
    const double w = data_.weight_of(0, i, 0);
    workspace.g[0] = 0;
    if (w == 0) return 0;  // left out, whatever the output is
    const OwnLossResults* const own = loss_.results;
    const auto term = own ? LossTerm<double>{own->value(i), own->derivative(i), 0}
                          : loss_term(loss_, double(f[i]), double(data_.y[i]));
    workspace.g[0] = real(term.derivative * w / (total_ * readout_of(data_.shape).divisor));
    return w * term.value;
  }

  const real* load_readout(int h, int first, int rows, Workspace<real>& workspace) const override {
    const Shape& s = data_.shape;
    if (gx_)
      std::copy_n(rows_ + (std::ptrdiff_t(h) * s.q + first) * dL_, rows * dL_, workspace.right);
    return columns_ + h * tiles_ + std::ptrdiff_t(first) * s.d;
  }

  real factor(const Workspace<real>& workspace) const override { return workspace.g[0]; }

  AlignedBuffer block_;
  real* rows_ = nullptr;      // (H, q, dL)
  real* columns_ = nullptr;   // transposed, a tile of rows after the other
  std::ptrdiff_t tiles_ = 0;  // numbers of a head of these
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
  using Base::data_, Base::dL_, Base::gx_, Base::kernels_, Base::L_, Base::loss_, Base::row_tile_,
      Base::total_;

  void take_readout(Arena& layout, Workspace<real>& workspace) const override {
    const std::size_t d = data_.shape.d, q = data_.shape.q, p = data_.shape.p, rows = row_tile_;
    workspace.g = layout.take<real>(q * p);
    workspace.gt = layout.take<real>(p * rows);
    workspace.ut = layout.take<real>(d * rows);
  }

  double measure(std::ptrdiff_t i, const real* f, Workspace<real>& workspace) const override {
    const Shape& s = data_.shape;
    double value = 0;
    const std::ptrdiff_t row_targets = data_.targets / s.q;
    for (int t = 0; t < s.q; ++t) {
      const double w = data_.weight_of(0, i, t);
      real* g = workspace.g + std::ptrdiff_t(t) * s.p;
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

  const real* load_readout(int h, int first, int rows, Workspace<real>& workspace) const override {
    const Shape& s = data_.shape;
    const int qL = int(round_up(rows, L_));
    if (h == 0)
      kernels_.pack_rows(workspace.g + std::ptrdiff_t(first) * s.p, rows, s.p, qL, workspace.gt);
    if (s.identity_v) {
      if (gx_)
        kernels_.scale_rows(workspace.g + std::ptrdiff_t(first) * s.p, real(1), rows, s.p, dL_,
                            workspace.right);
      return workspace.gt;
    }
    const real* vt = vt_ + std::ptrdiff_t(h) * s.p * dL_;
    kernels_.product(
        {{s.d, qL / L_, s.p}, {vt, dL_}, {workspace.gt, qL, L_}, {workspace.ut, qL, L_}, false});
    if (gx_)
      kernels_.product({{rows, dL_ / L_, s.p},
                        {workspace.gt, qL},
                        {vt, dL_, L_},
                        {workspace.right, dL_, L_},
                        false});
    return workspace.ut;
  }

  real factor(const Workspace<real>&) const override { return 1; }

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
