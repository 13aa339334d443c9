// Problems whose numbers are far from 1, brought near it by powers of two:
//
//   x 2^a,  z 2^b,  W 2^-(a+b), or Q 2^-b and K 2^-a,  U 2^-a,  V or A 2^-a,  a prompt 2^b
//
// have the logits and outputs of x, z, W, Q, K, U, V, A to the last bit, and the gradient by a
// tensor is that by its copy times the copy's factor. Without, products of two of them, such as Q
// K^T or D X, leave the range of the type although logits, outputs and gradients are inside it.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "../dispatch/dispatch.hpp"
#include "data.hpp"

namespace mhfast {

/// The powers of the copies; even, so that tied factors have half of what W would have.
struct Exponents {
  int x = 0, z = 0;

  bool any() const { return x != 0 || z != 0; }
  int of(TensorName name, bool tied) const {
    switch (name) {
      case kW:
        return -(x + z);
      case kQ:
        return tied ? -(x + z) / 2 : -z;
      case kPrompt:
        return z;
      case kEmbedding:
        return x;
      case kValueB:
        return 0;
      default:
        return -x;
    }
  }
};

/// Exponents of the largest number up to which nothing is scaled, and of the smallest.
template <class real>
inline constexpr int kOrdinaryExponent = sizeof(real) == 4 ? 20 : 150;

/// The largest finite |x|.
template <class real>
double largest_finite(const real* x, std::ptrdiff_t size) {
  double largest[kMaxLanes], unused[kMaxLanes];
  const Kernels<real>& kernels = active_kernels<real>();
  kernels.measure({size, x, largest, unused, 0});
  double most = 0;
  for (int l = 0; l < kernels.lanes; ++l) {
    if (!std::isfinite(largest[l])) {
      most = 0;
      for (std::ptrdiff_t i = 0; i < size; ++i)
        if (std::isfinite(x[i])) most = std::max(most, std::fabs(double(x[i])));
      return most;
    }
    most = std::max(most, largest[l]);
  }
  return most;
}

/// Of a number that is not 0; 0 for 0.
inline int exponent_of(double x) { return x == 0 ? 0 : std::ilogb(x); }

/// to = from 2^exponent; both may be the same.
template <class real>
void scale_by_power(const real* from, std::ptrdiff_t size, int exponent, real* to) {
  constexpr int kMax = sizeof(real) == 4 ? 64 : 512;  // such a factor is in range
  if (from != to) std::copy_n(from, size, to);
  while (exponent != 0) {
    const int part = std::clamp(exponent, -kMax, kMax);
    const real factor = std::ldexp(real(1), part);
    for (std::ptrdiff_t i = 0; i < size; ++i) to[i] *= factor;
    exponent -= part;
  }
}

/// Numbers from the first run's array to the end of the last one's.
inline std::ptrdiff_t all_runs(std::ptrdiff_t of_run, std::ptrdiff_t runs, std::ptrdiff_t size) {
  return (of_run ? (runs - 1) * of_run : 0) + size;
}

/// Largest entries of the tokens and of the external query rows, of those only that have influence.
template <class real>
struct Largest {
  double x = 0, z = 0;

  Largest(const Data<real>& data, std::ptrdiff_t runs) {
    const Shape& s = data.shape;
    const std::ptrdiff_t d = s.d, Td = s.T * d, qd = s.q * d;
    const bool has_z = data.has_z();
    if (!data.is_limited() || data.has_words()) {
      x = largest_finite(data.x, all_runs(data.run.x, runs, data.x_rows() * d));
      if (has_z) z = largest_finite(data.z, all_runs(data.run.z, runs, s.n * qd));
      return;
    }
    for (std::ptrdiff_t r = 0; r < runs; ++r)
      for (std::ptrdiff_t i = 0; i < s.n; ++i) {
        int keys = 0;  // that some row sees
        for (int t = 0; t < s.q; ++t) {
          const double limit = data.limit(i, int(r), t);
          keys = std::max(keys, std::isnan(limit) ? s.T : int(limit));
          if (has_z && limit != 0)
            z = std::max(z, largest_finite(data.z + r * data.run.z + i * qd + t * d, d));
        }
        x = std::max(x, largest_finite(data.x + r * data.run.x + i * Td, keys * d));
      }
  }
};

/// Exponents for a problem of `runs` runs, whose tensors are `apart` numbers apart. `of_data`: the
/// largest of `data`, or of all data that it is a part of.
template <class real>
Exponents choose_exponents(const Data<real>& data, const Largest<real>& of_data,
                           const Tensors<const real*>& tensors,
                           const Tensors<std::ptrdiff_t>& apart, int rank, std::ptrdiff_t runs) {
  const Shape& s = data.shape;
  if (s.identity_w || s.identity_v) return {};  // which cannot be multiplied
  const auto largest = [&](TensorName name) {
    const std::ptrdiff_t size = extent(name, s, rank).all();
    return tensors[name] ? largest_finite(tensors[name], all_runs(apart[name], runs, size)) : 0.0;
  };
  const auto choose = [](double x) {
    const int exponent = exponent_of(x);
    return std::abs(exponent) <= kOrdinaryExponent<real> ? 0 : -exponent / 2 * 2;
  };
  Exponents out;
  out.x = choose(of_data.x);
  out.z = s.shared_query            ? choose(largest(kPrompt))
          : data.queries_are_keys() ? out.x
                                    : choose(of_data.z);
  // What makes large tokens small makes W large, which few of them, next to ordinary ones, must
  // not.
  const int of_Q = exponent_of(largest(kQ));
  const int of_W = tensors[kW] ? exponent_of(largest(kW))
                               : of_Q + (tensors[kK] ? exponent_of(largest(kK)) : of_Q);
  const int excess = of_W - (out.x + out.z) - kOrdinaryExponent<real>;
  if (excess <= 0) return out;
  const auto weaken = [&](int exponent, int by) {
    return std::min(0, exponent + (by + 1) / 2 * 2);
  };
  if (out.x < 0 && out.z < 0) {
    out.x = weaken(out.x, excess / 2);
    out.z = data.queries_are_keys() ? out.x : weaken(out.z, excess / 2);
  } else if (out.x < 0) {
    out.x = weaken(out.x, excess);
  } else if (out.z < 0) {
    out.z = weaken(out.z, excess);
  }
  return out;
}

/// A data set with its tokens and query rows times their powers; copies only where those are not 0.
template <class real>
class RescaledData {
 public:
  RescaledData(const Data<real>& data, std::ptrdiff_t runs, const Exponents& exponents)
      : data_(data) {
    const Shape& s = data.shape;
    const auto copy = [](const real* from, std::ptrdiff_t size, int exponent,
                         std::vector<real>& to) {
      if (exponent == 0) return from;
      to.resize(size);
      scale_by_power(from, size, exponent, to.data());
      return static_cast<const real*>(to.data());
    };
    const std::ptrdiff_t n = s.n, qd = std::ptrdiff_t(s.q) * s.d;
    data_.x = copy(data.x, all_runs(data.run.x, runs, data.x_rows() * s.d), exponents.x, x_);
    if (data.self)
      data_.z = data_.x;
    else if (data.has_z())
      data_.z = copy(data.z, all_runs(data.run.z, runs, n * qd), exponents.z, z_);
  }
  RescaledData(const RescaledData&) = delete;
  RescaledData& operator=(const RescaledData&) = delete;

  const Data<real>& operator*() const { return data_; }

 private:
  Data<real> data_;
  std::vector<real> x_, z_;
};

/// One run's exponents for a single call. Parameters are looked at first, since with ordinary ones
/// no product leaves the range before the result does; `by_query`: except the gradient by it.
template <class real>
Exponents exponents_of_call(const Data<real>& data, const Model<const real*>& model,
                            bool by_query) {
  if (data.shape.n == 0) return {};
  bool ordinary = !by_query;
  for (int name = 0; name < kTensors && ordinary; ++name) {
    const real* at = model.at[name];
    // Z W of self-attention is in range where the logits are.
    if (!at || (name == kW && (data.self || model.is_factored()))) continue;
    const std::ptrdiff_t size = extent(TensorName(name), data.shape, model.rank).all();
    ordinary = std::abs(exponent_of(largest_finite(at, size))) <= kOrdinaryExponent<real>;
  }
  if (ordinary) return {};
  return choose_exponents<real>(data, Largest<real>(data, 1), model.at, {}, model.rank, 1);
}

/// One run's tensors times their powers, copies only where there is something to scale.
template <class real>
class RescaledTensors {
 public:
  RescaledTensors(const Tensors<const real*>& tensors, const Shape& s, int rank, bool tied,
                  const Exponents& exponents)
      : tensors_(tensors) {
    for (int name = 0; name < kTensors && exponents.any(); ++name) {
      if (!tensors[name]) continue;
      const std::ptrdiff_t size = extent(TensorName(name), s, rank).all();
      copies_[name].resize(size);
      scale_by_power(tensors[name], size, exponents.of(TensorName(name), tied),
                     copies_[name].data());
      tensors_[name] = copies_[name].data();
    }
  }
  RescaledTensors(const RescaledTensors&) = delete;
  RescaledTensors& operator=(const RescaledTensors&) = delete;

  const Tensors<const real*>& operator*() const { return tensors_; }

 private:
  Tensors<const real*> tensors_;
  std::array<std::vector<real>, kTensors> copies_;
};

}  // namespace mhfast
