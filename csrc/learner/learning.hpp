// Sums over many rows for learning a layer from examples: weights with which outputs are averages
// of tokens, equations for the sum of the value matrices, second moments of the facts about
// key-query matrices that follow from the weights, equations of a Gauss-Newton step.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mhfast {

/// n examples X (T, d) with outputs Y (T, p). `listed` are rows, sample * T + query; null: all.
struct Examples {
  std::ptrdiff_t n;
  int T, d, p;
  const double *X, *Y;
  const std::int64_t* listed;
  std::int64_t rows;

  std::int64_t row(std::int64_t i) const { return listed ? listed[i] : i; }
};

/// Weights (rows, T) on the simplex, at most `support` of a row positive, for which the average of
/// the tokens times `sum` (d, p) is nearest to each output, and the norm of the residual (rows).
void fit_rows(const Examples& examples, const double* sum, int support, int threads,
              double* weights, double* residuals);

/// Weighted normal equations for `sum` with the weights of fit_rows kept: the second moment
/// (d + p, d + p) of (average of tokens, output) over the rows, where a row of residual r has the
/// weight (1 + (r / scale)²)^-2. Also writes the residuals (rows).
void sum_equations(const Examples& examples, const double* sum, int support, double scale,
                   int threads, double* moment, double* residuals);

/// Facts about a key-query matrix: x_row · W · (x_first - x_second)ᵀ = value, with the weight
/// `weight`.
struct Facts {
  std::int64_t count;
  const std::int64_t *rows, *first, *second;  // keys are numbers of tokens in the row's sample
  const double *value, *weight;
};

/// Second moment (d² + 1, d² + 1) of (x_row ⊗ (x_first - x_second), value).
void fact_moment(const Examples& examples, const Facts& facts, int threads, double* moment);

/// A layer of H heads: W (H, d, d), V (H, d, p).
struct LayerView {
  int H;
  const double *W, *V;
};

/// Second moment (P + 1, P + 1) of (derivatives of F - Y by the P = H d (d + p) numbers of W, V;
/// F - Y) over all entries of the outputs.
void layer_equations(const Examples& examples, const LayerView& layer, int threads, double* moment);

}  // namespace mhfast
