#include "attention_weights.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "../problem/rescale.hpp"
#include "../runtime/team.hpp"
#include "../runtime/tuning.hpp"
#include "loadable_model.hpp"
#include "scores.hpp"

namespace mhfast {
namespace {

// Registers of query rows of a tile, at least: with fewer, products are narrow.
constexpr int kLeastTileVectors = 2;
// Fitted. Weights of a head of a sample up to which samples as lanes take no longer than rows,
// where both fill the lanes: with 64 half of the time, with 256 .7 to 1 of it, with 1024 more.
constexpr int kSampleWeights = 256;

/// How `for_attention` takes the samples: as many as there are lanes side by side where loss and
/// gradient would or their weights are few, or a tile of one sample's query rows at a time, which
/// are then the lanes. The weights are the same.
template <class real>
class AttentionBlocks {
 public:
  AttentionBlocks(const Data<real>& data, const Kernels<real>& kernels, std::ptrdiff_t first,
                  std::ptrdiff_t last)
      : data_(data), kernels_(kernels), first_(first), last_(last) {
    const Shape& s = data.shape;
    Shape shape = s;
    shape.n = last - first;
    const Plan plan = make_plan(shape, registers_of(kernels));
    // All query rows of a block of samples must fit, see plan.cpp.
    const bool fits = plan.samples_are_lanes() && plan.tile == s.q;
    by_samples_ = (fits || fills_lanes(shape)) && !data.has_words();
    const double row = double(s.H) * s.T * L() * sizeof(real);  // of one query row of all heads
    heads_ = by_samples_ && s.q == 1 && row <= kSlabBytes && !s.identity_w ? s.H : 1;
    const int fitting = int(kTileBytes / (double(s.T) * sizeof(real))) / L();
    tile_ = by_samples_ || s.shared_query
                ? s.q
                : std::min(s.q, std::max(fitting, kLeastTileVectors) * L());
    tiles_ = (s.q + tile_ - 1) / tile_;
    key_row_ = (by_samples_ ? s.T : (round_up(s.T, L()) / L() | 1) * L());
  }

  std::ptrdiff_t count() const {
    return by_samples_ ? (last_ - first_ + L() - 1) / L() : (last_ - first_) * tiles_;
  }
  std::ptrdiff_t sample(std::ptrdiff_t block) const { return first_ + block / tiles_ * lanes(); }
  /// Heads that are scored together: all, as rows of one product, or 1.
  int heads() const { return heads_; }
  int first_row(std::ptrdiff_t block) const { return int(block % tiles_) * tile_; }
  int rows(std::ptrdiff_t block) const { return std::min(tile_, data_.shape.q - first_row(block)); }
  int samples(std::ptrdiff_t i) const { return int(std::min<std::ptrdiff_t>(lanes(), last_ - i)); }
  /// Numbers of `rows` rows of one feature of a block.
  std::ptrdiff_t padded(int rows) const {
    return by_samples_ ? std::ptrdiff_t(rows) * L() : round_up(rows, L());
  }
  std::ptrdiff_t padded_tile() const { return padded(tile_); }
  /// Whether a block has all rows of its samples, and all keys.
  bool takes_whole_samples() const { return by_samples_ || (tiles_ == 1 && !data_.is_limited()); }
  /// Numbers of the weights of a block, as they are handed out.
  std::ptrdiff_t weights() const { return (by_samples_ ? L() * tile_ : padded_tile()) * key_row_; }

  /// Packs `rows` rows of each sample from `i`, `stride` numbers apart.
  void pack(const real* from, std::ptrdiff_t i, int rows, std::ptrdiff_t stride, real* to) const {
    const int d = data_.shape.d;
    if (by_samples_)
      kernels_.pack_lanes(from, stride, samples(i), std::ptrdiff_t(rows) * d, to);
    else
      kernels_.pack_rows(from, rows, d, int(padded(rows)), to);
  }
  void write_limits(std::ptrdiff_t block, real* to) const {
    const Shape& s = data_.shape;
    const std::ptrdiff_t i = sample(block);
    if (!by_samples_)
      return data_.write_limits(i, first_row(block), rows(block), int(padded(rows(block))), to);
    for (int t = 0; t < s.q; ++t)
      for (int l = 0; l < L(); ++l)
        to[t * L() + l] = real(l < samples(i) ? data_.limit(i + l, 0, t) : s.T);
    for (int h = 1; h < heads_; ++h) std::copy_n(to, s.q * L(), to + h * s.q * L());
  }
  /// Keys that are scored. Where rows are the lanes these come one after the other, so that later
  /// ones can be left out.
  int keys(std::ptrdiff_t block, const real* limits) const {
    const int all = data_.shape.T, count = rows(block);
    if (by_samples_ || !limits) return all;
    const bool known = std::none_of(limits, limits + count, [](real x) { return std::isnan(x); });
    return known ? seen_keys(limits, count) : all;
  }
  /// P = Z W of one head of a prompt, or (Z Q) K^T, as scores of a block would compute it: the same
  /// for all samples, with the same sums. `scratch`: three times the prompt with its rows as lanes.
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
    } else if (s.d % L() == 0 && s.q < L()) {  // few rows would leave lanes empty, features do not
      kernels_.product({{s.q, s.d / L(), s.d}, {z, qL}, {w, s.d, L()}, {zq, s.d, L()}});
      kernels_.pack_rows(zq, s.q, s.d, qL, p);
    } else {
      kernels_.product({{s.d, N, s.d}, {w, s.d}, {z, qL, L()}, {p, qL, L()}});
    }
    for (int k = 0; by_samples_ && k < s.d; ++k)
      for (int t = 0; t < s.q; ++t, to += L()) std::fill_n(to, L(), p[std::ptrdiff_t(k) * qL + t]);
  }
  void score(const ScoreArguments<real>& in) const {
    (by_samples_ ? kernels_.scores_samples : kernels_.scores_rows)(in);
  }
  int tile() const { return tile_; }
  /// The weights of a block for one head, from where they were scored: in `workspace` or, if there
  /// are `results` (last - first, H, q, T), in their place there.
  AttentionBlock<real> hand_out(std::ptrdiff_t block, int head, int keys, const real* weights,
                                real* workspace, real* results) const {
    const Shape& s = data_.shape;
    const std::ptrdiff_t i = sample(block), size = std::ptrdiff_t(s.q) * s.T;
    const int count = rows(block);
    AttentionBlock<real> out{};
    out.sample = i;
    out.samples = samples(i);
    out.head = head;
    out.first_row = first_row(block);
    out.rows = count;
    out.keys = keys;
    out.of_row = results ? s.T : key_row_;
    out.of_sample = results ? s.H * size : size;
    real* const to =
        results ? results + ((i - first_) * s.H + head) * size + std::ptrdiff_t(out.first_row) * s.T
                : workspace;
    out.at = to;
    if (!by_samples_) {
      out.by_keys = weights;
      out.of_key = padded(count);
      if (results) {
        kernels_.turn_weights(weights, out.of_key, keys, count, to, s.T);
        for (int t = 0; t < count; ++t)
          std::fill_n(to + std::ptrdiff_t(t) * s.T + keys, s.T - keys, real(0));
      } else {
        kernels_.pack_rows(weights, keys, int(out.of_key), int(key_row_), workspace);
      }
      return out;
    }
    if (heads_ > 1) weights += head * L();
    kernels_.unpack_weights(weights, heads_ * padded(count), keys, count, out.samples, to,
                            out.of_sample);
    return out;
  }

 private:
  /// Whether few weights of a sample leave no more lanes empty where samples are these than where
  /// rows of one head are. Gradients go over features as well, and so may have another plan.
  bool fills_lanes(const Shape& s) const {
    const auto idle = [this](std::ptrdiff_t count) {
      return double(round_up(count, L())) / double(count);
    };
    return std::ptrdiff_t(s.q) * s.T <= kSampleWeights && idle(s.n) <= idle(s.q);
  }
  int L() const { return kernels_.lanes; }
  int lanes() const { return by_samples_ ? L() : 1; }

  const Data<real>& data_;
  const Kernels<real>& kernels_;
  const std::ptrdiff_t first_, last_;
  bool by_samples_;
  int heads_ = 1;
  int tile_, tiles_;        // query rows of a block, and blocks of a sample
  std::ptrdiff_t key_row_;  // from row to row of weights that are handed out
};

/// As for_attention. `results`, if there are any, are written, those of heads that attend alike of
/// the first one only.
template <class real>
void for_blocks(const Data<real>& data, const Model<const real*>& model, real scale,
                std::ptrdiff_t first, std::ptrdiff_t last, int threads, real* results,
                const std::function<void(const AttentionBlock<real>&)>& body) {
  const Shape& s = data.shape;
  const Kernels<real>& kernels = active_kernels<real>();
  const AttentionBlocks<real> blocks(data, kernels, first, last);
  const std::ptrdiff_t queries = s.d * blocks.padded_tile(), keys = s.d * blocks.padded(s.T);
  const std::ptrdiff_t size_W = std::ptrdiff_t(s.d) * s.first_columns(), n = last - first;
  const bool factors = s.rank > 0;
  const double flops = double(n) * s.H * s.q * (s.flops_of_w() / 2 + 2.0 * s.T * s.d + 40.0 * s.T);
  const int members = useful_threads(threads, blocks.count(), flops);

  struct Workspace {
    real *x, *z, *p, *s, *limits, *rows, *weights;
  };
  std::vector<Workspace> workspaces(members);
  const bool z_is_x = data.self && blocks.takes_whole_samples();
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
                    : z_is_x       ? workspace.x
                                   : layout.template take<real>(queries);
      workspace.p = layout.template take<real>(blocks.heads() * queries * (factors ? 2 : 1));
      workspace.s = layout.template take<real>(blocks.heads() * s.T * blocks.padded_tile());
      workspace.limits = layout.template take<real>(blocks.heads() * blocks.padded_tile());
      workspace.weights = layout.template take<real>(blocks.weights());
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
    std::ptrdiff_t packed_sample = -1;
    int packed_keys = 0;
    for (std::ptrdiff_t b; (b = next.fetch_add(1, std::memory_order_relaxed)) < blocks.count();) {
      const std::ptrdiff_t i = blocks.sample(b);
      const int rows = blocks.rows(b);
      const auto rows_of = [&](const real* from, const std::int32_t* words, std::ptrdiff_t at,
                               int count) {
        if (!data.has_words()) return from + at * s.d;
        for (int k = 0; k < count; ++k)
          std::copy_n(data.x + words[at + k] * std::ptrdiff_t(s.d), s.d,
                      workspace.rows + std::ptrdiff_t(k) * s.d);
        return static_cast<const real*>(workspace.rows);
      };
      if (operands.limits) blocks.write_limits(b, workspace.limits);
      const int seen = blocks.keys(b, operands.limits);
      if (i != packed_sample || seen != packed_keys) {
        blocks.pack(rows_of(data.x, data.keys, i * s.T, seen), i, seen, std::ptrdiff_t(s.T) * s.d,
                    workspace.x);
        scale_by_power(workspace.x, s.d * blocks.padded(seen), exponents.x, workspace.x);
        packed_sample = i;
        packed_keys = seen;
      }
      if (workspace.z != workspace.x && !s.shared_query) {
        blocks.pack(rows_of(data.z, data.queries, i * s.q + blocks.first_row(b), rows), i, rows,
                    std::ptrdiff_t(s.q) * s.d, workspace.z);
        scale_by_power(workspace.z, s.d * blocks.padded(rows),
                       data.self ? exponents.x : exponents.z, workspace.z);
      }
      AttentionBlock<real> block{};
      for (int h = 0; h < s.H; ++h) {
        const bool is_alike = h > 0 && s.identity_w;  // as the head before
        if (h % blocks.heads() == 0 && !is_alike) {
          operands.w = s.identity_w ? nullptr : w + h * size_W;
          operands.kt = kt + h * size_W;
          auto scores =
              score_arguments(RowMode::kAttention, s.d, {seen, rows, 1}, operands, memory, 0);
          if (shared) {
            scores.shared_p = shared_p + h * queries;
            scores.shared_p_k = blocks.padded(s.q);
          }
          scores.heads = blocks.heads();
          blocks.score(scores);
        }
        if (!is_alike) block = blocks.hand_out(b, h, seen, workspace.s, workspace.weights, results);
        block.head = h;
        body(block);
      }
    }
  });
}

}  // namespace

template <class real>
void for_attention(const Data<real>& data, const Model<const real*>& model, real scale,
                   std::ptrdiff_t first, std::ptrdiff_t last, int threads,
                   const std::function<void(const AttentionBlock<real>&)>& body) {
  for_blocks<real>(data, model, scale, first, last, threads, nullptr, body);
}

template <class real>
int rows_of_blocks(const Data<real>& data) {
  return AttentionBlocks<real>(data, active_kernels<real>(), 0, data.shape.n).tile();
}

template <class real>
void attention(const Data<real>& data, const Model<const real*>& model, real scale,
               std::ptrdiff_t first, std::ptrdiff_t last, int threads, real* out) {
  const Shape& s = data.shape;
  const std::ptrdiff_t size = std::ptrdiff_t(s.q) * s.T;
  for_blocks<real>(data, model, scale, first, last, threads, out,
                   [&](const AttentionBlock<real>& block) {
                     for (int i = 0; i < block.samples; ++i) {
                       real* to = out + ((block.sample - first + i) * s.H + block.head) * size +
                                  std::ptrdiff_t(block.first_row) * s.T;
                       if (block.row(i, 0) == to) continue;
                       for (int t = 0; t < block.rows; ++t, to += s.T)
                         std::fill(std::copy_n(block.row(i, t), block.keys, to), to + s.T, real(0));
                     }
                   });
}

#define MHFAST_INSTANTIATE(real)                                                              \
  template void for_attention<real>(const Data<real>&, const Model<const real*>&, real,       \
                                    std::ptrdiff_t, std::ptrdiff_t, int,                      \
                                    const std::function<void(const AttentionBlock<real>&)>&); \
  template int rows_of_blocks<real>(const Data<real>&);                                       \
  template void attention<real>(const Data<real>&, const Model<const real*>&, real,           \
                                std::ptrdiff_t, std::ptrdiff_t, int, real*);
MHFAST_INSTANTIATE(float)
MHFAST_INSTANTIATE(double)
#undef MHFAST_INSTANTIATE

}  // namespace mhfast
