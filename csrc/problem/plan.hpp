// How a shape is computed: which axis lies along the lanes, and the sizes of the pieces.
//
// A plan depends on the shape, the type and the instruction set, never on the number of threads, so
// that results are bitwise equal for any number of threads. Forward results do not depend on the
// plan at all: every lane axis performs the same operations on a sample in the same order.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "../kernels/table.hpp"

namespace mhfast {

// Dictionaries of up to this many words for each token of a sample are always looked up: all of
// their products cost no more than those of two samples.
inline constexpr int kWordsOfToken = 2;

inline std::ptrdiff_t round_up(std::ptrdiff_t size, std::ptrdiff_t step) {
  return (size + step - 1) / step * step;
}

/// At least `size` numbers, an odd number of vectors: what goes down rows of so many would else
/// meet few sets of the first-level cache.
inline std::ptrdiff_t odd_vectors(std::ptrdiff_t size, int lanes) {
  return (round_up(size, lanes) / lanes | 1) * lanes;
}

struct Shape {
  std::ptrdiff_t n;                             // samples
  int T, q, d, H;                               // keys, query rows, features, heads
  int p = 0;                                    // outputs of a layer; 0: a classifier
  bool shared_query = false;                    // one query side for all samples, a prompt
  bool identity_w = false, identity_v = false;  // nothing is in the place of W; of V, where p is d
  int words = 0;          // of the dictionary that all tokens are taken from; 0: there is none
  bool causal = false;    // rows see no later token, and tiles of rows leave those out
  int rank = 0;           // of Q K^T, whose factors are multiplied with one by one; 0: W is dense
  int value_rank = 0;     // V_h is A_h B_h with so many columns of A_h; 0: V is not factored
  bool attended = false;  // in the place of tokens there are attended ones, see attended.hpp
  bool products = false;  // in the place of tokens there are X^T X, see products.hpp

  bool is_layer() const { return p > 0; }
  /// See Data: what the shape says about it.
  bool has_weights_of_words() const {
    return words > 0 && words <= kWordsOfToken * T && !is_layer();
  }
  bool rows_have_outputs() const { return is_layer(); }
  /// Rows with outputs of their own, outputs of such a row, and of a sample; a classifier has one.
  int output_rows() const { return rows_have_outputs() ? q : 1; }
  int row_outputs() const { return rows_have_outputs() ? p : 1; }
  std::ptrdiff_t outputs() const { return std::ptrdiff_t(output_rows()) * row_outputs(); }
  /// Columns of what a query row is multiplied with first, W or Q; none of an identity.
  int first_columns() const { return identity_w ? 0 : rank > 0 ? rank : d; }
  /// Flops of that product of one query row, or with both factors, and of its gradient.
  double flops_of_w() const { return (rank > 0 ? 8.0 : 4.0) * d * first_columns(); }
};

enum class PlanKind {
  kSamples,  // samples are the lanes throughout
  kHybrid,   // samples for scores and softmax, features for gradients
  kRows,     // query rows for scores and softmax, features for gradients
  kTiles,    // as kRows, a tile of query rows at a time: long sequences
  kWords,  // as kRows, where tokens are words: products of words are computed once, then looked up
  kAttended,  // features of attended tokens, which are known: what is left is the readout
  kProducts,  // of linear attention with X^T X known: samples for outputs, pairs of features after
  kRuns,      // independent runs, each with its own parameters
};
inline constexpr int kPlanKinds = 8;

/// Whether gradients have features along the lanes, in rows of whole vectors.
inline bool features_are_lanes(PlanKind kind) {
  return kind != PlanKind::kSamples && kind != PlanKind::kRuns;
}

/// Whether W of the shape's rank is multiplied with as its factors, (Z Q) K^T, not as their
/// product. A choice of the model alone, so that outputs do not depend on the batch or the plan.
bool prefers_factors(const Shape& shape);

/// Whether the values X V of a layer's keys come before A, F = A (X V): of long samples with few
/// outputs. A choice of the model and its tokens, which then have no plan but rows.
bool has_values_first(const Shape& shape, int bytes, int lanes);

/// Whether keys go through the factors, (Z Q) (X K)^T, as of long samples: a choice of the model
/// and its tokens, which then have no plans but tiles or, of a layer, rows.
bool has_keys_first(const Shape& shape);

/// Whether the gradients by the factors then come from X K and D^T (Z Q), whose rows are whole
/// vectors, not from D X.
bool has_gradients_of_keys(const Shape& shape, int lanes);

/// Whether tokens are multiplied with the factors and the readout before all else, samples being
/// the lanes of what is in between: see projections.hpp. A choice of the model and its tokens,
/// which then have no plan but hybrid. And the numbers of a token that the readout is then about.
bool has_projections(const Shape& shape);
inline int projected_columns(const Shape& shape) { return shape.is_layer() ? shape.p : shape.q; }

/// Whether chunks have gradients by the factors, not by their product; the query is not shared.
bool has_factor_gradients(const Shape& shape, PlanKind kind, int lanes);

/// Whether D X of all rows is kept, and the gradient by W is one product over them, Z^T (D X): of
/// few rows with many features, where chunks' own gradients would be larger.
bool has_row_gradients(const Shape& shape, PlanKind kind);

/// From row to row of that D X, an odd number of vectors: a product that goes down its rows would
/// else meet few sets of the first-level cache.
std::ptrdiff_t row_gradient_size(const Shape& shape, int lanes);

struct Plan {
  PlanKind kind;
  std::ptrdiff_t units;  // blocks of `lanes` samples, or samples; layers by rows: tiles of samples;
                         // of attended tokens: rows, see attended.hpp
  int chunks;            // of units; each owns one partial gradient
  int slab;              // units whose weights (tiles: gradients) are held at a time, all heads
  bool keep;             // weights are kept from the loss to the gradient; else recomputed
  int tile;              // tiles and layers: query rows at a time
  int heads;             // samples as lanes: whose scores and gradients go together
  int parts;  // tiles, layers by rows: pieces of a sample's query rows; threads share them
  double cycles[kPlanKinds];  // predicted for one loss and gradient of one run, by kind: with what
                              // chunks cost, without the other work of a training step

  bool samples_are_lanes() const {
    return kind == PlanKind::kSamples || kind == PlanKind::kHybrid || kind == PlanKind::kProducts;
  }
  bool runs_are_lanes() const { return kind == PlanKind::kRuns; }
  bool problems_are_lanes() const { return samples_are_lanes() || runs_are_lanes(); }
  bool features_are_lanes() const { return mhfast::features_are_lanes(kind); }
};

/// What a plan must know of the type and the instruction set.
struct Registers {
  int bytes;  // of one number
  int lanes;  // numbers in a register
  TileSizes tiles;
};

template <class real>
Registers registers_of(const Kernels<real>& kernels) {
  return {int(sizeof(real)), kernels.lanes, kernels.tiles};
}

Plan make_plan(const Shape& shape, const Registers& registers, bool runs_are_lanes = false);

/// Whether steps of `runs` trainings that change the readout alone are faster from attended tokens
/// that are computed once than from the shape's tokens.
bool prefers_attended(const Shape& shape, const Registers& registers, std::ptrdiff_t runs);

/// Whether `runs` side by side, each with its own parameters, are faster as lanes than one by one.
bool prefers_runs(const Shape& shape, const Registers& registers, std::ptrdiff_t runs);

/// The same of steps of linear attention from X^T X, which is computed once. `from_tokens`: the
/// shape otherwise.
bool prefers_products(const Shape& from_tokens, const Registers& registers, std::ptrdiff_t runs);

const char* plan_name(PlanKind kind);

/// For tests and measurements: every later plan is of this kind ("samples", "hybrid", "rows",
/// "tiles", "runs") if the shape supports it, or chosen by the cost model ("auto"). Attended tokens
/// are kept only if "attended" or nothing is forced, products of tokens only if "products" or
/// nothing is. Throws std::invalid_argument for another name.
void force_plan(const std::string& name);

/// The kind that is forced, if one is.
std::optional<PlanKind> forced_plan();

/// Layout of a chunk's partial gradient, in numbers, which of runs as lanes are registers, and of
/// samples as lanes sums over them: for all heads the part by W (or that by Q and
/// then that by K; or, if the query is shared, D X; nothing where D X of all rows is kept), then
/// that by U or V. Of words: the sum of D
/// over all pairs of a key word and a query word (or, if the query is shared, row), then that of A
/// over key words and query rows, or of a layer A^T G over key words and outputs. Of attended
/// tokens: for each output a row of features (see attended.hpp), of which a head's begin
/// `readout_head` numbers after those of the head before, and a register that reads beyond the last
/// row may take. Of products: for each entry of M a row of pairs, see products.hpp. Of projections
/// all parts are transposed, with features along the rows.
struct PartialGradient {
  std::ptrdiff_t weight_row, readout_row;  // of d (or r) numbers; of d, or of a layer's p
  std::ptrdiff_t weight_head, readout_head, readout_at, size;
};
PartialGradient partial_gradient(const Shape& shape, PlanKind kind, int lanes);

}  // namespace mhfast
