#include "evaluate.hpp"

#include <algorithm>
#include <cmath>
#include <exception>
#include <memory>

#include "../problem/alike_heads.hpp"
#include "../problem/clean.hpp"
#include "../problem/factors.hpp"
#include "../problem/rescale.hpp"
#include "../runtime/float_mode.hpp"
#include "../runtime/tuning.hpp"
#include "inputs.hpp"
#include "scores.hpp"
#include "triangular.hpp"

namespace mhfast {
namespace {

/// The calling thread's workspaces, for the duration of one call.
class CallScratch {
 public:
  CallScratch() = default;
  ~CallScratch() {
    for (AlignedBuffer& block : kept())
      if (block.size() > kKeptScratch) block.release();
  }
  CallScratch(const CallScratch&) = delete;
  CallScratch& operator=(const CallScratch&) = delete;
  AlignedBuffer& engine() const { return kept()[0]; }
  AlignedBuffer& model() const { return kept()[1]; }

 private:
  /// On the heap, because the thread-local storage that exists from the start of a thread is small.
  static std::array<AlignedBuffer, 2>& kept() {
    thread_local std::unique_ptr<std::array<AlignedBuffer, 2>> blocks;
    if (!blocks) blocks = std::make_unique<std::array<AlignedBuffer, 2>>();
    return *blocks;
  }
};

/// A model's parameters in the form that an engine expects: a factored V is multiplied out, and a
/// factored W unless its factors are multiplied with, in `block`, with memory for the gradients by
/// them.
template <class real>
class LoadableModel {
 public:
  LoadableModel(const Shape& s, const Model<const real*>& model, real scale, bool gradient,
                AlignedBuffer& block)
      : parameters{model.at[kW], model.at[kQ],      model.at[kK], model.at[kU],
                   model.at[kV], model.at[kPrompt], scale} {
    const bool has_product = model.is_factored() && s.rank == 0;
    const std::ptrdiff_t of_w = has_product ? extent(kW, s, 0).all() : 0;
    const std::ptrdiff_t of_v = model.has_factored_values() ? extent(kV, s, 0).all() : 0;
    if (of_w + of_v == 0) return;
    const auto lay_out = [&](Arena layout) {
      w_ = layout.take<real>(of_w);
      v_ = layout.template take<real>(of_v);
      by_w_ = layout.template take<real>(gradient ? of_w : 0);
      by_v_ = layout.template take<real>(gradient ? of_v : 0);
      return layout.size();
    };
    lay_out(Arena(block.reserve(lay_out(Arena()))));
    const Kernels<real>& kernels = active_kernels<real>();
    for (int h = 0; h < s.H; ++h) {
      if (of_w > 0) compose(kernels, s, model.rank, model.at[kQ], model.at[kK], h, 1, w_);
      if (of_v > 0) compose_values(kernels, s, model.at[kValueA], model.at[kValueB], h, 1, v_);
    }
    if (of_w > 0) parameters.W = w_;
    if (of_v > 0) parameters.V = v_;
  }

  Parameters<real> parameters;
  real* gradient_by_W() const { return by_w_; }
  real* gradient_by_V() const { return by_v_; }

 private:
  real *w_ = nullptr, *v_ = nullptr, *by_w_ = nullptr, *by_v_ = nullptr;
};

/// A problem as it is computed, see rescale.hpp.
template <class real>
struct Rescaled {
  const Exponents exponents;
  const RescaledData<real> data;
  const RescaledTensors<real> tensors;
  const Model<const real*> model;

  Rescaled(const Data<real>& given, const Model<const real*>& of, bool by_query)
      : exponents(exponents_of_call(given, of, by_query)),
        data(given, 1, exponents),
        tensors(of.at, given.shape, of.rank, of.is_tied(), exponents),
        model{*tensors, of.rank} {}

  /// From the gradients by the scaled copies to those by the caller's tensors.
  void restore(const Gradients<real>& gradients) const {
    if (!exponents.any()) return;
    const Shape& s = (*data).shape;
    const auto scale = [](real* x, std::ptrdiff_t size, int exponent) {
      if (x) scale_by_power(x, size, exponent, x);
    };
    for (int name = 0; name < kTensors; ++name)
      scale(gradients.of[name], extent(TensorName(name), s, model.rank).all(),
            exponents.of(TensorName(name), model.is_tied()));
    scale(gradients.x, s.n * s.T * s.d, exponents.x);
    scale(gradients.z, s.n * s.q * s.d, exponents.z);
    scale(gradients.embedding, std::ptrdiff_t(s.words) * s.d, exponents.x);
  }
};

template <class real>
TriangleUse use_of(const Gradients<real>& gradients) {
  if (gradients.x) return TriangleUse::kTokens;
  const bool differentiates = gradients.of_parameters() || gradients.z;
  return differentiates ? TriangleUse::kGradient : TriangleUse::kOutputs;
}

/// x *= factor exp(log_factor), also if these factors alone would underflow.
template <class real>
void multiply(real* x, std::ptrdiff_t size, double factor, double log_factor) {
  if (std::isinf(log_factor)) return;  // x is zero
  const double half = std::exp(log_factor / 2);
  for (std::ptrdiff_t i = 0; i < size; ++i) x[i] = real(double(x[i]) * half * factor * half);
}

/// Whether some head's gradient is so small that parts of it may have been flushed to zero.
template <class real>
bool is_near_underflow(const real* gradient, const Extent& e) {
  constexpr real kNearUnderflow = sizeof(real) == 4 ? real(1e-18) : real(1e-240);
  for (int h = 0; gradient && h < e.heads; ++h, gradient += e.size()) {
    const real* const end = gradient + e.size();
    // Usually the first entry decides.
    const auto is_large = [](real x) { return !(std::fabs(x) < kNearUnderflow); };
    if (std::any_of(gradient, end, is_large)) continue;
    if (std::any_of(gradient, end, [](real x) { return x != 0; })) return true;
  }
  return false;
}

/// Loss and gradient, and the outputs unless that is null; `careful`: also accurate if their
/// factors underflow, at twice the cost then.
template <class real>
double evaluate(const Data<real>& data, const Parameters<real>& parameters, Loss loss, int threads,
                const typename Engine<real>::Gradient& gradient, bool careful, real* outputs,
                AlignedBuffer& block) {
  const bool of_words = gradient.words_by_scores;
  const bool differentiates = gradient.by_w() || gradient.readout || gradient.prompt || of_words;
  typename Engine<real>::Options options;
  options.gradient = differentiates;
  options.wrt_W = gradient.by_w() || gradient.prompt || of_words;
  options.wrt_readout = gradient.readout || of_words;
  options.wrt_embedding = of_words;
  options.gaps = careful;
  Engine<real> engine(data, loss, options, threads);
  engine.bind(block);
  engine.write_outputs(outputs);
  const Shape& s = data.shape;
  bool scaled = false;
  run_short_team(engine.threads(), engine.expected_seconds(), [&](const Member& member) {
    const FlushToZero flush;
    engine.load_parameters(parameters, member);
    member.wait();
    engine.run_chunks(differentiates ? Pass::kGradient : Pass::kLoss, member);
    if (!differentiates) return;
    member.wait();
    if (engine.own_loss_failed()) return;
    if (careful) {
      if (member.index == 0) {
        engine.gather_scales();
        scaled = engine.needs_scaling(gradient.prompt || of_words);
        if (scaled) engine.restart();
      }
      member.wait();
      if (scaled) {
        engine.run_chunks(Pass::kScaledGradient, member);
        member.wait();
        if (engine.own_loss_failed()) return;
      }
    }
    engine.reduce_gradient(gradient, member);
    if (!scaled) return;
    member.wait();
    const Extent of_readout = extent(readout_of(s).name, s, 0);
    const std::ptrdiff_t size_W = std::ptrdiff_t(s.d) * s.first_columns();
    const std::ptrdiff_t size_readout = of_readout.size();
    flush.suspended([&] {
      for (int h = member.index; h < s.H; h += member.count) {
        for (real* by_w : {gradient.W, gradient.Q, gradient.K})
          if (by_w) multiply(by_w + h * size_W, size_W, engine.share(), engine.log_scale_W(h));
        if (gradient.readout)
          multiply(gradient.readout + h * size_readout, size_readout, engine.share(),
                   engine.log_scale_readout());
      }
      if (gradient.prompt && member.index == 0)
        multiply(gradient.prompt, extent(kPrompt, s, 0).size(), engine.share(),
                 engine.log_scale_W(0));
      if (of_words && member.index == 0) {
        const std::ptrdiff_t size = std::ptrdiff_t(s.words) * s.d;
        multiply(gradient.words_by_scores, size, engine.share(), engine.log_scale_W(0));
        multiply(gradient.words_by_values, size, engine.share(), engine.log_scale_readout());
      }
    });
  });
  return engine.totals().loss;
}

template <class real>
void write_outputs(const Data<real>& data, const Parameters<real>& parameters, int threads,
                   AlignedBuffer& block, real* out) {
  Engine<real> engine(data, std::nullopt, {}, threads);
  engine.bind(block);
  engine.write_outputs(out);
  run_short_team(engine.threads(), engine.expected_seconds(), [&](const Member& member) {
    engine.load_parameters(parameters, member);
    member.wait();
    engine.run_chunks(Pass::kOutputs, member);
  });
}

/// With R in the place of the tokens, of as many samples at a time as kTriangleBytes hold.
template <class real>
void write_outputs_by_triangles(const Data<real>& data, const Parameters<real>& parameters,
                                int threads, AlignedBuffer& block, real* out) {
  const Shape& s = data.shape;
  const double bytes = double(s.d) * s.d * sizeof(real);
  const auto most = std::max<std::ptrdiff_t>(1, std::ptrdiff_t(kTriangleBytes / bytes));
  for (std::ptrdiff_t first = 0; first < s.n; first += most) {
    const std::ptrdiff_t count = std::min(most, s.n - first);
    TriangularData<real> piece(at_samples(data, first, count), 1);
    piece.compute_all(threads);
    write_outputs(*piece, parameters, threads, block, out + first * s.outputs());
  }
}

}  // namespace

template <class real>
void outputs(const Data<real>& given, const Model<const real*>& model, real scale, int threads,
             real* out) {
  if (given.shape.n == 0) return;
  const AlikeHeads<real> heads(given, model);
  const CleanData<real> clean(heads.data(), 1);
  const Rescaled<real> problem(*clean, heads.model(), false);
  const Data<real>& data = *problem.data;
  CallScratch scratch;
  const LoadableModel<real> loadable(data.shape, problem.model, scale, false, scratch.model());
  if (prefers_triangle(data, TriangleUse::kOutputs))
    write_outputs_by_triangles(data, loadable.parameters, threads, scratch.engine(), out);
  else
    write_outputs(data, loadable.parameters, threads, scratch.engine(), out);
}

template <class real>
double value_and_grad(const Data<real>& given, const Model<const real*>& given_model, real scale,
                      Loss loss, int threads, const Gradients<real>& gradients) {
  const bool derivatives = targets_of(loss) == Targets::kDerivatives;
  const AlikeHeads<real> heads(given, given_model);
  const CleanData<real> clean(heads.data(), 1, derivatives);
  const bool of_inputs = gradients.x || gradients.z;
  const Rescaled<real> problem(*clean, heads.model(),
                               of_inputs || gradients.of[kPrompt] || gradients.embedding);
  const Model<const real*>& model = problem.model;
  const CheaperKeys<real> keys(*problem.data, use_of(gradients), threads);
  const Data<real>& data = *keys;
  const Shape& s = data.shape;
  CallScratch scratch;
  const LoadableModel<real> loadable(s, model, scale, true, scratch.model());
  const bool of_product = (gradients.of[kQ] || gradients.of[kK]) && s.rank == 0;
  const bool of_values = gradients.of[kValueA] || gradients.of[kValueB];
  const TensorName readout = readout_of(s).name;
  typename Engine<real>::Gradient gradient{
      of_product ? loadable.gradient_by_W() : gradients.of[kW],
      of_values ? loadable.gradient_by_V() : gradients.of[readout], gradients.of[kPrompt]};
  if (s.rank > 0) {
    gradient.Q = gradients.of[kQ];
    gradient.K = gradients.of[kK];
  }
  const Extent of_words{1, s.words, s.d};
  std::vector<real> by_values(gradients.embedding ? of_words.size() : 0);
  gradient.words_by_scores = gradients.embedding;
  gradient.words_by_values = gradients.embedding ? by_values.data() : nullptr;
  std::vector<real> f(of_inputs ? s.n * s.outputs() : 0);
  double value = 0;
  if (gradients.of_parameters() || !of_inputs) {
    value = evaluate(data, loadable.parameters, loss, threads, gradient, false,
                     of_inputs ? f.data() : nullptr, scratch.engine());
    if (is_near_underflow(gradient.W, extent(kW, s, 0)) ||
        is_near_underflow(gradient.Q, extent(kQ, s, s.rank)) ||
        is_near_underflow(gradient.K, extent(kK, s, s.rank)) ||
        is_near_underflow(gradient.readout, extent(readout, s, 0)) ||
        is_near_underflow(gradient.prompt, extent(kPrompt, s, 0)) ||
        is_near_underflow(gradient.words_by_scores, of_words) ||
        is_near_underflow(gradient.words_by_values, of_words))
      evaluate<real>(data, loadable.parameters, loss, threads, gradient, true, nullptr,
                     scratch.engine());
  } else {
    outputs(*problem.data, model, scale, threads, f.data());
  }
  for (int h = 0; of_product && h < s.H; ++h)
    differentiate_factors(active_kernels<real>(), s, model.rank, model.at[kQ], model.at[kK],
                          gradient.W, h, 1, gradients.of[kQ], gradients.of[kK]);
  for (int h = 0; of_values && h < s.H; ++h)
    differentiate_values(active_kernels<real>(), s, model.at[kValueA], model.at[kValueB],
                         gradient.readout, h, 1, gradients.of[kValueA], gradients.of[kValueB]);
  for (std::size_t i = 0; i < by_values.size(); ++i) gradients.embedding[i] += by_values[i];
  if (of_inputs) {
    Data<real> multiplied_out = data;  // which the gradients by inputs take
    multiplied_out.shape.rank = 0;
    const LoadableModel<real> dense(multiplied_out.shape, model, scale, false, scratch.model());
    value = input_gradients(multiplied_out, dense.parameters, loss, f.data(), threads, gradients.x,
                            gradients.z);
  }
  problem.restore(gradients);
  heads.spread(gradients.of);
  return value;
}

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
  real *w = nullptr, *kt = nullptr, *prompt = nullptr;
  const auto lay_out = [&](Arena layout) {
    w = layout.take<real>(s.H * size_W);
    kt = layout.take<real>(factors ? s.H * size_W : 0);
    prompt = layout.template take<real>(s.shared_query ? queries : 0);
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
  std::transform(first_factor, first_factor + s.H * size_W, w,
                 [scale](real x) { return scale * x; });
  for (int h = 0; factors && h < s.H; ++h)
    kernels.pack_rows(parameters.right() + h * size_W, s.d, s.rank, s.d, kt + h * size_W);
  if (s.shared_query) blocks.pack(parameters.prompt, first, s.q, 0, prompt);

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
        blocks.score(score_arguments(RowMode::kAttention, s.d, {s.T, s.q, 1}, operands, memory, 0));
        blocks.write(workspace.s, i, to);
      }
    }
  });
}

void for_runs(std::ptrdiff_t runs, int threads, double flops_of_one,
              const std::function<void(std::ptrdiff_t, int)>& body) {
  const int members = useful_threads(threads, runs, flops_of_one * double(runs));
  if (members == 1 || useful_threads(threads, runs, flops_of_one) > 1) {
    for (std::ptrdiff_t r = 0; r < runs; ++r) body(r, threads);
    return;
  }
  std::atomic<std::ptrdiff_t> next{0};
  std::vector<std::exception_ptr> errors(members);
  run_short_team(members, flops_of_one * double(runs) / 1e9, [&](const Member& member) {
    try {
      for (std::ptrdiff_t r; (r = next.fetch_add(1, std::memory_order_relaxed)) < runs;) body(r, 1);
    } catch (...) {
      errors[member.index] = std::current_exception();
    }
  });
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

#define MHFAST_INSTANTIATE(real)                                                                 \
  template void outputs<real>(const Data<real>&, const Model<const real*>&, real, int, real*);   \
  template double value_and_grad<real>(const Data<real>&, const Model<const real*>&, real, Loss, \
                                       int, const Gradients<real>&);                             \
  template void attention<real>(const Data<real>&, const Model<const real*>&, real,              \
                                std::ptrdiff_t, std::ptrdiff_t, int, real*);
MHFAST_INSTANTIATE(float)
MHFAST_INSTANTIATE(double)
#undef MHFAST_INSTANTIATE

}  // namespace mhfast
