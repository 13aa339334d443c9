#include "loop.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../problem/factors.hpp"
#include "../problem/readout.hpp"
#include "../runtime/tuning.hpp"
#include "records.hpp"

namespace mhfast {
namespace {

/// Numbers of `count` runs, `run` apart, to vectors of `width` and back. Lanes beyond the last run
/// repeat it.
template <class real>
void to_lanes(const real* from, std::ptrdiff_t run, int count, int width, std::ptrdiff_t size,
              real* to) {
  for (int l = 0; l < width; ++l) {
    const real* of_run = from + std::min(l, count - 1) * run;
    for (std::ptrdiff_t i = 0; i < size; ++i) to[i * width + l] = of_run[i];
  }
}

template <class real>
void from_lanes(const real* from, std::ptrdiff_t run, int count, int width, std::ptrdiff_t size,
                real* to) {
  for (int l = 0; l < count; ++l)
    for (std::ptrdiff_t i = 0; i < size; ++i) to[l * run + i] = from[i * width + l];
}

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
  make_tensors();
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
  sums_ = std::make_unique<Sums>(task_.sums());
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

/// The parameters as the engine takes them, their gradients, and what the optimizer keeps.
template <class real>
void Loop<real>::make_tensors() {
  const Shape& s = task_.data.shape;
  const bool lanes = width_ > 1;
  const bool of_factors = task_.wrt[kQ] || task_.wrt[kK],
             of_values = task_.wrt[kValueA] || task_.wrt[kValueB];
  const auto has_product = [](const auto& engine) {
    return !engine->multiplies_factors() && !engine->has_attended();
  };
  needs_product_ = task_.rank > 0 && (has_product(whole_) || has_product(engine_) ||
                                      std::any_of(tests_.begin(), tests_.end(), has_product));
  theta_ = task_.model.of(run_);
  first_ = task_.first.of(run_);
  second_ = task_.second.of(run_);
  const auto lay_out = [&](Arena layout) {
    for (int name = 0; name < kTensors; ++name) {
      const std::size_t size = extent(TensorName(name), s, task_.rank).all() * width_;
      const bool exists = task_.model.at[name];
      if (lanes && exists) theta_[name] = layout.template take<real>(size);
      if (lanes && task_.first.at[name]) first_[name] = layout.template take<real>(size);
      if (lanes && task_.second.at[name]) second_[name] = layout.template take<real>(size);
      if ((name == kW && needs_product_) || (name == kV && s.value_rank > 0))
        theta_[name] = layout.template take<real>(size);
      if (task_.exponents.any() && exists) scaled_theta_[name] = layout.template take<real>(size);
      if (task_.wrt[name] || (name == kW && of_factors && needs_product_) ||
          (name == kV && of_values))
        gradient_[name] = layout.template take<real>(size);
    }
    return layout.size();
  };
  const std::size_t bytes = lay_out(Arena());
  lay_out(Arena(own_block_.reserve(std::max<std::size_t>(bytes, 1))));
  if (lanes) take_lanes();
  for (int name = 0; name < kTensors; ++name)
    if (!scaled_theta_[name]) scaled_theta_[name] = theta_[name];
  rescale_prompt();
  if (needs_product_ && task_.keeps_attention()) {  // once for all steps
    rescale_heads({0, 1, nullptr});
    for (int h = 0; h < s.H; ++h) compose_product(h);
    needs_product_ = false;
  }

  descent_ = std::make_unique<Descent<real>>(task_.optimizer, width_, records_norm_);
  for (int name = 0; name < kTensors; ++name) {
    if (!task_.wrt[name]) continue;
    const Extent e = extent(TensorName(name), s, task_.rank);
    std::vector<double> lr(width_);
    for (int l = 0; l < width_; ++l)
      lr[l] = task_.optimizer.lr[name][run_ + std::min(l, count_ - 1)];
    descent_->add({TensorName(name),
                   e.heads,
                   e.rows,
                   e.columns,
                   e.size(),
                   theta_[name],
                   gradient_[name],
                   first_[name],
                   second_[name],
                   lr,
                   task_.constraints[name],
                   {},
                   {},
                   {},
                   {},
                   {},
                   {},
                   {}});
  }
  descent_->prepare(this->threads());  // a team may be larger than what a batch is worth
}

template <class real>
void Loop<real>::take_lanes() {
  const auto take = [&](const OfRuns<real*>& from, const Tensors<real*>& to) {
    const Tensors<real*> of_run = from.of(run_);
    for (int name = 0; name < kTensors; ++name)
      if (of_run[name])
        to_lanes<real>(of_run[name], from.run[name], count_, width_,
                       extent(TensorName(name), task_.data.shape, task_.rank).all(), to[name]);
  };
  take(task_.model, theta_);
  take(task_.first, first_);
  take(task_.second, second_);
}

template <class real>
void Loop<real>::write_back() {
  if (width_ == 1) return;
  const auto give = [&](const Tensors<real*>& from, const OfRuns<real*>& to) {
    const Tensors<real*> of_run = to.of(run_);
    for (int name = 0; name < kTensors; ++name)
      if (of_run[name] && task_.wrt[name])
        from_lanes<real>(from[name], to.run[name], count_, width_,
                         extent(TensorName(name), task_.data.shape, task_.rank).all(),
                         of_run[name]);
  };
  give(theta_, task_.model);
  give(first_, task_.first);
  give(second_, task_.second);
}

template <class real>
void Loop<real>::bind(Workspace& workspace) {
  engine_->bind(workspace.engine);
  if (workspace.shards.size() < further_.size()) workspace.shards.resize(further_.size());
  for (std::size_t i = 0; i < further_.size(); ++i) further_[i]->bind(workspace.shards[i]);
  test_block_ = &workspace.tests;
}

template <class real>
Parameters<real> Loop<real>::parameters() const {
  const Tensors<real*>& at = scaled_theta_;
  return {at[kW], at[kQ], at[kK], at[kU], at[kV], at[kPrompt], task_.scale};
}

/// A member's heads of the copies that the engine takes where data are scaled.
template <class real>
void Loop<real>::rescale_heads(const Member& member) {
  if (!task_.exponents.any()) return;
  for (int name = 0; name < kPrompt; ++name) {
    if (!task_.model.at[name]) continue;
    const Extent e = extent(TensorName(name), task_.data.shape, task_.rank);
    const std::ptrdiff_t numbers = e.size() * width_;
    for (int h = member.index; h < e.heads; h += member.count)
      scale_by_power(theta_[name] + h * numbers, numbers, exponent(TensorName(name)),
                     scaled_theta_[name] + h * numbers);
  }
}

template <class real>
void Loop<real>::rescale_prompt() {
  if (!task_.exponents.any() || !theta_[kPrompt]) return;
  const Extent e = extent(kPrompt, task_.data.shape, task_.rank);
  scale_by_power(theta_[kPrompt], e.all() * width_, exponent(kPrompt), scaled_theta_[kPrompt]);
}

/// W of one head, of factors.
template <class real>
void Loop<real>::compose_product(int head) {
  const Tensors<real*>& at = scaled_theta_;
  compose(active_kernels<real>(), task_.data.shape, task_.rank, at[kQ], at[kK], head, width_,
          at[kW]);
}

/// A member's heads of the parameters, after a step over the same heads, and the prompt; its share
/// of a batch.
template <class real>
void Loop<real>::load(const Member& member) {
  const Shape& s = task_.data.shape;
  const Tensors<real*>& at = scaled_theta_;
  rescale_heads(member);
  for (int h = member.index; needs_product_ && h < s.H; h += member.count) compose_product(h);
  for (int h = member.index; s.value_rank > 0 && h < s.H; h += member.count)
    compose_values<real>(active_kernels<real>(), s, at[kValueA], at[kValueB], h, width_, at[kV]);
  for (Engine<real>* shard : shards_) shard->load_parameters(parameters(), member);
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
    take_averages(member);
    descent_->update(member);
    if (task_.wrt[kPrompt]) {
      if (leader) rescale_prompt();
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

/// A member's heads of the means, to which a step adds what it is taken from.
template <class real>
void Loop<real>::take_averages(const Member& member) {
  for (int name = 0; name < kTensors; ++name) {
    if (!task_.averages.mean.at[name]) continue;
    const Extent e = extent(TensorName(name), task_.data.shape, task_.rank);
    for (int l = 0; l < count_; ++l) {
      if (averaged_[l] == 0) continue;
      for (int h = member.index; h < e.heads; h += member.count) {
        double* mean = task_.averages.mean.of(run_ + l)[name] + h * e.size();
        const real* theta = theta_[name] + h * e.size() * width_ + l;
        for (std::ptrdiff_t i = 0; i < e.size(); ++i)
          mean[i] = Averages::added(mean[i], theta[i * width_], averaged_[l]);
      }
    }
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
  whole_engine_->load_parameters(parameters(), member);
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

/// A member's heads of the gradient that a pass has left, of factors too.
template <class real>
void Loop<real>::differentiate(Engine<real>& engine, const Member& member) {
  const TensorName readout = readout_of(task_.data.shape).name;
  const bool factors = engine.multiplies_factors();
  GradientOut<real> to{factors ? nullptr : gradient_[kW], gradient_[readout], gradient_[kPrompt]};
  if (factors) {
    to.Q = gradient_[kQ];
    to.K = gradient_[kK];
  }
  engine.reduce_gradient(to, member);
  const Shape& s = task_.data.shape;
  const bool of_product = !factors && (gradient_[kQ] || gradient_[kK]);
  for (int h = member.index; of_product && h < s.H; h += member.count)
    differentiate_factors<real>(active_kernels<real>(), s, task_.rank, scaled_theta_[kQ],
                                scaled_theta_[kK], gradient_[kW], h, width_, gradient_[kQ],
                                gradient_[kK]);
  for (int h = member.index; (gradient_[kValueA] || gradient_[kValueB]) && h < s.H;
       h += member.count)
    differentiate_values<real>(active_kernels<real>(), s, scaled_theta_[kValueA],
                               scaled_theta_[kValueB], gradient_[kV], h, width_, gradient_[kValueA],
                               gradient_[kValueB]);
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
    take_sums(member);
  else
    differentiate(*engines[0], member);
  restore_gradients(member);
  descent_->scan(member);
  return true;
}

/// A member's heads of the gradient over all samples of all processes.
template <class real>
void Loop<real>::take_sums(const Member& member) {
  const double* sum = sums_->gradient(0);
  for (Trained<real>& tensor : descent_->tensors()) {
    for (int h = member.index; h < tensor.heads; h += member.count)
      std::transform(sum + h * tensor.size, sum + (h + 1) * tensor.size,
                     tensor.gradient + h * tensor.size, [](double x) { return real(x); });
    sum += tensor.heads * tensor.size;
  }
}

/// Adds up what a pass over the shards has left. False when the caller aborts.
template <class real>
bool Loop<real>::add_up(Pass kind, const Member& member) {
  for (int i = 0; is_gradient(kind) && i < sums_->shards(); ++i) {
    differentiate(*shards_[i], member);
    double* row = sums_->gradient(i);
    for (const Trained<real>& tensor : descent_->tensors()) {
      for (int h = member.index; h < tensor.heads; h += member.count)
        std::copy_n(tensor.gradient + h * tensor.size, tensor.size, row + h * tensor.size);
      row += tensor.heads * tensor.size;
    }
  }
  member.wait();
  if (member.index == 0) interrupted_ = !add_numbers(kind);
  member.wait();
  return !interrupted_;
}

/// The first member's part of it.
template <class real>
bool Loop<real>::add_numbers(Pass kind) {
  using Task = TrainingTask<real>;
  const int scales = task_.data.shape.H + 1;
  const bool gathers =
      engine_->gathers_gaps() && (kind == Pass::kScales || kind == Pass::kGradient);
  double margin = kInfinity;
  for (int i = 0; i < sums_->shards(); ++i) {
    const Totals of_shard = shards_[i]->totals();
    sums_->loss(i) = of_shard.loss;
    sums_->labels(i) = of_shard.correct;
    margin = std::min(margin, of_shard.margin);
    if (gathers) shards_[i]->gather_scales();
  }
  sums_->put(Task::kMarginInSlot, margin);
  for (int part = 0; gathers && part < scales; ++part) {
    double largest = -kInfinity;
    for (const Engine<real>* shard : shards_)
      largest = std::max(largest, shard->gathered_scale(part));
    sums_->put(Task::kScalesInSlot + part, largest);
  }
  if (!is_gradient(kind)) sums_->clear_gradients();
  CallbackResult result = CallbackResult::kGoOn;
  flush_->suspended([&] { result = sums_->add(step_); });
  if (result == CallbackResult::kAbort) return false;
  if (result == CallbackResult::kStop && !finishes()) finish_ = StopReason::kHook;
  totals_ = {sums_->loss(0), sums_->labels(0), sums_->smallest(Task::kMarginInSlot)};
  for (int part = 0; gathers && part < scales; ++part)
    for (Engine<real>* shard : shards_)
      shard->replace_scale(part, sums_->largest(Task::kScalesInSlot + part));
  return true;
}

/// From a member's gradients by the scaled copies to those by the parameters, unless steps take
/// these factors as logarithms.
template <class real>
void Loop<real>::restore_gradients(const Member& member) {
  if (!task_.exponents.any() || engine_->gathers_gaps()) return;
  for (Trained<real>& tensor : descent_->tensors()) {
    const std::ptrdiff_t numbers = tensor.size * width_;
    for (int h = member.index; h < tensor.heads; h += member.count) {
      real* g = tensor.gradient + h * numbers;
      scale_by_power(g, numbers, exponent(tensor.name), g);
    }
  }
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
        scale = std::log(2.0) * exponent(tensor.name);
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
    if (frozen_[l]) continue;
    losses_[l] = totals(*engine_, l).loss;
    const bool finite = std::isfinite(losses_[l]) && (!has_gradient || descent_->is_finite(l));
    if (!finite && !had_records) {  // a run that ends has its loss recorded
      again_ = true;
      continue;
    }
    if (!finite) {
      end(l, StopReason::kNonfinite);
    } else if (checks && limits.any()) {
      const Totals now = totals(*whole_, l);
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
    tests_[i]->load_parameters(parameters(), member);
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
      write_back();
      written_back = true;
    }
    for (int l = 0; l < count_; ++l) {
      const std::int64_t stopped = task_.stopped[run_ + l];
      const bool is_frozen =
          stopped >= 0 && row > std::max<std::int64_t>(0, r.row(task_.first_step, stopped));
      const bool is_constant =
          task_.keeps_attention() && row > 0 && is_of(r.quantity) == QuantityOf::kAttentionWeights;
      if (is_frozen || is_constant) {
        repeat_row(r, l, row - 1, row);
        continue;
      }
      if (is_of_parameters(r.quantity)) {
        write_record(task_, r, run_ + l, row, stopped >= 0 ? stopped : step_);
        continue;
      }
      const Totals now = r.set < 0 ? totals(*whole_, l) : tests_[r.set]->totals(l);
      double& to = static_cast<double*>(r.buffer)[(run_ + l) * r.capacity + row];
      to = r.quantity == Quantity::kLoss       ? now.loss
           : r.quantity == Quantity::kAccuracy ? now.correct
           : r.quantity == Quantity::kMargin   ? now.margin
                                               : gradient_norm(l);
    }
  }
}

template <class real>
void Loop<real>::repeat_row(const Record& r, int lane, std::int64_t from, std::int64_t to) {
  const bool is_real = r.quantity == Quantity::kParameter || r.quantity == Quantity::kAttention;
  const std::int64_t bytes = r.row_size * (is_real ? sizeof(real) : sizeof(double));
  char* rows = static_cast<char*>(r.buffer) + (run_ + lane) * r.capacity * bytes;
  if (from < 0)
    std::memset(rows + to * bytes, 0xff, bytes);  // all NaN
  else
    std::copy_n(rows + from * bytes, bytes, rows + to * bytes);
}

template <class real>
void Loop<real>::repeat_rows(std::int64_t reached) {
  // The step at which the caller's own loss failed has no row.
  const bool failed = is_stopped() && !interrupted_;
  for (const Record& r : task_.records) {
    const std::int64_t from = r.row(task_.first_step, step_) - (failed ? 1 : 0);
    const std::int64_t to = std::min(r.row(task_.first_step, reached), r.capacity - 1);
    for (int l = 0; l < count_; ++l)
      for (std::int64_t row = from + 1; row <= to; ++row) repeat_row(r, l, from, row);
  }
}

template <class real>
bool Loop<real>::report_progress(const FlushToZero& flush) {
  if (!interruptible_ || !task_.on_progress || interrupted_) return interrupted_;
  const auto now = Clock::now();
  if (now - last_progress_ < std::chrono::milliseconds(kProgressInterval)) return false;
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
