// Copies of a data set in the layouts that the kernels read, and copies multiplied by the loss
// derivative. `x` is (rows, d) row by row; lanes that have no sample or no row are zero.
#pragma once

#include "../simd/vec.hpp"

namespace mhfast {
namespace MHFAST_ISA {
namespace {

/// out[k][r] = x[r][k], k < columns, rows `stride` apart; rows from `valid` to L are zero
/// and are not read. A square of registers at a time is transposed in place.
template <class real>
void transpose_rows(const real* x, Index stride, int valid, Index columns, real* out, Index row) {
  constexpr int L = kLanes<real>;
  Index k = 0;
  for (; k + L <= columns; k += L) {
    Vec<real> square[L];
#pragma GCC unroll 16
    for (int r = 0; r < L; ++r)
      square[r] = r < valid ? load<real>(x + r * stride + k) : Vec<real>{};
    transpose<real>(square);
#pragma GCC unroll 16
    for (int r = 0; r < L; ++r) store<real>(out + (k + r) * row, square[r]);
  }
  for (; k < columns; ++k)
    for (int r = 0; r < L; ++r) out[k * row + r] = r < valid ? x[r * stride + k] : real(0);
}

/// Samples or runs as lanes: out[i][lane] = x[lane * stride + i], i < size, zero from lane `valid`.
template <class real>
void pack_lanes(const real* x, Index stride, int valid, Index size, real* out) {
  transpose_rows<real>(x, stride, valid, size, out, kLanes<real>);
}

/// The other way round, times a factor for each lane: to[lane * stride + i] (+)= factors[lane]
/// x[i][lane].
template <class real>
void unpack_lanes(const real* x, const real* factors, int valid, Index size, bool add, real* to,
                  Index stride) {
  constexpr int L = kLanes<real>;
  const auto write = [add](Vec<real> value, real* at) {
    store<real>(at, add ? load<real>(at) + value : value);
  };
  Index i = 0;
  for (; i + L <= size; i += L, x += L * L) {
    Vec<real> square[L];
#pragma GCC unroll 16
    for (int r = 0; r < L; ++r) square[r] = load<real>(x + r * L);
    transpose<real>(square);
#pragma GCC unroll 16
    for (int l = 0; l < L; ++l)
      if (l < valid) write(broadcast<real>(factors[l]) * square[l], to + l * stride + i);
  }
  for (; i < size; ++i, x += L)
    for (int l = 0; l < valid; ++l) {
      real& at = to[l * stride + i];
      at = (add ? at : real(0)) + factors[l] * x[l];
    }
}

/// Weights from scores with samples as lanes, [key][row][lane] with `key` numbers from key to key:
/// to[lane * stride + row * keys + k] = x[k][row][lane], of lanes below `valid`. A register of
/// results may take its numbers from several rows; the last one overlaps that before it.
template <class real>
void unpack_weights(const real* x, Index key, int keys, int rows, int valid, real* to,
                    Index stride) {
  constexpr int L = kLanes<real>;
  const int size = keys * rows;
  if (size < L) {
    for (int i = 0; i < size; ++i)
      for (int l = 0; l < valid; ++l) to[l * stride + i] = x[i % keys * key + i / keys * L + l];
    return;
  }
  for (int i = 0;;) {
    Vec<real> square[L];
    int k = i % keys;
    const real* row = x + Index(i / keys) * L;
#pragma GCC unroll 16
    for (int r = 0; r < L; ++r) {
      square[r] = load<real>(row + k * key);
      if (++k < keys) continue;
      k = 0;
      row += L;
    }
    transpose<real>(square);
#pragma GCC unroll 16
    for (int l = 0; l < L; ++l)
      if (l < valid) store<real>(to + l * stride + i, square[l]);
    if (i + L == size) return;
    i = i + 2 * L <= size ? i + L : size - L;
  }
}

/// Entries of vectors: out[k][row] = x[row][k].
template <class real>
void transpose_lanes(const real* x, int rows, int d, real* out) {
  constexpr int L = kLanes<real>;
  for (int r = 0; r < rows; ++r)
    for (int k = 0; k < d; ++k, x += L) store<real>(out + (Index(k) * rows + r) * L, load<real>(x));
}

/// Rows as lanes: out[k][row] = x[row][k], zero up to the `padded` row.
template <class real>
void pack_rows(const real* x, int rows, int d, int padded, real* out) {
  constexpr int L = kLanes<real>;
  int first = 0;  // of a block of L rows
  for (; first + L <= padded; first += L) {
    const int valid = rows - first < L ? (rows > first ? rows - first : 0) : L;
    transpose_rows<real>(x + Index(first) * d, d, valid, d, out + first, padded);
  }
  for (int k = 0; k < d; ++k)
    for (int r = first; r < padded; ++r)
      out[Index(k) * padded + r] = r < rows ? x[Index(r) * d + k] : real(0);
}

/// Weights from scores with rows as lanes, [key][row]: out[row][k] = x[k][row], `x_row` and
/// `out_row` numbers from row to row.
template <class real>
void turn_weights(const real* x, Index x_row, int keys, int rows, real* out, Index out_row) {
  constexpr int L = kLanes<real>;
  int first = 0;  // of a block of L keys
  for (; first + L <= keys; first += L, x += L * x_row)
    transpose_rows<real>(x, x_row, L, rows, out + first, out_row);
  for (; first < keys; ++first, x += x_row)
    for (int r = 0; r < rows; ++r) out[r * out_row + first] = x[r];
}

/// Features as lanes: out[row][k] = factor x[row][k], zero up to the `padded` feature.
template <class real>
void scale_rows(const real* x, real factor, int rows, int d, int padded, real* out) {
  constexpr int L = kLanes<real>;
  const int whole = d / L * L;
  for (int r = 0; r < rows; ++r, x += d, out += padded) {
    for (int k = 0; k < whole; k += L) store<real>(out + k, factor * load<real>(x + k));
    for (int k = whole; k < padded; ++k) out[k] = k < d ? factor * x[k] : real(0);
  }
}

/// The other way round: out[row][k] (+)= factor x[row][k], k < d, where rows of x are `padded`.
template <class real>
void unpad_rows(const real* x, int padded, real factor, int rows, int d, bool add, real* out) {
  constexpr int L = kLanes<real>;
  const int whole = d / L * L;
  for (int r = 0; r < rows; ++r, x += padded, out += d) {
    for (int k = 0; k < whole; k += L) {
      const Vec<real> value = factor * load<real>(x + k);
      store<real>(out + k, add ? load<real>(out + k) + value : value);
    }
    for (int k = whole; k < d; ++k) out[k] = (add ? out[k] : real(0)) + factor * x[k];
  }
}

/// Samples as lanes: out[i][lane] = factor[lane] x[i][lane], i < size.
template <class real>
void scale_samples(const real* x, const real* factor, Index size, real* out) {
  constexpr int L = kLanes<real>;
  const Vec<real> f = load<real>(factor);
  for (Index i = 0; i < size; ++i) store<real>(out + i * L, f * load<real>(x + i * L));
}

}  // namespace
}  // namespace MHFAST_ISA
}  // namespace mhfast
