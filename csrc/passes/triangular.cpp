#include "triangular.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <iterator>
#include <stdexcept>

#include "../dispatch/dispatch.hpp"
#include "../runtime/float_mode.hpp"
#include "../runtime/team.hpp"
#include "../runtime/tuning.hpp"

namespace mhfast {
namespace {

constexpr const char* kKeys[] = {"auto", "tokens", "triangle"};
std::atomic<int> forced_keys{0};

}  // namespace

void force_keys(const std::string& name) {
  const auto at = std::find(std::begin(kKeys), std::end(kKeys), name);
  if (at == std::end(kKeys))
    throw std::invalid_argument("keys: expected auto, tokens or triangle, got '" + name + "'");
  forced_keys.store(int(at - std::begin(kKeys)));
}

bool prefers_triangle(const Shape& s, RowMap row_map, TriangleUse use, double times) {
  if (row_map.name != RowMapName::kLinear || s.causal || s.words > 0) return false;
  if (use == TriangleUse::kTokens) return false;
  const int choice = forced_keys.load(std::memory_order_relaxed);
  if (choice != 0) return choice == 2;
  if (s.T < kFewerKeys * s.d) return false;
  if (use == TriangleUse::kTraining) return true;
  // Multiply-adds of a sample that it saves and that it takes.
  const double products = use == TriangleUse::kOutputs ? 2 : 4 * times;
  const double saved = products * s.H * s.q * double(s.T - s.d) * s.d;
  return saved > kTriangleProducts * double(s.T) * s.d * s.d;
}

bool prefers_products(const Shape& s, RowMap row_map, const Registers& registers,
                      std::ptrdiff_t runs) {
  if (row_map.name != RowMapName::kLinear) return false;
  if (forced_keys.load(std::memory_order_relaxed) != 0) return false;
  Shape from_tokens = s;
  if (prefers_triangle(s, row_map, TriangleUse::kTraining)) from_tokens.T = s.d;
  return prefers_products(from_tokens, registers, runs);
}

template <class real>
TriangularData<real>::TriangularData(const Data<real>& data, std::ptrdiff_t runs)
    : given_(data), runs_(runs), data_(data) {
  Shape& s = data_.shape;
  const std::ptrdiff_t dd = std::ptrdiff_t(s.d) * s.d, nq = s.n * s.q;
  const bool apart = data.run.x || data.run.lengths;
  triangles_.resize((apart ? runs : 1) * s.n * dd);
  data_.x = triangles_.data();
  data_.run.x = apart ? s.n * dd : 0;
  s.T = s.d;
  data_.self = false;
  data_.rows_are_tokens = data.self;
  data_.row_map.by_tokens = false;
  if (!data.is_limited()) return;
  const bool limits_apart = data.limits ? data.run.limits != 0 : data.run.lengths != 0;
  limits_.resize((limits_apart ? runs : 1) * nq);
  data_.limits = limits_.data();
  data_.run.limits = limits_apart ? nq : 0;
}

template <class real>
std::ptrdiff_t TriangularData<real>::workspace_size() const {
  const std::ptrdiff_t d = given_.shape.d, lanes = active_kernels<real>().lanes;
  return (2 * kTriangleRows + d) * d * lanes;
}

/// R of `count` samples, at most as many as there are lanes.
template <class real>
void TriangularData<real>::write_triangles(std::ptrdiff_t run, std::ptrdiff_t first, int count,
                                           real* workspace) {
  const Kernels<real>& kernels = active_kernels<real>();
  const int T = given_.shape.T, d = given_.shape.d, L = kernels.lanes;
  const std::ptrdiff_t Td = std::ptrdiff_t(T) * d, row = std::ptrdiff_t(d) * L;
  real* const triangle = workspace;
  real* const packed = triangle + d * row;
  real* const block = packed + kTriangleRows * row;
  const real* const x = given_.x + run * given_.run.x + first * Td;
  std::fill_n(triangle, d * row, real(0));
  std::ptrdiff_t longest = 0;
  for (int l = 0; l < count; ++l) longest = std::max(longest, length(run, first + l));
  for (int t = 0; t < longest; t += kTriangleRows) {
    const int rows = int(std::min<std::ptrdiff_t>(kTriangleRows, longest - t));
    kernels.pack_lanes(x + std::ptrdiff_t(t) * d, Td, count, std::ptrdiff_t(rows) * d, packed);
    for (int l = 0; l < count; ++l) {
      const std::ptrdiff_t seen = std::max<std::ptrdiff_t>(0, length(run, first + l) - t);
      for (std::ptrdiff_t i = seen * d; i < std::ptrdiff_t(rows) * d; ++i) packed[i * L + l] = 0;
    }
    kernels.transpose_lanes(packed, rows, d, block);
    kernels.triangle_samples({rows, d, block, triangle});
  }
  real* out = triangles_.data() + run * data_.run.x + first * d * d;
  for (int l = 0; l < count; ++l) {
    const double tokens = double(std::max<std::ptrdiff_t>(1, length(run, first + l)));
    const real factor = given_.row_map.by_tokens ? real(1 / std::sqrt(tokens)) : real(1);
    for (int i = 0; i < d * d; ++i) *out++ = factor * triangle[std::ptrdiff_t(i) * L + l];
  }
}

/// A row that sees a token sees all rows of R.
template <class real>
void TriangularData<real>::write_limits(std::ptrdiff_t run, std::ptrdiff_t first,
                                        std::ptrdiff_t last) {
  const Shape& s = given_.shape;
  double* to = limits_.data() + run * data_.run.limits + first * s.q;
  for (std::ptrdiff_t i = first; i < last; ++i)
    for (int t = 0; t < s.q; ++t) {
      const double limit = given_.limit(i, int(run), t);
      *to++ = limit > 0 ? double(s.d) : limit;  // 0 or NaN
    }
}

template <class real>
void TriangularData<real>::compute(std::ptrdiff_t first, std::ptrdiff_t last, real* workspace) {
  const int L = active_kernels<real>().lanes;
  for (std::ptrdiff_t r = 0; r < runs_with_triangles(); ++r)
    for (std::ptrdiff_t i = first; i < last; i += L)
      write_triangles(r, i, int(std::min<std::ptrdiff_t>(L, last - i)), workspace);
  for (std::ptrdiff_t r = 0; r < (limits_.empty() ? 0 : data_.run.limits ? runs_ : 1); ++r)
    write_limits(r, first, last);
}

template <class real>
void TriangularData<real>::compute_all(int threads) {
  const Shape& s = given_.shape;
  const int L = active_kernels<real>().lanes;
  const std::ptrdiff_t blocks = (s.n + L - 1) / L;
  const double flops = 2.0 * double(s.n) * runs_with_triangles() * s.T * s.d * s.d;
  const int members = useful_threads(threads, blocks, flops);
  const std::ptrdiff_t size = workspace_size();
  std::vector<real> workspaces(members * size);
  std::atomic<std::ptrdiff_t> next{0};
  run_short_team(members, flops / (kSlowFlops * L), [&](const Member& member) {
    const FlushToZero flush;
    for (std::ptrdiff_t b; (b = next.fetch_add(1, std::memory_order_relaxed)) < blocks;)
      compute(b * L, std::min((b + 1) * L, s.n), &workspaces[member.index * size]);
  });
}

template class TriangularData<float>;
template class TriangularData<double>;

}  // namespace mhfast
