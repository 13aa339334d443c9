// What training knows of a tensor that it trains, and of the sizes of its heads.
#pragma once

#include <algorithm>
#include <vector>

#include "../dispatch/dispatch.hpp"
#include "../problem/data.hpp"
#include "constraints.hpp"
#include "norms.hpp"

namespace mhfast {

/// A trained tensor and its gradient; of each head (and lane) what the step needs to know.
template <class real>
struct Trained {
  TensorName name;
  int heads, rows, columns;
  std::ptrdiff_t size;  // of one head, in numbers
  real *theta, *gradient, *first, *second;
  std::vector<double> lr;            // of each lane
  Constraint constraint;             // its arrays are the caller's
  std::vector<PowerSum> loss_norms;  // of the gradient as stored
  std::vector<PowerSum> step_norms;  // of gradient + l2 theta
  std::vector<PowerSum> dual_norms;  // of the same, in the power that a normalized step divides by
  std::vector<double> log_scales;    // log of the true gradient over the stored one
  std::vector<double> rates;         // the step's factor of the stored gradient
  std::vector<double> decays;        // the share of theta that the step subtracts, by lane
  Subspace<real> subspace;           // that of the constraint
};

/// Writes one sum for each of `width` lanes; power 0: only the largest, to see whether all are
/// finite.
template <class real>
void measure(const Kernels<real>& kernels, int width, const real* x, std::ptrdiff_t size,
             double power, PowerSum* out) {
  double largest[kMaxLanes], sum[kMaxLanes];
  kernels.measure({size * width, x, largest, sum, power});
  const double exponent = power == 0 ? 2 : power;
  if (width > 1) {
    for (int l = 0; l < width; ++l) out[l] = {largest[l], sum[l], exponent};
    return;
  }
  // As PowerSum::add does, of all lanes at once.
  double most = largest[0], total = 0;
  for (int l = 1; l < kernels.lanes; ++l)
    if (std::isnan(largest[l]) || largest[l] > most) most = largest[l];
  for (int l = 0; power != 0 && most > 0 && l < kernels.lanes; ++l) {
    const double ratio = largest[l] / most;
    total += sum[l] * (power == 2 ? ratio * ratio : std::pow(ratio, power));
  }
  *out = {most, power == 0 ? 1 : total, exponent};
}

}  // namespace mhfast
