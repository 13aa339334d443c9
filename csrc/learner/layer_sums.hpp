// The sums over queries of which the normal equations of a layer are made. With the weights a of
// head h for the query x, x̄ = Σ_b a_b x_b and m_o = Σ_b a_b (c_bo - c̄_o) x_b for c = X V_h, output
// o has the derivative x m_oᵀ by W_h and x̄ by column o of V_h. The sums therefore factor:
//
//     W, W:  (x xᵀ) times (Σ_o m_o m_oᵀ)        both symmetric
//     W, V:  (x x̄ᵀ) times m
//     V, V:  x̄ x̄ᵀ for equal outputs, else 0
//
// and with r = F - Y the right-hand sides are x (Σ_o r_o m_o)ᵀ and x̄ rᵀ. Derivatives side by side
// would take p (H d (d + p))² / 2 products for a query.
#pragma once

#include <vector>

#include "../runtime/tuning.hpp"
#include "gram.hpp"
#include "learning.hpp"

namespace mhfast {

/// i = h d + g is number g of head h, of H d = `all`.
struct LayerSums {
  LayerSums(const Examples& examples, const LayerView& layer);

  int d, p, all;
  std::vector<double> squares;   // (f ≥ e, i ≥ j): x_f x_e Σ_o m_oi m_oj, both by lower triangles
  std::vector<double> pairs;     // (f, j, o, i): x_f x̄_j m_oi
  std::vector<double> averages;  // (all + p, all + p): of x̄ of all heads, r
  std::vector<double> moves;     // (f, i): x_f Σ_o r_o m_oi
  std::vector<double> products;  // workspace (p)

  /// Sets the pairs (f, j, o, i) of all o and the numbers i of head h to the product of V_h (d, p)
  /// and x_f x̄_j times the covariance of the tokens, a lower triangle.
  void set_pairs(int f, int j, int h, const double* covariance, const double* V);

  /// The equations (P + 1, P + 1), see layer_equations.
  void assemble(double* out) const;
};

/// Numbers of a symmetric matrix, held as its lower triangle by rows, and where an entry of it is.
inline int packed(int size) { return size * (size + 1) / 2; }
inline int place(int i, int j) { return i < j ? packed(j) + i : packed(i) + j; }

/// The next columns of a row.
inline Columns after(const Columns& columns, int width) {
  const int end = columns.begin + columns.width;
  return {(end + kGramColumns - 1) / kGramColumns * kGramColumns, width};
}

/// The moment of these columns, in `sum`, which is made large enough.
inline CrossMoment moment(const Columns& left, const Columns& right, std::vector<double>& sum) {
  sum.resize(std::size_t(left.width) * right.width);
  return {left, right, sum.data()};
}

/// Fills the moments from `rows`, of which each member of the team writes with a copy.
template <class Rows>
void take_moments(const Rows& rows, RowSource source, const std::vector<CrossMoment>& moments,
                  int threads) {
  std::vector<Rows> members(gram_threads(source, moments, threads), rows);
  source.fill = [&](std::int64_t item, int member, double* out, std::ptrdiff_t stride) {
    members[member].write(item, out, stride);
  };
  cross_moments(source, moments, threads);
}

/// Writes the lower triangle of x xᵀ by rows. What is beyond the diagonal is overwritten by the
/// next row.
inline void write_square(const double* x, int d, double* out) {
  for (int f = 0; f < d; ++f, out += f)
    for (int g = 0; g < d; ++g) out[g] = x[f] * x[g];
}

/// The sums from a row for every query. About d (H d)² (min(p, d / 2) + d / 4) products
/// for each.
LayerSums sums_of_queries(const Examples& examples, const LayerView& layer, int threads);

/// The sums for T = 2 from a row for every sample. About 5/8 d² (H d)² products for each.
LayerSums sums_of_pairs(const Examples& examples, const LayerView& layer, int threads);

}  // namespace mhfast
