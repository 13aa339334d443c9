// How a pass goes over the data: what every plan has in common, and the interface of its strategy.
//
//   plan                           strategy
//   samples, hybrid, rows, runs    ClassifierSlabs, LayerSlabs    a slab of samples at a time
//   tiles                          TilePass                       long sequences of a classifier
//   rows of a layer                LayerRowPass                   a tile of query rows at a time
//   words                          ClassifierSlabs, LayerRowPass  as rows
//   attended                       AttendedPass                   rows of attended tokens
//   products                       ProductPass                    products of tokens
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "../dispatch/dispatch.hpp"
#include "gradient_scales.hpp"
#include "loaded_model.hpp"
#include "loss_weights.hpp"
#include "own_loss.hpp"
#include "partial_gradients.hpp"

namespace mhfast {

/// What an engine and its strategy share. In a pass a member writes the totals, scales and partial
/// gradients of the chunks that it works on, and the outputs of their samples.
template <class real>
struct PassState {
  const Kernels<real>& kernels;
  const Data<real> data;
  const std::optional<Loss> loss;  // none where only outputs are requested
  const PassOptions options;
  const Plan plan;
  const LaneLayout lanes;
  const int width;    // runs of the engine: one, or as many as lanes
  const int threads;  // that may take part in a pass

  LossShares shares;
  OwnLossPass own;
  LoadedModel<real> model;
  PartialGradients<real> gradients;
  GradientScales scales;
  std::vector<LaneTotals> totals;     // by chunk
  bool totals_wanted = true;          // else loss only tells whether it is finite
  real* outputs = nullptr;            // (n,) or (n, q, p), or null
  real *gx = nullptr, *gz = nullptr;  // gradients by tokens and by an external query, or null
  real* attention = nullptr;          // weights (n, H, q, T), see Engine; or null
  std::function<bool()> interrupted;  // see Engine::on_chunk

  PassState(const Data<real>& data, std::optional<Loss> loss, const PassOptions& options,
            const Plan& plan, int threads);

  /// Of samples from `sample` on, with query rows from `row` on; none where tokens are not words.
  WordsOfUnits words_of(std::ptrdiff_t sample, int row) const {
    WordsOfUnits words;
    if (!data.has_words()) return words;
    const Shape& s = data.shape;
    words.keys = data.keys + sample * s.T;
    words.keys_unit = s.T;
    words.queries = data.queries ? data.queries + sample * s.q + row : nullptr;
    words.queries_unit = s.q;
    words.row = model.tables().row;
    return words;
  }
  std::ptrdiff_t sample_of(const Slab<real>& slab, int entry) const {
    return slab.first_sample + entry / lanes.entries_in_sample;
  }
  /// Lanes beyond the last run repeat it.
  int run_of(int entry) const { return std::min(entry % lanes.entries_in_sample, data.runs - 1); }
  /// Entries of a slab, pairs of a sample and a run's lane; and with those of lanes without a
  /// sample, in whole vectors.
  int entries(const Slab<real>& slab) const { return slab.samples * lanes.entries_in_sample; }
  int entries_held(const Slab<real>& slab) const {
    return lanes.laned ? slab.units * lanes.lanes : int(round_up(slab.units, lanes.lanes));
  }
};

/// A data set in the layout that a strategy reads; engines of one plan and data share one.
template <class real>
struct Packed {
  AlignedBuffer block;
  real *x, *z, *y;
};

template <class real>
class Strategy {
 public:
  virtual ~Strategy() = default;

  /// Takes the scratch of all threads.
  virtual void lay_out(Arena& layout) = 0;

  /// A member's heads of what the strategy needs of the parameters besides LoadedModel.
  virtual void load(const Parameters<real>&, const Member&) {}

  /// Reads labels and weights of samples `first` to `last` again.
  virtual void read_samples(std::ptrdiff_t, std::ptrdiff_t) {}

  /// Memory for the data packed, or null where they are packed anew in every pass.
  virtual std::shared_ptr<Packed<real>> make_packed() const { return nullptr; }
  virtual void use_packed(const std::shared_ptr<Packed<real>>&) {}
  /// A member's part of the packing.
  virtual void pack_all(const Member&) {}

  /// One member's call before a further pass, when the last one is complete.
  virtual void restart() = 0;
  /// Every member's call.
  virtual void run(Pass pass, const Member& member) = 0;
};

/// A strategy whose units belong to chunks: any thread may take any chunk.
template <class real>
class ChunkPass : public Strategy<real> {
 public:
  void restart() final { next_chunk_.store(0, std::memory_order_relaxed); }
  void run(Pass pass, const Member& member) override;

 protected:
  explicit ChunkPass(PassState<real>& state) : state_(state) {}

  /// Works on units `first` to `last`, which are chunk `chunk`, in the scratch of thread `thread`.
  virtual void run_units(Pass pass, int chunk, std::ptrdiff_t first, std::ptrdiff_t last,
                         int thread) = 0;

  PassState<real>& state_;

 private:
  std::atomic<int> next_chunk_{0};
};

/// The strategy of the state's plan.
template <class real>
std::unique_ptr<Strategy<real>> make_strategy(PassState<real>& state);

}  // namespace mhfast
