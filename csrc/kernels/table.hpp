// What one instruction set offers: the arguments of the leaf kernels and the table of entry points.
//
// A *unit* is what one kernel step works on: a block of `lanes` samples when samples are the lanes,
// a single sample when query rows are. Kernels neither allocate, throw, nor start threads.
//
// Letters: T keys, q query rows, d features, L lanes; qL, dL: q, d rounded up to whole vectors.
//
//             samples as lanes           rows as lanes
//   packed    [unit][row][feature][L]    [feature][unit][row up to TL]
//   s, c      [unit][key][row][L]        [unit][key][row up to qL]
#pragma once

#include <cstddef>
#include <cstdint>

#include "../lists/losses.hpp"
#include "../lists/optimizers.hpp"
#include "../lists/row_maps.hpp"
#include "philox.hpp"

namespace mhfast {

inline constexpr int kMaxLanes = 16;       // of any instruction set
inline constexpr int kRowsTransposed = 4;  // vectors of rows that a gradient by factors transposes

/// A product or a batch of products of the same sizes. N counts vectors, all strides count numbers.
template <class real>
struct Product {
  struct {
    int M, N, K1, K2 = 1, batch = 1;
  } size;
  struct {
    const real* at;
    std::ptrdiff_t k1, k2 = 0, batch = 0;
  } a;
  struct {
    const real* at;
    std::ptrdiff_t k1, n, k2 = 0, batch = 0;
  } b;
  struct {
    real* at;
    std::ptrdiff_t m, n, batch = 0;
  } c;
  bool add = false;  // add to C instead of overwriting it
};

enum class RowMode {
  kReadout,     // readouts only
  kAttention,   // s becomes the weights A, denormal ones included; ut and c are not used
  kWeights,     // the same, denormal weights flushed to zero
  kDerivative,  // s becomes A, c becomes D
  kScaled,      // s becomes A, c becomes D exp(-gap of the sample)
};

/// The words that keys and query rows of units, one sample each, are. Logits of pairs of words are
/// looked up in w, a table [key word][query word], and C in ut, a table [key word][qL], unless that
/// is null and C is there. Without words of the queries, which all samples share, w is a table [key
/// word][qL].
///
/// With `counts`, the keys of a unit are its first counts[unit] numbers, distinct words, and
/// `times`, laid out as the keys, says how many tokens are that word; A and D are those of all
/// these tokens.
///
/// With `rounds`, the query rows of a unit's words are listed: the first row of each word (row),
/// then for each of rounds[unit] rounds and each first row (qL) another row of its word, in round 0
/// the row itself; -1 where there is none. Units are `rows_unit` numbers apart.
struct WordsOfUnits {
  const std::int32_t *keys = nullptr, *queries = nullptr;
  std::ptrdiff_t keys_unit = 0, queries_unit = 0;  // from unit to unit
  std::ptrdiff_t row = 0;                          // from key word to key word in w
  const std::int32_t *counts = nullptr, *times = nullptr;
  const double* log_times = nullptr;  // log of a number of tokens
  const std::int32_t *first_rows = nullptr, *rounds = nullptr;
  std::ptrdiff_t rows_unit = 0;
};

/// Logits, softmax and readout of one head for `units` units.
///
/// Samples as lanes: with q = 1 the rows of several heads, whose W and K^T follow each other, can
/// go together. They are rows of ut, p, s, c and limits then; readout and gap are those of each
/// head.
template <class real>
struct ScoreArguments {
  int T, q, d, units;
  const real* w;   // (d, d), or null: scale times the identity; or, of a rank, Q (d, rank)
  int rank;        // of factors, or 0
  const real* kt;  // then K^T (rank, d)
  real scale;
  const real* ut;  // U transposed: (d, q), rows as lanes (d, qL), from feature to feature `ut_k`;
                   // or null: c is there
  std::ptrdiff_t ut_k, ut_unit;  // from unit to unit: 0 where all have the same
  bool ut_laned;                 // ut holds vectors, one number for each lane
  const real* x;                 // packed keys
  std::ptrdiff_t x_row;          // rows as lanes: from feature to feature in it; 0: as packed
  const real* z;                 // packed queries; x itself for self-attention
  WordsOfUnits words;            // in place of x and z, and w and ut are tables then; or none
  const real* exps;              // of words: exp of the table w, or null
  const real* shared_p;          // Z W where all samples share Z, in the place of z; or null
  std::ptrdiff_t shared_p_k;     // from feature to feature in it
  const real* limits;  // keys that each row sees, as a row of s: (units, q * L or qL), or null
  real* p;             // scratch for Z W: d * units * (q * L or qL), of a rank twice that
  real* s;
  real* c;
  std::ptrdiff_t unit_stride;  // from unit to unit in s and c
  real* readout;               // (units, L) or (units,): sum over rows of <A, C>
  real* gap;  // null, or as readout: log of the largest weight that is not its row's largest,
              // relative to that (at most 0)
  real* row_readouts;  // scratch of q * L or qL
  real* row_gaps;      // the same, when gap is given or rows are scaled
  RowMode mode;
  RowMap map;
  int heads = 1;
  std::ptrdiff_t readout_head = 0;  // from head to head in readout and gap
};

/// Gradients of one head over `units` units, from A, D and keys multiplied by the loss derivative.
/// Sums over units: a null result is not computed, `add` adds to what is there. Of a rank r > 0
/// there are gradients by Q and K in place of gw, from Q and K: features as lanes (d, rL), zeros at
/// the end of a row.
template <class real>
struct GradientArguments {
  int T, q, d, units;
  const real* a;   // needed for gu
  const real* dd;  // D, needed for gw and ge
  const real* gx;  // samples as lanes [unit][key][feature][L]; features as lanes [unit][key][dL]
  const real* z;   // samples as lanes: packed queries; features as lanes: rows (units, q, d)
  real* e;         // scratch for D X: units * q * (d * L or dL); with factors see factor_scratch
  std::ptrdiff_t e_row;  // features as lanes: not 0: D X is what is computed, and from row to row
  real* gu;              // A X: (q, d) or, features as lanes, (q, dL); of runs (q, d, L)
  real* gw;              // Z^T D X: likewise of (d, d)
  real* ge;              // D X, where all units have the same queries: of (q, d)
  bool add;
  int rank;
  const real *fq, *fk;  // Q and K
  real *gq, *gk;        // Z^T D X K and (D X)^T Z Q, of (d, r); the same: their sum
  bool sums_lanes;      // lanes are samples, not runs: results are sums over them
  // With q = 1 the rows of several heads go together, as in ScoreArguments: rows of A, D, D X, gu
  // and ge. From head to head in gw, gq and gk; in the factors; and in D X where e_row is given.
  int heads = 1;
  std::ptrdiff_t weight_head = 0, factor_head = 0, e_head = 0;
};

/// Numbers that the gradients by factors of a rank need behind D X of so many rows, samples' with
/// features as lanes, else blocks'.
inline std::ptrdiff_t factor_scratch(std::ptrdiff_t rows, int rank, int d, int lanes,
                                     bool features_are_lanes) {
  if (!features_are_lanes) return rows * rank * lanes;
  return rows * ((rank + lanes - 1) / lanes * lanes) + std::ptrdiff_t(kRowsTransposed) * lanes * d;
}

/// Gradients of one head by its tables, from A and D of `units` units, laid out as rows of scores.
/// Added to what is there; null: not computed.
template <class real>
struct WordGradientArguments {
  int T, q, units;
  WordsOfUnits words;  // row: that of gw
  const real *a, *dd;  // of unit after unit `unit_stride` numbers apart
  std::ptrdiff_t unit_stride;
  const real* factors;  // (units)
  real* gu;             // A by key words: [key word][qL]
  real* gw;  // D by pairs: [key word][query word] or, if these are shared, [key word][qL]
};

/// A^T G by keys or, of a layer, by key words, [key (word)][outputs up to pL], added to what is
/// there.
template <class real>
struct WordValuesArguments {
  int T, q, vectors;         // pL / L
  const std::int32_t* keys;  // (T), or null: they are no words
  const real* a;             // [key][q]
  std::ptrdiff_t a_row;      // from key to key in it
  const real* g;             // (q, pL) derivatives by the outputs
  real* gv;
};

/// Outputs of a classifier: scale times the sum of its heads' readouts.
template <class real>
struct ReadoutArguments {
  std::ptrdiff_t count;
  int heads;
  const real* readouts;   // (heads, count)
  std::ptrdiff_t stride;  // from head to head
  double scale;
  double* f;  // (count)
};

/// Losses of a classifier's outputs. Arrays of `count` entries may be read, and the results
/// written, up to whole vectors; (L): one number for each lane, added to.
template <class real>
struct LossArguments {
  Loss kind;
  bool values;  // see LossTerm
  std::ptrdiff_t count;
  const double *f, *y;      // outputs and labels
  const double *w, *log_w;  // weights; their logarithms or, where all are 0 or 1, null
  const double* shares;     // (L): of a derivative in the derivative of the run's loss
  real* derivative;         // that derivative, 0 where w is
  double*
      log_derivative;  // log |weighted derivative| without the share, -inf where w is 0; or null
  double *loss, *correct, *margin;  // (L): sums, and the least m
};

/// The largest log_derivative, and that plus the head's gap: (heads + 1, L), the former last.
template <class real>
struct ScaleArguments {
  std::ptrdiff_t count;  // whole vectors
  int heads;
  const double* log_derivative;
  const real* gaps;       // (heads, count)
  std::ptrdiff_t stride;  // from head to head
  double* scales;
};

/// exp(gap - log_scale + log_derivative), 0 where the first or the last is infinite, with a sign.
template <class real>
struct FactorArguments {
  std::ptrdiff_t count;     // whole vectors
  const real* gaps;         // null: 0
  const double* log_scale;  // (L)
  const double* log_derivative;
  const real* signs;  // null: positive
  real* factors;
};

/// One head of a layer, samples (or runs) as lanes; y, f and g are [unit][row][feature or
/// output][L].
///
/// With q = 1 the rows of several heads can go together, as in ScoreArguments: they are rows of a,
/// y, ut and c then, and the heads' v, vt and gv follow each other.
template <class real>
struct LayerArguments {
  int T, q, d, p, units;
  const real* v;               // (d, p), or null: the identity
  const real* vt;              // V transposed: (p, d), or null
  const real* x;               // packed keys
  const real* a;               // weights A
  std::ptrdiff_t unit_stride;  // from unit to unit in a and c
  real* y;                     // A X
  real* f;                     // outputs Y V, added to if `add`
  const real* g;               // derivative of the loss by the outputs
  real* ut;                    // G V^T as [feature][unit, row, head][L]
  real* c;                     // C = G V^T X^T, then D
  real slope;                  // of linear weights: D is this times C; 0: of softmax
  real* gv;                    // sum over units of Y^T G: (d, p), of runs (d, p, L)
  bool add;
  bool sums_lanes;  // lanes are samples, not runs: gv is the sum over them
  int heads = 1;
};

/// A row of outputs f against targets y, p vectors each; lanes are samples or runs.
template <class real>
struct ResidualArguments {
  int p;
  const real *f, *y;
  const real* counts;  // (L) residuals are 0 where it is, whatever f is
  const real* factor;  // (L)
  real* g;             // factor (f - y), or null
  double* squares;     // (L) sum of (f - y)^2
  real* largest;       // (L) |f - y|
  double* correct;     // (L) how many f y > 0, and their least; or null
  double* margin;
};

/// Outputs of rows of attended tokens.
template <class real>
struct AttendedArguments {
  int rows, p, vectors;  // of features, with zeros at the end of the last one
  const real* x;         // (rows, vectors, L)
  const real* readout;   // (vectors, p, L)
  real* sums;            // scratch (rows, p, L)
  real* f;               // (rows, p)
};

enum class TileMode {
  kReadout,
  kWeights,  // A alone, whose readouts come from A X, as those of the gradient by U alone
  kDerivative,
  kGap,
  kScaled
};

/// A tile of query rows of one sample and head against all keys; q counts all rows of the sample.
template <class real>
struct TileArguments {
  int T, rows, d;
  const real* w;   // (d, d), or null: scale times the identity; or, of a rank, Q (d, rank)
  int rank;        // of factors, or 0
  const real* kt;  // then K^T (rank, d)
  real scale;
  const real *kx, *zq;          // where keys go through these, (X K)^T (rank, T) and (Z Q)^T of the
                                // tile (rank, qL), in the place of w; or null
  const real *zt, *ut;          // queries and U transposed, at the tile: (d, rows), rows padded
  std::ptrdiff_t z_row, u_row;  // from feature to feature in zt, and in ut
  const real* xt;               // keys transposed: (d, T)
  std::ptrdiff_t x_row;         // from feature to feature in xt and kx
  const real *x, *z;            // keys (T, dL); the tile's queries (rows, d)
  const real* limits;           // keys that each row sees (qL), or null
  real *pu, *sc, *axdx;         // scratch: 2 qL (d + rank), 2 qL T, 2 qL dL (see factor_scratch)
  real *readouts, *row_gaps;    // (qL)
  real* gap;                    // one number, or null: out, in for kScaled
  real *gu, *gw;                // A X (rows, dL), written; Z^T D X (d, dL), written or added to, or
                                // null: D stays in the second half of the rows of sc
  const real *fq, *fk;          // of a rank, in place of gw, as in GradientArguments
  real *gq, *gk;
  TileMode mode;
  RowMap map;
  bool add;
};

/// A gradient as its chunks left it: `partial` holds, for each chunk, (rows, d) numbers, padded to
/// whole vectors by row.
template <class real>
struct ReduceArguments {
  const real* partial;
  std::ptrdiff_t chunk_stride;
  int chunks, rows, d;
  real* out;  // (rows, d)
};

/// Softmax by rows and how it moves along a direction; arrays are laid out as rows of scores. Other
/// row maps leave the logits and their derivative in s and ds, and write the weights apart.
template <class real>
struct TangentArguments {
  int keys, columns;      // query rows in whole vectors
  std::ptrdiff_t stride;  // from key to key
  const real* limits;     // keys that each row sees, or null
  real *s, *ds;           // logits and their derivative; A and its relative derivative, or null
  real *c, *dc;           // readout coefficients and their derivative; D and its derivative
  real *readouts, *readout_tangents;  // (columns vectors): rows of <A, C> and their derivative
  RowMap map;
  real *a, *da;  // of another map: A and its derivative; scratch where D is requested
};

/// C[m][n] (+)= factor * sum over k of A[m][k] B[k][n], K > 0; an entry is `width` numbers, one for
/// each run, and strides count entries.
template <class real>
struct BatchedGemm {
  int M, N, K, width;
  const real* a;
  std::ptrdiff_t a_row, a_column;
  const real* b;
  std::ptrdiff_t b_row, b_column;
  real* c;
  std::ptrdiff_t c_row, c_column;
  real factor;
  bool add;
};

/// A step of an optimizer over `size` numbers. A parameter of a single run is processed like one of
/// as many runs as there are lanes: every array of `L` numbers here has one for each.
template <class real>
struct StepArguments {
  std::ptrdiff_t size;
  real* theta;
  const real* g;
  real *first, *second;  // what the optimizer keeps, of as many as it has slots
  const real* rate;      // (L) see Factors; lanes with `frozen` keep all they have
  const real* kept;      // (L)
  const real* frozen;    // (L) 0 or 1
  const real* decay;     // (L)
  const real* own;       // (L)
};

/// Sums over vectors, one result for each lane.
template <class real>
struct MeasureArguments {
  std::ptrdiff_t size;
  const real* x;
  double* largest;  // (L) largest |x|; NaN where an entry is
  double* sum;      // (L) sum of (|x| / largest)^power; power 0: not computed
  double power;
};

/// Sums over the entries of two arrays, in double.
template <class real>
struct PairArguments {
  std::ptrdiff_t size;
  const real *a, *b;
  double a_squares, b_squares, products, differences;  // a^2, b^2, a b, (a - b)^2
};

/// Triangular factors of samples, which are lanes: `triangle` becomes R of its own rows with those
/// of `block` below them; the block is overwritten.
template <class real>
struct TriangleArguments {
  int rows, d;
  real* block;     // [feature][row][L]
  real* triangle;  // [row][feature][L], zero below the diagonal
};

/// Tiles of a product in registers, see kernels/product.hpp: accumulators, and the most columns and
/// rows unless there are few of the other.
struct TileSizes {
  int accumulators, columns, rows;
};

/// Rows of tables of words, and query rows up to whole vectors, up to which D is added to pairs by
/// permutations of registers, see kernels/words.hpp; 0: never.
struct PermutedSizes {
  int words, rows;
};

/// One instruction set's kernels for one type.
template <class real>
struct Kernels {
  int lanes;
  TileSizes tiles;
  PermutedSizes permuted;
#define MHFAST_KERNEL(result, name, ...) result (*name)(__VA_ARGS__);
#include "../lists/kernels.inc"
#undef MHFAST_KERNEL
#define MHFAST_STEP(Type, name) void (*step_##name)(const StepArguments<real>&, const Type&);
  MHFAST_OPTIMIZERS(MHFAST_STEP)
#undef MHFAST_STEP
};

/// The two tables of an instruction set; the only symbol that its object file exports.
struct InstructionSet {
  const char* name;
  Kernels<float> f32;
  Kernels<double> f64;
};

}  // namespace mhfast
