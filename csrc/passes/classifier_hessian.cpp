#include "classifier_hessian.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "own_loss.hpp"

namespace mhfast {

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

template class ClassifierHessian<float>;
template class ClassifierHessian<double>;

}  // namespace mhfast
