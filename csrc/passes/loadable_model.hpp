// The parameters of a single call in the form that an engine expects, and the memory that a thread
// keeps for its calls.
#pragma once

#include <array>
#include <memory>

#include "../dispatch/dispatch.hpp"
#include "../problem/factors.hpp"
#include "../runtime/scratch.hpp"
#include "../runtime/tuning.hpp"

namespace mhfast {

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

}  // namespace mhfast
