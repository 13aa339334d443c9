// The steps of one training run, or of a block of runs that are lanes of one engine.
//
// Members of a team go through the phases of a step together. In each phase every shared number is
// written by one member at most, its owner there, and no other reads it in the same phase; `|` is
// a barrier.
//
//   phase     written                                           by          reads besides
//   load      W of factors, copies of a head's parameters       head        the prompt
//             copies of the samples of a batch, or new samples  share       their numbers
//             (first in an advance: what the losses of new      first       the new samples, which
//             samples are divided by)                                       change between advances
//   (| whole  a pass over all samples, where steps are taken    as below
//             on batches and it is due, up to norms of heads)
//   | pass    partial gradients, totals, scales of a chunk,     chunk       what was loaded
//             attention of its samples where it is recorded
//             whether the caller's own loss has failed          any
//   | scales  scales of heads (normalized steps only)           first
//   | reduce  a head's gradients, with l2, and their norms      head        partials, the prompt
//   (| reduce gradient of the prompt, from all heads            first       heads' products)
//   (| sums   with several processes: what they add up, and     first       heads' gradients and
//             from it totals and scales, before a head's                    totals of shards
//             gradients of all samples are taken from it        head        the sums)
//   | decide  rates, what stops and what is due, the numbers    first       totals, norms
//             of the next batch's samples, how many iterates
//             means have
//   | tests   load and pass over each test set that is due      as above
//   | record  rows of the records                               first       all parameters
//   (| make   a head's direction in place of its gradient,      head        what clipping leaves
//             momentum, dual norm)
//   (| choose factors of the directions                         first       all dual norms)
//   | update  a head's parameters, optimizer state and means    head        rates, counts of means
//   (| norms  a head's norm, or its projection                  head        its parameters)
//   (| factors of the projection, or projections of tensors     first       norms of all heads)
//   (| project  a head's parameters                             head        the factors)
//   next load
//
// "head": head h is the member's whose index is h mod count, in every phase, and the prompt counts
// as a head 0. "share": an equal part of the batch, by index; a pass over attended tokens begins
// with such parts of the readout, and a barrier. So update and load need no barrier between them as
// long as a member loads what it has stepped; a prompt that is trained is loaded by all, and takes
// one. "chunk": whoever takes it (a unit of tiles likewise, with barriers of its own inside the
// pass). The first member's flags (what ends, is due or was interrupted) change only in phases that
// are its own, and `interrupted_` in a pass, after which all read it behind the barrier. That the
// caller's own loss failed is one atomic flag of an engine, which is never taken back.
#pragma once

#include <chrono>
#include <deque>
#include <memory>

#include "../passes/engine.hpp"
#include "../runtime/float_mode.hpp"
#include "shard_sums.hpp"
#include "state.hpp"
#include "train.hpp"

namespace mhfast {

/// Scratch of one thread for whichever loop it works on.
struct Workspace {
  AlignedBuffer engine, tests, attention;
  std::deque<AlignedBuffer> shards;  // after the first
};

/// Packed data that loops share where their runs share the arrays.
template <class real>
struct SharedPacked {
  std::vector<std::shared_ptr<Packed<real>>> data;  // of each shard
  std::vector<std::shared_ptr<Packed<real>>> tests;
};

/// What thresholds are compared with, at one step of one run.
template <class Norm>
struct Now {
  const Totals& totals;
  const Norm& norm;

  double loss() const { return totals.loss; }
  double accuracy() const { return totals.correct; }
  double margin() const { return totals.margin; }
  double grad_norm() const { return norm(); }
};

/// What the threads of a loop share. Members of a team call `advance` together; whatever only the
/// first member writes is read by the others after a barrier.
template <class real>
class Loop {
 public:
  /// The runs from `run` on, as many as the plan puts side by side.
  Loop(TrainingTask<real>& task, std::ptrdiff_t run, int threads, SharedPacked<real>& shared);

  /// Lanes of a block of runs, 1 where runs go one by one.
  static int width(const TrainingTask<real>& task);

  int threads() const { return steps_alone_ ? whole_->threads() : engine_->threads(); }
  bool ended() const { return ended_; }
  std::int64_t step() const { return step_; }
  StopReason reason(int lane) const { return reasons_[lane]; }

  /// Takes scratch; one member's call before each advance.
  void bind(Workspace& workspace);

  /// Before an advance: takes these samples for the steps to come.
  void take_fresh(const Data<real>& samples) {
    batch_->replace(of_lanes(at_run(samples, run_, count_)));
  }

  /// Goes to `until`, or to the end: at the last step of the task theta is evaluated, recorded and
  /// left. An interruptible advance reports progress between chunks of work; a loop that this stops
  /// has ended.
  void advance(std::int64_t until, bool interruptible, const Member& member);

  /// Makes the next advance evaluate and record theta as it is, and end there for this reason.
  void finish(StopReason reason) { finish_ = reason; }

  /// Copies parameters and the optimizer's state from lanes to the task.
  void write_back() const { state_->write_back(); }

  /// Repeats the rows of frozen runs up to those of step `reached`.
  void repeat_rows(std::int64_t reached);

 private:
  using Clock = std::chrono::steady_clock;

  void take_shards(const Data<real>& data, const typename Engine<real>::Options& options,
                   int threads, SharedPacked<real>& shared);
  void take_batches(const Data<real>& data, typename Engine<real>::Options options, int threads);
  Data<real> of_lanes(const Data<real>& data) const;
  void make_state();
  bool shares_attention() const;
  void choose_attention();
  void load(const Member& member);
  void prepare_step();
  void advance_step(const Member& member, const FlushToZero& flush);
  bool evaluate(const std::vector<Engine<real>*>& engines, bool loss_only, const Member& member);
  bool evaluate_whole(const Member& member);
  bool pass(Engine<real>& engine, Pass kind, const Member& member);
  bool add_up(Pass kind, const Member& member);
  Totals totals(const Engine<real>& engine, int lane) const {
    return sums_ ? sums_->totals() : engine.totals(lane);
  }
  /// Of all samples, after `decide`.
  Totals whole_totals(int lane) const {
    return whole_ == engine_.get() ? totals_[lane] : totals(*whole_, lane);
  }
  void choose_scales(const std::vector<Engine<real>*>& engines);
  void decide(const FlushToZero& flush);
  void end(int lane, StopReason reason);
  void evaluate_tests(const Member& member);
  void record();
  bool wants_totals() const;
  bool wants_norm() const;
  double gradient_norm(int lane) const;
  bool is_frozen() const;
  bool checks_thresholds() const;
  bool goes_alone() const;
  bool is_stopped() const;
  bool finishes() const { return finish_ != StopReason::kNone; }
  bool is_due(const Record& r) const;
  bool report_progress(const FlushToZero& flush);

  TrainingTask<real>& task_;
  const std::ptrdiff_t run_;
  const int width_, count_;                     // lanes and runs
  std::unique_ptr<BatchData<real>> batch_;      // null: steps are taken on all samples
  std::unique_ptr<Engine<real>> engine_;        // of a step
  std::unique_ptr<Engine<real>> whole_engine_;  // of all samples, where that is another
  const Engine<real>* whole_ = nullptr;         // the one of all samples
  std::vector<Engine<real>*> shards_;           // of a step: `engine_`, and with several processes
  std::vector<std::unique_ptr<Engine<real>>> further_;  // those of this process's further shards
  std::unique_ptr<ShardSums<real>> sums_;               // null: there is one process
  std::vector<std::unique_ptr<Engine<real>>> tests_;
  AlignedBuffer* test_block_ = nullptr;
  bool shares_attention_ = false;      // passes leave the attention that records take
  std::ptrdiff_t held_attention_ = 0;  // its numbers, where it has no place in a record
  real* attention_block_ = nullptr;
  real* attention_ = nullptr;  // of the step at hand; null: it must be computed
  std::unique_ptr<State<real>> state_;
  std::unique_ptr<Descent<real>> descent_;
  bool records_norm_ = false;  // or stops at one
  bool scaled_ = false;        // the stored gradient lacks its largest factors

  std::int64_t step_;
  std::vector<Totals> totals_;          // of the samples of the step
  std::vector<double> losses_, norms_;  // norms: of gradients, where recorded
  std::vector<std::int64_t> since_;
  std::vector<char> frozen_;
  std::vector<std::int64_t> averaged_;  // iterates in a run's mean after this step; 0: as before it
  std::vector<StopReason> reasons_;
  StopReason finish_ = StopReason::kNone;
  bool again_ = false;  // theta_k is evaluated once more, for its loss
  bool interruptible_ = false, interrupted_ = false, ended_ = false, recording_ = false;
  bool whole_due_ = false;       // a step on a batch has a pass over all samples before it
  bool whole_norm_due_ = false;  // with its gradient
  bool steps_alone_ = false;  // batches are too small for more than one thread, all samples are not
  bool alone_ = false;        // the first member takes the next steps by itself
  std::vector<char> test_due_;
  const FlushToZero* flush_ = nullptr;  // the first member's
  TeamOrAlone pace_;
  Clock::time_point last_progress_ = Clock::now(), last_step_ = Clock::now();
  Clock::time_point last_look_ = last_progress_;
  int calls_ = 0, calls_of_look_ = 1;  // of report_progress, of which the last one looks
};

}  // namespace mhfast
