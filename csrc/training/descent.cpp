#include "descent.hpp"

#include <algorithm>
#include <cmath>

#include "polar.hpp"

namespace mhfast {

template <class real>
Descent<real>::Descent(const Optimizer& optimizer, int width, bool wants_norms)
    : optimizer_(optimizer),
      norm_(optimizer.with_rule([](const auto& rule) {
        const double power = rule.norm_power();
        return Norm{rule.normalizes(), rule.normalizes() && power != 2, power, rule.norm_eps(),
                    rule.norm_scope()};
      })),
      kernels_(active_kernels<real>()),
      width_(width),
      wants_norms_(wants_norms),
      step_needs_norm_(optimizer.with_rule([](const auto& rule) { return rule.kNeedsNorm; }) ||
                       (norm_.divides && !norm_.dual) || std::isfinite(optimizer.clip)),
      frozen_(width, 0),
      kept_(width, 1.0),
      own_(width, 1.0) {}

template <class real>
void Descent<real>::add(const Trained<real>& tensor) {
  const auto place = [this](TensorName name) {
    return std::pair(optimizer_.lr[name], optimizer_.schedule[name]);
  };
  tensors_.push_back(tensor);
  one_lr_ &= place(tensor.name) == place(tensors_.front().name);
  Trained<real>& added = tensors_.back();
  const std::size_t parts = std::size_t(tensor.heads) * width_;
  added.loss_norms.resize(parts);
  added.step_norms.resize(parts);
  added.dual_norms.resize(parts);
  added.log_scales.resize(parts, 0.0);
  added.rates.resize(parts, 0.0);
  added.decays.resize(width_, 0.0);
  added.subspace = Subspace<real>(tensor.constraint, tensor.theta, width_);
  constrained_ |= added.subspace.any();
  ties_heads_ |= tensor.constraint.over_heads;
}

template <class real>
void Descent<real>::prepare(int threads) {
  if (const auto* rule = std::get_if<SteepestDescent>(&optimizer_.rule))
    directions_ = std::make_unique<Directions<real>>(*rule, width_, tensors_, threads);
  if (!projects() || optimizer_.project_norm == BallNorm::kFro) return;
  std::size_t most = 0;
  for (const Trained<real>& tensor : tensors_) {
    most = std::max(most, std::size_t(tensor.size) * tensor.heads);
    if (optimizer_.project_norm != BallNorm::kPower)
      most = std::max(most, tensor.size + polar_scratch(tensor.rows, tensor.columns));
  }
  scratch_.assign(threads, std::vector<double>(most));
}

/// Calls body(tensor) for every tensor that has a constraint, between two barriers.
template <class real>
template <class Body>
void Descent<real>::constrain(const Member& member, const Body& body) {
  if (!constrained_) return;
  member.wait();  // all heads are there
  for (Trained<real>& tensor : tensors_)
    if (tensor.subspace.any()) body(tensor);
  member.wait();
}

/// Measures a member's heads of the gradient and adds l2 theta to them.
template <class real>
void Descent<real>::scan(const Member& member) {
  constrain(member,
            [&](Trained<real>& tensor) { tensor.subspace.project(tensor.gradient, member); });
  const bool wants_sizes = wants_norms_ || step_needs_norm_;
  for (Trained<real>& tensor : tensors_) {
    const double l2 = optimizer_.l2[tensor.name];
    if (member.count == 1 && !wants_sizes && !norm_.dual && l2 == 0) {
      measure(tensor.gradient, tensor.size * tensor.heads, 0, tensor.loss_norms.data());
      for (int h = 1; h < tensor.heads; ++h)
        std::copy_n(tensor.loss_norms.data(), width_, &tensor.loss_norms[h * width_]);
      tensor.step_norms = tensor.loss_norms;
      continue;
    }
    for (int h = member.index; h < tensor.heads; h += member.count) {
      const std::ptrdiff_t numbers = tensor.size * width_;
      real* g = tensor.gradient + h * numbers;
      PowerSum* loss_norms = &tensor.loss_norms[h * width_];
      PowerSum* step_norms = &tensor.step_norms[h * width_];
      measure(g, tensor.size, wants_sizes ? 2 : 0, loss_norms);
      std::copy_n(loss_norms, width_, step_norms);
      if (l2 != 0) {
        const real* theta = tensor.theta + h * numbers;
        for (std::ptrdiff_t i = 0; i < numbers; ++i) g[i] = real(g[i] + l2 * theta[i]);
        tensor.subspace.clear_kept(tensor.gradient, h * tensor.size, (h + 1) * tensor.size);
        if (step_needs_norm_) measure(g, tensor.size, 2, step_norms);
      }
      if (norm_.dual) measure(g, tensor.size, norm_.power, &tensor.dual_norms[h * width_]);
    }
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
  if (norm_.eps == 0) return rate / norm.norm();
  const double actual = kept * norm.norm() * std::exp(log_scale);
  return rate * (actual / (actual + norm_.eps)) / norm.norm();
}

/// The factors of a tensor's heads; `whole` is the norm of everything, where steps divide by that.
template <class real>
void Descent<real>::choose_normalized(Trained<real>& tensor, int lane, double rate, double kept,
                                      const PowerSum& whole, double whole_scale) {
  const std::vector<PowerSum>& norms = norm_.dual ? tensor.dual_norms : tensor.step_norms;
  PowerSum all_heads;
  all_heads.power = norm_.power;
  for (int h = 0; h < tensor.heads; ++h) all_heads.add(norms[h * width_ + lane]);
  for (int h = 0; h < tensor.heads; ++h) {
    const double scale = tensor.log_scales[h * width_ + lane];
    double& chosen = tensor.rates[h * width_ + lane];
    switch (norm_.by) {
      case Scope::kTensor:
        chosen = divided(rate, all_heads, scale, kept);
        break;
      case Scope::kHead:
        chosen = divided(rate, norms[h * width_ + lane], scale, kept);
        break;
      case Scope::kAll:
        chosen = divided(rate, whole, whole_scale, kept);
        if (scaled_) chosen *= std::exp(scale - whole_scale);
        break;
    }
  }
}

template <class real>
void Descent<real>::fill(Trained<real>& tensor, int lane, double rate) {
  for (int h = 0; h < tensor.heads; ++h) tensor.rates[h * width_ + lane] = rate;
}

/// How far the step from theta_step goes, for each lane: slots that were zero at step `since`,
/// losses where needed.
template <class real>
void Descent<real>::choose_rates(std::int64_t step, const std::vector<std::int64_t>& since,
                                 const std::vector<double>& losses,
                                 const std::vector<char>& frozen) {
  frozen_ = frozen;
  optimizer_.with_rule([&](const auto& rule) { choose_rates_of(rule, step, since, losses); });
}

template <class real>
template <class Rule>
void Descent<real>::choose_rates_of(const Rule& rule, std::int64_t step,
                                    const std::vector<std::int64_t>& since,
                                    const std::vector<double>& losses) {
  const Optimizer& o = optimizer_;
  AtStep at{};
  for (int lane = 0; lane < width_; ++lane) {
    if (frozen_[lane]) {
      for (Trained<real>& tensor : tensors_) fill(tensor, lane, 0.0);
      continue;
    }
    at.loss = losses[lane];
    at.taken = double(step + 1 - since[lane]);
    at.norm = 0;
    at.kept = 1;
    if (std::isfinite(o.clip) || Rule::kNeedsNorm) {
      double log_scale = 0;
      const PowerSum whole = whole_norm(&Trained<real>::step_norms, lane, log_scale);
      at.norm = whole.is_zero() ? 0.0 : whole.norm() * std::exp(log_scale);
      if (at.norm > o.clip) at.kept = o.clip / at.norm;
    }
    kept_[lane] = at.kept;
    own_[lane] = rule.own(at);
    double whole_scale = 0;
    PowerSum whole;
    if (norm_.divides && norm_.by == Scope::kAll)
      whole = whole_norm(norm_.dual ? &Trained<real>::dual_norms : &Trained<real>::step_norms, lane,
                         whole_scale);
    double rate = 0, decay = 0;
    for (Trained<real>& tensor : tensors_) {
      if (!one_lr_ || &tensor == &tensors_.front()) {
        const double* schedule = o.schedule[tensor.name];
        at.schedule = schedule ? schedule[step] : 1.0;
        at.lr = tensor.lr[lane] * at.schedule;
        rate = norm_.divides ? at.lr : rule.rate(at);
        decay = rule.decay(at);
      }
      tensor.decays[lane] = decay;
      if (norm_.divides)
        choose_normalized(tensor, lane, rate, at.kept, whole, whole_scale);
      else
        fill(tensor, lane, rate);
    }
  }
}

template <class real>
void Descent<real>::update(const Member& member) {
  if (directs()) {
    make_directions(member);
    member.wait();
    if (member.index == 0) choose_directions();
    member.wait();
  }
  apply(member);
  if (projects()) {
    measure_parameters(member);
    member.wait();
    if (member.index == 0) choose_projections();
    member.wait();
    project(member);
  }
  constrain(member, [&](Trained<real>& tensor) { tensor.subspace.hold(tensor.theta, member); });
}

template <class real>
void Descent<real>::make_directions(const Member& member) {
  directions_->make(kept_, frozen_, member);
}

template <class real>
void Descent<real>::apply(const Member& member) {
  const int L = kernels_.lanes;
  real kept[kMaxLanes], frozen[kMaxLanes], own[kMaxLanes];
  const auto fill_lanes = [&](real* lanes, const auto* of_runs) {
    if (width_ == 1) return void(std::fill_n(lanes, L, real(*of_runs)));
    for (int l = 0; l < L; ++l) lanes[l] = real(of_runs[l]);
  };
  fill_lanes(kept, kept_.data());
  fill_lanes(frozen, frozen_.data());
  fill_lanes(own, own_.data());
  for (Trained<real>& tensor : tensors_) {
    real rate[kMaxLanes], decay[kMaxLanes];
    fill_lanes(decay, tensor.decays.data());
    for (int h = member.index; h < tensor.heads; h += member.count) {
      fill_lanes(rate, &tensor.rates[h * width_]);
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
                                   own};
      optimizer_.with_rule([&](const auto& rule) { step_of(kernels_, rule)(in, rule); });
    }
  }
}

/// The step of a projection that is not a factor, of some heads of a tensor together.
template <class real>
void Descent<real>::project_nearest(Trained<real>& tensor, int first, int heads,
                                    double* scratch) const {
  const double radius = optimizer_.radius[tensor.name];
  if (!std::isfinite(radius)) return;
  const bool sphere = optimizer_.project == Projection::kSphere;
  const std::ptrdiff_t size = heads * tensor.size;
  real* theta = tensor.theta + first * tensor.size * width_;
  for (int l = 0; l < width_; ++l) {
    if (frozen_[l]) continue;
    for (std::ptrdiff_t i = 0; i < size; ++i) scratch[i] = double(theta[i * width_ + l]);
    if (optimizer_.project_norm == BallNorm::kPower)
      project_power(scratch, size, optimizer_.project_power, radius, sphere);
    else
      project_singular(scratch, tensor.rows, tensor.columns, optimizer_.project_norm, radius,
                       sphere, scratch + size);
    for (std::ptrdiff_t i = 0; i < size; ++i) theta[i * width_ + l] = real(scratch[i]);
  }
}

/// In norms other than "fro" heads are projected here, whole tensors in choose_projections.
template <class real>
void Descent<real>::measure_parameters(const Member& member) {
  if (optimizer_.project_norm != BallNorm::kFro) {
    for (Trained<real>& tensor : tensors_)
      for (int h = member.index; h < tensor.heads && optimizer_.project_by == Scope::kHead;
           h += member.count)
        project_nearest(tensor, h, 1, scratch_[member.index].data());
    return;
  }
  for (Trained<real>& tensor : tensors_)
    for (int h = member.index; h < tensor.heads; h += member.count)
      measure(tensor.theta + h * tensor.size * width_, tensor.size, 2,
              &tensor.step_norms[h * width_]);
}

template <class real>
void Descent<real>::choose_projections() {
  const Optimizer& o = optimizer_;
  if (o.project_norm != BallNorm::kFro) {
    for (Trained<real>& tensor : tensors_)
      if (o.project_by == Scope::kTensor)
        project_nearest(tensor, 0, tensor.heads, scratch_[0].data());
    return;
  }
  const auto factor = [&](const PowerSum& norm, double radius) {
    const double size = norm.norm();
    const bool moves = size > 0 && (o.project == Projection::kSphere || size > radius);
    return moves && std::isfinite(radius) ? radius / size : 1.0;
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
        const PowerSum& norm = o.project_by == Scope::kHead     ? head
                               : o.project_by == Scope::kTensor ? all_heads
                                                                : whole;
        tensor.rates[h * width_ + lane] = frozen_[lane] ? 1.0 : factor(norm, o.radius[tensor.name]);
      }
    }
  }
}

template <class real>
void Descent<real>::project(const Member& member) {
  if (optimizer_.project_norm != BallNorm::kFro) return;
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
