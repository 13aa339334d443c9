#include "loop.hpp"

#include <algorithm>
#include <cmath>

#include "../problem/readout.hpp"
#include "../runtime/tuning.hpp"
#include "records.hpp"

namespace mhfast {
namespace {

/// Whether all runs have the same numbers in the packed copy of a data set.
template <class real>
bool is_shared(const Data<real>& data) {
  return data.run.x == 0 && data.run.z == 0 &&
         (data.run.y == 0 || !readout_of(data.shape).targets_packed);
}

template <class real>
void pack_for(Engine<real>& engine, const Data<real>& data, int threads,
              std::shared_ptr<Packed<real>>& shared) {
  if (shared) {
    engine.use_packed(shared);
    return;
  }
  const auto packed = engine.make_packed();
  engine.use_packed(packed);
  const double work = 4.0 * double(data.shape.n) * data.shape.T * data.shape.d;
  run_team(useful_threads(threads, data.shape.n, work),
           [&](const Member& member) { engine.pack_all(member); });
  if (is_shared(data)) shared = packed;
}

}  // namespace

template <class real>
int Loop<real>::width(const TrainingTask<real>& task) {
  const Kernels<real>& kernels = active_kernels<real>();
  if (task.processes) return 1;  // what they prefer would depend on their samples
  // Tokens that are words have no plan with runs as lanes, a test set's no more than the samples'.
  for (const Data<real>& test : task.tests)
    if (test.has_words()) return 1;
  const bool as_lanes = prefers_runs(task.step_shape(), registers_of(kernels), task.runs);
  return as_lanes ? kernels.lanes : 1;
}

template <class real>
Loop<real>::Loop(TrainingTask<real>& task, std::ptrdiff_t run, int threads,
                 SharedPacked<real>& shared)
    : task_(task),
      run_(run),
      width_(width(task)),
      count_(int(std::min<std::ptrdiff_t>(width_, task.runs - run))),
      step_(task.first_step),
      totals_(width_),
      losses_(width_),
      norms_(width_),
      since_(width_),
      frozen_(width_, 0),
      averaged_(width_, 0),
      reasons_(width_) {
  for (const Record& r : task.records) records_norm_ |= r.quantity == Quantity::kGradNorm;
  records_norm_ |= !std::isnan(task.thresholds.grad_norm);
  for (int l = 0; l < width_; ++l) {
    const std::ptrdiff_t of_lane = run + std::min(l, count_ - 1);
    since_[l] = task.optimizer.since[of_lane];
    frozen_[l] = task.stopped[of_lane] >= 0;
  }

  typename Engine<real>::Options options;
  options.gradient = true;
  options.wrt_W = !task.keeps_attention();
  options.wrt_readout = task.wrt[kU] || task.wrt[kV] || task.wrt[kValueA] || task.wrt[kValueB];
  options.gaps = task.optimizer.ignores_scale() && !task.optimizer.decays(task.wrt);
  options.runs_are_lanes = width_ > 1;
  const Data<real> data = of_lanes(at_run(task.data, run, count_));
  if (task.batches.size > 0) {
    take_batches(data, options, threads);
  } else if (task.processes) {
    take_shards(data, options, threads, shared);
  } else {
    engine_ = std::make_unique<Engine<real>>(data, task.loss, options, threads);
    shared.data.resize(1);
    pack_for(*engine_, data, threads, shared.data[0]);
    whole_ = engine_.get();
  }
  shards_.push_back(engine_.get());
  for (const auto& engine : further_) shards_.push_back(engine.get());
  typename Engine<real>::Options forward;
  forward.runs_are_lanes = width_ > 1;
  forward.members = this->threads();  // a small test set alone would take fewer
  shared.tests.resize(task.tests.size());
  for (std::size_t i = 0; i < task.tests.size(); ++i) {
    const Data<real> test = of_lanes(at_run(task.tests[i], run, count_));
    tests_.push_back(std::make_unique<Engine<real>>(test, task.loss, forward, this->threads()));
    pack_for(*tests_.back(), test, threads, shared.tests[i]);
  }
  const auto interrupted = [this] { return interrupted_ || report_progress(*flush_); };
  for (Engine<real>* shard : shards_) shard->on_chunk(interrupted);
  if (whole_engine_) whole_engine_->on_chunk(interrupted);
  for (auto& test : tests_) test->on_chunk(interrupted);
  test_due_.resize(tests_.size());
  shares_attention_ = shares_attention();
  const Shape& s = task.data.shape;
  // For means of attention it is held where it takes no more memory than the tokens.
  for (const Record& r : task.records)
    if (shares_attention_ && s.H * s.q <= s.d && r.quantity != Quantity::kAttention &&
        is_of(r.quantity) == QuantityOf::kAttentionWeights)
      held_attention_ = s.n * s.H * s.q * s.T;
  make_state();
}

/// Whether the attention of a step's pass is that of the data as they were given.
template <class real>
bool Loop<real>::shares_attention() const {
  const Data<real>&data = task_.data, &given = task_.given;
  const bool same = data.x == given.x && data.z == given.z && data.limits == given.limits &&
                    !task_.exponents.any() && !data.shape.attended && !data.shape.products;
  return same && width_ == 1 && whole_ == engine_.get() && !sums_ && !data.has_words() &&
         !data.shape.identity_w && engine_->finds_attention();
}

/// Where the pass of the step at hand leaves attention: in the place that a record has for it, else
/// in a block.
template <class real>
void Loop<real>::choose_attention() {
  attention_ = nullptr;
  // A pass for the loss alone has weights of layers only.
  const bool finds = step_ < task_.last_step || records_norm_ || task_.data.shape.is_layer();
  for (const Record& r : task_.records) {
    if (!shares_attention_ || !finds || is_of(r.quantity) != QuantityOf::kAttentionWeights)
      continue;
    const std::int64_t row = r.row(task_.first_step, step_);
    if (step_ % r.every != 0 || row >= r.capacity) continue;
    if (row > 0 && task_.keeps_attention()) continue;  // it is repeated
    if (r.quantity == Quantity::kAttention)
      attention_ = attention_at<real>(r, run_, row);
    else if (!attention_)
      attention_ = attention_block_;
  }
  engine_->write_attention(attention_);
}

/// Where runs are lanes, factors are multiplied out.
template <class real>
Data<real> Loop<real>::of_lanes(const Data<real>& data) const {
  Data<real> out = data;
  if (width_ > 1) out.shape.rank = 0;
  return out;
}

/// The engines of this process's shards, whose sums are divided as those of all samples are.
template <class real>
void Loop<real>::take_shards(const Data<real>& data, const typename Engine<real>::Options& options,
                             int threads, SharedPacked<real>& shared) {
  sums_ = std::make_unique<ShardSums<real>>(task_);
  shared.data.resize(sums_->shards());
  std::ptrdiff_t first = 0;
  for (int i = 0; i < sums_->shards(); ++i) {
    const Data<real> shard = at_samples(data, first, task_.processes.shards[i]);
    auto engine = std::make_unique<Engine<real>>(shard, task_.loss, options, threads);
    pack_for(*engine, shard, threads, shared.data[i]);
    engine->weigh_by(task_.weights[run_], task_.label_counts[run_]);
    first += shard.shape.n;
    if (i == 0)
      engine_ = std::move(engine);
    else
      further_.push_back(std::move(engine));
  }
  whole_ = engine_.get();
}

/// The engine of a batch, and the one of all samples, which are not kept packed: they may be large,
/// and are looked at seldom.
template <class real>
void Loop<real>::take_batches(const Data<real>& data, typename Engine<real>::Options options,
                              int threads) {
  const Data<real> source =
      task_.batches.fresh > 0 ? of_lanes(at_run(task_.fresh, run_, count_)) : data;
  batch_ = std::make_unique<BatchData<real>>(source, task_.batches, run_, count_);
  typename Engine<real>::Options of_whole = options;
  of_whole.gradient = records_norm_;
  whole_engine_ = std::make_unique<Engine<real>>(data, task_.loss, of_whole, threads);
  whole_ = whole_engine_.get();
  if (task_.triangular_batches) batch_->use_triangles(whole_->threads());
  engine_ = std::make_unique<Engine<real>>(**batch_, task_.loss, options, whole_->threads());
  if (task_.batches.fresh == 0) engine_->weigh_as_part_of(data);
  if (!task_.populations.of_run.empty())
    batch_->draw_from(task_.populations, task_.batches, task_.exponents, run_, whole_->threads());
  batch_->draw(step_);
  steps_alone_ = engine_->threads() == 1 && whole_->threads() > 1;
}

/// The state of the runs, and what steps it.
template <class real>
void Loop<real>::make_state() {
  const auto multiplies = [](const auto& engine) {
    return !engine->multiplies_factors() && !engine->has_attended();
  };
  const bool any = multiplies(whole_) || multiplies(engine_) ||
                   std::any_of(tests_.begin(), tests_.end(), multiplies);
  state_ = std::make_unique<State<real>>(task_, run_, count_, width_, task_.rank > 0 && any);
  descent_ = std::make_unique<Descent<real>>(task_.optimizer, width_, records_norm_);
  for (int name = 0; name < kTensors; ++name)
    if (task_.wrt[name]) descent_->add(state_->trained(TensorName(name)));
  descent_->prepare(this->threads());  // a team may be larger than what a batch is worth
}

template <class real>
void Loop<real>::bind(Workspace& workspace) {
  engine_->bind(workspace.engine);
  if (held_attention_ > 0)
    attention_block_ =
        reinterpret_cast<real*>(workspace.attention.reserve(held_attention_ * sizeof(real)));
  if (workspace.shards.size() < further_.size()) workspace.shards.resize(further_.size());
  for (std::size_t i = 0; i < further_.size(); ++i) further_[i]->bind(workspace.shards[i]);
  test_block_ = &workspace.tests;
}

/// A member's heads of the parameters, after a step over the same heads, and the prompt; its share
/// of a batch.
template <class real>
void Loop<real>::load(const Member& member) {
  state_->compose(member);
  for (Engine<real>* shard : shards_) shard->load_parameters(state_->parameters(), member);
  if (!batch_) return;
  batch_->copy(member);
  engine_->read_samples(batch_->first(member.index, member),
                        batch_->first(member.index + 1, member));
}

/// One member's call when theta_k is there: what a pass at it has to find.
template <class real>
void Loop<real>::prepare_step() {
  const bool totals = wants_totals();
  whole_norm_due_ = batch_ && wants_norm();
  whole_due_ = batch_ && (totals || whole_norm_due_);
  for (Engine<real>* shard : shards_) {
    shard->restart();
    shard->want_totals(batch_ ? descent_->needs_losses() : totals);
  }
  choose_attention();
}

template <class real>
void Loop<real>::advance(std::int64_t until, bool interruptible, const Member& member) {
  const FlushToZero flush;
  const bool leader = member.index == 0;
  if (leader) {
    flush_ = &flush;
    interruptible_ = interruptible;
    if (task_.batches.fresh > 0) engine_->weigh_as_part_of(batch_->source());
    prepare_step();
  }
  load(member);
  member.wait();
  const auto goes_on = [&] {
    return !ended_ && (step_ < until || until == task_.last_step || finishes());
  };
  while (goes_on()) {
    advance_step(member, flush);
    member.wait();
    if (!alone_) continue;
    // The others sleep at the barrier while the first member continues alone.
    if (leader)
      while (goes_on() && goes_alone()) advance_step(Member{0, 1, nullptr}, flush);
    member.wait();
  }
}

/// One step, or the last record. Members that share it end it together.
template <class real>
void Loop<real>::advance_step(const Member& member, const FlushToZero& flush) {
  const bool leader = member.index == 0;
  const bool loss_only = step_ == task_.last_step && (batch_ || !records_norm_);
  const bool complete = evaluate_whole(member) && evaluate(shards_, loss_only, member);
  if (complete) {
    member.wait();
    if (leader) {
      decide(flush);
      if (engine_->threads() > 1) {
        const auto now = Clock::now();
        pace_.report(std::chrono::duration<double>(now - last_step_).count());
        last_step_ = now;
      }
      if (member.count > 1) alone_ = !ended_ && (steps_alone_ || pace_.alone());
    }
    member.wait();
    if (recording_ && !is_stopped()) evaluate_tests(member);
    if (recording_ && !is_stopped()) {
      if (leader) record();
      member.wait();
    }
  }
  if (is_stopped() || ended_) {
    member.wait();  // all have seen why
    if (leader && is_stopped())
      for (int l = 0; l < count_; ++l) end(l, StopReason::kAborted);
    return;
  }
  if (!again_) {
    state_->add_to_averages(averaged_, member);
    descent_->update(member);
    if (task_.wrt[kPrompt]) {
      if (leader) state_->rescale_prompt();
      member.wait();  // one member's, and loaded by every other
    }
    load(member);
  }
  if (leader) {
    if (!again_) {
      for (int l = 0; l < count_; ++l)
        if (averaged_[l] > 0) task_.averages.counts[run_ + l] = averaged_[l];
      ++step_;
    }
    prepare_step();
  }
}

/// Whether the first member takes the next step by itself.
template <class real>
bool Loop<real>::goes_alone() const {
  return steps_alone_ ? !whole_due_ : pace_.alone();
}

/// Whether all runs stand still, which a resumed training may find at its start.
template <class real>
bool Loop<real>::is_frozen() const {
  return std::all_of(frozen_.begin(), frozen_.end(), [](char frozen) { return frozen; });
}

/// With batches once an epoch: each time takes a pass over all samples.
template <class real>
bool Loop<real>::checks_thresholds() const {
  return !batch_ || step_ % task_.epoch() == 0;
}

/// Whether the loss over all samples is asked for at this step, by a record or by what decides.
template <class real>
bool Loop<real>::wants_totals() const {
  // That a process asks for the end is known after the pass only.
  const bool at_end = step_ == task_.last_step || finishes() || is_frozen();
  // A step on a batch is a small part of a pass over all samples, which only what is asked for
  // takes.
  if (sums_ || again_ || (at_end && !batch_)) return true;
  if (task_.thresholds.ask_for_totals() && (at_end || checks_thresholds())) return true;
  if (descent_->needs_losses() && !batch_) return true;
  for (const Record& r : task_.records)
    if (!is_of_parameters(r.quantity) && r.set < 0 && (at_end || step_ % r.every == 0)) return true;
  return false;
}

/// Whether the norm of the gradient over all samples is: a run that ends has it recorded.
template <class real>
bool Loop<real>::wants_norm() const {
  if (!records_norm_) return false;
  if (step_ == task_.last_step || finishes() || again_ || is_frozen()) return true;
  if (task_.thresholds.any() && checks_thresholds()) return true;
  for (const Record& r : task_.records)
    if (r.quantity == Quantity::kGradNorm && step_ % r.every == 0) return true;
  return false;
}

/// Of the gradient over all samples.
template <class real>
double Loop<real>::gradient_norm(int lane) const {
  return batch_ ? norms_[lane] : descent_->gradient_norm(lane);
}

/// The pass over all samples that a step on a batch may have before it. False as below.
template <class real>
bool Loop<real>::evaluate_whole(const Member& member) {
  if (!whole_due_) return true;
  const bool leader = member.index == 0;
  if (leader) {
    whole_engine_->restart();
    whole_engine_->bind(*test_block_);
  }
  member.wait();
  whole_engine_->load_parameters(state_->parameters(), member);
  member.wait();
  if (!evaluate({whole_engine_.get()}, !whole_norm_due_, member)) return false;
  member.wait();
  for (int l = 0; leader && whole_norm_due_ && l < count_; ++l)
    norms_[l] = descent_->gradient_norm(l);
  return true;
}

/// False when it was interrupted, or the caller's own loss failed.
template <class real>
bool Loop<real>::pass(Engine<real>& engine, Pass kind, const Member& member) {
  if (member.count <= engine.threads())
    engine.run_chunks(kind, member);
  else if (member.index == 0)
    engine.run_chunks(kind, Member{0, 1, nullptr});
  member.wait();
  return !interrupted_ && !engine.own_loss_failed();
}

/// Loss and gradient at theta_k, of the samples of these engines: one, or with several processes
/// all shards, whose processes make the same passes. False when a pass was interrupted.
template <class real>
bool Loop<real>::evaluate(const std::vector<Engine<real>*>& engines, bool loss_only,
                          const Member& member) {
  const auto of_gradient = [&] { return scaled_ ? Pass::kScaledGradient : Pass::kGradient; };
  // A step after one whose gradient was scaled is as a rule another.
  Pass kind = loss_only ? Pass::kLoss : scaled_ ? Pass::kScales : Pass::kGradient;
  while (true) {
    for (Engine<real>* engine : engines)
      if (!pass(*engine, kind, member)) return false;
    if (sums_ && !add_up(kind, member)) return false;
    if (loss_only) return true;
    if (!engines[0]->gathers_gaps() || kind == Pass::kScaledGradient) break;
    if (member.index == 0) {
      choose_scales(engines);
      if (of_gradient() != kind)
        for (Engine<real>* engine : engines) engine->restart();
    }
    member.wait();
    if (of_gradient() == kind) break;
    kind = of_gradient();
  }
  if (sums_)
    sums_->take_gradients(descent_->tensors(), member);
  else
    state_->differentiate(*engines[0], member);
  // Else steps take these factors as logarithms.
  if (!engine_->gathers_gaps()) state_->restore_gradients(descent_->tensors(), member);
  descent_->scan(member);
  return true;
}

/// Adds up what a pass over the shards has left. False when the caller aborts.
template <class real>
bool Loop<real>::add_up(Pass kind, const Member& member) {
  for (int i = 0; is_gradient(kind) && i < sums_->shards(); ++i) {
    state_->differentiate(*shards_[i], member);
    sums_->put_gradients(i, descent_->tensors(), member);
  }
  member.wait();
  if (member.index == 0) {
    const CallbackResult result = sums_->add(kind, shards_, step_, *flush_);
    interrupted_ = result == CallbackResult::kAbort;
    if (result == CallbackResult::kStop && !finishes()) finish_ = StopReason::kHook;
  }
  member.wait();
  return !interrupted_;
}

/// Decides whether a gradient that is to be normalized must have its largest factors taken out.
template <class real>
void Loop<real>::choose_scales(const std::vector<Engine<real>*>& engines) {
  const bool together =
      task_.optimizer.norm_scope() != Scope::kHead || task_.wrt[kPrompt] || descent_->ties_heads();
  for (Engine<real>* engine : engines) {
    if (!sums_) engine->gather_scales();  // else they have those of all processes
    scaled_ = engine->needs_scaling(together);
  }
  const Engine<real>& engine = *engines[0];
  descent_->set_scaled(scaled_ || task_.exponents.any());
  for (Trained<real>& tensor : descent_->tensors())
    for (int h = 0; h < tensor.heads; ++h)
      for (int l = 0; l < width_; ++l) {
        double& scale = tensor.log_scales[h * width_ + l];
        scale = std::log(2.0) * state_->exponent(tensor.name);
        if (!scaled_) continue;
        const bool is_readout = tensor.name != kPrompt && tensor.name >= kU;  // or its factors
        scale += std::log(engine.share(l)) +
                 (is_readout ? engine.log_scale_readout(l) : engine.log_scale_W(h, l));
      }
}

/// The first member's part of a step: which runs end here, what is due, how far to step.
template <class real>
void Loop<real>::decide(const FlushToZero& flush) {
  const bool at_end = step_ == task_.last_step;
  const Thresholds& limits = task_.thresholds;
  report_progress(flush);
  const bool has_gradient = !at_end || (records_norm_ && !batch_);
  const bool had_records =
      batch_ ? whole_due_ && (whole_norm_due_ || !records_norm_) : wants_totals();
  const bool checks = checks_thresholds();
  again_ = false;
  recording_ = false;
  for (int l = 0; l < count_; ++l) {
    totals_[l] = totals(*engine_, l);
    if (frozen_[l]) continue;
    losses_[l] = totals_[l].loss;
    const bool finite = std::isfinite(losses_[l]) && (!has_gradient || descent_->is_finite(l));
    if (!finite && !had_records) {  // a run that ends has its loss recorded
      again_ = true;
      continue;
    }
    if (!finite) {
      end(l, StopReason::kNonfinite);
    } else if (checks && limits.any()) {
      const Totals now = whole_totals(l);
      const auto norm = [&] { return gradient_norm(l); };
      end(l, limits.reached(Now<decltype(norm)>{now, norm}));
    }
    if (!frozen_[l]) continue;
    task_.stopped[run_ + l] = step_;
    task_.reasons[run_ + l] = reasons_[l];
  }
  if (again_) return;
  ended_ = at_end || finishes() ||
           std::all_of(frozen_.begin(), frozen_.begin() + count_, [](char f) { return f; });
  for (int l = 0; ended_ && l < count_; ++l)
    if (!frozen_[l]) reasons_[l] = !finishes() ? StopReason::kSteps : finish_;
  std::fill(test_due_.begin(), test_due_.end(), 0);
  for (const Record& r : task_.records) {
    if (!is_due(r)) continue;
    recording_ = true;
    if (r.set >= 0) test_due_[r.set] = 1;
  }
  if (ended_) return;
  const bool averages = task_.averages.counts && step_ >= task_.averages.first;
  for (int l = 0; l < count_; ++l)
    averaged_[l] = averages && !frozen_[l] ? task_.averages.counts[run_ + l] + 1 : 0;
  descent_->choose_rates(step_, since_, losses_, frozen_);
  if (batch_) batch_->draw(step_ + 1);
}

/// Freezes a run for a reason, if there is one; an interrupted loop ends without freezing any.
template <class real>
void Loop<real>::end(int lane, StopReason reason) {
  if (reason == StopReason::kNone) return;
  if (!frozen_[lane]) reasons_[lane] = reason;
  if (reason == StopReason::kAborted)
    ended_ = true;
  else
    frozen_[lane] = 1;
}

template <class real>
void Loop<real>::evaluate_tests(const Member& member) {
  for (std::size_t i = 0; i < tests_.size(); ++i) {
    if (!test_due_[i]) continue;
    if (member.index == 0) {
      tests_[i]->restart();
      tests_[i]->bind(*test_block_);
    }
    member.wait();
    tests_[i]->load_parameters(state_->parameters(), member);
    member.wait();
    tests_[i]->run_chunks(Pass::kLoss, member);
    member.wait();
    if (is_stopped()) return;
  }
}

/// Whether a pass was interrupted, or the caller's own loss failed in it.
template <class real>
bool Loop<real>::is_stopped() const {
  const auto failed = [](const auto& engine) { return engine && engine->own_loss_failed(); };
  return interrupted_ || failed(whole_engine_) ||
         std::any_of(shards_.begin(), shards_.end(), failed) ||
         std::any_of(tests_.begin(), tests_.end(), failed);
}

template <class real>
void Loop<real>::record() {
  bool written_back = false;
  for (const Record& r : task_.records) {
    const std::int64_t row = r.row(task_.first_step, step_);
    if (!is_due(r) || row >= r.capacity) continue;
    if (is_of_parameters(r.quantity) && !written_back) {
      state_->write_back();
      written_back = true;
    }
    for (int l = 0; l < count_; ++l) {
      const std::int64_t stopped = task_.stopped[run_ + l];
      const bool is_frozen =
          stopped >= 0 && row > std::max<std::int64_t>(0, r.row(task_.first_step, stopped));
      const bool is_constant =
          task_.keeps_attention() && row > 0 && is_of(r.quantity) == QuantityOf::kAttentionWeights;
      if (is_frozen || is_constant) {
        repeat_row<real>(r, run_ + l, row - 1, row);
        continue;
      }
      if (is_of_parameters(r.quantity)) {
        write_record<real>(task_, r, run_ + l, row, stopped >= 0 ? stopped : step_, attention_);
        continue;
      }
      const Totals now = r.set < 0 ? whole_totals(l) : tests_[r.set]->totals(l);
      double& to = static_cast<double*>(r.buffer)[(run_ + l) * r.capacity + row];
      to = r.quantity == Quantity::kLoss       ? now.loss
           : r.quantity == Quantity::kAccuracy ? now.correct
           : r.quantity == Quantity::kMargin   ? now.margin
                                               : gradient_norm(l);
    }
  }
}

template <class real>
void Loop<real>::repeat_rows(std::int64_t reached) {
  // The step at which the caller's own loss failed has no row.
  const bool failed = is_stopped() && !interrupted_;
  for (const Record& r : task_.records) {
    const std::int64_t from = r.row(task_.first_step, step_) - (failed ? 1 : 0);
    const std::int64_t to = std::min(r.row(task_.first_step, reached), r.capacity - 1);
    for (int l = 0; l < count_; ++l)
      for (std::int64_t row = from + 1; row <= to; ++row) repeat_row<real>(r, run_ + l, from, row);
  }
}

template <class real>
bool Loop<real>::report_progress(const FlushToZero& flush) {
  if (!interruptible_ || !task_.on_progress || interrupted_) return interrupted_;
  if (++calls_ < calls_of_look_) return false;
  const auto now = Clock::now(),
             due = last_progress_ + std::chrono::milliseconds(kProgressInterval);
  const bool slow = now - last_look_ > std::chrono::milliseconds(kLookInterval);
  calls_of_look_ = slow ? 1 : std::min(2 * calls_of_look_, kMostCallsOfLook);
  calls_ = 0;
  last_look_ = now;
  if (now < due) return false;
  last_progress_ = now;
  flush.suspended([&] { interrupted_ = task_.on_progress(step_) == CallbackResult::kAbort; });
  return interrupted_;
}

template <class real>
bool Loop<real>::is_due(const Record& r) const {
  return step_ % r.every == 0 || (ended_ && finish_ != StopReason::kAborted);
}

template class Loop<float>;
template class Loop<double>;

}  // namespace mhfast
