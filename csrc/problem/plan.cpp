#include "plan.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>
#include <tuple>

#include "../runtime/tuning.hpp"
#include "attended.hpp"
#include "products.hpp"
#include "readout.hpp"

namespace mhfast {
namespace {

std::atomic<int> forced{-1};

/// Softmax, readout and derivative of `columns` vectors over T keys; slower if they exceed the
/// caches.
double softmax_cycles(double columns, double T, int bytes, int lanes) {
  const double size = 2 * columns * T * bytes * lanes;
  const double a_vector = bytes == 4 ? kSoftmaxCycles32 : kSoftmaxCycles64;
  return columns * T *
         (a_vector + (size > kFirstLevelBytes ? kFirstLevelCycles : 0) +
          (size > kSecondLevelBytes ? kSecondLevelCycles : 0));
}

/// Query rows of a tile: as many as keep its weights in the second-level cache; causal ones few, as
/// a tile goes through the keys that its last row sees.
int tile_rows(const Shape& s, int bytes, int lanes) {
  const int fitting = int(kTileBytes / (2.0 * s.T * bytes)) / lanes;
  const int most = s.causal ? std::min(fitting, kCausalTileVectors) : fitting;
  return int(std::min<std::ptrdiff_t>(std::max(most, 1) * lanes, round_up(s.q, lanes)));
}

/// Query rows of a layer's sample that go together where rows are the lanes. A prompt's product
/// with W has all of its rows.
int layer_tile(const Shape& s, int bytes, int lanes) {
  return s.shared_query ? s.q : std::min(tile_rows(s, bytes, lanes), s.q);
}

/// Whether A of all heads of such a tile is kept until the loss is known.
bool keeps_layer_weights(const Shape& s, int bytes, int lanes) {
  const double rows = double(round_up(layer_tile(s, bytes, lanes), lanes));
  return s.H * rows * s.T * bytes <= kSlabBytes;
}

/// Bytes of A and D of all heads, for a block of samples or for a sample.
double weights_bytes(const Shape& s, bool samples_are_lanes, int bytes, int lanes) {
  const double rows = samples_are_lanes ? double(s.q) * lanes : double(round_up(s.q, lanes));
  return 2.0 * s.H * s.T * rows * bytes;
}

/// Predicted cycles of one head.
struct Cost {
  const Shape s;
  const Registers& registers;
  const int bytes = registers.bytes, L = registers.lanes;
  // Whether there are products with W and with V, and derivatives by the logits: 1 or 0.
  const double W = !s.identity_w, V = !s.identity_v, D = !s.identity_w || s.shared_query;

  /// Registers that hold so many numbers.
  double vectors(std::ptrdiff_t size) const { return std::ceil(double(size) / L); }

  double scores_samples() const {  // for a block
    return kept(true, queries(s.q) + product_of_samples(s.T, s.d, true) +
                          product_of_samples(s.T, s.d) + softmax_cycles(s.q, s.T, bytes, L));
  }
  double scores_rows() const {  // for a sample
    const double N = vectors(s.q);
    return kept(false,
                queries(N) + 2 * product_cycles(s.T, N, s.d) + softmax_cycles(N, s.T, bytes, L));
  }
  double gradients_samples() const {  // for a block
    return (1 + D) * product_of_samples(s.d, s.T, true) + by_queries(s.q);
  }
  double gradients_features() const {  // for a sample
    const double N = vectors(s.d);
    return (1 + D) * product_cycles(s.q, N, s.T) + by_queries_of_rows(s.q);
  }
  double gradients_hybrid() const {  // for a sample
    return (1 + D) * product_of_samples(vectors(s.d), s.T) + by_queries_of_rows(s.q) +
           (s.q == 1 ? copied_keys() : 0);
  }
  /// For a block of samples, or of a sample of `lanes` runs, whose heads never go together.
  double layer(bool of_runs = false) const {
    return layer_but_keys(of_runs) + D * layer_product(s.d, s.T, of_runs) + by_queries(s.q);
  }
  double layer_hybrid() const {  // for a block
    const double samples = std::min<double>(L, double(s.n)), N = vectors(s.d);
    const bool factors = has_factor_gradients(s, PlanKind::kHybrid, L);
    const double of_head = (factors ? kFactorKeyCycles : kKeyCycles) * s.T * N;
    const double keys = s.q == 1 ? of_head - kKeyCycles * s.T * N + copied_keys() : of_head;
    return layer_but_keys() +
           samples * (D * product_of_samples(N, s.T) + by_queries_of_rows(s.q) + keys);
  }
  double layer_rows() const {  // for a sample
    const int rows = layer_tile(s, bytes, L);
    const double N = vectors(rows), F = vectors(s.d), P = vectors(s.p);
    const double keys = seen_keys(rows);
    const bool keys_first = has_keys_first(s);
    const double scores = (keys_first ? product_cycles(s.rank, N, s.d) : queries(N)) +
                          product_cycles(keys, N, keys_first ? s.rank : s.d) +
                          softmax_cycles(N, keys, bytes, L);
    const double readout = has_values_first(s, bytes, L)
                               ? product_cycles(s.p, N, keys) + D * product_cycles(keys, N, s.p) +
                                     product_cycles(keys, P, rows) + product_cycles(s.p, F, keys)
                               : product_cycles(s.d, N, keys) + V * product_cycles(rows, P, s.d) +
                                     V * D * product_cycles(s.d, N, s.p) +
                                     D * product_cycles(keys, N, s.d) +
                                     V * product_cycles(s.d, P, rows) + 2 * N * s.d;
    const double a_tile =
        (keeps_layer_weights(s, bytes, L) ? 1 : 1 + D) * scores + readout +
        (keys_first ? by_keys(rows, keys)
                    : D * product_cycles(rows, F, keys) + by_queries_of_rows(rows));
    return std::ceil(double(s.q) / rows) * a_tile + of_keys(keys_first);
  }
  double projections() const {  // for a block
    const double samples = std::min<double>(L, double(s.n)), T = s.T, q = s.q;
    const double r = s.rank, c = projected_columns(s), columns = T * (r + c) + q * r;
    const double before = product_cycles(2 * r + c, vectors(std::ptrdiff_t(samples * T)), s.d);
    const double after = product_cycles(2 * r + c, vectors(s.d), samples * T);
    const double of_weights = q * T * (3 * r + 3 * c) * kLanedProductCycles;
    return before + after + of_weights + kGatherCycles * samples * columns +
           softmax_cycles(q, T, bytes, L);
  }
  /// Of a row of attended tokens: outputs, their losses, and the gradient.
  double attended() const {
    const double vectors = this->vectors(AttendedRows(s, L).size), p = s.row_outputs();
    return 2 * p * vectors * kLanedProductCycles + p * kOutputCycles;
  }
  /// Of products, for a block: M, and the gradient by its tensor; outputs, and the gradient by M.
  double products() const {
    const ProductSizes of(s, L);
    return kTransposeCycles * double(of.pairs) + product_cycles(of.entries, 1, double(of.pairs)) +
           product_cycles(of.entries, double(of.row) / L, L) + product_cycles(s.p, s.q, s.d, true) +
           product_cycles(s.d, s.p, s.q, true);
  }
  /// Then of a step, whatever the number of samples: the tensor, and the gradients by its factors.
  double tensor() const {
    const ProductSizes of(s, L);
    return s.d * product_cycles(s.d * s.p, vectors(s.d), s.H) +
           2 * product_cycles(s.H, vectors(s.d), of.entries * s.d) +
           kTensorCycles * of.entries * s.d * s.d;
  }
  double words() const {  // for a sample
    const double N = vectors(s.q),
                 values = s.is_layer() ? 4 * product_cycles(s.T, vectors(s.p), s.q) : 0;
    return kept(false, softmax_cycles(N, s.T, bytes, L)) + kWordCycles * s.q * s.T + values;
  }
  double runs() const {  // for a sample of `lanes` runs
    const double gradient = W * s.d * s.d + double(s.q) * s.d;
    const bool fits = s.H * gradient * bytes * L <= kRunGradientBytes;
    return (fits ? 0 : kGradientCycles * gradient) + W * product_cycles(s.d, s.q, s.d, true) +
           2 * product_cycles(s.q, s.T, s.d, true) + softmax_cycles(s.q, s.T, bytes, L) +
           (1 + D) * product_cycles(s.q, s.d, s.T, true) + by_queries(s.q);
  }
  double tiles() const {  // for a sample
    const int rows = tile_rows(s, bytes, L);
    const double N = vectors(rows), F = vectors(s.d);
    const double keys = seen_keys(rows);
    const bool keys_first = has_keys_first(s);
    const double products = keys_first
                                ? product_cycles(s.rank, N, s.d) + product_cycles(keys, N, s.rank) +
                                      product_cycles(keys, N, s.d) + product_cycles(N * L, F, keys)
                                : queries(N) + product_cycles(keys, 2 * N, s.d) +
                                      product_cycles((1 + W) * N * L, F, keys) +
                                      by_queries_of_rows(rows, PlanKind::kTiles);
    const double a_tile = products + (keys_first ? by_keys(rows, keys) : 0) +
                          softmax_cycles(N, keys, bytes, L) + s.d * (N + F);
    const double packing = 2.0 * s.T * s.d;
    const double gradient = double(partial_gradient(s, PlanKind::kTiles, L).size) / (s.H * L);
    return packing + std::ceil(double(s.q) / rows) * a_tile + 2 * gradient + of_factors(keys_first);
  }

 private:
  /// What is done once for a sample's keys: packing, and products of all of them.
  double of_keys(bool keys_first) const {
    const double T = vectors(s.T);
    const double values = has_values_first(s, bytes, L) ? product_cycles(s.p, T, s.d) : 0;
    return values + of_factors(keys_first) + 2.0 * s.T * s.d / s.H;
  }
  double of_factors(bool keys_first) const {
    if (!keys_first) return 0;
    return product_cycles(s.rank, vectors(s.T), s.d) + product_cycles(s.d, vectors(s.rank), s.T);
  }
  /// Of so many rows, what the gradients by factors take from D where keys go through these.
  double by_keys(double rows, double keys) const {
    if (!has_gradients_of_keys(s, L))
      return product_cycles(rows, vectors(s.d), keys) + by_queries_of_rows(rows, PlanKind::kTiles);
    const double F = vectors(s.rank);
    return 2 * product_cycles(rows, F, keys) + product_cycles(s.d, F, rows);
  }
  /// Keys that a tile of so many rows goes through, on average.
  double seen_keys(int rows) const {
    return s.causal ? std::min<double>(s.T, (s.q + std::min(rows, s.q)) / 2.0) : s.T;
  }
  /// All of a layer with samples or runs as lanes but D X and what it is multiplied with.
  double layer_but_keys(bool of_runs = false) const {
    const double rows = s.q, p = s.p;
    return queries(rows) + (1 + D) * layer_product(s.T, s.d, of_runs) +
           softmax_cycles(rows, s.T, bytes, L) + layer_product(s.d, s.T, of_runs) +
           V * product_cycles(p, rows, s.d) + V * D * product_cycles(s.d, rows, p) +
           V * product_cycles(s.d, p, rows, true);
  }
  /// Z W, or (Z Q) K^T, of so many vectors of query rows.
  double queries(double N) const {
    if (s.rank > 0) return product_cycles(s.rank, N, s.d) + product_cycles(s.d, N, s.rank);
    const double bytes_of_W = W * s.d * s.d * bytes;
    const double read = bytes_of_W > kSecondLevelBytes ? bytes_of_W / kStreamBytes : 0;
    return W * product_cycles(s.d, N, s.d) + read;
  }
  /// A copy of a sample's keys by features, which is one for all heads.
  double copied_keys() const { return kKeyCycles * s.T * vectors(s.d) / s.H; }
  /// Z^T D X, or the gradients by Q and K from D X: of rows of vectors of problems; then of rows
  /// that are not, whose features are the lanes, and which are transposed for it.
  double by_queries(double rows) const {
    if (!has_factor_gradients(s, PlanKind::kSamples, L))
      return W * product_cycles(s.d, s.d, rows, true);
    return 2 * (product_cycles(s.rank, rows, s.d) + product_cycles(s.d, s.rank, rows, true));
  }
  double by_queries_of_rows(double rows, PlanKind kind = PlanKind::kRows) const {
    if (has_row_gradients(s, kind)) {
      const double all = double(s.n) * s.q;
      return product_cycles(s.d, vectors(s.d), all) * rows / all;
    }
    if (!has_factor_gradients(s, PlanKind::kRows, L))
      return W * product_cycles(s.d, vectors(s.d), rows);
    const double F = vectors(s.rank);
    return 2 * (product_cycles(rows, F, s.d) + product_cycles(s.d, F, rows) +
                kTransposeCycles * rows * vectors(s.d));
  }
  /// The product of a head's query rows where samples are lanes; of one row all heads go together.
  double layer_product(double N, double K, bool of_runs) const {
    return of_runs ? product_cycles(s.q, N, K, true) : product_of_samples(N, K, true);
  }
  double product_of_samples(double N, double K, bool laned = false) const {
    const double heads = s.q == 1 ? s.H : 1;
    return product_cycles(s.q * heads, N, K, laned) / heads;
  }
  /// A product of M rows, N vectors and depth K, in the tiles of kernels/product.hpp.
  double product_cycles(double M, double N, double K, bool laned = false) const {
    const TileSizes& tile = registers.tiles;
    const double columns = std::ceil(N / tile.columns), width = std::ceil(N / columns);
    const double height = std::min(std::floor(tile.accumulators / width), double(tile.rows));
    const double rows = std::ceil(M / height);
    return M * N * K * (laned ? kLanedProductCycles : kSharedProductCycles) +
           kTileCycles * rows * columns + kStoreCycles * M * N;
  }
  /// Scores whose weights are kept until the loss is known, perhaps beyond the second-level cache,
  /// or else are computed twice.
  double kept(bool samples_are_lanes, double cycles) const {
    const double size = weights_bytes(s, samples_are_lanes, bytes, L);
    if (size > kKeepBytes) return 2 * cycles;
    return cycles + (size > kSecondLevelBytes ? 2 * size / s.H / kStreamBytes : 0);
  }
};

/// Chunks of a plan whose units, `units` of them, take so many cycles; `summed` for each chunk to
/// sum over lanes.
int count_chunks(double units, double cycles, double partial_bytes, double summed) {
  const double affordable = kReductionShare * cycles / (2 * partial_bytes / kCopyBytes + summed);
  const double wanted =
      std::clamp(affordable, std::min(kFewChunks, cycles / kChunkCycles), kManyChunks);
  return int(std::max(1.0, std::min({units, wanted, kPartialBytes / partial_bytes})));
}

/// Cycles of a loss and gradient by each kind of plan, infinite where it does not apply, and the
/// chunks that it has.
struct Prediction {
  double cycles[kPlanKinds];
  int chunks[kPlanKinds];

  Prediction() {
    std::fill_n(cycles, kPlanKinds, std::numeric_limits<double>::infinity());
    std::fill_n(chunks, kPlanKinds, 1);
  }

  /// With so many units of so many cycles in all; adds what chunks cost.
  void set(PlanKind kind, const Cost& cost, double units, double of_units) {
    const PartialGradient part = partial_gradient(cost.s, kind, cost.L);
    const double size = double(part.size);
    const double summed = kind == PlanKind::kSamples ? kLaneSumCycles * size : 0;
    const int count = count_chunks(units, of_units, size * cost.bytes, summed);
    chunks[int(kind)] = count;
    cycles[int(kind)] = of_units + count * (kBeginCycles + size * cost.bytes / kCopyBytes + summed);
  }
};

/// Runs that are lanes multiply factors out.
Shape dense(const Shape& s) {
  Shape shape = s;
  shape.rank = 0;
  return shape;
}

/// Of words there is one plan.
Prediction predict_words(const Shape& s, const Cost& cost, double units) {
  Prediction result;
  result.set(PlanKind::kWords, cost, units, s.H * double(s.n) * cost.words());
  return result;
}

/// Query rows of a layer at a time: all, unless the weights of one unit would exceed the cache.
int layer_rows(const Shape& s, int bytes, int lanes) {
  const double a_row = double(s.H) * s.T * lanes * bytes;
  return int(std::clamp(kSlabBytes / a_row, 1.0, double(s.q)));
}

Prediction predict_layer(const Shape& s, const Cost& cost) {
  const double n = double(s.n), H = s.H, blocks = cost.vectors(s.n);
  const double parts = std::ceil(double(s.q) / layer_tile(s, cost.bytes, cost.L));
  if (s.words > 0) return predict_words(s, cost, n * parts);
  Prediction result;
  if (has_values_first(s, cost.bytes, cost.L) || has_keys_first(s)) {
    result.set(PlanKind::kRows, cost, n * parts, H * n * cost.layer_rows());
    return result;
  }
  result.cycles[int(PlanKind::kRuns)] = H * n * Cost{dense(s), cost.registers}.layer(true) / cost.L;
  if (has_projections(s)) {
    result.set(PlanKind::kHybrid, cost, blocks, H * blocks * cost.projections());
    return result;
  }
  result.set(PlanKind::kSamples, cost, blocks, H * blocks * cost.layer());
  if (layer_rows(s, cost.bytes, cost.L) == s.q)
    result.set(PlanKind::kHybrid, cost, blocks, H * blocks * cost.layer_hybrid());
  result.set(PlanKind::kRows, cost, n * parts, H * n * cost.layer_rows());
  return result;
}

Prediction predict_classifier(const Shape& s, const Cost& cost) {
  const double n = double(s.n), H = s.H, blocks = cost.vectors(s.n);
  if (s.words > 0) return predict_words(s, cost, n);
  Prediction result;
  if (has_keys_first(s)) {
    result.cycles[int(PlanKind::kTiles)] = H * n * (kBeginCycles + cost.tiles());
    return result;
  }
  result.cycles[int(PlanKind::kRuns)] = H * n * Cost{dense(s), cost.registers}.runs() / cost.L;
  if (has_projections(s)) {
    result.set(PlanKind::kHybrid, cost, blocks, H * blocks * cost.projections());
    return result;
  }
  const auto fits = [&](PlanKind kind) {
    const bool samples_are_lanes = kind != PlanKind::kRows;
    return s.shared_query ||
           weights_bytes(s, samples_are_lanes, cost.bytes, cost.L) / H <= kUnitBytes;
  };
  if (fits(PlanKind::kSamples)) {
    const double scores = blocks * cost.scores_samples();
    result.set(PlanKind::kSamples, cost, blocks, H * (scores + blocks * cost.gradients_samples()));
    result.set(PlanKind::kHybrid, cost, blocks, H * (scores + n * cost.gradients_hybrid()));
  }
  if (fits(PlanKind::kRows))
    result.set(PlanKind::kRows, cost, n, H * n * (cost.scores_rows() + cost.gradients_features()));
  if (!s.shared_query) result.cycles[int(PlanKind::kTiles)] = H * n * (kBeginCycles + cost.tiles());
  return result;
}

/// Units whose weights are held at a time: as many as fit into the cache for all heads, but no more
/// than needed to amortise the accumulators of a gradient.
int slab_units(double weights, double rows) {
  return int(
      std::max(1.0, std::min(std::floor(kSlabBytes / weights), std::ceil(kSlabRows / rows))));
}

/// Heads that go together: of one query row all, so that products with the keys have several rows.
int heads_together(const Shape& s, PlanKind kind) {
  const bool samples_are_lanes = kind == PlanKind::kSamples || kind == PlanKind::kHybrid;
  return samples_are_lanes && s.q == 1 ? s.H : 1;
}

void size_tiles(const Shape& s, int bytes, int lanes, Plan& plan) {
  plan.tile = tile_rows(s, bytes, lanes);
  plan.parts = (s.q + kPartRows - 1) / kPartRows;
  const PartialGradient part = partial_gradient(s, PlanKind::kTiles, lanes);
  const double gradients =
      double(s.H) * bytes * (double(part.weight_head) * plan.parts + double(part.readout_head));
  plan.slab = int(std::max(1.0, std::min(double(s.n), kTileGradientBytes / gradients)));
}

void size_layer_rows(const Shape& s, int bytes, int lanes, Plan& plan) {
  plan.tile = layer_tile(s, bytes, lanes);
  plan.parts = (s.q + plan.tile - 1) / plan.tile;
  plan.units = s.n * plan.parts;
  plan.keep = keeps_layer_weights(s, bytes, lanes);
  plan.slab = 1;
}

void size_slabs(const Shape& s, int bytes, int lanes, Plan& plan) {
  const double weights = weights_bytes(s, plan.problems_are_lanes(), bytes, lanes);
  plan.keep = weights <= kKeepBytes;
  plan.tile = s.q;
  plan.slab = slab_units(weights, plan.problems_are_lanes() ? double(s.q) * lanes : s.q);
}

void size_classifier(const Shape& s, int bytes, int lanes, Plan& plan) {
  if (plan.kind == PlanKind::kTiles) return size_tiles(s, bytes, lanes, plan);
  size_slabs(s, bytes, lanes, plan);
  if (plan.keep) plan.heads = heads_together(s, plan.kind);
}

void size_layer(const Shape& s, int bytes, int lanes, Plan& plan) {
  if (plan.kind == PlanKind::kRows || plan.kind == PlanKind::kWords)
    return size_layer_rows(s, bytes, lanes, plan);
  size_slabs(s, bytes, lanes, plan);
  plan.keep = true;
  plan.tile = has_projections(s) ? s.q : layer_rows(s, bytes, lanes);
  if (plan.tile < s.q) plan.slab = 1;
  if (weights_bytes(s, true, bytes, lanes) <= kKeepBytes) plan.heads = heads_together(s, plan.kind);
}

Prediction predict_attended(const Shape& s, const Cost& cost) {
  const double rows = double(AttendedRows(s, cost.L).count);
  Prediction result;
  result.set(PlanKind::kAttended, cost, rows, rows * cost.attended());
  return result;
}

void size_attended(const Shape& s, int bytes, int lanes, Plan& plan) {
  const AttendedRows rows(s, lanes);
  plan.units = rows.count;
  plan.keep = true;
  plan.tile = 1;
  const double row = double(rows.size) * bytes, sums = double(s.row_outputs()) * lanes * bytes;
  const double fitting = std::min(kSlabBytes / row, kTileBytes / sums);
  plan.slab = int(std::clamp(fitting, double(lanes), double(kSlabRows)));
}

Prediction predict_products(const Shape& s, const Cost& cost) {
  const double blocks = cost.vectors(s.n);
  Prediction result;
  result.set(PlanKind::kProducts, cost, blocks, blocks * cost.products());
  result.cycles[int(PlanKind::kProducts)] += cost.tensor();
  return result;
}

void size_products(const Shape& s, int bytes, int lanes, Plan& plan) {
  const double block = double(ProductSizes(s, lanes).pairs) * lanes * bytes;
  plan.keep = true;
  plan.tile = s.q;
  plan.slab = int(std::clamp(kProductSlabBytes / block, 1.0, kProductBlocks));
}

/// What a plan is made by: predicted cycles of all kinds, and sizes of the chosen one.
struct Planner {
  Prediction (*predict)(const Shape&, const Cost&);
  void (*size)(const Shape&, int bytes, int lanes, Plan&);
};

const Planner& planner_of(const Shape& s) {
  static constexpr Planner classifier{predict_classifier, size_classifier};
  static constexpr Planner layer{predict_layer, size_layer};
  static constexpr Planner attended{predict_attended, size_attended};
  static constexpr Planner products{predict_products, size_products};
  if (s.attended) return attended;
  if (s.products) return products;
  return s.is_layer() ? layer : classifier;
}

/// The prediction, cached for the next call and the next loop of the same shape.
const Prediction& prediction(const Shape& s, const Registers& registers) {
  struct Kept {
    Shape shape{};
    Registers registers{};
    Prediction prediction;

    auto key() const {
      return std::tie(shape.n, shape.T, shape.q, shape.d, shape.H, shape.p, shape.shared_query,
                      shape.identity_w, shape.identity_v, shape.words, shape.causal, shape.rank,
                      shape.attended, shape.products, registers.bytes, registers.lanes,
                      registers.tiles.accumulators);
    }
  };
  thread_local std::unique_ptr<Kept> last;  // on the heap, as thread-local storage is small
  if (!last) last = std::make_unique<Kept>();
  Kept& kept = *last;
  Kept asked;
  asked.shape = s;
  asked.registers = registers;
  if (asked.key() != kept.key()) {
    asked.prediction = planner_of(s).predict(s, Cost{s, registers});
    kept = asked;
  }
  return kept.prediction;
}

/// The kind for one run that is predicted to be fastest, or the forced one.
PlanKind choose(const double (&cycles)[kPlanKinds]) {
  constexpr int kKinds = int(PlanKind::kRuns);
  const int choice = forced.load(std::memory_order_relaxed);
  if (choice >= 0 && choice < kKinds && std::isfinite(cycles[choice])) return PlanKind(choice);
  return PlanKind(std::min_element(cycles, cycles + kKinds) - cycles);
}

/// Predicted cycles of a step of each of `runs` runs that are lanes.
double cycles_of_lanes(const Prediction& predicted, const Registers& registers,
                       std::ptrdiff_t runs) {
  const int lanes = registers.lanes;
  // Lanes without a run are idle.
  const double idle = double(round_up(runs, lanes)) / double(runs);
  return (predicted.cycles[int(PlanKind::kRuns)] + kLanesStepCycles / lanes) * idle;
}

/// Of one of `runs` runs, from the tokens.
double cycles_of_step(const Prediction& predicted, const Shape& s, const Registers& registers,
                      std::ptrdiff_t runs) {
  return prefers_runs(s, registers, runs)
             ? cycles_of_lanes(predicted, registers, runs)
             : predicted.cycles[int(choose(predicted.cycles))] + kStepCycles;
}

}  // namespace

const char* plan_name(PlanKind kind) {
  switch (kind) {
    case PlanKind::kSamples:
      return "samples";
    case PlanKind::kHybrid:
      return "hybrid";
    case PlanKind::kRows:
      return "rows";
    case PlanKind::kTiles:
      return "tiles";
    case PlanKind::kWords:
      return "words";
    case PlanKind::kAttended:
      return "attended";
    case PlanKind::kProducts:
      return "products";
    case PlanKind::kRuns:
      break;
  }
  return "runs";
}

void force_plan(const std::string& name) {
  for (int kind = 0; kind < kPlanKinds; ++kind)
    if (name == plan_name(PlanKind(kind))) return forced.store(kind);
  if (name != "auto")
    throw std::invalid_argument(
        "plan: expected samples, hybrid, rows, tiles, words, attended, products, runs or auto, got "
        "'" +
        name + "'");
  forced.store(-1);
}

std::optional<PlanKind> forced_plan() {
  const int choice = forced.load(std::memory_order_relaxed);
  return choice >= 0 ? std::optional(PlanKind(choice)) : std::nullopt;
}

bool prefers_factors(const Shape& s) {
  return s.rank > 0 && s.words == 0 && kFactorColumns * s.rank <= s.d;
}

bool has_values_first(const Shape& s, int bytes, int lanes) {
  if (!s.is_layer() || s.identity_v || s.words > 0 || s.attended || s.shared_query) return false;
  if (s.T < kLongTokens || s.q < kLongTokens) return false;
  return 2 * round_up(s.p, lanes) <= s.d && 2 * s.p <= layer_tile(s, bytes, lanes);
}

bool has_keys_first(const Shape& s) {
  if (s.rank == 0 || s.words > 0 || s.attended || s.shared_query) return false;
  return s.T >= kLongTokens && s.q >= kLongTokens;
}

bool has_projections(const Shape& s) {
  if (s.rank == 0 || s.words > 0 || s.attended || s.shared_query || s.identity_v) return false;
  if (s.q < 2 || has_keys_first(s)) return false;
  return s.d >= kProjectedFeatures && std::ptrdiff_t(s.T) * s.q <= kProjectedWeights &&
         projected_columns(s) <= s.d / kFactorColumns;
}

bool has_gradients_of_keys(const Shape& s, int lanes) {
  return has_keys_first(s) && kFactorColumns * round_up(s.rank, lanes) <= round_up(s.d, lanes);
}

bool has_factor_gradients(const Shape& s, PlanKind kind, int lanes) {
  if (s.rank == 0 || s.shared_query) return false;
  if (features_are_lanes(kind) && (has_gradients_of_keys(s, lanes) || has_projections(s)))
    return true;
  if (!features_are_lanes(kind)) return kGradientColumns * s.rank <= s.d;
  const double of_factor = double(kGradientColumns * round_up(s.rank, lanes));
  return of_factor + kTransposeCycles / kSharedProductCycles * 2 <= round_up(s.d, lanes);
}

bool has_row_gradients(const Shape& s, PlanKind kind) {
  if (kind != PlanKind::kHybrid && kind != PlanKind::kRows) return false;
  if (s.shared_query || s.identity_w || s.rank > 0) return false;
  const double rows = double(s.n) * s.q, bytes = s.H * rows * s.d * sizeof(double);
  return rows <= s.d || (rows <= kRowGradients * s.d && bytes <= kPartialBytes);
}

std::ptrdiff_t row_gradient_size(const Shape& s, int lanes) { return odd_vectors(s.d, lanes); }

PartialGradient partial_gradient(const Shape& s, PlanKind kind, int lanes) {
  const auto row = [&](int size) {
    return features_are_lanes(kind)  ? round_up(size, lanes)
           : kind == PlanKind::kRuns ? std::ptrdiff_t(size) * lanes
                                     : std::ptrdiff_t(size);
  };
  const Readout readout = readout_of(s);
  PartialGradient part{};
  if (kind == PlanKind::kAttended) {
    const AttendedRows rows(s, lanes);
    part.readout_row = rows.size;
    part.readout_head = rows.features_of_head;
    part.size = rows.size * s.row_outputs() + lanes;
    return part;
  }
  if (kind == PlanKind::kProducts) {
    const ProductSizes of(s, lanes);
    part.readout_row = of.row;
    part.size = of.entries * of.row + lanes;
    return part;
  }
  if (kind == PlanKind::kWords) {
    part.weight_row = row(s.shared_query ? s.q : s.words);
    part.readout_row = row(s.is_layer() ? s.p : s.q);
    part.weight_head = s.words * part.weight_row;
    part.readout_head = s.words * part.readout_row;
  } else {
    const bool factors = has_factor_gradients(s, kind, lanes);
    const bool transposed = kind == PlanKind::kHybrid && has_projections(s);
    part.weight_row = row(factors ? s.rank : s.d);
    part.readout_row = row(readout.columns);
    if (s.is_layer() && kind == PlanKind::kHybrid) part.readout_row = readout.columns;
    part.weight_head = (s.shared_query                               ? s.q
                        : s.identity_w || has_row_gradients(s, kind) ? 0
                        : factors                                    ? 2 * s.d
                                                                     : s.d) *
                       part.weight_row;
    part.readout_head = readout.rows * part.readout_row;
    if (transposed) {
      part.weight_row = part.readout_row = row(s.d);
      part.weight_head = 2 * s.rank * part.weight_row;
      part.readout_head = projected_columns(s) * part.readout_row;
    }
  }
  part.readout_at = round_up(s.H * part.weight_head, lanes);
  part.size = round_up(part.readout_at + s.H * part.readout_head, lanes) + lanes;
  return part;
}

bool prefers_runs(const Shape& s, const Registers& registers, std::ptrdiff_t runs) {
  if (runs < 2 || s.words > 0 || s.attended || s.products) return false;
  const int choice = forced.load(std::memory_order_relaxed);
  if (choice >= 0) return PlanKind(choice) == PlanKind::kRuns;
  const Prediction& predicted = prediction(s, registers);
  return cycles_of_lanes(predicted, registers, runs) <
         predicted.cycles[int(choose(predicted.cycles))] + kStepCycles;
}

bool prefers_attended(const Shape& s, const Registers& registers, std::ptrdiff_t runs) {
  const int choice = forced.load(std::memory_order_relaxed);
  if (choice >= 0) return PlanKind(choice) == PlanKind::kAttended;
  const Prediction& predicted = prediction(s, registers);
  const double from_tokens = cycles_of_step(predicted, s, registers, runs);
  Shape attended = s;
  attended.attended = true;
  return prediction(attended, registers).cycles[int(PlanKind::kAttended)] + kStepCycles <
         from_tokens;
}

bool prefers_products(const Shape& s, const Registers& registers, std::ptrdiff_t runs) {
  if (!ProductSizes::exist(s)) return false;
  const int choice = forced.load(std::memory_order_relaxed);
  if (choice >= 0) return PlanKind(choice) == PlanKind::kProducts;
  const double from_tokens = cycles_of_step(prediction(s, registers), s, registers, runs);
  const Shape products = of_products(s);
  return prediction(products, registers).cycles[int(PlanKind::kProducts)] + kStepCycles <
         from_tokens;
}

Plan make_plan(const Shape& s, const Registers& registers, bool runs_are_lanes) {
  const int lanes = registers.lanes;
  const Prediction& predicted = prediction(s, registers);
  Plan plan{};
  std::copy_n(predicted.cycles, kPlanKinds, plan.cycles);
  plan.kind = runs_are_lanes ? PlanKind::kRuns : choose(plan.cycles);
  plan.heads = 1;
  plan.chunks = predicted.chunks[int(plan.kind)];  // runs: each block belongs to one thread
  plan.units = plan.samples_are_lanes() ? round_up(s.n, lanes) / lanes : s.n;
  planner_of(s).size(s, registers.bytes, lanes, plan);
  return plan;
}

}  // namespace mhfast
