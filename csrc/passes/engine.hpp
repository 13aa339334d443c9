// One pass over the data of a model: outputs, loss and gradients.
//
//   scores and readout of every head  ->  loss and its derivative  ->  gradients        (by slab)
//
// Samples are cut into chunks that depend on the shape alone. A chunk is worked on by one thread, a
// slab of samples at a time, all heads of a slab before the next, and leaves a partial gradient of
// its own; these are summed in the order of the chunks. So any thread may take any chunk.
//
// An engine has one run, or as many as there are lanes: then parameters, losses and gradients are
// vectors, one number for each run.
#pragma once

#include "strategy.hpp"

namespace mhfast {

template <class real>
class Engine {
 public:
  using Options = PassOptions;
  using Gradient = GradientOut<real>;

  Engine(const Data<real>& data, std::optional<Loss> loss, const Options& options, int threads);

  /// Takes scratch from `block`, which must serve nothing else until the next call; the parameters
  /// must be loaded again.
  void bind(AlignedBuffer& block);

  int threads() const { return threads_; }
  int width() const { return state_.width; }  // runs of this engine: one, or as many as lanes
  double expected_seconds() const { return expected_seconds_; }  // of a pass, see run_short_team
  bool multiplies_factors() const { return state_.data.shape.rank > 0; }  // in place of W
  bool has_attended() const { return state_.data.shape.attended; }  // and so takes no W at all
  bool gathers_gaps() const { return state_.options.gaps; }

  /// Keeps the data packed for many passes, or takes another engine's.
  std::shared_ptr<Packed<real>> make_packed() const { return strategy_->make_packed(); }
  void use_packed(const std::shared_ptr<Packed<real>>& packed) { strategy_->use_packed(packed); }

  /// For samples drawn from those of `whole`: sums over them are divided by the divisor of `whole`
  /// times their share of its samples, so that the mean of their loss over draws is the loss of
  /// `whole`.
  void weigh_as_part_of(const Data<real>& whole) {
    state_.shares.weigh(whole, state_.data.shape.n, *state_.loss, state_.width, state_.lanes.lanes);
  }
  /// For one of several parts of the samples of a run: what sums over all of them are divided by.
  void weigh_by(double weight, double labels) {
    state_.shares.weigh_by(state_.data.shape, weight, labels);
  }
  /// Reads labels and weights of samples `first` to `last` again.
  void read_samples(std::ptrdiff_t first, std::ptrdiff_t last) {
    strategy_->read_samples(first, last);
  }

  /// The parts of a pass, each called by every member of a team with a barrier after it.
  void pack_all(const Member& member) { strategy_->pack_all(member); }
  void load_parameters(const Parameters<real>& parameters, const Member& member);
  void run_chunks(Pass pass, const Member& member) { strategy_->run(pass, member); }
  void reduce_gradient(const Gradient& gradient, const Member& member) {
    const real* words = state_.data.has_words() ? state_.data.x : nullptr;
    state_.gradients.reduce(state_.model, words, state_.data.z, gradient, member);
  }

  /// One member's call before a further pass, when the last one is complete.
  void restart() { strategy_->restart(); }

  /// After a pass: whether the caller's own loss failed, so that nothing of the pass is right.
  bool own_loss_failed() const { return state_.own.failed(); }

  /// Called by the first member after each of its chunks; returning true ends the pass early.
  void on_chunk(std::function<bool()> interrupted) { state_.interrupted = std::move(interrupted); }

  /// Whether the totals of the next passes are wanted; without, loss only tells whether it is
  /// finite.
  void want_totals(bool wanted) { state_.totals_wanted = wanted; }

  /// After a pass.
  Totals totals(int lane = 0) const;

  /// After a pass for scales or the gradient, with Options::gaps: finds the largest factors of the
  /// gradient.
  void gather_scales() { state_.scales.gather(lanes_of_runs()); }
  /// Those of the heads and last of the readout, for one of several parts of the samples, and the
  /// largest of all parts in their place.
  double gathered_scale(int part) const { return state_.scales.gathered(part); }
  void replace_scale(int part, double maximum) { state_.scales.replace(part, maximum); }
  /// Then, whether they are so small that it takes a scaled pass, which leaves them out.
  /// `together`: one scale for all heads.
  bool needs_scaling(bool together);
  /// What the scaled pass leaves out: share() and, as whole numbers, the logarithms of the rest.
  double log_scale_W(int head, int lane = 0) const { return state_.scales.log_of_W(head)[lane]; }
  double log_scale_readout(int lane = 0) const { return state_.scales.log_of_readout()[lane]; }
  double share(int lane = 0) const { return state_.shares.of_lane[lane]; }

  /// Where outputs go, or null: (n,) or (n, q, p).
  void write_outputs(real* outputs) { state_.outputs = outputs; }
  /// Whether a pass for the gradient or for scales, or of a layer for the loss, can leave the
  /// weights of all heads, which are those of `attention` where denormal numbers are flushed; and
  /// where they go, (n, H, q, T), or null. A scaled pass leaves them as they are.
  bool finds_attention() const;
  void write_attention(real* attention) { state_.attention = attention; }
  /// Where gradients by inputs go, with Options::wrt_inputs: that by the tokens, to which that by
  /// the query rows is added where these are tokens, and else the latter; or null.
  void write_input_gradients(real* gx, real* gz) {
    state_.gx = gx;
    state_.gz = gz;
  }

 private:
  Engine(const Data<real>& data, std::optional<Loss> loss, const Options& options, const Plan& plan,
         int threads);
  void lay_out(Arena& layout);

  /// Runs that are lanes; 0: lanes are samples, or parts of them.
  int lanes_of_runs() const { return state_.width > 1 ? state_.data.runs : 0; }

  const int threads_;
  const double expected_seconds_;
  PassState<real> state_;
  const std::unique_ptr<Strategy<real>> strategy_;
};

}  // namespace mhfast
