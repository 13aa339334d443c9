#include "attention_weights.hpp"

#include <algorithm>
#include <atomic>
#include <vector>

#include "../problem/rescale.hpp"
#include "../runtime/team.hpp"
#include "loadable_model.hpp"
#include "scores.hpp"

namespace mhfast {
namespace {

/// How `attention` takes the samples: as many as there are lanes side by side where loss and
/// gradient would, or one at a time with its query rows as lanes. The weights are the same.
template <class real>
class AttentionBlocks {
 public:
  AttentionBlocks(const Data<real>& data, const Kernels<real>& kernels, std::ptrdiff_t first,
                  std::ptrdiff_t last)
      : data_(data), kernels_(kernels), first_(first), last_(last) {
    Shape shape = data.shape;
    shape.n = last - first;
    const Plan plan = make_plan(shape, registers_of(kernels));
    // All query rows of a block of samples must fit, see plan.cpp.
    by_samples_ = plan.samples_are_lanes() && plan.tile == shape.q && !data.has_words();
  }

  std::ptrdiff_t count() const {
    return by_samples_ ? (last_ - first_ + L() - 1) / L() : last_ - first_;
  }
  std::ptrdiff_t sample(std::ptrdiff_t block) const { return first_ + block * lanes(); }
  /// Numbers of `rows` rows of one feature of a block.
  std::ptrdiff_t padded(int rows) const {
    return by_samples_ ? std::ptrdiff_t(rows) * L() : round_up(rows, L());
  }
  /// Packs `rows` rows of each sample from `i`, `stride` numbers apart.
  void pack(const real* from, std::ptrdiff_t i, int rows, std::ptrdiff_t stride, real* to) const {
    const int d = data_.shape.d;
    if (by_samples_)
      kernels_.pack_lanes(from, stride, samples(i), std::ptrdiff_t(rows) * d, to);
    else
      kernels_.pack_rows(from, rows, d, int(padded(rows)), to);
  }
  void write_limits(std::ptrdiff_t i, real* to) const {
    const Shape& s = data_.shape;
    if (!by_samples_) return data_.write_limits(i, 0, s.q, int(padded(s.q)), to);
    for (int t = 0; t < s.q; ++t)
      for (int l = 0; l < L(); ++l) *to++ = real(l < samples(i) ? data_.limit(i + l, 0, t) : s.T);
  }
  /// P = Z W of one head of a prompt, or (Z Q) K^T, as scores of a block would compute it: the same
  /// for all samples. `scratch`: three times the prompt with its rows as lanes.
  void multiply_prompt(const real* prompt, const real* w, const real* kt, real* scratch,
                       real* to) const {
    const Shape& s = data_.shape;
    const int qL = int(round_up(s.q, L())), N = qL / L();
    const std::ptrdiff_t size = std::ptrdiff_t(s.d) * qL;
    real *const z = scratch, *const zq = scratch + size;
    real* const p = by_samples_ ? scratch + 2 * size : to;
    kernels_.pack_rows(prompt, s.q, s.d, qL, z);
    if (s.rank > 0) {
      kernels_.product({{s.rank, N, s.d}, {w, s.rank}, {z, qL, L()}, {zq, qL, L()}});
      kernels_.product({{s.d, N, s.rank}, {kt, s.d}, {zq, qL, L()}, {p, qL, L()}});
    } else {
      kernels_.product({{s.d, N, s.d}, {w, s.d}, {z, qL, L()}, {p, qL, L()}});
    }
    for (int k = 0; by_samples_ && k < s.d; ++k)
      for (int t = 0; t < s.q; ++t, to += L()) std::fill_n(to, L(), p[std::ptrdiff_t(k) * qL + t]);
  }
  void score(const ScoreArguments<real>& in) const {
    (by_samples_ ? kernels_.scores_samples : kernels_.scores_rows)(in);
  }
  /// Writes the weights of one head of the samples from `i`, which are (H, q, T) apart.
  void write(const real* weights, std::ptrdiff_t i, real* to) const {
    const Shape& s = data_.shape;
    const std::ptrdiff_t key = padded(s.q), size = std::ptrdiff_t(s.q) * s.T;
    const int row = by_samples_ ? L() : 1;
    for (int l = 0; l < samples(i); ++l, to += s.H * size)
      for (int t = 0; t < s.q; ++t)
        for (int k = 0; k < s.T; ++k) to[t * s.T + k] = weights[k * key + t * row + l];
  }
  int samples(std::ptrdiff_t i) const { return int(std::min<std::ptrdiff_t>(lanes(), last_ - i)); }

 private:
  int L() const { return kernels_.lanes; }
  int lanes() const { return by_samples_ ? L() : 1; }

  const Data<real>& data_;
  const Kernels<real>& kernels_;
  const std::ptrdiff_t first_, last_;
  bool by_samples_;
};

}  // namespace

template <class real>
void attention(const Data<real>& data, const Model<const real*>& model, real scale,
               std::ptrdiff_t first, std::ptrdiff_t last, int threads, real* out) {
  const Shape& s = data.shape;
  const Kernels<real>& kernels = active_kernels<real>();
  const AttentionBlocks<real> blocks(data, kernels, first, last);
  const std::ptrdiff_t queries = s.d * blocks.padded(s.q), keys = s.d * blocks.padded(s.T);
  const std::ptrdiff_t size_W = std::ptrdiff_t(s.d) * s.first_columns(), n = last - first;
  const bool factors = s.rank > 0;
  const double flops = double(n) * s.H * s.q * (s.flops_of_w() / 2 + 2.0 * s.T * s.d + 40.0 * s.T);
  const int members = useful_threads(threads, blocks.count(), flops);

  struct Workspace {
    real *x, *z, *p, *s, *limits, *rows;
  };
  std::vector<Workspace> workspaces(members);
  const bool scaled = scale != real(1), shared = s.shared_query && !s.identity_w;
  real *scaled_w = nullptr, *kt = nullptr, *prompt = nullptr, *by_rows = nullptr,
       *shared_p = nullptr;
  const std::ptrdiff_t prompt_rows = s.d * round_up(s.q, kernels.lanes);
  const auto lay_out = [&](Arena layout) {
    scaled_w = layout.take<real>(scaled ? s.H * size_W : 0);
    kt = layout.take<real>(factors ? s.H * size_W : 0);
    prompt = layout.template take<real>(s.shared_query ? queries : 0);
    by_rows = layout.template take<real>(shared ? 3 * prompt_rows : 0);
    shared_p = layout.template take<real>(shared ? s.H * queries : 0);
    for (Workspace& workspace : workspaces) {
      workspace.x = layout.template take<real>(keys);
      workspace.z = s.shared_query ? prompt
                    : data.self    ? workspace.x
                                   : layout.template take<real>(queries);
      workspace.p = layout.template take<real>(queries * (factors ? 2 : 1));
      workspace.s = layout.template take<real>(s.T * blocks.padded(s.q));
      workspace.limits = layout.template take<real>(blocks.padded(s.q));
      workspace.rows = layout.template take<real>(
          data.has_words() ? std::ptrdiff_t(std::max(s.T, s.q)) * s.d : 0);
    }
    return layout.size();
  };
  CallScratch scratch;
  const Exponents exponents = exponents_of_call(data, model, false);
  const RescaledTensors<real> tensors(model.at, s, model.rank, model.is_tied(), exponents);
  const LoadableModel<real> loadable(s, {*tensors, model.rank}, scale, false, scratch.model());
  const Parameters<real>& parameters = loadable.parameters;
  lay_out(Arena(scratch.engine().reserve(lay_out(Arena()))));
  const real* const first_factor = factors ? parameters.Q : parameters.W;
  if (scaled)
    std::transform(first_factor, first_factor + s.H * size_W, scaled_w,
                   [scale](real x) { return scale * x; });
  const real* const w = scaled ? scaled_w : first_factor;
  for (int h = 0; factors && h < s.H; ++h)
    kernels.pack_rows(parameters.right() + h * size_W, s.d, s.rank, s.d, kt + h * size_W);
  if (s.shared_query) blocks.pack(parameters.prompt, first, s.q, 0, prompt);
  for (int h = 0; shared && h < s.H; ++h)
    blocks.multiply_prompt(parameters.prompt, w + h * size_W, kt + h * size_W, by_rows,
                           shared_p + h * queries);

  std::atomic<std::ptrdiff_t> next{0};
  run_short_team(members, flops / 1e9, [&](const Member& member) {
    const Workspace& workspace = workspaces[member.index];
    ScoreOperands<real> operands{w, workspace.x, workspace.z,
                                 data.is_limited() ? workspace.limits : nullptr};
    operands.map = data.row_map;
    operands.scale = scale;
    operands.rank = s.rank;
    const ScoreMemory<real> memory{workspace.p, workspace.s, nullptr, nullptr, nullptr, nullptr};
    for (std::ptrdiff_t b; (b = next.fetch_add(1, std::memory_order_relaxed)) < blocks.count();) {
      const std::ptrdiff_t i = blocks.sample(b);
      const auto rows_of = [&](const real* rows, const std::int32_t* words, int count) {
        if (!data.has_words()) return rows + i * count * s.d;
        for (int k = 0; k < count; ++k)
          std::copy_n(data.x + words[i * count + k] * std::ptrdiff_t(s.d), s.d,
                      workspace.rows + std::ptrdiff_t(k) * s.d);
        return static_cast<const real*>(workspace.rows);
      };
      blocks.pack(rows_of(data.x, data.keys, s.T), i, s.T, std::ptrdiff_t(s.T) * s.d, workspace.x);
      scale_by_power(workspace.x, keys, exponents.x, workspace.x);
      if (workspace.z != workspace.x && !s.shared_query) {
        blocks.pack(rows_of(data.z, data.queries, s.q), i, s.q, std::ptrdiff_t(s.q) * s.d,
                    workspace.z);
        scale_by_power(workspace.z, queries, exponents.z, workspace.z);
      }
      if (operands.limits) blocks.write_limits(i, workspace.limits);
      for (int h = 0; h < s.H; ++h) {
        const std::ptrdiff_t size = std::ptrdiff_t(s.q) * s.T;
        real* to = out + ((i - first) * s.H + h) * size;
        if (s.identity_w && h > 0) {  // heads of an identity attend alike
          for (int l = 0; l < blocks.samples(i); ++l, to += s.H * size)
            std::copy_n(to - size, size, to);
          continue;
        }
        operands.w = s.identity_w ? nullptr : w + h * size_W;
        operands.kt = kt + h * size_W;
        auto scores = score_arguments(RowMode::kAttention, s.d, {s.T, s.q, 1}, operands, memory, 0);
        if (shared) {
          scores.shared_p = shared_p + h * queries;
          scores.shared_p_k = blocks.padded(s.q);
        }
        blocks.score(scores);
        blocks.write(workspace.s, i, to);
      }
    }
  });
}

template void attention<float>(const Data<float>&, const Model<const float*>&, float,
                               std::ptrdiff_t, std::ptrdiff_t, int, float*);
template void attention<double>(const Data<double>&, const Model<const double*>&, double,
                                std::ptrdiff_t, std::ptrdiff_t, int, double*);

}  // namespace mhfast
