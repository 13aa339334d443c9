#include "token_products.hpp"

#include <algorithm>
#include <atomic>
#include <vector>

#include "../dispatch/dispatch.hpp"
#include "../runtime/float_mode.hpp"
#include "../runtime/team.hpp"
#include "../runtime/tuning.hpp"

namespace mhfast {
namespace {

template <class real>
bool has_runs_apart(const Data<real>& data) {
  return data.run.x || data.run.lengths;
}

}  // namespace

template <class real>
double TokenProducts<real>::bytes(const Data<real>& data, std::ptrdiff_t runs) {
  const ProductSizes sizes(data.shape, active_kernels<real>().lanes);
  const double sets = has_runs_apart(data) ? double(runs) : 1.0;
  return sets * double(data.shape.n) * double(sizes.row) * sizeof(real);
}

template <class real>
TokenProducts<real>::TokenProducts(const Data<real>& data, std::ptrdiff_t runs, int threads)
    : given_(data), sizes_(data.shape, active_kernels<real>().lanes), data_(data) {
  const Shape& s = given_.shape;
  const std::ptrdiff_t of_run = s.n * sizes_.row, sets = has_runs_apart(data) ? runs : 1;
  const std::ptrdiff_t dL = round_up(s.d, active_kernels<real>().lanes);
  const auto lay_out = [&](Arena layout) {
    products_ = layout.take<real>(sets * of_run);
    return layout.size();
  };
  lay_out(Arena(block_.reserve(lay_out(Arena()))));
  data_.shape = of_products(s);
  data_.x = products_;
  data_.run.x = sets > 1 ? of_run : 0;
  data_.self = false;
  data_.rows_are_tokens = given_.self;
  const std::ptrdiff_t samples = sets * s.n, size = (s.T + s.d) * dL;
  const double flops = 2.0 * double(samples) * s.T * s.d * s.d;
  const int members = useful_threads(threads, samples, flops);
  std::vector<real> workspaces(members * size);
  std::atomic<std::ptrdiff_t> next{0};
  run_team(members, [&](const Member& member) {
    const FlushToZero flush;
    for (std::ptrdiff_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < samples;)
      write(i / s.n, i % s.n, &workspaces[member.index * size]);
  });
}

/// Of one sample, in the order of the tokens; the workspace is for tokens and X^T X in whole
/// vectors.
template <class real>
void TokenProducts<real>::write(std::ptrdiff_t run, std::ptrdiff_t sample, real* workspace) const {
  const Kernels<real>& kernels = active_kernels<real>();
  const Shape& s = given_.shape;
  const int d = s.d, L = kernels.lanes, dL = int(round_up(d, L));
  const std::int64_t length =
      given_.lengths ? given_.lengths[run * given_.run.lengths + sample] : s.T;
  real* const to = products_ + (run * s.n + sample) * sizes_.row;
  std::fill_n(to, sizes_.row, real(0));
  if (length == 0) return;
  real* const products = workspace + std::ptrdiff_t(s.T) * dL;
  kernels.scale_rows(given_.key(sample, int(run), 0), real(1), int(length), d, dL, workspace);
  kernels.product(
      {{d, dL / L, int(length)}, {workspace, dL}, {workspace, dL, L}, {products, dL, L}});
  const real factor = given_.row_map.by_tokens ? real(1) / real(length) : real(1);
  real* out = to;
  for (int b = 0; b < d; ++b)
    for (int c = b; c < d; ++c) *out++ = factor * products[std::ptrdiff_t(b) * dL + c];
}

template class TokenProducts<float>;
template class TokenProducts<double>;

}  // namespace mhfast
