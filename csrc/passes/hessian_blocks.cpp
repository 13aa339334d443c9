// Hessian-vector products with samples as lanes, see hessian_product.hpp.
#include <cmath>

#include "../runtime/tuning.hpp"
#include "hessian_product.hpp"

namespace mhfast {

/// Whether query rows as lanes would leave more lanes empty, and W and a block fit the cache.
template <class real>
bool HessianProduct<real>::prefers_blocks() const {
  if (const auto forced = forced_plan()) return *forced == PlanKind::kSamples;
  const double T = s_.T, d = s_.d, q = s_.q, rows = block_rows(), n = double(s_.n);
  const double lanes = kernels_.lanes, vector = lanes * sizeof(real);
  const double of_layer = s_.is_layer() ? 4 * rows * d : 0;
  if (!s_.identity_w && d * d * sizeof(real) > kSecondLevelBytes)
    return false;  // a block would read all of W
  if ((5 * T * rows + 3 * rows * d + T * d + of_layer) * vector > kTangentBlockBytes) return false;
  const double idle_rows = padded(s_.q) / q, idle_samples = std::ceil(n / lanes) * lanes / n;
  return idle_samples * kBlockCost < idle_rows;
}

template <class real>
typename HessianProduct<real>::Block HessianProduct<real>::take_block(Arena& layout) const {
  const std::size_t L = kernels_.lanes, T = s_.T, d = s_.d, q = s_.q, p = s_.p;
  const std::size_t rows = block_rows(), dL = padded(s_.d);
  const bool layer = s_.is_layer();
  Block block{};
  const auto take = [&](std::size_t size, std::initializer_list<real**> arrays) {
    for (real** array : arrays) *array = layout.take<real>(size);
  };
  take(T * d * L, {&block.x});
  take(q * d * L, {&block.z, &block.dz});
  take(rows * d * L, {&block.p, &block.dp, &block.e});
  take(T * rows * L, {&block.s, &block.ds, &block.c, &block.dc, &block.m});
  take(data_.row_map.is_softmax() ? 0 : T * rows * L, {&block.a, &block.da});
  take(rows * L, {&block.row_limits, &block.readouts, &block.readout_tangents});
  take(q * dL * L, {&block.e_rows});
  take(round_up(std::ptrdiff_t(rows * d), std::ptrdiff_t(L)), {&block.sums});
  take(layer ? rows * d * L : 0, {&block.ax, &block.dax, &block.u, &block.du});
  take(q * p * L,
       {&block.f, &block.df, &block.g, &block.dg, &block.y, &block.g_rows, &block.dg_rows});
  std::fill_n(block.derivative, kMaxLanes, real(1));
  return block;
}

template <class real>
TangentArguments<real> HessianProduct<real>::rows_of(const Block& block) const {
  const int rows = block_rows();
  return {s_.T,
          rows,
          std::ptrdiff_t(rows) * kernels_.lanes,
          data_.is_limited() ? block.row_limits : nullptr,
          block.s,
          block.ds,
          block.c,
          block.dc,
          block.readouts,
          block.readout_tangents,
          data_.row_map,
          block.a,
          block.da};
}

/// A of a block that has been scored and its derivative, (T, rows) each.
template <class real>
WithTangent<real> HessianProduct<real>::weights_of(const TangentArguments<real>& in,
                                                   const Block& block) const {
  if (!data_.row_map.is_softmax()) {
    kernels_.tangent_weights(in);
    return {in.a, in.da};
  }
  const std::ptrdiff_t size = s_.T * in.stride;
  for (std::ptrdiff_t k = 0; k < size; ++k) block.m[k] = in.s[k] * in.ds[k];
  return {in.s, block.m};
}

/// to (rows, d) = weights (T, rows)^T X.
template <class real>
void HessianProduct<real>::multiply_keys(const Block& block, const real* weights, real* to) const {
  const std::ptrdiff_t L = kernels_.lanes, row = s_.d * L;
  kernels_.product_lanes(
      {{block_rows(), s_.d, s_.T}, {weights, block_rows() * L}, {block.x, row, L}, {to, row, L}});
}

/// to (T, rows) = X rows, of (d, rows): numbers or, if laned, vectors.
template <class real>
void HessianProduct<real>::multiply_queries(const Block& block, const real* rows, bool laned,
                                            real* to) const {
  const int R = block_rows();
  const std::ptrdiff_t L = kernels_.lanes;
  const auto product = laned ? kernels_.product_lanes : kernels_.product;
  product({{R, s_.T, s_.d}, {rows, laned ? R * L : R}, {block.x, L, s_.d * L}, {to, L, R * L}});
}

template <class real>
void HessianProduct<real>::load_block(std::ptrdiff_t first, int count, const Block& block) const {
  const std::ptrdiff_t L = kernels_.lanes, keys = std::ptrdiff_t(s_.T) * s_.d;
  kernels_.pack_lanes(data_.x + first * keys, keys, count, keys, block.x);
  if (data_.is_limited())
    for (int r = 0; r < block_rows(); ++r)
      for (int l = 0; l < L; ++l)
        block.row_limits[r * L + l] = real(l < count ? data_.limit(first + l, 0, r / s_.H) : s_.T);
}

/// Z, and P = Z W of all rows with its tangent.
template <class real>
void HessianProduct<real>::load_block_queries(std::ptrdiff_t first, int count,
                                              const Block& block) const {
  const int d = s_.d, q = s_.q;
  const std::ptrdiff_t L = kernels_.lanes, dd = std::ptrdiff_t(d) * d, row = d * L;
  const std::ptrdiff_t size = std::ptrdiff_t(q) * d, p_row = block_rows() * L;
  if (s_.shared_query) {
    kernels_.pack_lanes(model_.at[kPrompt], 0, int(L), size, block.z);
    if (tangent_[kPrompt]) kernels_.pack_lanes(tangent_[kPrompt], 0, int(L), size, block.dz);
  } else {
    kernels_.pack_lanes(data_.z + first * size, size, count, size, block.z);
  }
  const WithTangent<real> z{block.z, s_.shared_query && tangent_[kPrompt] ? block.dz : nullptr};
  for (int h = 0; h < s_.H; ++h) {
    real *const p = block.p + h * L, *const dp = block.dp + h * L;
    if (s_.identity_w) {
      const auto scale = [&](const real* from, real* to) {
        for (int t = 0; from && t < q; ++t)
          for (int k = 0; k < d; ++k, from += L)
            for (int l = 0; l < L; ++l) to[k * p_row + t * s_.H * L + l] = scale_ * from[l];
      };
      scale(z.value, p);
      scale(z.tangent, dp);
      continue;
    }
    const auto multiply_by = [&](const real* w, const real* of, real* to, bool add) {
      kernels_.product({{d, q, d}, {w + h * dd, d}, {of, L, row}, {to, p_row, s_.H * L}, add});
    };
    multiply_by(w_.value, z.value, p, false);
    if (w_.tangent) multiply_by(w_.tangent, z.value, dp, false);
    if (z.tangent) multiply_by(w_.value, z.tangent, dp, w_.tangent);
  }
}

/// As for a sample.
template <class real>
void HessianProduct<real>::score(const Block& block) const {
  const TangentArguments<real> in = rows_of(block);
  multiply_queries(block, block.p, true, in.s);
  if (w_.tangent || (s_.shared_query && tangent_[kPrompt]))
    multiply_queries(block, block.dp, true, in.ds);
  else if (!readout_only_ || !data_.row_map.is_softmax())
    std::fill_n(in.ds, s_.T * in.stride, real(0));
  find_weights(in);
}

/// As for a sample; U (d, rows).
template <class real>
void HessianProduct<real>::derive(const WithTangent<real>& readout, bool laned,
                                  const Block& block) const {
  const TangentArguments<real> in = rows_of(block);
  multiply_queries(block, readout.value, laned, in.c);
  if (readout.tangent)
    multiply_queries(block, readout.tangent, laned, in.dc);
  else
    std::fill_n(in.dc, s_.T * in.stride, real(0));
  kernels_.tangent_derivative(in);
}

/// Adds the sums over samples of (rows, d) to (q, dL) numbers of each head.
template <class real>
void HessianProduct<real>::add_rows(const Block& block, const real* rows, real* sums,
                                    std::ptrdiff_t of_head, bool fresh) const {
  const int d = s_.d, dL = padded(d);
  const std::ptrdiff_t size = std::ptrdiff_t(block_rows()) * d;
  kernels_.sum_lanes(rows, size / kernels_.lanes * kernels_.lanes, block.sums);
  for (std::ptrdiff_t k = size / kernels_.lanes * kernels_.lanes; k < size; ++k) {
    block.sums[k] = 0;
    for (int l = 0; l < kernels_.lanes; ++l) block.sums[k] += rows[k * kernels_.lanes + l];
  }
  const real* from = block.sums;
  for (int t = 0; t < s_.q; ++t)
    for (int h = 0; h < s_.H; ++h, from += d) {
      real* const to = sums + h * of_head + std::ptrdiff_t(t) * dL;
      for (int k = 0; k < d; ++k) to[k] = (fresh ? real(0) : to[k]) + from[k];
    }
}

/// (rows, d) of a head as rows of its samples, (L q, dL).
template <class real>
const real* HessianProduct<real>::unpack_rows(const Block& block, const real* rows, int h) const {
  const std::ptrdiff_t L = kernels_.lanes, d = s_.d, dL = padded(s_.d);
  real ones[kMaxLanes];
  std::fill_n(ones, kMaxLanes, real(1));
  for (int t = 0; t < s_.q; ++t)
    kernels_.unpack_lanes(rows + (t * s_.H + h) * d * L, ones, int(L), d, false,
                          block.e_rows + t * dL, s_.q * dL);
  return block.e_rows;
}

/// As for a sample.
template <class real>
void HessianProduct<real>::add_weight_terms(std::ptrdiff_t first, int count, const Block& block,
                                            const Sums& sums, bool fresh) const {
  if (!wants_W_) return;
  const int d = s_.d, dL = padded(d), L = kernels_.lanes;
  const TangentArguments<real> in = rows_of(block);
  const std::ptrdiff_t vectors = s_.T * std::ptrdiff_t(in.columns);
  const auto add_term = [&](real* sum) {
    multiply_keys(block, block.m, block.e);
    if (s_.shared_query) return add_rows(block, block.e, sum, weight_size_, fresh);
    for (int h = 0; h < s_.H; ++h)
      multiply(d, dL, count * s_.q, data_.z + first * s_.q * d, d, unpack_rows(block, block.e, h),
               dL, sum + h * weight_size_, dL, !fresh);
  };
  const real *const a = block.tangent, *const b = block.derivative;
  for (std::ptrdiff_t v = 0, k = 0; v < vectors; ++v)
    for (int l = 0; l < L; ++l, ++k) block.m[k] = a[l] * in.c[k] + b[l] * in.dc[k];
  add_term(sums.of_W);
  if (!wants_plain_) return;
  for (std::ptrdiff_t v = 0, k = 0; v < vectors; ++v)
    for (int l = 0; l < L; ++l, ++k) block.m[k] = b[l] * in.c[k];
  add_term(sums.plain);
}

template <class real>
void HessianProduct<real>::run_blocks(int chunk, Block& block) {
  const std::ptrdiff_t L = kernels_.lanes, blocks = (s_.n + L - 1) / L;
  const std::ptrdiff_t begin = blocks * chunk / chunks_ * L,
                       end = std::min(s_.n, blocks * (chunk + 1) / chunks_ * L);
  for (std::ptrdiff_t i = begin; i < end; i += L) {
    const int count = int(std::min(L, end - i));
    load_block(i, count, block);
    // A prompt is the same for all samples.
    if (i == begin || !s_.shared_query) load_block_queries(i, count, block);
    score(block);
    run_block(i, count, block, sums_[chunk], i == begin);
  }
}

#define MHFAST_INSTANTIATE(real)                                                                  \
  template bool HessianProduct<real>::prefers_blocks() const;                                     \
  template HessianProduct<real>::Block HessianProduct<real>::take_block(Arena&) const;            \
  template TangentArguments<real> HessianProduct<real>::rows_of(const Block&) const;              \
  template WithTangent<real> HessianProduct<real>::weights_of(const TangentArguments<real>&,      \
                                                              const Block&) const;                \
  template void HessianProduct<real>::multiply_keys(const Block&, const real*, real*) const;      \
  template void HessianProduct<real>::derive(const WithTangent<real>&, bool, const Block&) const; \
  template void HessianProduct<real>::add_rows(const Block&, const real*, real*, std::ptrdiff_t,  \
                                               bool) const;                                       \
  template const real* HessianProduct<real>::unpack_rows(const Block&, const real*, int) const;   \
  template void HessianProduct<real>::add_weight_terms(std::ptrdiff_t, int, const Block&,         \
                                                       const Sums&, bool) const;                  \
  template void HessianProduct<real>::run_blocks(int, Block&);
MHFAST_INSTANTIATE(float)
MHFAST_INSTANTIATE(double)
#undef MHFAST_INSTANTIATE

}  // namespace mhfast
