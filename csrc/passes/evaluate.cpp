#include "evaluate.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <vector>

#include "../problem/alike_heads.hpp"
#include "../problem/clean.hpp"
#include "../problem/factors.hpp"
#include "../problem/rescale.hpp"
#include "../runtime/float_mode.hpp"
#include "inputs.hpp"
#include "loadable_model.hpp"
#include "triangular.hpp"

namespace mhfast {
namespace {

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
                AlignedBuffer& block, real* gx = nullptr, real* gz = nullptr) {
  const bool of_words = gradient.words_by_scores;
  const bool of_inputs = gx || gz;
  const bool differentiates =
      gradient.by_w() || gradient.readout || gradient.prompt || of_words || of_inputs;
  typename Engine<real>::Options options;
  options.gradient = differentiates;
  options.wrt_W = gradient.by_w() || gradient.prompt || of_words;
  options.wrt_readout = gradient.readout || of_words;
  options.wrt_embedding = of_words;
  options.wrt_inputs = of_inputs;
  options.gaps = careful;
  Engine<real> engine(data, loss, options, threads);
  engine.bind(block);
  engine.write_outputs(outputs);
  engine.write_input_gradients(gx, gz);
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
                               of_inputs || gradients.of[kPrompt] || gradients.of[kEmbedding]);
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
  std::vector<real> by_values(gradients.of[kEmbedding] ? of_words.size() : 0);
  gradient.words_by_scores = gradients.of[kEmbedding];
  gradient.words_by_values = gradients.of[kEmbedding] ? by_values.data() : nullptr;
  // Where there are projections one pass finds all gradients.
  const bool together = of_inputs && has_projections(s);
  // So does that by inputs where W is large.
  const bool by_inputs = of_inputs && !together && gradients.of_parameters() &&
                         inputs_find_parameters(data, loss, gradients.x, gradients.z);
  const bool by_parameters = gradients.of_parameters() || !of_inputs || together;
  std::vector<real> f(of_inputs && by_parameters && !together && !by_inputs ? s.n * s.outputs()
                                                                            : 0);
  double value = 0;
  if (by_parameters) {
    if (by_inputs)
      value = input_and_parameter_gradients(data, loadable.parameters, loss, threads, gradients.x,
                                            gradients.z, gradient.W, gradient.readout);
    else
      value = evaluate(data, loadable.parameters, loss, threads, gradient, false,
                       f.empty() ? nullptr : f.data(), scratch.engine(),
                       together ? gradients.x : nullptr, together ? gradients.z : nullptr);
    if (is_near_underflow(gradient.W, extent(kW, s, 0)) ||
        is_near_underflow(gradient.Q, extent(kQ, s, s.rank)) ||
        is_near_underflow(gradient.K, extent(kK, s, s.rank)) ||
        is_near_underflow(gradient.readout, extent(readout, s, 0)) ||
        is_near_underflow(gradient.prompt, extent(kPrompt, s, 0)) ||
        is_near_underflow(gradient.words_by_scores, of_words) ||
        is_near_underflow(gradient.words_by_values, of_words))
      evaluate<real>(data, loadable.parameters, loss, threads, gradient, true, nullptr,
                     scratch.engine());
  }
  for (int h = 0; of_product && h < s.H; ++h)
    differentiate_factors(active_kernels<real>(), s, model.rank, model.at[kQ], model.at[kK],
                          gradient.W, h, 1, gradients.of[kQ], gradients.of[kK]);
  for (int h = 0; of_values && h < s.H; ++h)
    differentiate_values(active_kernels<real>(), s, model.at[kValueA], model.at[kValueB],
                         gradient.readout, h, 1, gradients.of[kValueA], gradients.of[kValueB]);
  for (std::size_t i = 0; i < by_values.size(); ++i) gradients.of[kEmbedding][i] += by_values[i];
  if (of_inputs && !together && !by_inputs)
    value = input_gradients<real>(
        data, loadable.parameters, loss, by_parameters ? f.data() : nullptr,
        [&](real* to) { outputs(*problem.data, model, scale, threads, to); }, threads, gradients.x,
        gradients.z);
  problem.restore(gradients);
  heads.spread(gradients.of);
  return value;
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
                                       int, const Gradients<real>&);
MHFAST_INSTANTIATE(float)
MHFAST_INSTANTIATE(double)
#undef MHFAST_INSTANTIATE

}  // namespace mhfast
