// Hessian-vector products of classifiers and of layers: their losses and readouts.
#include "curvature.hpp"

#include <cmath>
#include <numeric>
#include <optional>
#include <vector>

#include "../problem/alike_heads.hpp"
#include "../problem/clean.hpp"
#include "../problem/factors.hpp"
#include "../problem/rescale.hpp"
#include "evaluate.hpp"
#include "hessian_product.hpp"
#include "loadable_model.hpp"
#include "own_loss.hpp"
#include "triangular.hpp"

namespace mhfast {
namespace {

/// The derivative of a sample's loss by the sum of its readouts, and its change along the
/// direction.
struct LossChange {
  double derivative, tangent;
};

/// Works on all rows of a sample before its loss is known. If there are many, only the weights of
/// one head are kept, and they are computed twice.
template <class real>
class ClassifierHessian final : public HessianProduct<real> {
 public:
  explicit ClassifierHessian(const HessianCall<real>& call)
      : HessianProduct<real>(call, call.data.shape.q, false) {
    if (readout_only_) {
      load_pairs();
      return;
    }
    this->load_readout(s_.q, s_.d, this->padded(s_.q));
    if (!this->blocks_) return;
    const auto by_rows = [&](const real* from, std::vector<real>& to) -> const real* {
      if (!from) return nullptr;
      const std::ptrdiff_t rows = this->block_rows();
      to.resize(rows * s_.d);
      for (int h = 0; h < s_.H; ++h)
        for (int t = 0; t < s_.q; ++t)
          for (int k = 0; k < s_.d; ++k) to[k * rows + t * s_.H + h] = *from++;
      return to.data();
    };
    of_rows_ = {by_rows(model_.at[kU], value_of_rows_), by_rows(tangent_[kU], tangent_of_rows_)};
  }

 private:
  using Base = HessianProduct<real>;
  using Base::data_, Base::heads_kept_, Base::kernels_, Base::loss_, Base::model_, Base::out_,
      Base::readout_, Base::readout_only_, Base::readout_size_, Base::s_, Base::tangent_,
      Base::tile_rows_, Base::total_, Base::wants_readout_;
  using typename Base::Block, typename Base::Sums, typename Base::Tile, typename Base::Workspace;

  void run_sample(std::ptrdiff_t i, Workspace& workspace, const Sums& sums,
                  bool fresh) const override;
  void run_block(std::ptrdiff_t first, int count, Block& block, const Sums& sums,
                 bool fresh) const override;
  void load_pairs();
  void run_readout(std::ptrdiff_t i, Workspace& workspace, const Sums& sums, bool fresh) const;
  void run_readout(std::ptrdiff_t first, int count, Block& block, const Sums& sums,
                   bool fresh) const;
  void differentiate(std::ptrdiff_t first, int count, const double* phi, const double* phi_tangent,
                     Block& block) const;
  LossChange differentiate(std::ptrdiff_t i, double phi, double phi_tangent) const;
  void add_readout_terms(int h, const Tile& tile, double derivative, double tangent,
                         Workspace& workspace, const Sums& sums, bool fresh) const;
  void store_readout(int h) const override {
    this->sum_chunks(&Sums::of_readout, h * readout_size_, s_.q,
                     out_[kU] + std::ptrdiff_t(h) * s_.q * s_.d);
  }

  std::vector<real> value_of_rows_, tangent_of_rows_;
  WithTangent<real> of_rows_;  // U (d, rows (t, h)), of blocks
  std::vector<real> pairs_;    // U and its tangent, where A X is all that is needed
};

/// From the sums over rows and heads of a sample.
template <class real>
LossChange ClassifierHessian<real>::differentiate(std::ptrdiff_t i, double phi,
                                                  double phi_tangent) const {
  const double w = data_.weight_of(0, i, 0);
  if (w == 0) return {0, 0};
  const double by_heads = 1 / std::sqrt(double(s_.H)), share = w / total_ * by_heads;
  const double y = double(data_.y[i]);
  const OwnLossResults* const own = loss_.results;
  return {(own ? own->derivative(i) : loss_term(loss_, phi * by_heads, y).derivative) * share,
          (own ? own->curvature(i) : curvature(loss_, phi * by_heads, y)) *
              (phi_tangent * by_heads) * share};
}

template <class real>
void ClassifierHessian<real>::run_sample(std::ptrdiff_t i, Workspace& workspace, const Sums& sums,
                                         bool fresh) const {
  if (readout_only_) return run_readout(i, workspace, sums, fresh);
  const int qL = this->padded(s_.q);
  const bool kept = heads_kept_ == s_.H && tile_rows_ >= qL;
  const std::ptrdiff_t of_head = std::ptrdiff_t(s_.d) * qL;
  const auto for_heads = [&](const auto& body) {
    for (int first = 0; first < s_.q; first += int(tile_rows_)) {
      const int rows = std::min(int(tile_rows_), s_.q - first);
      const Tile tile{first, rows, this->padded(rows)};
      this->find_limits(i, tile, workspace);
      for (int h = 0; h < s_.H; ++h) body(h, tile);
    }
  };
  const auto evaluate = [&](int h, const Tile& tile) {
    this->score(h, tile, workspace);
    const std::ptrdiff_t at = h * of_head + tile.first;
    this->derive(h, tile, {readout_.value + at, readout_.tangent ? readout_.tangent + at : nullptr},
                 qL, workspace);
  };
  double phi = 0, phi_tangent = 0;
  for_heads([&](int h, const Tile& tile) {
    evaluate(h, tile);
    for (int t = 0; t < tile.rows; ++t) {
      phi += double(workspace.readouts[t]);
      phi_tangent += double(workspace.readout_tangents[t]);
    }
  });
  const LossChange change = differentiate(i, phi, phi_tangent);
  for_heads([&](int h, const Tile& tile) {
    if (!kept) evaluate(h, tile);
    this->add_weight_terms(i, h, tile, change.derivative, change.tangent, workspace, sums, fresh);
    add_readout_terms(h, tile, change.derivative, change.tangent, workspace, sums, fresh);
  });
}

/// U and U. side by side, of blocks (rows (t, h), d, 2), else (H, q, dL / L, 2, L).
template <class real>
void ClassifierHessian<real>::load_pairs() {
  const int d = s_.d, L = this->blocks_ ? 1 : kernels_.lanes;
  const std::ptrdiff_t row = round_up(d, L);
  pairs_.assign(2 * s_.H * s_.q * row, real(0));
  for (int m = 0; m < 2; ++m) {
    const real* u = m == 0 ? model_.at[kU] : tangent_[kU];
    for (int h = 0; u && h < s_.H; ++h)
      for (int t = 0; t < s_.q; ++t, u += d) {
        real* const to = pairs_.data() + 2 * row * (this->blocks_ ? t * s_.H + h : h * s_.q + t);
        for (int k = 0; k < d; ++k) to[(k / L * 2 + m) * L + k % L] = u[k];
      }
  }
}

/// Where A X is all: it is kept of a sample until its loss is known.
template <class real>
void ClassifierHessian<real>::run_readout(std::ptrdiff_t i, Workspace& workspace, const Sums& sums,
                                          bool fresh) const {
  const int L = kernels_.lanes, dL = this->padded(s_.d);
  real sums_of_lanes[2 * kMaxLanes];
  double phi = 0, phi_tangent = 0;
  for (int first = 0; first < s_.q; first += int(tile_rows_)) {
    const int rows = std::min(int(tile_rows_), s_.q - first);
    const Tile tile{first, rows, this->padded(rows)};
    this->find_limits(i, tile, workspace);
    for (int h = 0; h < s_.H; ++h) {
      this->score(h, tile, workspace);
      const real* const weights = this->still_weights(this->rows_of(h, tile, workspace));
      const std::ptrdiff_t row = std::ptrdiff_t(h) * s_.q + first;
      real* const ax = workspace.ax + row * dL;
      this->multiply(rows, dL, s_.T, weights, tile_rows_, workspace.x, dL, ax, dL, false);
      kernels_.product_lanes({{2, 1, rows * dL / L},
                              {pairs_.data() + 2 * row * dL, 2 * L},
                              {ax, L, L},
                              {sums_of_lanes, L, L}});
      phi = std::accumulate(sums_of_lanes, sums_of_lanes + L, phi);
      phi_tangent = std::accumulate(sums_of_lanes + L, sums_of_lanes + 2 * L, phi_tangent);
    }
  }
  if (!wants_readout_) return;
  const real tangent = real(differentiate(i, phi, phi_tangent).tangent);
  kernels_.combine(workspace.ax, 0, &tangent, 1, s_.H * readout_size_, sums.of_readout, !fresh);
}

/// What a block's derivatives are multiplied by, from the sums of its samples.
template <class real>
void ClassifierHessian<real>::differentiate(std::ptrdiff_t first, int count, const double* phi,
                                            const double* phi_tangent, Block& block) const {
  for (int l = 0; l < kernels_.lanes; ++l) {
    const LossChange change =
        l < count ? differentiate(first + l, phi[l], phi_tangent[l]) : LossChange{0, 0};
    block.derivative[l] = real(change.derivative);
    block.tangent[l] = real(change.tangent);
  }
}

/// As for a sample.
template <class real>
void ClassifierHessian<real>::run_readout(std::ptrdiff_t first, int count, Block& block,
                                          const Sums& sums, bool fresh) const {
  const int L = kernels_.lanes, rows = this->block_rows();
  this->multiply_keys(block, this->still_weights(this->rows_of(block)), block.e);
  real readouts[2 * kMaxLanes];
  double phi[kMaxLanes] = {}, phi_tangent[kMaxLanes] = {};
  for (int r = 0; r < rows; ++r) {
    kernels_.product({{2, 1, s_.d},
                      {pairs_.data() + std::ptrdiff_t(2) * r * s_.d, 2},
                      {block.e + std::ptrdiff_t(r) * s_.d * L, L, L},
                      {readouts, L, L}});
    for (int l = 0; l < L; ++l) {
      phi[l] += double(readouts[l]);
      phi_tangent[l] += double(readouts[L + l]);
    }
  }
  if (!wants_readout_) return;
  differentiate(first, count, phi, phi_tangent, block);
  const std::ptrdiff_t vectors = std::ptrdiff_t(rows) * s_.d;
  for (std::ptrdiff_t v = 0, k = 0; v < vectors; ++v)
    for (int l = 0; l < L; ++l, ++k) block.e[k] *= block.tangent[l];
  this->add_rows(block, block.e, sums.of_readout, readout_size_, fresh);
}

template <class real>
void ClassifierHessian<real>::run_block(std::ptrdiff_t first, int count, Block& block,
                                        const Sums& sums, bool fresh) const {
  if (readout_only_) return run_readout(first, count, block, sums, fresh);
  const int L = kernels_.lanes, rows = this->block_rows();
  this->derive(of_rows_, false, block);
  double phi[kMaxLanes] = {}, phi_tangent[kMaxLanes] = {};
  for (int r = 0; r < rows; ++r)
    for (int l = 0; l < L; ++l) {
      phi[l] += double(block.readouts[r * L + l]);
      phi_tangent[l] += double(block.readout_tangents[r * L + l]);
    }
  differentiate(first, count, phi, phi_tangent, block);
  this->add_weight_terms(first, count, block, sums, fresh);
  if (!wants_readout_) return;
  const WithTangent<real> weights = this->weights_of(this->rows_of(block), block);
  const std::ptrdiff_t vectors = std::ptrdiff_t(s_.T) * rows;
  for (std::ptrdiff_t v = 0, k = 0; v < vectors; ++v)
    for (int l = 0; l < L; ++l, ++k)
      block.m[k] = block.tangent[l] * weights.value[k] + block.derivative[l] * weights.tangent[k];
  this->multiply_keys(block, block.m, block.e);
  this->add_rows(block, block.e, sums.of_readout, readout_size_, fresh);
}

/// derivative. A X + derivative A. X, by row.
template <class real>
void ClassifierHessian<real>::add_readout_terms(int h, const Tile& tile, double derivative,
                                                double tangent, Workspace& workspace,
                                                const Sums& sums, bool fresh) const {
  if (!wants_readout_) return;
  const int T = s_.T, dL = this->padded(s_.d);
  const std::ptrdiff_t R = tile_rows_, size = T * R;
  const TangentArguments<real> in = this->rows_of(h, tile, workspace);
  const real a = real(tangent), b = real(derivative);
  if (data_.row_map.is_softmax()) {
    for (std::ptrdiff_t k = 0; k < size; ++k) workspace.m[k] = in.s[k] * (a + b * in.ds[k]);
  } else {
    const WithTangent<real> weights = this->weights_of(in, workspace);
    for (std::ptrdiff_t k = 0; k < size; ++k)
      workspace.m[k] = a * weights.value[k] + b * weights.tangent[k];
  }
  this->multiply(tile.rows, dL, T, workspace.m, R, workspace.x, dL,
                 sums.of_readout + h * readout_size_ + std::ptrdiff_t(tile.first) * dL, dL, !fresh);
}

/// A row of outputs, `stride` numbers apart, with its targets; its derivatives, which are zeros
/// before, are written to both g and g_row.
template <class real>
struct OutputRow {
  const real *f, *df, *y;
  std::ptrdiff_t stride;
  real *g, *dg, *g_row, *dg_row;
};

/// Works on a tile of rows: their losses are known from all heads of these rows.
template <class real>
class LayerHessian final : public HessianProduct<real> {
 public:
  explicit LayerHessian(const HessianCall<real>& call)
      : HessianProduct<real>(call, call.data.shape.p, true) {
    if (!values_first_) this->load_readout(s_.d, s_.p, s_.d);
  }

 private:
  using Base = HessianProduct<real>;
  using Base::attended_size_, Base::by_V_, Base::data_, Base::kernels_, Base::loss_, Base::model_,
      Base::moves_, Base::of_keys_, Base::out_, Base::queries_row_, Base::readout_,
      Base::readout_size_, Base::s_, Base::tangent_, Base::tile_rows_, Base::total_,
      Base::values_first_, Base::values_row_, Base::wants_readout_, Base::wants_W_;
  using typename Base::Block, typename Base::Sums, typename Base::Tile, typename Base::Workspace;

  void run_sample(std::ptrdiff_t i, Workspace& workspace, const Sums& sums,
                  bool fresh) const override;
  void run_values(std::ptrdiff_t i, Workspace& workspace, const Sums& sums, bool fresh) const;
  void load_values(const Workspace& workspace) const;
  WithTangent<real> find_weights(const Tile& tile, Workspace& workspace) const;
  void find_outputs(const Tile& tile, const WithTangent<real>& weights,
                    const Workspace& workspace) const;
  void derive_values(const Tile& tile, Workspace& workspace) const;
  void add_by_values(const Tile& tile, const WithTangent<real>& weights,
                     const Workspace& workspace) const;
  void add_values_terms(const Workspace& workspace, const Sums& sums, bool fresh) const;
  void run_block(std::ptrdiff_t first, int count, Block& block, const Sums& sums,
                 bool fresh) const override;
  void find_outputs(const Block& block) const;
  void find_derivatives(std::ptrdiff_t first, int count, const Block& block) const;
  WithTangent<real> find_upstream(const Block& block) const;
  void add_readout_terms(int count, const Block& block, const Sums& sums, bool fresh) const;
  void differentiate_row(std::ptrdiff_t i, int t, const OutputRow<real>& row) const;
  void add_outputs(int h, const Tile& tile, Workspace& workspace) const;
  void find_derivatives(std::ptrdiff_t i, const Tile& tile, Workspace& workspace) const;
  WithTangent<real> find_upstream(int h, const Tile& tile, Workspace& workspace) const;
  void add_readout_terms(int h, const Tile& tile, Workspace& workspace, const Sums& sums,
                         bool fresh) const;
  void store_readout(int h) const override;
};

/// Adds one head's outputs F = A X V and their tangents, outputs by rows as (p, R).
template <class real>
void LayerHessian<real>::add_outputs(int h, const Tile& tile, Workspace& workspace) const {
  const int d = s_.d, T = s_.T, p = s_.p, N = tile.padded;
  const std::ptrdiff_t R = tile_rows_, dL = this->padded(d), of_head = std::ptrdiff_t(h) * d * p;
  const TangentArguments<real> in = this->rows_of(h, tile, workspace);
  const WithTangent<real> weights = this->moved_weights(in, workspace);
  if (h == 0 && !moves_) std::fill_n(workspace.df, p * R, real(0));
  const bool add = h > 0 || !moves_;
  if (s_.identity_v) {
    this->multiply(d, N, T, workspace.x, dL, weights.value, R, workspace.f, R, h > 0);
    if (moves_) this->multiply(d, N, T, workspace.x, dL, weights.tangent, R, workspace.df, R, add);
    return;
  }
  real *const yt = workspace.yt + h * attended_size_, *const dyt =
                                                          workspace.dyt + h * attended_size_;
  this->multiply(d, N, T, workspace.x, dL, weights.value, R, yt, R, false);
  if (moves_) this->multiply(d, N, T, workspace.x, dL, weights.tangent, R, dyt, R, false);
  const WithTangent<real> v{model_.at[kV] + of_head,
                            tangent_[kV] ? tangent_[kV] + of_head : nullptr};
  this->multiply(p, N, d, v.value, p, yt, R, workspace.f, R, h > 0);
  this->multiply_tangents(p, N, d, v, p, {yt, moves_ ? dyt : nullptr}, R, workspace.df, R, add);
}

/// Derivatives of the outputs of a tile and their tangents, both ways round.
template <class real>
void LayerHessian<real>::find_derivatives(std::ptrdiff_t i, const Tile& tile,
                                          Workspace& workspace) const {
  const int p = s_.p;
  const std::ptrdiff_t R = tile_rows_, row_targets = data_.targets / s_.q;
  std::fill_n(workspace.g, p * R, real(0));
  std::fill_n(workspace.dg, p * R, real(0));
  for (int t = 0; t < tile.rows; ++t) {
    const real* given = data_.y + i * data_.targets + (tile.first + t) * row_targets;
    // Targets next to the outputs, whose numbers are R apart.
    for (int o = 0; o < row_targets; ++o) workspace.y[o * R + t] = given[o];
    differentiate_row(i, tile.first + t,
                      {workspace.f + t, workspace.df + t, workspace.y + t, R, workspace.g + t,
                       workspace.dg + t, workspace.g_rows + t * p, workspace.dg_rows + t * p});
  }
}

/// Derivatives by the outputs of a row and their tangents, which are zeros if its weight is.
template <class real>
void LayerHessian<real>::differentiate_row(std::ptrdiff_t i, int t,
                                           const OutputRow<real>& row) const {
  const int p = s_.p;
  const double w = data_.weight_of(0, i, t), share = w / total_;
  if (w != 0) {
    const auto emit = [&](int o, double derivative) {
      row.g[o * row.stride] = real(derivative * share);
    };
    const auto emit_tangent = [&](int o, double tangent) {
      row.dg[o * row.stride] = real(tangent * share);
    };
    if (loss_.results) {
      loss_.results->row(i, t, emit);
      loss_.results->derivative_tangents(i, t, row.df, row.stride, emit_tangent);
    } else {
      row_loss(loss_, row.f, row.y, row.stride, p, true, emit);
      derivative_tangents(loss_, row.f, row.df, row.y, row.stride, p, emit_tangent);
    }
  }
  for (int o = 0; o < p; ++o) {
    row.g_row[o] = row.g[o * row.stride];
    row.dg_row[o] = row.dg[o * row.stride];
  }
}

/// U = G V^T of a head and its tangent, (d, R).
template <class real>
WithTangent<real> LayerHessian<real>::find_upstream(int h, const Tile& tile,
                                                    Workspace& workspace) const {
  const WithTangent<real> g{workspace.g, workspace.dg};
  if (s_.identity_v) return g;
  const std::ptrdiff_t R = tile_rows_, of_head = std::ptrdiff_t(h) * s_.d * s_.p;
  const WithTangent<real> vt{readout_.value + of_head,
                             readout_.tangent ? readout_.tangent + of_head : nullptr};
  this->multiply(s_.d, tile.padded, s_.p, vt.value, s_.d, g.value, R, workspace.ut, R, false);
  this->multiply_tangents(s_.d, tile.padded, s_.p, vt, s_.d, g, R, workspace.dut, R, false);
  return {workspace.ut, workspace.dut};
}

template <class real>
void LayerHessian<real>::run_sample(std::ptrdiff_t i, Workspace& workspace, const Sums& sums,
                                    bool fresh) const {
  if (values_first_) return run_values(i, workspace, sums, fresh);
  const std::ptrdiff_t R = tile_rows_;
  for (int first = 0; first < s_.q; first += int(R)) {
    const int rows = std::min(int(R), s_.q - first);
    const Tile tile{first, rows, this->padded(rows)};
    this->find_limits(i, tile, workspace);
    for (int h = 0; h < s_.H; ++h) {
      this->score(h, tile, workspace);
      add_outputs(h, tile, workspace);
    }
    find_derivatives(i, tile, workspace);
    for (int h = 0; h < s_.H; ++h) {
      if (wants_W_) {
        this->derive(h, tile, find_upstream(h, tile, workspace), R, workspace);
        this->add_weight_terms(i, h, tile, 1, 0, workspace, sums, fresh);
      }
      add_readout_terms(h, tile, workspace, sums, fresh);
    }
  }
}

/// (A. X)^T G + (A X)^T G. and (A X)^T G, transposed.
template <class real>
void LayerHessian<real>::add_readout_terms(int h, const Tile& tile, Workspace& workspace,
                                           const Sums& sums, bool fresh) const {
  if (!wants_readout_) return;
  const int d = s_.d, dL = this->padded(d);
  const std::ptrdiff_t R = tile_rows_, of_head = h * readout_size_;
  const bool more = !fresh || tile.first > 0;
  const bool kept = attended_size_ > 0;
  const WithTangent<real> weights =
      kept ? WithTangent<real>{}
           : this->moved_weights(this->rows_of(h, tile, workspace), workspace);
  const auto find_rows = [&](const real* attended, const real* of_weights) {
    if (kept) return kernels_.pack_rows(attended + h * attended_size_, d, int(R), dL, workspace.e);
    this->multiply(tile.rows, dL, s_.T, of_weights, R, workspace.x, dL, workspace.e, dL, false);
  };
  const auto add_term = [&](const real* g, real* sum, bool add) {
    this->multiply(s_.p, dL, tile.rows, g, s_.p, workspace.e, dL, sum + of_head, dL, add);
  };
  if (moves_) {
    find_rows(workspace.dyt, weights.tangent);
    add_term(workspace.g_rows, sums.of_readout, more);
  }
  find_rows(workspace.yt, weights.value);
  add_term(workspace.dg_rows, sums.of_readout, more || moves_);
  if (by_V_) add_term(workspace.g_rows, sums.by_V, more);
}

/// The same where values come first.
template <class real>
void LayerHessian<real>::run_values(std::ptrdiff_t i, Workspace& workspace, const Sums& sums,
                                    bool fresh) const {
  if (!data_.self || workspace.row == 0) load_values(workspace);
  for (int first = 0; first < s_.q; first += int(tile_rows_)) {
    const int rows = std::min(int(tile_rows_), s_.q - first);
    const Tile tile{first, rows, this->padded(rows)};
    this->find_limits(i, tile, workspace);
    for (int h = 0; h < s_.H; ++h) this->score(h, tile, workspace);
    const WithTangent<real> weights = find_weights(tile, workspace);
    find_outputs(tile, weights, workspace);
    find_derivatives(i, tile, workspace);
    if (wants_readout_) add_by_values(tile, weights, workspace);
    if (!wants_W_) continue;
    derive_values(tile, workspace);
    for (int h = 0; h < s_.H; ++h) this->add_weight_terms(i, h, tile, 1, 0, workspace, sums, fresh);
  }
  if (wants_readout_) add_values_terms(workspace, sums, fresh);
}

/// X V of all heads and its tangent, both ways round: of the tokens of several samples where these
/// are the queries that go together.
template <class real>
void LayerHessian<real>::load_values(const Workspace& workspace) const {
  const int p = s_.p, row = int(values_row_), columns = s_.H * p;
  const std::ptrdiff_t L = kernels_.lanes, of_head = std::ptrdiff_t(s_.d) * p;
  const real* const tokens = data_.self ? workspace.zt : workspace.xt;
  const auto load = [&](const real* v, real* values, real* rows) {
    if (!v) return;
    kernels_.product({{p, int(row / L), s_.d, 1, s_.H},
                      {v, p, 0, of_head},
                      {tokens, row, L},
                      {values, row, L, std::ptrdiff_t(p) * row}});
    kernels_.pack_rows(values, columns, row, columns, rows);
  };
  load(model_.at[kV], workspace.values, workspace.value_rows);
  load(tangent_[kV], workspace.dvalues, workspace.dvalue_rows);
}

/// A of all heads and its tangent, (H, T, R).
template <class real>
WithTangent<real> LayerHessian<real>::find_weights(const Tile& tile, Workspace& workspace) const {
  const bool is_softmax = data_.row_map.is_softmax();
  const std::ptrdiff_t size = s_.H * s_.T * tile_rows_;
  for (int h = 0; !is_softmax && h < s_.H; ++h)
    kernels_.tangent_weights(this->rows_of(h, tile, workspace));
  for (std::ptrdiff_t k = 0; is_softmax && moves_ && k < size; ++k)
    workspace.da[k] = workspace.s[k] * workspace.ds[k];
  return {is_softmax ? workspace.s : workspace.a, moves_ ? workspace.da : nullptr};
}

/// F = A (X V) and its tangent, (p, R).
template <class real>
void LayerHessian<real>::find_outputs(const Tile& tile, const WithTangent<real>& weights,
                                      const Workspace& workspace) const {
  const int T = s_.T, p = s_.p, H = s_.H;
  const std::ptrdiff_t R = tile_rows_, L = kernels_.lanes, columns = std::ptrdiff_t(H) * p;
  const std::ptrdiff_t at = data_.self ? workspace.row * columns : 0;
  const auto add = [&](const real* values, const real* of_rows, real* to, bool more) {
    kernels_.product({{p, int(tile.padded / L), T, H},
                      {values + at, columns, p},
                      {of_rows, R, L, T * R},
                      {to, R, L},
                      more});
  };
  add(workspace.value_rows, weights.value, workspace.f, false);
  if (moves_) add(workspace.value_rows, weights.tangent, workspace.df, false);
  if (tangent_[kV]) add(workspace.dvalue_rows, weights.value, workspace.df, moves_);
  if (!moves_ && !tangent_[kV]) std::fill_n(workspace.df, p * R, real(0));
}

/// C = G (X V)^T and its tangent, then D and its own, of all heads.
template <class real>
void LayerHessian<real>::derive_values(const Tile& tile, Workspace& workspace) const {
  const std::ptrdiff_t R = tile_rows_, L = kernels_.lanes, row = values_row_;
  const std::ptrdiff_t at = data_.self ? workspace.row : 0;
  const auto add = [&](const real* values, const real* g, real* to, bool more) {
    kernels_.product({{s_.T, int(tile.padded / L), s_.p, 1, s_.H},
                      {values + at, row, 0, s_.p * row},
                      {g, R, L},
                      {to, R, L, s_.T * R},
                      more});
  };
  add(workspace.values, workspace.g, workspace.c, false);
  add(workspace.values, workspace.dg, workspace.dc, false);
  if (tangent_[kV]) add(workspace.dvalues, workspace.g, workspace.dc, true);
  for (int h = 0; h < s_.H; ++h) kernels_.tangent_derivative(this->rows_of(h, tile, workspace));
}

/// What a tile adds to A.^T G + A^T G. and A^T G of all heads, transposed.
template <class real>
void LayerHessian<real>::add_by_values(const Tile& tile, const WithTangent<real>& weights,
                                       const Workspace& workspace) const {
  const int p = s_.p, columns = int(of_keys_);
  const bool more = tile.first > 0;
  const auto turn = [&](const real* of_rows) {
    kernels_.pack_rows(of_rows, s_.H * s_.T, int(tile_rows_), columns, workspace.turned);
  };
  const auto add = [&](const real* g, real* to, bool add) {
    this->multiply(p, columns, tile.rows, g, p, workspace.turned, columns, to, columns, add);
  };
  if (moves_) {
    turn(weights.tangent);
    add(workspace.g_rows, workspace.by_values, more);
  }
  turn(weights.value);
  add(workspace.dg_rows, workspace.by_values, more || moves_);
  if (by_V_) add(workspace.g_rows, workspace.by_V, more);
}

/// X^T (A.^T G + A^T G.) and X^T (A^T G) of all heads, transposed.
template <class real>
void LayerHessian<real>::add_values_terms(const Workspace& workspace, const Sums& sums,
                                          bool fresh) const {
  const int p = s_.p, dL = this->padded(s_.d);
  const std::ptrdiff_t L = kernels_.lanes;
  const auto add = [&](const real* by_values, real* to) {
    kernels_.pack_rows(by_values, p, int(of_keys_), p, workspace.by_value_rows);
    kernels_.product({{p, int(dL / L), s_.T, 1, s_.H},
                      {workspace.by_value_rows, p, 0, std::ptrdiff_t(s_.T) * p},
                      {workspace.x, dL, L},
                      {to, dL, L, readout_size_},
                      !fresh});
  };
  add(workspace.by_values, sums.of_readout);
  if (by_V_) add(workspace.by_V, sums.by_V);
}

/// F = A X V and its tangent; A X and its own are kept.
template <class real>
void LayerHessian<real>::find_outputs(const Block& block) const {
  const int d = s_.d, p = s_.p, q = s_.q, H = s_.H;
  const std::ptrdiff_t L = kernels_.lanes, row = d * L;
  const WithTangent<real> weights = this->moved_weights(this->rows_of(block), block);
  this->multiply_keys(block, weights.value, block.ax);
  if (moves_)
    this->multiply_keys(block, weights.tangent, block.dax);
  else
    std::fill_n(block.df, q * p * L, real(0));
  const auto sum_heads = [&](const real* from, real* to) {
    for (int t = 0; t < q; ++t, to += row)
      for (int h = 0; h < H; ++h, from += row)
        for (std::ptrdiff_t k = 0; k < row; ++k) to[k] = (h > 0 ? to[k] : real(0)) + from[k];
  };
  if (s_.identity_v) {
    sum_heads(block.ax, block.f);
    if (moves_) sum_heads(block.dax, block.df);
    return;
  }
  const auto multiply_by = [&](const real* v, const real* of, real* to, bool add) {
    kernels_.product(
        {{p, q, d, H}, {v, p, std::ptrdiff_t(d) * p}, {of, L, H * row, row}, {to, L, p * L}, add});
  };
  multiply_by(model_.at[kV], block.ax, block.f, false);
  if (moves_) multiply_by(model_.at[kV], block.dax, block.df, false);
  if (tangent_[kV]) multiply_by(tangent_[kV], block.ax, block.df, true);
}

template <class real>
void LayerHessian<real>::find_derivatives(std::ptrdiff_t first, int count,
                                          const Block& block) const {
  const int p = s_.p, q = s_.q, L = kernels_.lanes;
  const std::ptrdiff_t size = std::ptrdiff_t(q) * p * L, row_targets = data_.targets / q;
  std::fill_n(block.g, size, real(0));
  std::fill_n(block.dg, size, real(0));
  kernels_.pack_lanes(data_.y + first * data_.targets, data_.targets, count, data_.targets,
                      block.y);
  for (int l = 0; l < count; ++l)
    for (int t = 0; t < q; ++t) {
      const std::ptrdiff_t at = std::ptrdiff_t(t) * p * L + l,
                           row = (std::ptrdiff_t(l) * q + t) * p;
      differentiate_row(first + l, t,
                        {block.f + at, block.df + at, block.y + t * row_targets * L + l, L,
                         block.g + at, block.dg + at, block.g_rows + row, block.dg_rows + row});
    }
}

/// U = G V^T of all heads and its tangent, (d, rows).
template <class real>
WithTangent<real> LayerHessian<real>::find_upstream(const Block& block) const {
  const int d = s_.d, p = s_.p, q = s_.q;
  const std::ptrdiff_t L = kernels_.lanes, row = this->block_rows() * L,
                       head = std::ptrdiff_t(d) * p;
  for (int h = 0; h < s_.H; ++h) {
    real *const u = block.u + h * L, *const du = block.du + h * L;
    const auto multiply_by = [&](const real* vt, const real* of, real* to, bool add) {
      kernels_.product({{d, q, p}, {vt + h * head, d}, {of, L, p * L}, {to, row, s_.H * L}, add});
    };
    const auto copy = [&](const real* from, real* to) {
      for (int t = 0; t < q; ++t)
        for (int k = 0; k < d; ++k, from += L) std::copy_n(from, L, to + k * row + t * s_.H * L);
    };
    if (s_.identity_v) {
      copy(block.g, u);
      copy(block.dg, du);
      continue;
    }
    multiply_by(readout_.value, block.g, u, false);
    multiply_by(readout_.value, block.dg, du, false);
    if (readout_.tangent) multiply_by(readout_.tangent, block.g, du, true);
  }
  return {block.u, block.du};
}

template <class real>
void LayerHessian<real>::add_readout_terms(int count, const Block& block, const Sums& sums,
                                           bool fresh) const {
  if (!wants_readout_) return;
  const int rows = count * s_.q, dL = this->padded(s_.d);
  for (int h = 0; h < s_.H; ++h) {
    const auto add_term = [&](const real* g, const real* attended, real* sum, bool more) {
      this->multiply(s_.p, dL, rows, g, s_.p, attended, dL, sum + h * readout_size_, dL, more);
    };
    if (moves_)
      add_term(block.g_rows, this->unpack_rows(block, block.dax, h), sums.of_readout, !fresh);
    const real* const ax = this->unpack_rows(block, block.ax, h);
    add_term(block.dg_rows, ax, sums.of_readout, moves_ || !fresh);
    if (by_V_) add_term(block.g_rows, ax, sums.by_V, !fresh);
  }
}

template <class real>
void LayerHessian<real>::run_block(std::ptrdiff_t first, int count, Block& block, const Sums& sums,
                                   bool fresh) const {
  find_outputs(block);
  find_derivatives(first, count, block);
  if (wants_W_) {
    this->derive(find_upstream(block), true, block);
    this->add_weight_terms(first, count, block, sums, fresh);
  }
  add_readout_terms(count, block, sums, fresh);
}

template <class real>
void LayerHessian<real>::store_readout(int h) const {
  const int d = s_.d, p = s_.p;
  std::vector<real> vt(std::size_t(p) * d);
  const auto store = [&](real* Sums::* part, real* to) {
    this->sum_chunks(part, h * readout_size_, p, vt.data());
    for (int k = 0; k < d; ++k)
      for (int o = 0; o < p; ++o) to[(std::ptrdiff_t(h) * d + k) * p + o] = vt[o * d + k];
  };
  store(&Sums::of_readout, out_[kV]);
  if (by_V_) store(&Sums::by_V, by_V_);
}

/// With V as it is; `by_V`: the gradient by it, or null.
template <class real>
void product_of_dense(const Data<real>& data, const Model<const real*>& given_model,
                      const Tensors<const real*>& tangent, real scale, Loss loss, int threads,
                      const Tensors<real*>& out, real* by_V) {
  AlikeHeads<real> heads(data, given_model);
  const Model<const real*>& model = heads.model();
  const CleanData<real> clean(heads.data(), 1);
  const Shape& s = heads.data().shape;
  const bool tied = model.is_tied();
  const Exponents exponents = exponents_of_call(*clean, model, true);
  const RescaledData<real> scaled_data(*clean, 1, exponents);
  const RescaledTensors<real> tensors(model.at, s, model.rank, tied, exponents);
  const RescaledTensors<real> tangents(heads.merged(tangent), s, model.rank, tied, exponents);
  const Model<const real*> scaled_model{*tensors, model.rank};
  std::optional<OwnLossResults> own;
  if (loss.own) {
    std::vector<real> f(s.n * s.outputs());
    outputs(*clean, model, scale, threads, f.data());
    own.emplace(*clean, *loss.own, f.data(), true);
    if (!own->succeeded()) return;
    loss.results = &*own;
  }
  const CheaperKeys<real> keys(*scaled_data, TriangleUse::kGradient, threads);
  CallScratch scratch;
  const HessianCall<real> call{*keys,   scaled_model, *tangents, scale,           loss,
                               threads, out,          by_V,      scratch.engine()};
  if (s.is_layer())
    LayerHessian<real>(call).run();
  else
    ClassifierHessian<real>(call).run();
  for (int name = 0; name < kTensors && exponents.any(); ++name)
    if (out[name])
      scale_by_power(out[name], extent(TensorName(name), s, model.rank).all(),
                     exponents.of(TensorName(name), tied), out[name]);
  heads.spread(out);
  if (!by_V) return;
  scale_by_power(by_V, extent(kV, s, 0).all(), exponents.of(kV, tied), by_V);
  Tensors<real*> gradient{};
  gradient[kV] = by_V;
  heads.spread(gradient);
}

/// That of V = A B: H. = V' of the dense product for V. = A. B + A B., and by the factors
/// V' B^T + G B.^T and A^T V' + A.^T G, where G is the gradient by V.
template <class real>
void product_by_values(const Data<real>& data, const Model<const real*>& model,
                       const Tensors<const real*>& tangent, real scale, Loss loss, int threads,
                       const Tensors<real*>& out) {
  const Kernels<real>& kernels = active_kernels<real>();
  const Shape& s = data.shape;
  const real *A = model.at[kValueA], *B = model.at[kValueB], *dA = tangent[kValueA],
             *dB = tangent[kValueB];
  const std::ptrdiff_t size = extent(kV, s, 0).all();
  std::vector<real> value(size), moving(dA || dB ? size : 0);
  for (int h = 0; h < s.H; ++h) {
    compose_values(kernels, s, A, B, h, 1, value.data());
    if (dA) compose_values(kernels, s, dA, B, h, 1, moving.data());
    if (dB) compose_values(kernels, s, A, dB, h, 1, moving.data(), dA != nullptr);
  }
  Model<const real*> dense = model;
  Tensors<const real*> along = tangent;
  Tensors<real*> to = out;
  for (const TensorName name : {kValueA, kValueB}) {
    dense.at[name] = along[name] = nullptr;
    to[name] = nullptr;
  }
  dense.at[kV] = value.data();
  if (dA || dB) along[kV] = moving.data();
  std::vector<real> change(out[kValueA] || out[kValueB] ? size : 0);
  real* const by_A = dB ? out[kValueA] : nullptr;
  real* const by_B = dA ? out[kValueB] : nullptr;
  std::vector<real> gradient(by_A || by_B ? size : 0);
  if (!change.empty()) to[kV] = change.data();
  product_of_dense(data, dense, along, scale, loss, threads, to,
                   gradient.empty() ? nullptr : gradient.data());
  for (int h = 0; h < s.H && !change.empty(); ++h)
    differentiate_values(kernels, s, A, B, change.data(), h, 1, out[kValueA], out[kValueB]);
  for (int h = 0; h < s.H && !gradient.empty(); ++h)
    differentiate_values(kernels, s, dA, dB, gradient.data(), h, 1, by_A, by_B, true);
}

}  // namespace

template <class real>
void hessian_product(const Data<real>& data, const Model<const real*>& model,
                     const Tensors<const real*>& tangent, real scale, Loss loss, int threads,
                     const Tensors<real*>& out) {
  if (model.has_factored_values())
    return product_by_values(data, model, tangent, scale, loss, threads, out);
  product_of_dense<real>(data, model, tangent, scale, loss, threads, out, nullptr);
}

template void hessian_product<float>(const Data<float>&, const Model<const float*>&,
                                     const Tensors<const float*>&, float, Loss, int,
                                     const Tensors<float*>&);
template void hessian_product<double>(const Data<double>&, const Model<const double*>&,
                                      const Tensors<const double*>&, double, Loss, int,
                                      const Tensors<double*>&);

}  // namespace mhfast
