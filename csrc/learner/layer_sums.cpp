#include "layer_sums.hpp"

#include <algorithm>

namespace mhfast {
namespace {

std::size_t product(std::size_t a, std::size_t b) { return a * b; }

}  // namespace

LayerSums::LayerSums(const Examples& examples, const LayerView& layer)
    : d(examples.d),
      p(examples.p),
      all(layer.H * d),
      squares(product(packed(d), packed(all))),
      pairs(product(d * all, p * all)),
      averages(product(all + p, all + p)),
      moves(product(d, all)),
      products(p) {}

void LayerSums::set_pairs(int f, int j, int h, const double* covariance, const double* V) {
  double* const to = &pairs[product(f * all + j, p * all) + h * d];
  for (int g = 0; g < d; ++g) {
    std::fill(products.begin(), products.end(), 0.0);
    for (int k = 0; k < d; ++k) {
      const double factor = covariance[place(g, k)];
      for (int o = 0; o < p; ++o) products[o] += factor * V[k * p + o];
    }
    for (int o = 0; o < p; ++o) to[std::ptrdiff_t(o) * all + g] = products[o];
  }
}

void LayerSums::assemble(double* out) const {
  const std::ptrdiff_t values_at = std::ptrdiff_t(all) * d, error_at = values_at + all * p;
  const auto put = [&](std::ptrdiff_t i, std::ptrdiff_t j, double value) {
    out[i * (error_at + 1) + j] = out[j * (error_at + 1) + i] = value;
  };
  const auto average = [&](int i, int j) { return averages[std::ptrdiff_t(i) * (all + p) + j]; };
  // W_h[f, g] is at h d² + f d + g, V_h[g, o] at i p + o.
  const auto weight = [&](int i, int f) { return (i / d * d + f) * d + i % d; };
  for (int i = 0; i < all; ++i)
    for (int f = 0; f < d; ++f) {
      for (int j = 0; j <= i; ++j)
        for (int e = 0; e < d; ++e)
          put(weight(i, f), weight(j, e),
              squares[std::ptrdiff_t(place(f, e)) * packed(all) + place(i, j)]);
      for (int j = 0; j < all; ++j)
        for (int o = 0; o < p; ++o)
          put(weight(i, f), values_at + j * p + o,
              pairs[std::ptrdiff_t(f * all + j) * p * all + o * all + i]);
      put(weight(i, f), error_at, moves[std::ptrdiff_t(f) * all + i]);
    }
  for (int i = 0; i < all; ++i)
    for (int o = 0; o < p; ++o) {
      for (int j = 0; j < all; ++j)
        for (int u = 0; u < p; ++u)
          put(values_at + i * p + o, values_at + j * p + u, o == u ? average(i, j) : 0.0);
      put(values_at + i * p + o, error_at, average(i, all + o));
    }
  double square = 0;
  for (int o = 0; o < p; ++o) square += average(all + o, all + o);
  put(error_at, error_at, square);
}

void layer_equations(const Examples& examples, const LayerView& layer, int threads,
                     double* moment) {
  const auto sums = examples.T == 2 ? sums_of_pairs : sums_of_queries;
  sums(examples, layer, threads).assemble(moment);
}

}  // namespace mhfast
