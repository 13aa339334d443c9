// The steps of optimizers, sizes of gradients and steps, and the products of small parameter
// matrices. Arrays hold either one parameter's numbers in a row or one number for each lane's run;
// the same text serves both, because a factor is a vector. The rules are in csrc/optimizers.
#pragma once

#include "../simd/vec.hpp"
#include "table.hpp"

namespace mhfast {
namespace MHFAST_ISA {
namespace {

template <class real>
struct StepMath {
  using Real = real;
  using Number = Vec<real>;
  static Number root(Number x) {
    return by_lane<real>(x, [](real e) { return real(__builtin_sqrt(e)); });
  }
  /// sign(x) |x|^power
  static Number signed_power(Number x, double power) {
    if (power == 1) return x;
    return by_lane<real>(x, [power](real e) {
      return real(__builtin_copysign(__builtin_pow(__builtin_fabs(double(e)), power), double(e)));
    });
  }
  /// scale sinh(arcsinh(x / scale) - s), or for scale 0 its limit x exp(-sign(x) s)
  static Number multiplied(Number x, Number s, double scale) {
    for (int l = 0; l < kLanes<real>; ++l) {
      const double at = double(x[l]), by = double(s[l]);
      x[l] = real(scale > 0 ? scale * __builtin_sinh(__builtin_asinh(at / scale) - by)
                            : at * __builtin_exp(at < 0 ? by : -by));
    }
    return x;
  }
  /// x / size, 0 where size is
  static Number divide(Number x, Number size) {
    return select<real>(size == Number{}, Number{}, x / size);
  }
  /// -1, 0 or 1; NaN of NaN
  static Number sign(Number x) {
    const Number zero{}, one = broadcast<real>(real(1));
    return select<real>(x > zero, one, select<real>(x < zero, -one, x));
  }
};

/// The vectors of arrays of `size` numbers; the last one is passed through a copy if it is partial.
template <class real, class Body>
inline void for_vectors(Index size, const Body& body) {
  constexpr int L = kLanes<real>;
  Index i = 0;
  for (; i + L <= size; i += L) body(i, L);
  if (i < size) body(i, int(size - i));
}

template <class real>
inline Vec<real> load_part(const real* x, int count) {
  if (count == kLanes<real>) return load<real>(x);
  Vec<real> v{};
  for (int l = 0; l < count; ++l) v[l] = x[l];
  return v;
}

template <class real>
inline void store_part(real* x, Vec<real> v, int count) {
  if (count == kLanes<real>) return store<real>(x, v);
  for (int l = 0; l < count; ++l) x[l] = v[l];
}

/// A step of one optimizer; frozen lanes keep all they have.
template <class Rule, class real>
void step(const StepArguments<real>& in, const Rule& rule) {
  using Number = Vec<real>;
  const typename Rule::template Step<StepMath<real>> next(
      rule, {load<real>(in.rate), load<real>(in.kept), load<real>(in.decay), load<real>(in.own)});
  const IntVec<real> frozen = load<real>(in.frozen) != Number{};
  // Copied: the compiler must assume that a store may change `in`.
  real *const theta_at = in.theta, *const first_at = in.first, *const second_at = in.second;
  const real* const g_at = in.g;
  for_vectors<real>(in.size, [&](Index i, int count) {
    const Number theta = load_part(theta_at + i, count);
    const Number g = load_part(g_at + i, count);
    Number first{}, second{};
    if constexpr (Rule::kSlots > 0) first = load_part(first_at + i, count);
    if constexpr (Rule::kSlots > 1) second = load_part(second_at + i, count);
    const Number first_before = first, second_before = second;
    const Number stepped = next(theta, g, first, second);
    store_part(theta_at + i, select<real>(frozen, theta, stepped), count);
    if constexpr (Rule::kSlots > 0)
      store_part(first_at + i, select<real>(frozen, first_before, first), count);
    if constexpr (Rule::kSlots > 1)
      store_part(second_at + i, select<real>(frozen, second_before, second), count);
  });
}

/// Sums are in double: entries of a parameter may be millions.
template <class real>
void measure(const MeasureArguments<real>& in) {
  using Wide = typename DoubleRegister<real>::Type;
  constexpr int L = kLanes<real>;
  constexpr int kChains = 4;                       // sums that do not wait for each other
  Vec<real> largests[kChains]{}, nans[kChains]{};  // NaN and infinite entries make these NaN
  Wide sums[kChains]{};
  const bool euclidean = in.power == 2;
  const auto take = [&](int chain, Vec<real> x) {
    largests[chain] = maximum<real>(absolute<real>(x), largests[chain]);
    nans[chain] += x * real(0);
    if (euclidean) {
      const Wide wide = __builtin_convertvector(x, Wide);
      sums[chain] += wide * wide;
    }
  };
  const real* const from = in.x;
  const Index together = in.size / (kChains * L) * (kChains * L);
  for (Index i = 0; i < together; i += kChains * L)
#pragma GCC unroll 4
    for (int chain = 0; chain < kChains; ++chain) take(chain, load<real>(from + i + chain * L));
  for_vectors<real>(in.size - together,
                    [&](Index i, int count) { take(0, load_part(from + together + i, count)); });
  Vec<real> largest{}, nan{};
  Wide squares{};
  for (int chain = 0; chain < kChains; ++chain) {
    largest = maximum<real>(largests[chain], largest);
    nan += nans[chain];
    squares += sums[chain];
  }
  for (int l = 0; l < L; ++l) in.largest[l] = double(largest[l]) + double(nan[l]);
  if (in.power == 0) {
    for (int l = 0; l < L; ++l) in.sum[l] = 1;
    return;
  }
  const Wide wide = __builtin_convertvector(largest, Wide);
  const Wide inverse = wide > Wide{} ? 1.0 / wide : Wide{};
  // Squares neither overflow nor lose digits to underflow, as a rule; lanes do not depend on
  // others.
  const auto is_safe = [&](int l) {
    return euclidean && (wide[l] == 0 || (squares[l] > 1e-250 && squares[l] < 1e250));
  };
  bool all_safe = true;
  for (int l = 0; l < L; ++l) all_safe &= is_safe(l);
  Wide sum{};
  if (!all_safe)
    for_vectors<real>(in.size, [&](Index i, int count) {
      const Wide x = __builtin_convertvector(load_part(in.x + i, count), Wide) * inverse;
      if (euclidean) {
        sum += x * x;
      } else {
        for (int l = 0; l < L; ++l) sum[l] += __builtin_pow(__builtin_fabs(x[l]), in.power);
      }
    });
  for (int l = 0; l < L; ++l)
    in.sum[l] = is_safe(l) ? squares[l] * inverse[l] * inverse[l] : sum[l];
}

template <class real>
void compare(PairArguments<real>& in) {
  using Number = Vec<double>;
  constexpr int L = kLanes<double>, kChains = 2;  // sums that do not wait for each other
  Number a_squares[kChains]{}, b_squares[kChains]{}, products[kChains]{}, differences[kChains]{};
  const auto take = [&](int chain, Number a, Number b) {
    const Number difference = a - b;
    a_squares[chain] += a * a;
    b_squares[chain] += b * b;
    products[chain] += a * b;
    differences[chain] += difference * difference;
  };
  const real *const a = in.a, *const b = in.b;
  Index i = 0;
  for (; i + kChains * L <= in.size; i += kChains * L)
#pragma GCC unroll 2
    for (int chain = 0; chain < kChains; ++chain)
      take(chain, load_wide(a + i + chain * L), load_wide(b + i + chain * L));
  for (; i < in.size; i += L) {
    Number left{}, right{};
    for (int l = 0; l < L && i + l < in.size; ++l) {
      left[l] = a[i + l];
      right[l] = b[i + l];
    }
    take(0, left, right);
  }
  const auto sum = [](const Number(&chains)[kChains]) {
    double total = 0;
    for (const Number& chain : chains)
      for (int l = 0; l < L; ++l) total += chain[l];
    return total;
  };
  in.a_squares = sum(a_squares);
  in.b_squares = sum(b_squares);
  in.products = sum(products);
  in.differences = sum(differences);
}

// Numbers of B that a batched product gathers at a time, and of how many of its rows where an entry
// is one number, or one for each run.
inline constexpr int kGathered = 2048, kGatheredRows = 16, kGatheredRowsOfRuns = 4;

/// Rows of B, of `columns` entries side by side.
template <class real>
struct GatheredRows {
  const real* at;
  Index row;
  int rows, columns;
};

// Rows of C that a batched product computes at a time, and sums of vectors.
inline constexpr int kAddedRows = 4, kAddedSums = 8;

/// M rows of C (+)= the rows of a block of B, each times an entry of A, in their order.
template <class real, int M>
inline void add_rows(const BatchedGemm<real>& p, const real* a, const GatheredRows<real>& b,
                     bool add, real* c) {
  constexpr int L = kLanes<real>, V = kAddedSums / M;
  int n = 0;
  for (; p.c_column == 1 && n + V * L <= b.columns; n += V * L) {
    Vec<real> sums[M][V];
    for (int m = 0; m < M; ++m)
      for (int v = 0; v < V; ++v)
        sums[m][v] = add ? load<real>(c + m * p.c_row + n + v * L) : Vec<real>{};
    for (int k = 0; k < b.rows; ++k) {
      Vec<real> entries[V];
      for (int v = 0; v < V; ++v) entries[v] = load<real>(b.at + k * b.row + n + v * L);
      for (int m = 0; m < M; ++m) {
        const Vec<real> factor = broadcast<real>(a[m * p.a_row + k * p.a_column]);
        for (int v = 0; v < V; ++v) sums[m][v] += factor * entries[v];
      }
    }
    for (int m = 0; m < M; ++m)
      for (int v = 0; v < V; ++v) store<real>(c + m * p.c_row + n + v * L, sums[m][v]);
  }
  for (int m = 0; m < M; ++m, a += p.a_row, c += p.c_row) {
    int i = n;
    for (; p.c_column == 1 && i + L <= b.columns; i += L) {
      Vec<real> sum = add ? load<real>(c + i) : Vec<real>{};
      for (int k = 0; k < b.rows; ++k)
        sum += broadcast<real>(a[k * p.a_column]) * load<real>(b.at + k * b.row + i);
      store<real>(c + i, sum);
    }
    for (; i < b.columns; ++i) {
      real sum = add ? c[i * p.c_column] : real(0);
      for (int k = 0; k < b.rows; ++k) sum += a[k * p.a_column] * b.at[k * b.row + i];
      c[i * p.c_column] = sum;
    }
  }
}

/// The same of M rows at most.
template <class real, int M = kAddedRows>
inline void add_rows(int rows, const BatchedGemm<real>& p, const real* a,
                     const GatheredRows<real>& b, bool add, real* c) {
  if (rows == M) return add_rows<real, M>(p, a, b, add, c);
  if constexpr (M > 1) add_rows<real, M - 1>(rows, p, a, b, add, c);
}

/// The same of entries that are one number for each of `width` runs.
template <class real>
inline void add_rows_of_runs(const real* a, Index a_column, const GatheredRows<real>& b, int width,
                             bool add, real* c, Index c_column) {
  for (int k = 0; k < b.rows; ++k)
    for (int n = 0; n < b.columns; ++n)
      for (int l = 0; l < width; ++l) {
        real& to = c[n * c_column * width + l];
        to = (add || k > 0 ? to : real(0)) +
             a[k * a_column * width + l] * b.at[k * b.row + n * width + l];
      }
}

// Rows of A up to which B is read where it lies: gathering it would take as long as the product.
inline constexpr int kFewRows = 4;

/// Few rows of A times columns of B that are consecutive in memory, as A's rows are: inner products
/// over lanes, of several columns at a time.
template <class real, int M>
void few_inner_products(const BatchedGemm<real>& p) {
  constexpr int L = kLanes<real>, kColumns = 4;
  for (int first = 0; first < p.N; first += kColumns) {
    const int columns = p.N - first < kColumns ? p.N - first : kColumns;
    Vec<real> sums[kColumns][M] = {};
    const real* b[kColumns];
    for (int n = 0; n < kColumns; ++n) b[n] = p.b + (first + (n < columns ? n : 0)) * p.b_column;
    int k = 0;
    for (; k + L <= p.K; k += L) {
      Vec<real> a[M];
      for (int m = 0; m < M; ++m) a[m] = load<real>(p.a + m * p.a_row + k);
#pragma GCC unroll 4
      for (int n = 0; n < kColumns; ++n) {
        const Vec<real> entry = load<real>(b[n] + k);
        for (int m = 0; m < M; ++m) sums[n][m] += a[m] * entry;
      }
    }
    for (int n = 0; n < columns; ++n)
      for (int m = 0; m < M; ++m) {
        real sum = 0;
        for (int l = 0; l < L; ++l) sum += sums[n][m][l];
        for (int rest = k; rest < p.K; ++rest) sum += p.a[m * p.a_row + rest] * b[n][rest];
        real& c = p.c[m * p.c_row + (first + n) * p.c_column];
        c = p.factor * sum + (p.add ? c : real(0));
      }
  }
}

template <class real, int M = kFewRows>
void few_rows(const BatchedGemm<real>& p) {
  if (p.M == M) return few_inner_products<real, M>(p);
  if constexpr (M > 1) few_rows<real, M - 1>(p);
}

/// A block of B is gathered at a time, so that all rows of A meet it in the first-level cache.
template <class real>
void batched_gemm(const BatchedGemm<real>& p) {
  if (p.width == 1 && p.M <= kFewRows && p.a_column == 1 && p.b_row == 1) return few_rows(p);
  const bool in_place = p.width == 1 && p.M <= kFewRows && p.b_column == 1 && p.factor == real(1);
  const int width = p.width, most = width == 1 ? kGatheredRows : kGatheredRowsOfRuns;
  const int columns = in_place ? p.N : kGathered / most / width;
  real block[kGathered];
  GatheredRows<real> gathered{block, Index(columns) * width, 0, 0};
  const auto gather = [&](const real* b, int k, int n) {
    for (int l = 0; l < width; ++l)
      block[k * gathered.row + n * width + l] =
          p.factor * b[(k * p.b_row + n * p.b_column) * width + l];
  };
  for (int first = 0; first < p.N; first += columns) {
    gathered.columns = p.N - first < columns ? p.N - first : columns;
    for (int done = 0; done < p.K; done += most) {
      gathered.rows = p.K - done < most ? p.K - done : most;
      const real* b = p.b + (done * p.b_row + first * p.b_column) * width;
      if (in_place) {
        gathered.at = b;
        gathered.row = p.b_row;
      } else if (p.b_row == 1)  // columns are consecutive in memory
        for (int n = 0; n < gathered.columns; ++n)
          for (int k = 0; k < gathered.rows; ++k) gather(b, k, n);
      else
        for (int k = 0; k < gathered.rows; ++k)
          for (int n = 0; n < gathered.columns; ++n) gather(b, k, n);
      const bool add = p.add || done > 0;
      const real* a = p.a + done * p.a_column * width;
      real* c = p.c + first * p.c_column * width;
      if (width == 1)
        for (int m = 0; m < p.M; m += kAddedRows)
          add_rows(p.M - m < kAddedRows ? p.M - m : kAddedRows, p, a + m * p.a_row, gathered, add,
                   c + m * p.c_row);
      else
        for (int m = 0; m < p.M; ++m)
          add_rows_of_runs(a + m * p.a_row * width, p.a_column, gathered, width, add,
                           c + m * p.c_row * width, p.c_column);
    }
  }
}

}  // namespace
}  // namespace MHFAST_ISA
}  // namespace mhfast
