// What one instruction set offers: the arguments of the leaf kernels and the table of entry points.
//
// A *unit* is what one kernel step works on: a block of `lanes` samples when samples are the lanes,
// a single sample when query rows are. Kernels neither allocate, throw, nor start threads.
//
//   letters   T keys, q query rows, d features, L lanes, qL / dL: q / d rounded up to whole vectors
//   packed    samples as lanes [unit][row][feature][L];  rows as lanes [feature][unit][row up to
//   TL] s, c      samples as lanes [unit][key][row][L];      rows as lanes [unit][key][row up to
//   qL]
#pragma once

#include <cstddef>
#include <cstdint>

namespace mhfast {

enum class RowMode {
  kReadout,     // readouts only
  kAttention,   // s becomes the weights A; ut and c are not used
  kDerivative,  // s becomes A, c becomes D
  kScaled,      // s becomes A, c becomes D exp(-gap of the sample)
};

/// Logits, softmax and readout of one head for `units` units.
template <class real>
struct ScoreArguments {
  int T, q, d, units;
  const real* w;   // (d, d)
  const real* ut;  // U transposed: (d, q), rows as lanes: (d, qL)
  const real* x;   // packed keys
  const real* z;   // packed queries; x itself for self-attention
  real* p;         // scratch for Z W: d * units * (q * L or qL)
  real* s;
  real* c;
  std::ptrdiff_t unit_stride;  // from unit to unit in s and c
  real* readout;               // (units, L) or (units,): sum over rows of <A, C>
  real* gap;  // null, or as readout: log of the largest weight that is not its row's largest,
              // relative to that (at most 0)
  real* row_readouts;  // scratch of q * L or qL
  real* row_gaps;      // the same, when gap is given or rows are scaled
  RowMode mode;
};

/// Gradients of one head over `units` units, from A, D and keys multiplied by the loss derivative.
template <class real>
struct GradientArguments {
  int T, q, d, units;
  const real* a;   // null if gu is
  const real* dd;  // D; null if gw is
  const real* gx;  // samples as lanes [unit][key][feature][L]; features as lanes [unit][key][dL]
  const real* z;   // samples as lanes: packed queries; features as lanes: rows (units, q, d)
  real* e;         // scratch for D X: units * q * (d * L or dL)
  real* gu;        // (q, d, L) or (q, dL), or null
  real* gw;        // (d, d, L) or (d, dL), or null
  bool add;        // add to gu and gw instead of overwriting them
};

enum class TileMode { kReadout, kDerivative, kGap, kScaled };

/// A tile of query rows of one sample and head against all keys; q counts all rows of the sample.
template <class real>
struct TileArguments {
  int T, rows, d;
  const real* w;              // (d, d)
  const real *zt, *ut;        // queries and U transposed, at the tile: (d, rows), rows padded
  std::ptrdiff_t z_row;       // from feature to feature in zt and ut
  const real* xt;             // keys transposed: (d, T)
  std::ptrdiff_t x_row;       // from feature to feature in xt
  const real *x, *z;          // keys (T, dL); the tile's queries (rows, d)
  real *pu, *sc, *axdx;       // scratch: 2 qL d, 2 qL T, 2 qL dL
  real *readouts, *row_gaps;  // (qL)
  real* gap;                  // one number, or null: out, in for kScaled
  real *gu, *gw;              // A X (rows, dL), written; Z^T D X (d, dL), written or added to
  TileMode mode;
  bool add;
};

/// A gradient as its chunks left it: `partial` holds, for each chunk, (rows, d) entries, either one
/// vector each (samples as lanes) or padded to whole vectors by row (features as lanes).
template <class real>
struct ReduceArguments {
  const real* partial;
  std::ptrdiff_t chunk_stride;
  int chunks, rows, d;
  real* out;  // (rows, d)
};

/// One instruction set's kernels for one type. Names: operation, then what the lanes are.
template <class real>
struct Kernels {
  int lanes;
  void (*scores_samples)(const ScoreArguments<real>&);
  void (*scores_rows)(const ScoreArguments<real>&);
  void (*gradients_samples)(const GradientArguments<real>&);
  // Features as lanes; A and D come from scores_rows, or from one block of scores_samples, whose
  // samples are then the units.
  void (*gradients_features_of_rows)(const GradientArguments<real>&);
  void (*gradients_features_of_samples)(const GradientArguments<real>&);
  void (*tile_scores)(const TileArguments<real>&);
  void (*tile_gradients)(const TileArguments<real>&);
  // out (+)= sum over `count` of factors[i] x[i * stride + .], each of `size` whole vectors'
  // numbers.
  void (*combine)(const real* x, std::ptrdiff_t stride, const real* factors, int count,
                  std::ptrdiff_t size, real* out, bool add);
  void (*reduce_samples)(const ReduceArguments<real>&);
  void (*reduce_features)(const ReduceArguments<real>&);
  void (*pack_samples)(const real* x, int valid, int rows, int d, real* out);
  void (*pack_rows)(const real* x, int rows, int d, int padded, real* out);
  void (*scale_rows)(const real* x, real factor, int rows, int d, int padded, real* out);
  void (*scale_samples)(const real* x, const real* factor, std::ptrdiff_t size, real* out);
  void (*exponentials)(const real* x, std::ptrdiff_t size, real* out);
  double (*multiply_adds)(std::int64_t rounds);  // runs them; returns their flops
};

/// The two tables of an instruction set; the only symbol that its object file exports.
struct InstructionSet {
  const char* name;
  Kernels<float> f32;
  Kernels<double> f64;
};

}  // namespace mhfast
