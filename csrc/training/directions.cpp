#include "directions.hpp"

#include <cmath>
#include <limits>

#include "polar.hpp"

namespace mhfast {

template <class real>
Directions<real>::Directions(const SteepestDescent& rule, int width,
                             std::vector<Trained<real>>& tensors, int threads)
    : rule_(rule), kernels_(active_kernels<real>()), width_(width), tensors_(tensors) {
  std::size_t scratch = 0;
  for (int i = 0; i < int(tensors.size()); ++i) {
    const Trained<real>& tensor = tensors[i];
    scratch =
        std::max(scratch, std::size_t(tensor.size) + polar_scratch(tensor.rows, tensor.columns));
    for (int h = 0; h < tensor.heads; ++h) {
      if (h == 0 || rule.by == Scope::kHead) groups_.emplace_back();
      groups_.back().push_back({i, h});
    }
  }
  if (rule.norm == Norm::kSpectral) scratch_.assign(threads, std::vector<double>(scratch));
}

template <class real>
void Directions<real>::make(const std::vector<double>& kept, const std::vector<char>& frozen,
                            const Member& member) {
  for (Trained<real>& tensor : tensors_)
    for (int h = member.index; h < tensor.heads; h += member.count) {
      real* g = tensor.gradient + h * tensor.size * width_;
      PowerSum* dual = &tensor.dual_norms[h * width_];
      if (rule_.beta != 0 || rule_.scaled) mix(tensor, h, kept, frozen);
      switch (rule_.norm) {
        case Norm::kMax:
          if (rule_.scaled) measure(kernels_, width_, g, tensor.size, 1, dual);
          for (std::ptrdiff_t i = 0; i < tensor.size * width_; ++i)
            g[i] = real(g[i] > 0) - real(g[i] < 0);
          break;
        case Norm::kL1:
          measure(kernels_, width_, g, tensor.size, 0, dual);
          keep_largest(g, tensor.size);
          break;
        case Norm::kFro:
          measure(kernels_, width_, g, tensor.size, 2, dual);
          break;
        case Norm::kSpectral:
          make_spectral(tensor, h, scratch_[member.index].data());
          break;
      }
    }
}

/// first = beta first + kept g;  g = first, or kept g + beta first
template <class real>
void Directions<real>::mix(Trained<real>& tensor, int head, const std::vector<double>& kept,
                           const std::vector<char>& frozen) const {
  const std::ptrdiff_t at = head * tensor.size * width_;
  real *g = tensor.gradient + at, *first = tensor.first + at;
  const real beta = real(rule_.beta);
  for (std::ptrdiff_t i = 0; i < tensor.size; ++i)
    for (int l = 0; l < width_; ++l, ++g, ++first) {
      if (frozen[l]) continue;
      const real push = real(kept[l]) * *g;
      *first = beta * *first + push;
      *g = rule_.nesterov ? push + beta * *first : *first;
    }
}

/// Only the sign of each lane's largest entry stays, the first of equal ones.
template <class real>
void Directions<real>::keep_largest(real* g, std::ptrdiff_t size) const {
  for (int l = 0; l < width_; ++l) {
    std::ptrdiff_t at = l;
    for (std::ptrdiff_t i = l; i < size * width_; i += width_)
      if (std::fabs(g[i]) > std::fabs(g[at])) at = i;
    const real sign = real(g[at] > 0) - real(g[at] < 0);
    for (std::ptrdiff_t i = l; i < size * width_; i += width_) g[i] = 0;
    g[at] = sign;
  }
}

template <class real>
void Directions<real>::make_spectral(Trained<real>& tensor, int head, double* scratch) const {
  real* g = tensor.gradient + head * tensor.size * width_;
  double *m = scratch, *rest = m + tensor.size;
  for (int l = 0; l < width_; ++l) {
    for (std::ptrdiff_t i = 0; i < tensor.size; ++i) m[i] = double(g[i * width_ + l]);
    const double epsilon = double(std::numeric_limits<real>::epsilon());
    const double sum = rule_.polar == Polar::kExact
                           ? polar_exact(m, tensor.rows, tensor.columns, epsilon, rest)
                           : polar_newton_schulz(m, tensor.rows, tensor.columns, rest);
    tensor.dual_norms[head * width_ + l] = {sum, 1, 1};
    for (std::ptrdiff_t i = 0; i < tensor.size; ++i) g[i * width_ + l] = real(m[i]);
  }
}

template <class real>
void Directions<real>::choose(bool scaled) {
  for (const std::vector<Head>& group : groups_)
    for (int lane = 0; lane < width_; ++lane) choose_of(group, lane, scaled);
}

/// `scaled`: the gradients of heads lack factors, those of log_scales.
template <class real>
void Directions<real>::choose_of(const std::vector<Head>& group, int lane, bool scaled) {
  const auto place = [&](const Head& h) { return h.head * width_ + lane; };
  const auto log_scale = [&](const Head& h) {
    return scaled ? tensors_[h.tensor].log_scales[place(h)] : 0.0;
  };
  double largest_scale = log_scale(group.front());
  for (const Head& h : group) largest_scale = std::max(largest_scale, log_scale(h));
  const Head* longest = nullptr;
  PowerSum longest_norm, whole;
  whole.power = tensors_[group.front().tensor].dual_norms[place(group.front())].power;
  for (const Head& h : group) {
    PowerSum norm = tensors_[h.tensor].dual_norms[place(h)];
    norm.largest *= std::exp(log_scale(h) - largest_scale);
    whole.add(norm);
    if (longest && !(norm.largest > longest_norm.largest)) continue;
    longest = &h;
    longest_norm = norm;
  }
  for (const Head& h : group) {
    double& rate = tensors_[h.tensor].rates[place(h)];
    switch (rule_.norm) {
      case Norm::kMax:
      case Norm::kSpectral:
        if (rule_.scaled) rate *= whole.norm();
        break;
      case Norm::kL1:
        rate *= &h != longest ? 0.0 : rule_.scaled ? longest_norm.largest : 1.0;
        break;
      case Norm::kFro:
        if (rule_.scaled) break;
        rate *= whole.is_zero() ? 0.0 : std::exp(log_scale(h) - largest_scale) / whole.norm();
        break;
    }
  }
}

template class Directions<float>;
template class Directions<double>;

}  // namespace mhfast
