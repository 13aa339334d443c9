// The rows that tangent kernels are made of: A X and D X of every query row and head.
//
//   of a classifier  A X and scale D X, D the derivative of <U_t, A_t X> by the logits of row t
//   of a layer       the same of each output o of a row, whose U_t is column o of V
//
// Heads of an identity are one, whose readout is the sum of theirs; nothing is divided by heads.
#pragma once

#include "../problem/data.hpp"

namespace mhfast {

/// Rows (n, q, g, d) of a range of g heads and, of a layer, (n, q, p, g, d); no `moved`: only A X.
template <class real>
struct TangentRows {
  int first_head, last_head;
  real *pooled, *moved;
};

/// Whether all numbers are finite and near enough to 1 that products of a few of them, and of the
/// rows above, are far inside the type's range. NaN and padding that no row sees count too.
template <class real>
bool is_ordinary(const Data<real>& data, const Model<const real*>& model, real scale);

/// Writes the rows of a problem of softmax that is ordinary. `moved` is divided by a power of two
/// where its entries are far from 1, which is returned.
template <class real>
int tangent_rows(const Data<real>& data, const Model<const real*>& model, real scale, int threads,
                 const TangentRows<real>& out);

/// Of pairs of rows i, j and outputs o, r of a layer, in place:
/// K[i][o][j][r] alike[i][j] + [o = r] of_rows[i][j]; either may be null, which is 1 or 0.
template <class real>
void join_outputs(std::ptrdiff_t rows, std::ptrdiff_t columns, int outputs, const real* alike,
                  const real* of_rows, real* K);

}  // namespace mhfast
