// A data set and a model's parameters as the caller holds them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "loss.hpp"
#include "plan.hpp"

namespace mhfast {

/// The tensors that a model may have, in the order in which callers name them.
enum TensorName {
#define MHFAST_PARAMETER(enumerator, ...) enumerator,
#include "../lists/parameters.inc"
#undef MHFAST_PARAMETER
  kTensors
};

inline constexpr const char* kTensorNames[kTensors] = {
#define MHFAST_PARAMETER(enumerator, name, ...) name,
#include "../lists/parameters.inc"
#undef MHFAST_PARAMETER
};

/// Those that the scores depend on, and so attention; the others are read out.
inline constexpr TensorName kOfScores[] = {kW, kQ, kK, kPrompt};

template <class Pointer>
using Tensors = std::array<Pointer, kTensors>;

/// x (n, T, d), z (n, q, d), y and weight (n,), or null; a layer's y (n, q, p) or classes (n, q),
/// its weight perhaps (n, q). For self-attention z is x; an external z may begin at the same
/// address. Where the query is shared z is not used. Where the shape has words, x is the dictionary
/// (words, d), `keys` are the words of the tokens (n, T) and `queries` those of the query rows
/// (n, q), and z is not used. Runs that are lanes of one engine have their arrays `run` numbers
/// apart, 0 where they share one. `rows_are_tokens`: query rows are those of the sample although z
/// is not x.
template <class real>
struct Data {
  Shape shape;
  bool self, rows_are_tokens;
  RowMap row_map;
  const real* x;
  const real* z;
  const std::int32_t* keys;
  const std::int32_t* queries;
  const real* y;
  const real* weight;
  const std::int64_t* lengths;  // visible keys, or null: all
  const double* limits;         // (n, q) in place of what `limit` says, or null: see CleanData
  bool weighs_rows;
  std::ptrdiff_t targets;  // numbers of y of one sample
  int runs;
  struct {
    std::ptrdiff_t x, z, keys, queries, y, weight, lengths, limits;
  } run;

  bool has_words() const { return shape.words > 0; }
  /// Whether the weights of words are looked up, each word of a sample once, and not only logits.
  /// This does not depend on n, so that a sample's outputs do not either.
  bool has_weights_of_words() const {
    return self && row_map.is_softmax() && shape.has_weights_of_words();
  }
  /// Rows of d numbers in x, and in an external z.
  std::ptrdiff_t x_rows() const { return has_words() ? shape.words : shape.n * shape.T; }
  bool has_z() const { return z && !self && !shape.shared_query && !has_words(); }
  bool queries_are_keys() const { return self || (has_words() && !shape.shared_query); }
  /// A token of a sample, and a row of its query side, which is not shared.
  const real* key(std::ptrdiff_t sample, int run_index, std::ptrdiff_t k) const {
    const std::ptrdiff_t at = sample * shape.T + k;
    return x + run_index * run.x + (has_words() ? keys[run_index * run.keys + at] : at) * shape.d;
  }
  const real* query(std::ptrdiff_t sample, int run_index, std::ptrdiff_t row) const {
    const std::ptrdiff_t at = sample * shape.q + row;
    if (!has_words()) return z + run_index * run.z + at * shape.d;
    return x + run_index * run.x + queries[run_index * run.queries + at] * shape.d;
  }

  /// Keys that row `row` of a sample sees; NaN where one of them, or the row itself, is not finite.
  double limit(std::ptrdiff_t sample, int run_index, int row) const {
    const std::ptrdiff_t T = shape.T;
    if (limits) return limits[run_index * run.limits + sample * shape.q + row];
    const std::ptrdiff_t length = lengths ? lengths[run_index * run.lengths + sample] : T;
    if (self && row >= length) return 0;
    return double(shape.causal && row + 1 < length ? row + 1 : length);
  }
  bool is_limited() const { return lengths || shape.causal || limits; }

  /// Limits of rows `first` to `first + rows` of a sample where rows are lanes; none to `padded`.
  void write_limits(std::ptrdiff_t sample, int first, int rows, int padded, real* to) const {
    for (int t = 0; t < padded; ++t) to[t] = real(t < rows ? limit(sample, 0, first + t) : shape.T);
  }

  /// In self-attention, rows beyond the sample's length have weight 0, if rows have weights.
  double weight_of(int run_index, std::ptrdiff_t sample, int row) const {
    if (shape.rows_have_outputs() && row >= rows_of(run_index, sample)) return 0.0;
    if (!weight) return 1.0;
    const std::ptrdiff_t at = weighs_rows ? sample * shape.q + row : sample;
    return double(weight[run_index * run.weight + at]);
  }
  /// What a run's loss is divided by.
  double total_weight(int run_index, Loss loss) const {
    if (targets_of(loss) == Targets::kDerivatives) return 1.0;
    const bool by_row = weighs_rows || is_of_rows(loss);
    if (!weight && !by_row) return double(shape.n);
    double total = 0;
    for (std::ptrdiff_t i = 0; i < shape.n; ++i) {
      if (!by_row) total += double(weight[run_index * run.weight + i]);
      for (int t = 0; by_row && t < shape.q; ++t) total += weight_of(run_index, i, t);
    }
    return total;
  }
  /// Labels that accuracy is the mean over, each with its weight.
  double total_labels(int run_index, Loss loss) const {
    if (shape.outputs() == 1 || is_of_rows(loss)) return total_weight(run_index, loss);
    double total = 0;
    for (std::ptrdiff_t i = 0; i < shape.n; ++i)
      for (int t = 0; t < shape.output_rows(); ++t)
        total += weight_of(run_index, i, t) * shape.row_outputs();
    return total;
  }

 private:
  std::ptrdiff_t rows_of(int run_index, std::ptrdiff_t sample) const {
    return (self || rows_are_tokens) && lengths
               ? std::ptrdiff_t(lengths[run_index * run.lengths + sample])
               : shape.q;
  }
};

/// Keys from the first to the last that one of the rows with these limits sees, at least one.
template <class real>
int seen_keys(const real* limits, int rows) {
  real most = 1;
  for (int t = 0; t < rows; ++t)
    if (limits[t] > most) most = limits[t];  // of NaN all results are NaN
  return int(most);
}

/// The data of `count` runs from `run` on.
template <class real>
Data<real> at_run(const Data<real>& set, std::ptrdiff_t run, int count) {
  Data<real> data = set;
  data.x += run * set.run.x;
  data.z = set.z ? set.z + run * set.run.z : nullptr;
  data.keys = set.keys ? set.keys + run * set.run.keys : nullptr;
  data.queries = set.queries ? set.queries + run * set.run.queries : nullptr;
  data.y = set.y ? set.y + run * set.run.y : nullptr;
  data.weight = set.weight ? set.weight + run * set.run.weight : nullptr;
  data.lengths = set.lengths ? set.lengths + run * set.run.lengths : nullptr;
  data.limits = set.limits ? set.limits + run * set.run.limits : nullptr;
  data.runs = count;
  return data;
}

/// `count` samples from `first` on, of all runs.
template <class real>
Data<real> at_samples(const Data<real>& set, std::ptrdiff_t first, std::ptrdiff_t count) {
  const Shape& s = set.shape;
  Data<real> data = set;
  data.shape.n = count;
  if (!set.has_words()) data.x = set.x + first * s.T * s.d;
  if (set.self)
    data.z = data.x;
  else if (set.has_z())
    data.z = set.z + first * s.q * s.d;
  data.keys = set.keys ? set.keys + first * s.T : nullptr;
  data.queries = set.queries ? set.queries + first * s.q : nullptr;
  data.y = set.y ? set.y + first * set.targets : nullptr;
  data.weight = set.weight ? set.weight + first * (set.weighs_rows ? s.q : 1) : nullptr;
  data.lengths = set.lengths ? set.lengths + first : nullptr;
  data.limits = set.limits ? set.limits + first * s.q : nullptr;
  return data;
}

/// A model as the caller holds it: W or, of rank `rank`, Q and K (null: W = Q Q^T); U, V or A and
/// B, V = A B; perhaps a prompt. Without any of the first W is the identity for all heads, without
/// U, V and A it is V.
template <class Pointer>
struct Model {
  Tensors<Pointer> at;
  int rank;  // 0: W is dense

  bool is_factored() const { return rank > 0; }
  bool is_tied() const { return rank > 0 && !at[kK]; }
  bool has_factored_values() const { return at[kValueA] != nullptr; }
};

/// Heads, and rows and columns of a head, of a tensor; the prompt is of one head.
struct Extent {
  int heads, rows, columns;
  std::ptrdiff_t size() const { return std::ptrdiff_t(rows) * columns; }
  std::ptrdiff_t all() const { return heads * size(); }
};

inline Extent extent(TensorName name, const Shape& s, int rank) {
  switch (name) {
#define MHFAST_PARAMETER(enumerator, name, letters, heads, rows, columns) \
  case enumerator:                                                        \
    return {heads, rows, columns};
#include "../lists/parameters.inc"
#undef MHFAST_PARAMETER
    case kTensors:
      break;
  }
  return {0, 0, 0};
}

/// One run's parameters, or those of as many runs as there are lanes, a vector for each number.
template <class real>
struct Parameters {
  const real* W;       // (H, d, d), or null: identities, or it is multiplied with as its factors
  const real *Q, *K;   // (H, d, r), or null; where Q is not, K null: tied
  const real* U;       // (H, q, d), or null
  const real* V;       // (H, d, p), or null; without both V is the identity
  const real* prompt;  // (q, d), or null
  real scale;          // of the logits

  const real* readout() const { return V ? V : U; }
  const real* right() const { return K ? K : Q; }
};

}  // namespace mhfast
