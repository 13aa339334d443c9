// The one micro-kernel: C (+)= A B, where every entry of B and C is a register.
//
//   C[m][n] (+)= sum over k2, k1 of A(m, k2, k1) B(k2, k1, n),   m < M, n < N, k2 < K2, k1 < K1
//   (K1, K2 > 0)
//
// for each of a batch of problems of equal sizes.
//
// B and C hold vectors: a lane is a problem (samples as lanes), a query row or a feature. An entry
// of A is either shared by all lanes (one number, broadcast from memory) or laned (a vector of its
// own). All work is therefore broadcast times vector or vector times vector; no lanes are shuffled.
// The depth has two levels because the summed axis often is a pair (sample, key) or (sample, query)
// with two strides; accumulators stay in registers across both.
//
// Tiles of MR x NR accumulators are compile-time; M and N are cut into nearly equal tiles (16 rows
// as 6 + 5 + 5, never 6 + 6 + 4), since a narrow last tile costs as much as a full one. The order
// of summation over k depends on K2 and K1 only.
#pragma once

#include <utility>

#include "../simd/vec.hpp"
#include "table.hpp"

namespace mhfast {
namespace MHFAST_ISA {
namespace {

/// How entry (m, .) of A is read.
enum class Left {
  kShared,        // numbers, consecutive in m
  kSharedOfLane,  // numbers, one lane of a laned array: consecutive vectors in m
  kLaned,         // vectors, consecutive in m
};

// Accumulators of a tile. Sixteen registers hold 12, NR of B and one of A; thirty-two hold 24.
inline constexpr int kAccumulators = MHFAST_VECTOR_REGISTERS >= 32 ? 24 : 12;
inline constexpr int kMaxNR = MHFAST_VECTOR_REGISTERS >= 32 ? 4 : 3;
inline constexpr int kMaxMR = 12;
// For few rows tiles are wider: with 3 accumulators a multiply-add would wait for the one before.
inline constexpr int kWidestNR = 8;

constexpr int widest(int rows) {
  const int most = kAccumulators / (rows < 1 ? 1 : rows);
  return most > kWidestNR ? kWidestNR : most > kMaxNR ? most : kMaxNR;
}

constexpr int round_up(int size, int step) { return (size + step - 1) / step * step; }

constexpr int max_rows(int nr) { return kAccumulators / nr < kMaxMR ? kAccumulators / nr : kMaxMR; }

template <class real, Left left>
inline Vec<real> left_entry(const real* a, int m) {
  if constexpr (left == Left::kShared) return broadcast<real>(a[m]);
  if constexpr (left == Left::kSharedOfLane) return broadcast<real>(a[m * kLanes<real>]);
  if constexpr (left == Left::kLaned) return load<real>(a + m * kLanes<real>);
}

/// A range of `tiles` tiles of equal size along one axis.
struct Cut {
  int first, size, tiles;
};

/// Cuts `length` into the fewest tiles of at most `most`: first of size s, then of size s - 1.
inline void cut(int length, int most, Cut (&cuts)[2]) {
  if (length <= most) {  // no division
    cuts[0] = {0, length, length > 0};
    cuts[1] = {0, 0, 0};
    return;
  }
  const int tiles = (length + most - 1) / most, size = (length + tiles - 1) / tiles;
  const int smaller = size * tiles - length;
  cuts[0] = {0, size, tiles - smaller};
  cuts[1] = {size * (tiles - smaller), size - 1, smaller};
}

/// The tiles of a range of rows and of one of columns, in each problem of the batch. Overhead is
/// small for short depths: the loop ends at a pointer. The product is read number by number,
/// because it was written just before. A pointer to a row of C is hidden from the compiler, which
/// would keep one for every entry otherwise; the three axes of tiles are one loop, around which it
/// moves less than around nested ones.
template <class real, Left left, int MR, int NR>
void tiles(const Product<real>& p, const Cut& rows, const Cut& columns) {
  constexpr int kStep = left == Left::kShared ? 1 : kLanes<real>;
  const real* a_batch = p.a.at + rows.first * kStep;
  const real* b_batch = p.b.at + columns.first * p.b.n;
  real* c_batch = p.c.at + rows.first * p.c.m + columns.first * p.c.n;
  const real *a_tile = a_batch, *b_tile = b_batch;
  real *c_columns = c_batch, *c_tile = c_batch;
  for (int i = rows.tiles, j = columns.tiles, u = p.size.batch;;) {
    Vec<real> sum[MR][NR] = {};
    const Index depth = p.size.K1 * p.a.k1, a_k1 = p.a.k1, b_k1 = p.b.k1, b_n = p.b.n;
    const real *a2 = a_tile, *b2 = b_tile;
    for (int k2 = p.size.K2;;) {
      const real *a = a2, *b = b2, *const end = a + depth;
      do {
        Vec<real> right[NR];
#pragma GCC unroll 8
        for (int n = 0; n < NR; ++n) right[n] = load<real>(b + n * b_n);
#pragma GCC unroll 12
        for (int m = 0; m < MR; ++m) {
          const Vec<real> entry = left_entry<real, left>(a, m);
#pragma GCC unroll 8
          for (int n = 0; n < NR; ++n) sum[m][n] += entry * right[n];
        }
        a += a_k1;
        b += b_k1;
      } while (a != end);
      if (--k2 == 0) break;
      a2 += p.a.k2;
      b2 += p.b.k2;
    }
    const Index c_m = p.c.m, c_n = p.c.n;
    real* c = c_tile;
    if (p.add) {
#pragma GCC unroll 12
      for (int m = 0; m < MR; ++m, c += c_m) {
        asm("" : "+r"(c));
#pragma GCC unroll 8
        for (int n = 0; n < NR; ++n) sum[m][n] = load<real>(c + n * c_n) + sum[m][n];
      }
      c = c_tile;
    }
#pragma GCC unroll 12
    for (int m = 0; m < MR; ++m, c += c_m) {
      asm("" : "+r"(c));
#pragma GCC unroll 8
      for (int n = 0; n < NR; ++n) store<real>(c + n * c_n, sum[m][n]);
    }

    if (--i > 0) {
      a_tile += MR * kStep;
      c_tile += MR * c_m;
      continue;
    }
    i = rows.tiles;
    if (--j > 0) {
      b_tile += NR * p.b.n;
      c_columns += NR * c_n;
    } else {
      if (--u == 0) return;
      j = columns.tiles;
      a_batch += p.a.batch;
      b_tile = b_batch += p.b.batch;
      c_columns = c_batch += p.c.batch;
    }
    a_tile = a_batch;
    c_tile = c_columns;
  }
}

template <class real>
using TilesOfSize = void (*)(const Product<real>&, const Cut&, const Cut&);

/// `tiles` of each size: at [vectors - 1][rows - 1].
template <class real, Left left>
struct TilesOfSizes {
  TilesOfSize<real> at[kWidestNR][kMaxMR] = {};

  constexpr TilesOfSizes() { add_widths(std::make_integer_sequence<int, kWidestNR>()); }
  template <int... n>
  constexpr void add_widths(std::integer_sequence<int, n...>) {
    (add_heights<n>(std::make_integer_sequence<int, max_rows(n + 1)>()), ...);
  }
  template <int n, int... m>
  constexpr void add_heights(std::integer_sequence<int, m...>) {
    ((at[n][m] = tiles<real, left, m + 1, n + 1>), ...);
  }
};
template <class real, Left left>
constexpr TilesOfSizes<real, left> kTilesOfSizes;

/// One row, short enough to fit into registers, times columns: the row is read once, and each
/// column is a separate chain. Sums are those of a tile.
template <class real, Left left, int K>
void row_times_columns(const Product<real>& product) {
  constexpr int L = kLanes<real>;
  const Index a_k1 = product.a.k1, next_a = product.a.batch, next_b = product.b.batch;
  const Index b_n = product.b.n, c_n = product.c.n, next_c = product.c.batch;
  const int N = product.size.N;
  const bool add = product.add;
  const real *a = product.a.at, *b = product.b.at;
  real* c = product.c.at;
  for (int u = product.size.batch; u > 0; --u, a += next_a, b += next_b, c += next_c) {
    Vec<real> row[K];
#pragma GCC unroll 24
    for (int k = 0; k < K; ++k) row[k] = left_entry<real, left>(a + k * a_k1, 0);
    const real* column = b;
    real* to = c;
    for (int n = N; n > 0; --n, column += b_n, to += c_n) {
      Vec<real> sum{};
#pragma GCC unroll 24
      for (int k = 0; k < K; ++k) sum += row[k] * load<real>(column + k * L);
      store<real>(to, add ? load<real>(to) + sum : sum);
    }
  }
}

/// `row_times_columns` of each length, at that minus 1.
template <class real, Left left>
struct RowsOfLengths {
  void (*at[kAccumulators])(const Product<real>&) = {};

  constexpr RowsOfLengths() { add(std::make_integer_sequence<int, kAccumulators>()); }
  template <int... k>
  constexpr void add(std::integer_sequence<int, k...>) {
    ((at[k] = row_times_columns<real, left, k + 1>), ...);
  }
};
template <class real, Left left>
constexpr RowsOfLengths<real, left> kRowsOfLengths;

// Depth at a time: a shared operand with long rows is read across them, and more cache lines than
// this would be evicted before the next tile reads their other numbers.
inline constexpr int kDepth = 256;

/// A product of depth 0: sums of nothing.
template <class real>
[[gnu::noinline]] void multiply_nothing(const Product<real>& p) {
  for (int u = 0; u < p.size.batch && !p.add; ++u)
    for (int m = 0; m < p.size.M; ++m)
      for (int n = 0; n < p.size.N; ++n)
        store<real>(p.c.at + u * p.c.batch + m * p.c.m + n * p.c.n, Vec<real>{});
}

/// Not inlined: its many calls would each be compiled with their way to the tiles.
template <Left left, class real>
[[gnu::noinline]] void multiply(const Product<real>& product) {
  const auto& size = product.size;
  if (size.K1 == 0) return multiply_nothing(product);
  if (size.M == 1 && size.K2 == 1 && size.K1 <= kAccumulators && product.b.k1 == kLanes<real>)
    return kRowsOfLengths<real, left>.at[size.K1 - 1](product);
  Cut columns[2];
  cut(product.size.N, widest(product.size.M), columns);
  const auto run = [&columns](const Product<real>& p) {
    for (const Cut& c : columns) {
      if (!c.tiles) continue;
      Cut rows[2];
      cut(p.size.M, max_rows(c.size), rows);
      for (const Cut& r : rows)
        if (r.tiles) kTilesOfSizes<real, left>.at[c.size - 1][r.size - 1](p, r, c);
    }
  };
  if (product.size.K1 <= kDepth || product.size.K2 > 1) return run(product);
  Product<real> part = product;
  for (int rest = product.size.K1; rest > 0; rest -= kDepth) {
    part.size.K1 = rest < kDepth ? rest : kDepth;
    run(part);
    part.a.at += kDepth * part.a.k1;
    part.b.at += kDepth * part.b.k1;
    part.add = true;
  }
}

/// The sums over lanes of `count` registers, whole vectors of them.
template <class real>
inline void sum_lanes(const real* vectors, Index count, real* out) {
  constexpr int L = kLanes<real>;
  for (Index i = 0; i < count; i += L) {
    Vec<real> rows[L];
#pragma GCC unroll 16
    for (int l = 0; l < L; ++l) rows[l] = load<real>(vectors + (i + l) * L);
    store<real>(out + i, row_sums<real>(rows));
  }
}

// Registers of a product whose lanes are summed: so many are held at a time, in the first-level
// cache, of as many rows as tiles have.
inline constexpr int kHeldRows = max_rows(kMaxNR), kHeldColumns = 24;

/// C[m][n] (+)= the sum over lanes of A B, numbers: strides of C are of these. Where lanes are
/// samples, a gradient is then as small as what it is by.
template <Left left, class real>
[[gnu::noinline]] void multiply_and_sum(const Product<real>& product) {
  constexpr int L = kLanes<real>;
  constexpr int kStep = left == Left::kShared ? 1 : L;
  alignas(64) real held[round_up(kHeldRows * kHeldColumns, L) * L];
  real sums[round_up(kHeldRows * kHeldColumns, L)];
  Cut rows[2], columns[2];
  cut(product.size.M, kHeldRows, rows);
  cut(product.size.N, kHeldColumns, columns);
  const auto sum = [&](int row, int M, int column, int N) {
    Product<real> part = product;
    part.size.M = M;
    part.size.N = N;
    part.a.at += row * kStep;
    part.b.at += column * product.b.n;
    part.c = {held, Index(N) * L, L};
    part.add = false;
    multiply<left>(part);
    sum_lanes(held, round_up(M * N, L), sums);
    real* c = product.c.at + row * product.c.m + column;
    const real* from = sums;
    for (int m = 0; m < M; ++m, c += product.c.m, from += N)
      for (int n = 0; n < N; ++n) c[n] = product.add ? c[n] + from[n] : from[n];
  };
  for (const Cut& r : rows)
    for (int i = 0; i < r.tiles; ++i)
      for (const Cut& c : columns)
        for (int j = 0; j < c.tiles; ++j)
          sum(r.first + i * r.size, r.size, c.first + j * c.size, c.size);
}

}  // namespace
}  // namespace MHFAST_ISA
}  // namespace mhfast
