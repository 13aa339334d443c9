// Gradients by inputs: what classifiers and layers do for their readouts.
#include "inputs.hpp"

#include <algorithm>
#include <optional>
#include <vector>

#include "../problem/readout.hpp"
#include "../runtime/tuning.hpp"
#include "input_gradients.hpp"
#include "own_loss.hpp"
#include "scores.hpp"

namespace mhfast {
namespace {

/// U is the same for all samples. Gradients are linear in the derivative of a sample's loss, which
/// is multiplied in at the end.
template <class real>
class ClassifierInputs final : public InputGradients<real> {
 public:
  ClassifierInputs(const Data<real>& data, const Parameters<real>& parameters, Loss loss, real* gx,
                   real* gz, const ByParameters<real>& by)
      : InputGradients<real>(data, parameters, loss, gx, gz, by) {
    if (block_heads_ == 0) return;
    const Shape& s = data.shape;
    const std::size_t rows = std::size_t(s.q) * s.H;
    const auto lay_out = [&](Arena layout) {
      u_ = layout.template take<real>(rows * s.d);
      u_transposed_ = layout.template take<real>(rows * s.d);
      return layout.size();
    };
    lay_out(Arena(block_.reserve(lay_out(Arena()))));
    for (int head = 0; head < s.H; head += block_heads_) {
      const int heads = std::min(block_heads_, s.H - head), group_rows = s.q * heads;
      const std::ptrdiff_t at = std::ptrdiff_t(head) * s.q * s.d;
      for (std::ptrdiff_t t = 0; t < s.q; ++t)
        for (std::ptrdiff_t h = 0; h < heads; ++h)
          std::copy_n(parameters.U + at + (h * s.q + t) * s.d, s.d,
                      u_ + at + (t * heads + h) * s.d);
      kernels_.pack_rows(u_ + at, group_rows, s.d, group_rows, u_transposed_ + at);
    }
  }

 private:
  using Base = InputGradients<real>;
  using Base::block_heads_, Base::by_, Base::data_, Base::dL_, Base::gx_, Base::gz_, Base::kept_ax_,
      Base::kernels_, Base::L_, Base::loss_, Base::parameters_, Base::samples_, Base::total_,
      Base::wL_;
  using typename Base::Batch, typename Base::BlockReadout, typename Base::BlockWorkspace,
      typename Base::HeadGroup, typename Base::Workspace;

  void take_readout(Arena& layout, Workspace& workspace) const override {
    workspace.g = layout.take<real>(samples_);
  }

  double measure(std::ptrdiff_t i, const real* f, real* g) const override {
    const double w = data_.weight_of(0, i, 0);
    *g = 0;
    if (w == 0) return 0;  // left out, whatever the output is
    const OwnLossResults* const own = loss_.results;
    const auto term = own ? LossTerm<double>{own->value(i), own->derivative(i), 0}
                          : loss_term(loss_, double(*f), double(data_.y[i]));
    *g = real(term.derivative * w / (total_ * readout_of(data_.shape).divisor));
    return w * term.value;
  }

  double finish_sample(std::ptrdiff_t i, double found, real* g) const override {
    const Shape& s = data_.shape;
    if (!this->matters(g)) return 0;
    const real f = real(found * (1.0 / readout_of(s).divisor));
    const double value = measure(i, &f, g);
    const auto scale = [&](real* of_all, std::ptrdiff_t size) {
      real* const of_sample = of_all + i * size;
      if (*g == 0)
        std::fill_n(of_sample, size, real(0));
      else
        std::transform(of_sample, of_sample + size, of_sample, [&](real x) { return *g * x; });
    };
    if (gx_) scale(gx_, std::ptrdiff_t(s.T) * s.d);
    if (gz_) scale(gz_, std::ptrdiff_t(s.q) * s.d);
    return value;
  }

  bool finds_outputs() const override { return !loss_.own; }
  int derivatives() const override { return 1; }

  void load_readout(const Batch& batch, Workspace& workspace) const override {
    const Shape& s = data_.shape;
    real* to = workspace.u;
    for (int t = batch.first; t < batch.first + batch.rows; ++t)
      for (int h = batch.head; h < batch.head + batch.heads; ++h, to += dL_)
        kernels_.scale_rows(parameters_.U + (std::ptrdiff_t(h) * s.q + t) * s.d, real(1), 1, s.d,
                            dL_, to);
  }

  std::ptrdiff_t readout_stride(const Batch&) const override { return 0; }

  void take_block_readout(Arena& layout, BlockWorkspace& workspace) const override {
    workspace.g = layout.take<real>(L_);
  }

  BlockReadout load_block_readout(const HeadGroup& group, const BlockWorkspace&) const override {
    const std::ptrdiff_t at = std::ptrdiff_t(group.head) * data_.shape.q * data_.shape.d;
    return {u_ + at, u_transposed_ + at, false};
  }

  real factor(const real* g) const override { return *g; }

  void store_readout(int head) const override {
    const Shape& s = data_.shape;
    const std::ptrdiff_t of_head = std::ptrdiff_t(s.q) * s.d;
    real* const to = by_.readout + head * of_head;
    std::fill_n(to, of_head, real(0));
    const real* from = kept_ax_ + head * s.n * s.q * wL_;
    for (std::ptrdiff_t i = 0; i < s.n; ++i)
      for (int t = 0; t < s.q; ++t, from += wL_)
        for (int k = 0; k < s.d; ++k) to[t * std::ptrdiff_t(s.d) + k] += from[k];
  }

  AlignedBuffer block_;
  real *u_ = nullptr, *u_transposed_ = nullptr;  // U of each group by rows (t, h)
};

/// U of a sample is G V^T, which has the derivatives in it.
template <class real>
class LayerInputs final : public InputGradients<real> {
 public:
  LayerInputs(const Data<real>& data, const Parameters<real>& parameters, Loss loss, real* gx,
              real* gz, const ByParameters<real>& by)
      : InputGradients<real>(data, parameters, loss, gx, gz, by) {
    const Shape& s = data.shape;
    const std::ptrdiff_t head = std::ptrdiff_t(s.p) * dL_;
    if (s.identity_v) return;
    const int pL = int(round_up(s.p, L_));
    const auto lay_out = [&](Arena layout) {
      vt_ = layout.template take<real>(s.H * head);
      v_ = layout.template take<real>(finds_outputs() ? std::ptrdiff_t(s.H) * s.d * pL : 0);
      return layout.size();
    };
    lay_out(Arena(block_.reserve(lay_out(Arena()))));
    if (finds_outputs()) kernels_.scale_rows(parameters.V, real(1), s.H * s.d, s.p, pL, v_);
    for (std::ptrdiff_t h = 0; h < s.H; ++h)
      kernels_.pack_rows(parameters.V + h * s.d * s.p, s.d, s.p, dL_, vt_ + h * head);
  }

 private:
  using Base = InputGradients<real>;
  using Base::block_heads_, Base::by_, Base::data_, Base::dL_, Base::heads_, Base::kept_ax_,
      Base::kept_g_, Base::kernels_, Base::L_, Base::loss_, Base::parameters_, Base::rows_,
      Base::samples_, Base::total_, Base::wL_;
  using typename Base::Batch, typename Base::BlockReadout, typename Base::BlockWorkspace,
      typename Base::HeadGroup, typename Base::Workspace;

  void take_readout(Arena& layout, Workspace& workspace) const override {
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
                                        : row_loss(loss_, f + std::ptrdiff_t(t) * s.p,
                                                   data_.y + i * data_.targets + t * row_targets, 1,
                                                   s.p, true, emit);
      value += w * row.value;
    }
    return value;
  }

  int derivatives() const override { return data_.shape.q * data_.shape.p; }

  /// Where all heads and rows of a sample go together, its outputs come from the same scores.
  bool finds_outputs() const override {
    const Shape& s = data_.shape;
    const bool together =
        block_heads_ == 0 && !this->goes_by_heads() && heads_ == s.H && rows_ == s.q;
    if (s.d < kFoundFeatures) return false;
    return together && !s.shared_query && data_.row_map.is_softmax() && !loss_.own;
  }
  bool finds_weights_first() const override { return finds_outputs(); }
  double finish_sample(std::ptrdiff_t, double found, real*) const override { return found; }

  void find_derivatives(const Batch& batch, Workspace& workspace) const override {
    const Shape& s = data_.shape;
    const int M = batch.all_rows(), ML = int(round_up(M, L_)), pL = int(round_up(s.p, L_));
    const std::ptrdiff_t row = std::ptrdiff_t(batch.heads) * dL_;
    real* const f = workspace.f;
    if (s.identity_v) {
      for (int m = 0; m < M; ++m)
        for (int h = 0; h < batch.heads; ++h) {
          const real* const from = workspace.ax_rows + m * row + h * std::ptrdiff_t(dL_);
          real* const to = f + m * std::ptrdiff_t(pL);
          for (int k = 0; k < pL; ++k) to[k] = (h > 0 ? to[k] : real(0)) + from[k];
        }
    } else {
      kernels_.pack_rows(workspace.ax_rows, M, int(row), ML, workspace.et);
      kernels_.product({{M, pL / L_, s.d, batch.heads},
                        {workspace.et, ML, std::ptrdiff_t(dL_) * ML},
                        {v_, pL, L_, std::ptrdiff_t(s.d) * pL},
                        {f, pL, L_}});
    }
    for (int m = 1; m < M && pL > s.p; ++m)  // without what fills the rows
      std::copy_n(f + std::ptrdiff_t(m) * pL, s.p, f + std::ptrdiff_t(m) * s.p);
    for (int i = 0; i < batch.samples; ++i) {
      real* const g = workspace.g + std::ptrdiff_t(i) * derivatives();
      if (!this->matters(g)) continue;
      workspace.found[i] = measure(batch.sample + i, f + std::ptrdiff_t(i) * s.q * s.p, g);
    }
  }

  void load_readout(const Batch& batch, Workspace& workspace) const override {
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

  const real* transposed_values(int head) const override {
    return vt_ + head * (std::ptrdiff_t(data_.shape.p) * dL_);
  }

  void take_block_readout(Arena& layout, BlockWorkspace& workspace) const override {
    const std::size_t of_sample = derivatives(), d = data_.shape.d, L = L_;
    const std::size_t rows = std::size_t(data_.shape.q) * block_heads_;
    workspace.g = layout.take<real>(of_sample * L);
    workspace.g_lanes = layout.take<real>(of_sample * L);
    workspace.u = layout.take<real>(rows * d * L);
    workspace.u_transposed = layout.take<real>(rows * d * L);
  }

  void load_block_targets(const BlockWorkspace& workspace, int samples) const override {
    kernels_.pack_lanes(workspace.g, derivatives(), samples, derivatives(), workspace.g_lanes);
  }

  BlockReadout load_block_readout(const HeadGroup& group,
                                  const BlockWorkspace& workspace) const override {
    const Shape& s = data_.shape;
    const std::ptrdiff_t row = std::ptrdiff_t(s.d) * L_, next = group.heads * row;
    for (int h = 0; h < group.heads; ++h) {
      real* const to = workspace.u + h * row;
      if (s.identity_v) {
        for (int t = 0; t < s.q; ++t) std::copy_n(workspace.g_lanes + t * row, row, to + t * next);
        continue;
      }
      kernels_.product({{s.d, s.q, s.p},
                        {vt_ + (group.head + h) * std::ptrdiff_t(s.p) * dL_, dL_},
                        {workspace.g_lanes, L_, std::ptrdiff_t(s.p) * L_},
                        {to, L_, next}});
    }
    kernels_.transpose_lanes(workspace.u, s.q * group.heads, s.d, workspace.u_transposed);
    return {workspace.u, workspace.u_transposed, true};
  }

  real factor(const real*) const override { return 1; }

  void store_readout(int head) const override {
    const Shape& s = data_.shape;
    const std::ptrdiff_t rows = s.n * s.q;
    std::vector<real> transposed(std::size_t(s.p) * dL_);
    kernels_.product({{s.p, dL_ / L_, int(rows)},
                      {kept_g_, s.p},
                      {kept_ax_ + head * rows * wL_, wL_, L_},
                      {transposed.data(), dL_, L_}});
    real* to = by_.readout + std::ptrdiff_t(head) * s.d * s.p;
    for (int k = 0; k < s.d; ++k)
      for (int o = 0; o < s.p; ++o) *to++ = transposed[std::size_t(o) * dL_ + k];
  }

  AlignedBuffer block_;
  real* vt_ = nullptr;  // V^T with features as lanes: (H, p, dL)
  real* v_ = nullptr;   // V with outputs as lanes: (H, d, pL)
};

}  // namespace

template <class real>
double input_gradients(const Data<real>& data, const Parameters<real>& parameters, Loss loss,
                       const real* outputs, const std::function<void(real*)>& find, int threads,
                       real* gx, real* gz) {
  std::vector<real> found;
  std::optional<OwnLossResults> own;
  const auto find_all = [&] {
    found.resize(data.shape.n * data.shape.outputs());
    find(found.data());
    outputs = found.data();
  };
  if (loss.own) {
    if (!outputs) find_all();
    own.emplace(data, *loss.own, outputs, false);
    if (!own->succeeded()) return 0;
    loss.results = &*own;
  }
  const auto run = [&](InputGradients<real>&& gradients) {
    if (!outputs && !gradients.finds_outputs()) find_all();
    return gradients.run(outputs, threads);
  };
  if (data.shape.is_layer()) return run(LayerInputs<real>(data, parameters, loss, gx, gz, {}));
  return run(ClassifierInputs<real>(data, parameters, loss, gx, gz, {}));
}

template <class real>
bool inputs_find_parameters(const Data<real>& data, Loss loss, const real* gx, const real* gz) {
  return !loss.own && InputGradients<real>::finds_parameters(data, gz || (data.self && gx));
}

template <class real>
double input_and_parameter_gradients(const Data<real>& data, const Parameters<real>& parameters,
                                     Loss loss, int threads, real* gx, real* gz, real* by_W,
                                     real* by_readout) {
  const ByParameters<real> by{by_W, by_readout};
  if (data.shape.is_layer())
    return LayerInputs<real>(data, parameters, loss, gx, gz, by).run(nullptr, threads);
  return ClassifierInputs<real>(data, parameters, loss, gx, gz, by).run(nullptr, threads);
}

template double input_gradients<float>(const Data<float>&, const Parameters<float>&, Loss,
                                       const float*, const std::function<void(float*)>&, int,
                                       float*, float*);
template double input_gradients<double>(const Data<double>&, const Parameters<double>&, Loss,
                                        const double*, const std::function<void(double*)>&, int,
                                        double*, double*);
template bool inputs_find_parameters<float>(const Data<float>&, Loss, const float*, const float*);
template bool inputs_find_parameters<double>(const Data<double>&, Loss, const double*,
                                             const double*);
template double input_and_parameter_gradients<float>(const Data<float>&, const Parameters<float>&,
                                                     Loss, int, float*, float*, float*, float*);
template double input_and_parameter_gradients<double>(const Data<double>&,
                                                      const Parameters<double>&, Loss, int, double*,
                                                      double*, double*, double*);

}  // namespace mhfast
