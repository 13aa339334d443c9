#include "descent.hpp"

#include <algorithm>
#include <cmath>

namespace mhfast {

template <class real>
Descent<real>::Descent(const Optimizer& optimizer, int width, bool wants_norms)
    : optimizer_(optimizer),
      kernels_(active_kernels<real>()),
      width_(width),
      wants_norms_(wants_norms),
      step_needs_norm_(optimizer.method == Method::kNormalized ||
                       optimizer.method == Method::kPolyak || std::isfinite(optimizer.clip)),
      frozen_(width, 0),
      kept_(width, 1.0),
      decay_(width, 0.0),
      root_(width, 1.0) {}

template <class real>
void Descent<real>::add(const Trained<real>& tensor) {
  tensors_.push_back(tensor);
  Trained<real>& added = tensors_.back();
  const std::size_t parts = std::size_t(tensor.heads) * width_;
  added.loss_norms.resize(parts);
  added.step_norms.resize(parts);
  added.dual_norms.resize(parts);
  added.log_scales.resize(parts, 0.0);
  added.rates.resize(parts, 0.0);
}

/// Writes one sum for each lane; power 0: only the largest, to see whether all are finite.
template <class real>
void Descent<real>::measure(const real* x, std::ptrdiff_t size, double power, PowerSum* out) const {
  double largest[kMostLanes], sum[kMostLanes];
  kernels_.measure({size * width_, x, largest, sum, power});
  const double exponent = power == 0 ? 2 : power;
  if (width_ > 1) {
    for (int l = 0; l < width_; ++l) out[l] = {largest[l], sum[l], exponent};
    return;
  }
  *out = {0, 0, exponent};
  for (int l = 0; l < kernels_.lanes; ++l) out->add({largest[l], sum[l], exponent});
}

/// Measures a member's heads of the gradient and adds l2 theta to them.
template <class real>
void Descent<real>::scan(const Member& member) {
  const double l2 = optimizer_.l2;
  const bool dual = optimizer_.method == Method::kMirror && optimizer_.normalized;
  for (Trained<real>& tensor : tensors_)
    for (int h = member.index; h < tensor.heads; h += member.count) {
      const std::ptrdiff_t numbers = tensor.size * width_;
      real* g = tensor.gradient + h * numbers;
      PowerSum* loss_norms = &tensor.loss_norms[h * width_];
      PowerSum* step_norms = &tensor.step_norms[h * width_];
      measure(g, tensor.size, wants_norms_ || step_needs_norm_ ? 2 : 0, loss_norms);
      std::copy_n(loss_norms, width_, step_norms);
      if (l2 != 0) {
        const real* theta = tensor.theta + h * numbers;
        for (std::ptrdiff_t i = 0; i < numbers; ++i) g[i] = real(g[i] + l2 * theta[i]);
        if (step_needs_norm_) measure(g, tensor.size, 2, step_norms);
      }
      if (dual) measure(g, tensor.size, optimizer_.norm_power(), &tensor.dual_norms[h * width_]);
    }
}

template <class real>
bool Descent<real>::is_finite(int lane) const {
  for (const Trained<real>& tensor : tensors_)
    for (int h = 0; h < tensor.heads; ++h)
      if (!std::isfinite(tensor.loss_norms[h * width_ + lane].largest)) return false;
  return true;
}

/// Norm over all tensors and heads, divided by exp(log_scale), the largest of their scales.
template <class real>
PowerSum Descent<real>::whole_norm(Norms norms, int lane, double& log_scale) const {
  log_scale = 0;
  if (scaled_) {
    log_scale = -kInfinity;
    for (const Trained<real>& tensor : tensors_)
      for (int h = 0; h < tensor.heads; ++h)
        log_scale = std::max(log_scale, tensor.log_scales[h * width_ + lane]);
  }
  PowerSum sum;
  sum.power = (tensors_[0].*norms)[lane].power;
  for (const Trained<real>& tensor : tensors_)
    for (int h = 0; h < tensor.heads; ++h) {
      PowerSum part = (tensor.*norms)[h * width_ + lane];
      if (part.is_zero()) continue;
      if (scaled_) part.largest *= std::exp(tensor.log_scales[h * width_ + lane] - log_scale);
      sum.add(part);
    }
  return sum;
}

template <class real>
double Descent<real>::gradient_norm(int lane) const {
  double log_scale = 0;
  const double norm = whole_norm(&Trained<real>::loss_norms, lane, log_scale).norm();
  return norm == 0 ? norm : norm * std::exp(log_scale);
}

/// rate / (norm + eps), for a norm stored without exp(log_scale); a zero gradient does not move.
template <class real>
double Descent<real>::divided(double rate, const PowerSum& norm, double log_scale,
                              double kept) const {
  if (norm.is_zero()) return 0.0;
  if (optimizer_.eps == 0) return rate / norm.norm();
  const double actual = kept * norm.norm() * std::exp(log_scale);
  return rate * (actual / (actual + optimizer_.eps)) / norm.norm();
}

template <class real>
void Descent<real>::choose_normalized(int lane, double rate, double kept) {
  const Norms norms = optimizer_.method == Method::kMirror ? &Trained<real>::dual_norms
                                                           : &Trained<real>::step_norms;
  double whole_scale = 0;
  PowerSum whole;
  if (optimizer_.by == Scope::kAll) whole = whole_norm(norms, lane, whole_scale);
  for (Trained<real>& tensor : tensors_) {
    PowerSum all_heads;
    all_heads.power = optimizer_.norm_power();
    for (int h = 0; h < tensor.heads; ++h) all_heads.add((tensor.*norms)[h * width_ + lane]);
    for (int h = 0; h < tensor.heads; ++h) {
      const double scale = tensor.log_scales[h * width_ + lane];
      double& chosen = tensor.rates[h * width_ + lane];
      switch (optimizer_.by) {
        case Scope::kTensor:
          chosen = divided(rate, all_heads, scale, kept);
          break;
        case Scope::kHead:
          chosen = divided(rate, (tensor.*norms)[h * width_ + lane], scale, kept);
          break;
        case Scope::kAll:
          chosen = divided(rate, whole, whole_scale, kept);
          if (scaled_) chosen *= std::exp(scale - whole_scale);
          break;
      }
    }
  }
}

template <class real>
void Descent<real>::fill(int lane, double rate) {
  for (Trained<real>& tensor : tensors_)
    for (int h = 0; h < tensor.heads; ++h) tensor.rates[h * width_ + lane] = rate;
}

/// How far the step from theta_step goes, for each lane: learning rates `lr`, moments that were
/// zero at step `since`, losses where needed.
template <class real>
void Descent<real>::choose_rates(std::int64_t step, const std::vector<double>& lr,
                                 const std::vector<std::int64_t>& since,
                                 const std::vector<double>& losses,
                                 const std::vector<char>& frozen) {
  const Optimizer& o = optimizer_;
  const double factor = o.schedule ? o.schedule[step] : 1.0;
  frozen_ = frozen;
  const bool clips = std::isfinite(o.clip);
  for (int lane = 0; lane < width_; ++lane) {
    double rate = lr[lane] * factor, norm = 0, kept = 1;  // kept: what clipping leaves
    if (frozen_[lane]) {
      fill(lane, 0.0);
      continue;
    }
    if (clips || o.method == Method::kPolyak) {
      double log_scale = 0;
      const PowerSum whole = whole_norm(&Trained<real>::step_norms, lane, log_scale);
      norm = whole.is_zero() ? 0.0 : whole.norm() * std::exp(log_scale);
      if (norm > o.clip) kept = o.clip / norm;
    }
    kept_[lane] = kept;
    switch (o.method) {
      case Method::kNormalized:
        choose_normalized(lane, rate, kept);
        break;
      case Method::kMirror:
        if (o.normalized)
          choose_normalized(lane, rate, kept);
        else
          fill(lane, rate * kept);
        break;
      case Method::kPolyak: {
        const double excess = losses[lane] - o.target, clipped = norm * kept;
        const double polyak = excess > 0 && clipped > 0 ? o.factor * excess / clipped / clipped : 0;
        fill(lane, std::min(polyak, o.max_lr) * factor * kept);
        break;
      }
      case Method::kGradientDescent:
        fill(lane, rate * kept);
        break;
      case Method::kMomentum:
        fill(lane, rate);
        break;
      case Method::kAdam: {
        const double taken = double(step + 1 - since[lane]);  // steps since the moments were zero
        decay_[lane] = rate * o.weight_decay;
        root_[lane] = 1 / std::sqrt(1 - std::pow(o.beta2, taken));
        fill(lane, rate * (1 / (1 - std::pow(o.beta1, taken))));
        break;
      }
    }
  }
}

template <class real>
void Descent<real>::apply(const Member& member) {
  const Optimizer& o = optimizer_;
  const int L = kernels_.lanes;
  real rate[kMostLanes], kept[kMostLanes], frozen[kMostLanes], decay[kMostLanes];
  real root[kMostLanes];
  const auto lane_of = [this](int l) { return width_ > 1 ? l : 0; };
  for (int l = 0; l < L; ++l) {
    kept[l] = real(kept_[lane_of(l)]);
    frozen[l] = real(frozen_[lane_of(l)] ? 1 : 0);
    decay[l] = real(decay_[lane_of(l)]);
    root[l] = real(root_[lane_of(l)]);
  }
  for (Trained<real>& tensor : tensors_)
    for (int h = member.index; h < tensor.heads; h += member.count) {
      for (int l = 0; l < L; ++l) rate[l] = real(tensor.rates[h * width_ + lane_of(l)]);
      const std::ptrdiff_t numbers = tensor.size * width_, at = h * numbers;
      const StepArguments<real> in{numbers,
                                   tensor.theta + at,
                                   tensor.gradient + at,
                                   tensor.first ? tensor.first + at : nullptr,
                                   tensor.second ? tensor.second + at : nullptr,
                                   rate,
                                   kept,
                                   frozen,
                                   decay,
                                   root,
                                   o.beta1,
                                   o.beta2,
                                   o.eps,
                                   o.power,
                                   o.nesterov};
      switch (o.method) {
        case Method::kMomentum:
          kernels_.step_momentum(in);
          break;
        case Method::kAdam:
          kernels_.step_adam(in);
          break;
        case Method::kMirror:
          kernels_.step_mirror(in);
          break;
        default:
          kernels_.step_gradient(in);
      }
    }
}

template <class real>
void Descent<real>::measure_parameters(const Member& member) {
  for (Trained<real>& tensor : tensors_)
    for (int h = member.index; h < tensor.heads; h += member.count)
      measure(tensor.theta + h * tensor.size * width_, tensor.size, 2,
              &tensor.step_norms[h * width_]);
}

template <class real>
void Descent<real>::choose_projections() {
  const Optimizer& o = optimizer_;
  const auto factor = [&](const PowerSum& norm) {
    const double size = norm.norm();
    const bool moves = size > 0 && (o.project == Projection::kSphere || size > o.radius);
    return moves ? o.radius / size : 1.0;
  };
  for (int lane = 0; lane < width_; ++lane) {
    PowerSum whole;
    for (const Trained<real>& tensor : tensors_)
      for (int h = 0; h < tensor.heads; ++h) whole.add(tensor.step_norms[h * width_ + lane]);
    for (Trained<real>& tensor : tensors_) {
      PowerSum all_heads;
      for (int h = 0; h < tensor.heads; ++h) all_heads.add(tensor.step_norms[h * width_ + lane]);
      for (int h = 0; h < tensor.heads; ++h) {
        const PowerSum& head = tensor.step_norms[h * width_ + lane];
        tensor.rates[h * width_ + lane] = frozen_[lane]
                                              ? 1.0
                                              : factor(o.project_by == Scope::kHead     ? head
                                                       : o.project_by == Scope::kTensor ? all_heads
                                                                                        : whole);
      }
    }
  }
}

template <class real>
void Descent<real>::project(const Member& member) {
  for (Trained<real>& tensor : tensors_)
    for (int h = member.index; h < tensor.heads; h += member.count) {
      real* theta = tensor.theta + h * tensor.size * width_;
      const double* factors = &tensor.rates[h * width_];
      for (std::ptrdiff_t i = 0; i < tensor.size; ++i)
        for (int l = 0; l < width_; ++l, ++theta)
          if (factors[l] != 1) *theta = real(double(*theta) * factors[l]);
    }
}

template class Descent<float>;
template class Descent<double>;

}  // namespace mhfast
