#include "state.hpp"

#include <algorithm>

#include "../problem/factors.hpp"
#include "../problem/readout.hpp"

namespace mhfast {
namespace {

/// Numbers of `count` runs, `run` apart, to vectors of `width` and back. Lanes beyond the last run
/// repeat it.
template <class real>
void to_lanes(const real* from, std::ptrdiff_t run, int count, int width, std::ptrdiff_t size,
              real* to) {
  for (int l = 0; l < width; ++l) {
    const real* of_run = from + std::min(l, count - 1) * run;
    for (std::ptrdiff_t i = 0; i < size; ++i) to[i * width + l] = of_run[i];
  }
}

template <class real>
void from_lanes(const real* from, std::ptrdiff_t run, int count, int width, std::ptrdiff_t size,
                real* to) {
  for (int l = 0; l < count; ++l)
    for (std::ptrdiff_t i = 0; i < size; ++i) to[l * run + i] = from[i * width + l];
}

}  // namespace

template <class real>
State<real>::State(TrainingTask<real>& task, std::ptrdiff_t run, int count, int width,
                   bool multiplies)
    : task_(task),
      run_(run),
      count_(count),
      width_(width),
      multiplies_(multiplies),
      theta_(task.model.of(run)),
      first_(task.first.of(run)),
      second_(task.second.of(run)) {
  take_memory();
  if (width > 1) take_lanes();
  for (int name = 0; name < kTensors; ++name)
    if (!loaded_[name]) loaded_[name] = theta_[name];
  rescale_prompt();
  if (multiplies_ && task.keeps_attention()) {  // once for all steps
    rescale_heads({0, 1, nullptr});
    for (int h = 0; h < task.data.shape.H; ++h) multiply_factors(h);
    multiplies_ = false;
  }
}

/// For lanes, copies, products and gradients.
template <class real>
void State<real>::take_memory() {
  const bool lanes = width_ > 1;
  const bool of_factors = task_.wrt[kQ] || task_.wrt[kK],
             of_values = task_.wrt[kValueA] || task_.wrt[kValueB];
  const auto lay_out = [&](Arena layout) {
    for (int name = 0; name < kTensors; ++name) {
      const std::size_t size = extent_of(name).all() * width_;
      const bool exists = task_.model.at[name];
      if (lanes && exists) theta_[name] = layout.template take<real>(size);
      if (lanes && task_.first.at[name]) first_[name] = layout.template take<real>(size);
      if (lanes && task_.second.at[name]) second_[name] = layout.template take<real>(size);
      if ((name == kW && multiplies_) || (name == kV && task_.data.shape.value_rank > 0))
        theta_[name] = layout.template take<real>(size);
      if (task_.exponents.any() && exists) loaded_[name] = layout.template take<real>(size);
      if (task_.wrt[name] || (name == kW && of_factors && multiplies_) || (name == kV && of_values))
        gradient_[name] = layout.template take<real>(size);
    }
    return layout.size();
  };
  const std::size_t bytes = lay_out(Arena());
  lay_out(Arena(block_.reserve(std::max<std::size_t>(bytes, 1))));
}

template <class real>
void State<real>::take_lanes() {
  const auto take = [&](const OfRuns<real*>& from, const Tensors<real*>& to) {
    const Tensors<real*> of_run = from.of(run_);
    for (int name = 0; name < kTensors; ++name)
      if (of_run[name])
        to_lanes<real>(of_run[name], from.run[name], count_, width_, extent_of(name).all(),
                       to[name]);
  };
  take(task_.model, theta_);
  take(task_.first, first_);
  take(task_.second, second_);
}

template <class real>
void State<real>::write_back() const {
  if (width_ == 1) return;
  const auto give = [&](const Tensors<real*>& from, const OfRuns<real*>& to) {
    const Tensors<real*> of_run = to.of(run_);
    for (int name = 0; name < kTensors; ++name)
      if (of_run[name] && task_.wrt[name])
        from_lanes<real>(from[name], to.run[name], count_, width_, extent_of(name).all(),
                         of_run[name]);
  };
  give(theta_, task_.model);
  give(first_, task_.first);
  give(second_, task_.second);
}

template <class real>
Parameters<real> State<real>::parameters() const {
  return {loaded_[kW], loaded_[kQ],      loaded_[kK], loaded_[kU],
          loaded_[kV], loaded_[kPrompt], task_.scale};
}

template <class real>
Trained<real> State<real>::trained(TensorName name) const {
  const Extent e = extent_of(name);
  std::vector<double> lr(width_);
  for (int l = 0; l < width_; ++l) lr[l] = task_.optimizer.lr[name][run_ + std::min(l, count_ - 1)];
  Trained<real> tensor{};
  tensor.name = name;
  tensor.heads = e.heads;
  tensor.rows = e.rows;
  tensor.columns = e.columns;
  tensor.size = e.size();
  tensor.theta = theta_[name];
  tensor.gradient = gradient_[name];
  tensor.first = first_[name];
  tensor.second = second_[name];
  tensor.lr = lr;
  tensor.constraint = task_.constraints[name];
  return tensor;
}

template <class real>
void State<real>::rescale_heads(const Member& member) {
  if (!task_.exponents.any()) return;
  for (int name = 0; name < kPrompt; ++name) {
    if (!task_.model.at[name]) continue;
    const Extent e = extent_of(name);
    const std::ptrdiff_t numbers = e.size() * width_;
    for (int h = member.index; h < e.heads; h += member.count)
      scale_by_power(theta_[name] + h * numbers, numbers, exponent(TensorName(name)),
                     loaded_[name] + h * numbers);
  }
}

template <class real>
void State<real>::rescale_prompt() {
  if (!task_.exponents.any() || !theta_[kPrompt]) return;
  scale_by_power(theta_[kPrompt], extent_of(kPrompt).all() * width_, exponent(kPrompt),
                 loaded_[kPrompt]);
}

/// W of one head.
template <class real>
void State<real>::multiply_factors(int head) {
  mhfast::compose(active_kernels<real>(), task_.data.shape, task_.rank, loaded_[kQ], loaded_[kK],
                  head, width_, loaded_[kW]);
}

template <class real>
void State<real>::compose(const Member& member) {
  const Shape& s = task_.data.shape;
  rescale_heads(member);
  for (int h = member.index; multiplies_ && h < s.H; h += member.count) multiply_factors(h);
  for (int h = member.index; s.value_rank > 0 && h < s.H; h += member.count)
    compose_values<real>(active_kernels<real>(), s, loaded_[kValueA], loaded_[kValueB], h, width_,
                         loaded_[kV]);
}

template <class real>
void State<real>::differentiate(Engine<real>& engine, const Member& member) {
  const Kernels<real>& kernels = active_kernels<real>();
  const Shape& s = task_.data.shape;
  const TensorName readout = readout_of(s).name;
  const bool factors = engine.multiplies_factors();
  GradientOut<real> to{factors ? nullptr : gradient_[kW], gradient_[readout], gradient_[kPrompt]};
  if (factors) {
    to.Q = gradient_[kQ];
    to.K = gradient_[kK];
  }
  engine.reduce_gradient(to, member);
  const bool of_product = !factors && (gradient_[kQ] || gradient_[kK]),
             of_values = gradient_[kValueA] || gradient_[kValueB];
  for (int h = member.index; of_product && h < s.H; h += member.count)
    differentiate_factors<real>(kernels, s, task_.rank, loaded_[kQ], loaded_[kK], gradient_[kW], h,
                                width_, gradient_[kQ], gradient_[kK]);
  for (int h = member.index; of_values && h < s.H; h += member.count)
    differentiate_values<real>(kernels, s, loaded_[kValueA], loaded_[kValueB], gradient_[kV], h,
                               width_, gradient_[kValueA], gradient_[kValueB]);
}

template <class real>
void State<real>::restore_gradients(std::vector<Trained<real>>& tensors,
                                    const Member& member) const {
  if (!task_.exponents.any()) return;
  for (Trained<real>& tensor : tensors) {
    const std::ptrdiff_t numbers = tensor.size * width_;
    for (int h = member.index; h < tensor.heads; h += member.count) {
      real* g = tensor.gradient + h * numbers;
      scale_by_power(g, numbers, exponent(tensor.name), g);
    }
  }
}

template <class real>
void State<real>::add_to_averages(const std::vector<std::int64_t>& counts,
                                  const Member& member) const {
  for (int name = 0; task_.averages.counts && name < kTensors; ++name) {
    if (!task_.averages.mean.at[name]) continue;
    const Extent e = extent_of(name);
    for (int l = 0; l < count_; ++l) {
      if (counts[l] == 0) continue;
      for (int h = member.index; h < e.heads; h += member.count) {
        double* mean = task_.averages.mean.of(run_ + l)[name] + h * e.size();
        const real* theta = theta_[name] + h * e.size() * width_ + l;
        for (std::ptrdiff_t i = 0; i < e.size(); ++i)
          mean[i] = Averages::added(mean[i], theta[i * width_], counts[l]);
      }
    }
  }
}

template class State<float>;
template class State<double>;

}  // namespace mhfast
