#include "layer_hessian.hpp"

#include <algorithm>

#include "own_loss.hpp"

namespace mhfast {

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

template class LayerHessian<float>;
template class LayerHessian<double>;

}  // namespace mhfast
