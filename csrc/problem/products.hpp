// Linear attention of a layer from products of tokens that are computed once. Where every row sees
// all N tokens of its sample, with the symmetric matrix G = X^T X / N of the sample
//
//   F = Z M,     M = sum over heads of scale W_h G V_h = the sum over pairs b <= c of K_bc G_bc,
//
// K_bc (d, p) = scale sum over heads of W_h[:, b] V_h[c, :], and with b and c exchanged where they
// differ. The tensor K is that of all heads together: a sample takes 4 multiply-adds for each entry
// of M and pair, and 4 for each of M and query row, whatever the number of heads, and neither
// scores nor anything else of T tokens.
#pragma once

#include "plan.hpp"

namespace mhfast {

/// Pairs of features, in the order (0, 0), (0, 1), ... (0, d - 1), (1, 1) ...; padded by zeros to
/// whole vectors; and entries of M, also with what fills the last vector of them.
struct ProductSizes {
  std::ptrdiff_t pairs, row, entries, padded;

  ProductSizes(const Shape& s, int lanes)
      : pairs(std::ptrdiff_t(s.d) * (s.d + 1) / 2),
        row(round_up(pairs, lanes)),
        entries(std::ptrdiff_t(s.d) * s.p),
        padded(round_up(entries, lanes)) {}

  /// Whether the model is one that products serve.
  static bool exist(const Shape& s) {
    return s.is_layer() && s.words == 0 && !s.causal && !s.attended && !s.shared_query &&
           !s.identity_w && !s.identity_v;
  }
};

/// The shape with products in the place of tokens. Factors of W are multiplied out.
inline Shape of_products(const Shape& s) {
  Shape shape = s;
  shape.products = true;
  shape.rank = 0;
  return shape;
}

}  // namespace mhfast
