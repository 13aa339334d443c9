// Cross entropy of a row of outputs and the probabilities q that its targets have,
// sum_o q_o (log sum_k exp(f_k) - f_o), and how the softmax of a row changes.
//
// The likeliest output is treated separately from the others: every term is then at least 0, and
// where q is close to a class of a large margin the loss and its derivative, sum(q) P - q, keep
// their digits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "loss.hpp"

namespace mhfast {

/// `label` is the likeliest target, probability(o) its q. Calls emit(o, d value / d f_o).
template <class real, class Probability, class Emit>
inline RowLoss likelihood_row(const real* f, std::ptrdiff_t stride, int p, int label,
                              const Probability& probability, const Emit& emit) {
  int top = 0;
  double other = -HUGE_VAL;
  for (int o = 0; o < p; ++o) {
    if (f[o * stride] > f[top * stride]) top = o;
    if (o != label) other = std::max(other, double(f[o * stride]));
  }
  const double largest = double(f[top * stride]);
  double rest = 0, total = 0, value = 0;
  for (int o = 0; o < p; ++o) {
    if (o != top) rest += std::exp(double(f[o * stride]) - largest);
    total += probability(o);
  }
  const double log_sum = std::log1p(rest), sum = 1 + rest;
  for (int o = 0; o < p; ++o) {
    const double q = probability(o), lack = largest - double(f[o * stride]);
    if (q != 0) value += q * (log_sum + lack);
    emit(o, o == top ? (total - q) - total * (rest / sum) : total * (std::exp(-lack) / sum) - q);
  }
  const double of_label = double(f[label * stride]);
  return {value, of_label > other ? 1.0 : 0.0, of_label - other};
}

/// Calls emit(o, change of total softmax(f)_o as the outputs change by df), that is total P (df -
/// sum(P df)), the differences of df being taken from the likeliest output's.
template <class real, class Emit>
inline void move_softmax(const real* f, const real* df, std::ptrdiff_t stride, int p, double total,
                         const Emit& emit) {
  double largest = -HUGE_VAL, sum = 0, mean = 0, centre = 0;
  for (int o = 0; o < p; ++o)
    if (double(f[o * stride]) > largest) {
      largest = double(f[o * stride]);
      centre = double(df[o * stride]);
    }
  for (int o = 0; o < p; ++o) {
    const double e = std::exp(double(f[o * stride]) - largest);
    sum += e;
    mean += e * (double(df[o * stride]) - centre);
  }
  mean /= sum;
  for (int o = 0; o < p; ++o)
    emit(o, total * (std::exp(double(f[o * stride]) - largest) / sum) *
                ((double(df[o * stride]) - centre) - mean));
}

}  // namespace mhfast
