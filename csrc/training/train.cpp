#include "train.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>

#include "../passes/attended_tokens.hpp"
#include "../passes/evaluate.hpp"
#include "../passes/token_products.hpp"
#include "../passes/triangular.hpp"
#include "../problem/clean.hpp"
#include "../runtime/tuning.hpp"
#include "coefficient_loop.hpp"
#include "loop.hpp"

namespace mhfast {

namespace {

/// All loops of a task, brought from one common step to the next.
template <class real, class LoopOfRuns>
class Training {
 public:
  /// `make`: the loop of `width` runs from one on, with so many threads.
  template <class Make>
  Training(TrainingTask<real>& task, int width, const Make& make) : task_(task), width_(width) {
    const std::ptrdiff_t loops = (task.runs + width - 1) / width;
    const int threads = task.threads > 0 ? task.threads : default_threads();
    // Loops share the threads where there are enough of them; else each has all in turn.
    members_ = int(std::min<std::ptrdiff_t>(threads, loops));
    // Processes must make the calls for their loops in the same order.
    side_by_side_ = loops > 1 && members_ == threads && !task.processes;
    if (!side_by_side_) members_ = 1;
    for (std::ptrdiff_t i = 0; i < loops; ++i)
      loops_.push_back(make(i * width, side_by_side_ ? 1 : threads));
    workspaces_ = std::vector<Workspace>(members_);
  }

  TrainingEnd run();

 private:
  bool all_ended() const {
    return std::all_of(loops_.begin(), loops_.end(), [](const auto& l) { return l->ended(); });
  }
  bool advance(std::int64_t step, std::int64_t until);
  bool take_fresh(std::int64_t step);
  void advance_once(std::int64_t until);
  void finish(StopReason reason);
  std::int64_t reached() const {
    std::int64_t step = task_.first_step;
    for (const auto& loop : loops_) step = std::max(step, loop->step());
    return step;
  }

  TrainingTask<real>& task_;
  const int width_;
  std::vector<std::unique_ptr<LoopOfRuns>> loops_;
  std::vector<Workspace> workspaces_;
  std::unique_ptr<RescaledData<real>> fresh_;
  int members_;
  bool side_by_side_;
  std::int64_t segment_ = 1;  // steps between common stops
};

/// Brings all loops to `until`, or to their ends.
template <class real, class LoopOfRuns>
void Training<real, LoopOfRuns>::advance_once(std::int64_t until) {
  if (!side_by_side_) {
    for (auto& loop : loops_) {
      if (loop->ended()) continue;
      loop->bind(workspaces_[0]);
      const bool interruptible = loops_.size() == 1;
      run_team(loop->threads(),
               [&](const Member& member) { loop->advance(until, interruptible, member); });
    }
    return;
  }
  std::atomic<std::size_t> next{0};
  run_team(members_, [&](const Member& member) {
    for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < loops_.size();) {
      LoopOfRuns& loop = *loops_[i];
      if (loop.ended()) continue;
      loop.bind(workspaces_[member.index]);
      loop.advance(until, false, Member{0, 1, nullptr});
    }
  });
}

/// From a common step to another. False when the caller aborts.
template <class real, class LoopOfRuns>
bool Training<real, LoopOfRuns>::advance(std::int64_t step, std::int64_t until) {
  if (loops_.size() == 1) {
    advance_once(until);
    return loops_[0]->reason(0) != StopReason::kAborted;
  }
  using Clock = std::chrono::steady_clock;
  do {
    const std::int64_t stop = std::min(until, step + segment_);
    const auto start = Clock::now();
    advance_once(stop);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    const bool is_free = !task_.processes;  // else their order would depend on the time
    if (is_free && seconds < kSegmentSeconds / 2) segment_ *= 2;
    if (is_free && seconds > kSegmentSeconds && segment_ > 1) segment_ /= 2;
    step = stop;
    const auto aborted = [](const auto& loop) { return loop->reason(0) == StopReason::kAborted; };
    if (std::any_of(loops_.begin(), loops_.end(), aborted)) return false;
    if (task_.on_progress && task_.on_progress(step) == CallbackResult::kAbort) return false;
  } while (step < until && !all_ended());
  return true;
}

/// New samples for all loops. False when the caller aborts.
template <class real, class LoopOfRuns>
bool Training<real, LoopOfRuns>::take_fresh(std::int64_t step) {
  const Data<real>* drawn = task_.draw(step);
  if (!drawn) return false;
  fresh_ = std::make_unique<RescaledData<real>>(*drawn, task_.runs, task_.exponents);
  for (auto& loop : loops_) loop->take_fresh(**fresh_);
  return true;
}

/// Ends at theta as it is, recorded.
template <class real, class LoopOfRuns>
void Training<real, LoopOfRuns>::finish(StopReason reason) {
  for (auto& loop : loops_) loop->finish(reason);
  advance_once(task_.last_step);
}

template <class real, class LoopOfRuns>
TrainingEnd Training<real, LoopOfRuns>::run() {
  const std::int64_t every = task_.hook_every, fresh = task_.batches.fresh,
                     first = task_.first_step, last = task_.last_step;
  std::int64_t asked = -1;
  const auto ask = [&](std::int64_t step) {
    if (!task_.hook) return CallbackResult::kGoOn;
    for (auto& loop : loops_) {
      loop->write_back();
      if (loop->ended()) loop->repeat_rows(step);
    }
    asked = step;
    return task_.hook(step);
  };
  const bool calls = fresh > 0 && task_.populations.of_run.empty();
  TrainingEnd end{task_.first_step, LastRow::kAll, {}};
  std::int64_t step = task_.first_step;
  bool aborted = false;
  while (!all_ended() && !aborted) {
    const bool asks = task_.hook && step % every == 0 && step < last;
    const CallbackResult answer = asks ? ask(step) : CallbackResult::kGoOn;
    if (answer != CallbackResult::kGoOn) {
      aborted = answer == CallbackResult::kAbort;
      finish(aborted ? StopReason::kAborted : StopReason::kHook);
      end.last_row = aborted ? LastRow::kDue : LastRow::kAll;
      break;
    }
    const auto next = [&](std::int64_t period) { return (step / period + 1) * period; };
    std::int64_t until = task_.hook ? std::min(last, next(every)) : last;
    if (calls) until = std::min(until, next(fresh));
    const bool draws = calls && step % fresh == 0 && step > first && step < last;
    if ((draws && !take_fresh(step)) || !advance(step, until)) {
      aborted = true;
      end.last_row = LastRow::kNone;
      break;
    }
    step = until;
  }
  end.reached = reached();
  for (auto& loop : loops_) {
    loop->write_back();
    if (loop->step() < end.reached) loop->repeat_rows(end.reached);
  }
  if (!aborted && asked != end.reached) ask(end.reached);
  for (auto& loop : loops_)
    for (int l = 0; l < width_ && end.reasons.size() < std::size_t(task_.runs); ++l)
      end.reasons.push_back(loop->reason(l));
  return end;
}

/// What a process must know of all samples before the first step. False when the caller aborts.
template <class real>
bool share(TrainingTask<real>& task, Largest<real>& largest) {
  using Task = TrainingTask<real>;
  Sums sums = task.sums();
  sums.put(Task::kLargestXInSlot, largest.x);
  sums.put(Task::kLargestZInSlot, largest.z);
  for (std::ptrdiff_t r = 0; r < task.runs; ++r) {
    const Data<real> data = at_run(task.data, r, 1);
    std::ptrdiff_t first = 0;
    for (int i = 0; i < sums.shards(); ++i) {
      const std::ptrdiff_t count = task.processes.shards[i];
      const Data<real> shard = at_samples(data, first, count);
      sums.loss(i) = shard.total_weight(0, task.loss);
      sums.labels(i) = shard.total_labels(0, task.loss);
      first += count;
    }
    sums.clear_gradients();
    if (sums.add(task.first_step) == CallbackResult::kAbort) return false;
    task.weights.push_back(sums.loss(0));
    task.label_counts.push_back(sums.labels(0));
  }
  largest.x = sums.largest(Task::kLargestXInSlot);
  largest.z = sums.largest(Task::kLargestZInSlot);
  return true;
}

/// Whether all samples of a training get cheaper keys before the first step: where steps are taken
/// on all of them, or their factors are few. Else batches may get them at every step.
template <class real>
bool prefers_triangles_of_all(const TrainingTask<real>& task) {
  const Shape& s = task.data.shape;
  if (task.batches.fresh > 0) return prefers_triangle(task.data, TriangleUse::kOutputs);
  const double runs = task.data.run.x ? double(task.runs) : 1.0;
  const double bytes = runs * double(s.n) * s.d * s.d * sizeof(real);
  return (task.batches.size == 0 || bytes <= kTriangleBytes) &&
         prefers_triangle(task.data, TriangleUse::kTraining);
}

/// The attended tokens of a training whose steps are on all samples and change the readout alone,
/// in the place of its tokens and, as far as there is memory for them, of those of its test sets.
template <class real>
class KeptAttention {
 public:
  explicit KeptAttention(TrainingTask<real>& task) : task_(task) {
    if (!task.keeps_attention() || task.batches.size > 0 || task.processes) return;
    if (task.first_step == task.last_step) return;  // there is a loss to compute and no step
    if (!take(task.data, prefers_triangles_of_all(task), task.runs)) return;
    for (Data<real>& test : task.tests)  // runs go one by one now
      take(test, prefers_triangle(test, TriangleUse::kOutputs), 1);
  }
  KeptAttention(const KeptAttention&) = delete;
  KeptAttention& operator=(const KeptAttention&) = delete;

 private:
  /// `triangle`, `runs`: what a step from the tokens would have, its keys and runs side by side.
  bool take(Data<real>& data, bool triangle, std::ptrdiff_t runs) {
    const auto& run = data.run;
    bool apart = run.x || run.z || run.keys || run.queries || run.lengths || run.limits;
    for (const TensorName name : kOfScores) apart |= task_.model.run[name] != 0;
    const double bytes = AttendedTokens<real>::bytes(data, task_.runs, apart);
    if (bytes_ + bytes > kAttendedBytes) return false;
    Shape from_tokens = data.shape;
    if (triangle) from_tokens.T = from_tokens.d;
    if (!prefers_attended(from_tokens, registers_of(active_kernels<real>()), runs)) return false;
    bytes_ += bytes;
    sets_.push_back(std::make_unique<AttendedTokens<real>>(data, task_.runs, apart));
    AttendedTokens<real>& attended = *sets_.back();
    for_runs(apart ? task_.runs : 1, task_.threads, attended.flops(),
             [&](std::ptrdiff_t r, int threads) {
               Tensors<const real*> tensors{};
               const Tensors<real*> of_run = task_.model.of(r);
               for (const TensorName name : kOfScores) tensors[name] = of_run[name];
               const bool tied = task_.rank > 0 && !tensors[kK];
               const RescaledTensors<real> scaled(tensors, data.shape, task_.rank, tied,
                                                  task_.exponents);
               attended.compute(r, {*scaled, task_.rank}, task_.scale, threads);
             });
    data = **sets_.back();
    return true;
  }

  const TrainingTask<real>& task_;
  double bytes_ = 0;
  std::vector<std::unique_ptr<AttendedTokens<real>>> sets_;
};

/// Whether steps are from products of the tokens.
template <class real>
bool takes_products(const TrainingTask<real>& task) {
  if (task.batches.size > 0 || task.processes || task.first_step == task.last_step) return false;
  if (TokenProducts<real>::bytes(task.data, task.runs) > kProductBytes) return false;
  return prefers_products(task.data.shape, task.data.row_map, registers_of(active_kernels<real>()),
                          task.runs);
}

}  // namespace

template <class real>
TrainingEnd train(TrainingTask<real>& task) {
  std::vector<std::unique_ptr<TriangularData<real>>> triangular;
  std::vector<std::unique_ptr<CleanData<real>>> clean;
  std::vector<std::unique_ptr<RescaledData<real>>> scaled;
  const auto prepare = [&](Data<real>& data) {
    scaled.push_back(std::make_unique<RescaledData<real>>(data, task.runs, task.exponents));
    data = **scaled.back();
  };
  const auto clear = [&](Data<real>& data) {
    clean.push_back(std::make_unique<CleanData<real>>(data, task.runs));
    data = **clean.back();
  };
  const auto take_triangles = [&](Data<real>& data) {
    triangular.push_back(std::make_unique<TriangularData<real>>(data, task.runs));
    triangular.back()->compute_all(task.threads);
    data = **triangular.back();
  };
  task.given = task.data;
  clear(task.data);
  Tensors<const real*> tensors;
  std::copy(task.model.at.begin(), task.model.at.end(), tensors.begin());
  Largest<real> largest(task.data, task.runs);
  if (task.processes && !share(task, largest))
    return {task.first_step, LastRow::kNone,
            std::vector<StopReason>(task.runs, StopReason::kAborted)};
  task.exponents =
      choose_exponents(task.data, largest, tensors, task.model.run, task.rank, task.runs);
  prepare(task.data);
  for (Data<real>& test : task.tests) {
    clear(test);
    prepare(test);
  }
  const KeptAttention<real> attention(task);
  if (Coefficients<real>::serve(task)) {
    const Coefficients<real> coefficients(task);
    const auto make = [&](std::ptrdiff_t run, int) {
      return std::make_unique<CoefficientLoop<real>>(task, coefficients, run);
    };
    return Training<real, CoefficientLoop<real>>(task, 1, make).run();
  }
  if (task.coefficients.taken) *task.coefficients.taken = false;
  for (Data<real>& test : task.tests)
    if (!test.shape.attended && prefers_triangle(test, TriangleUse::kOutputs)) take_triangles(test);
  if (task.batches.fresh > 0) {
    prepare(task.fresh);
    task.triangular_batches =
        prefers_triangle(task.fresh, TriangleUse::kGradient, double(task.batches.fresh));
  }
  std::unique_ptr<TokenProducts<real>> products;
  if (takes_products(task)) {
    products = std::make_unique<TokenProducts<real>>(task.data, task.runs, task.threads);
    task.data = **products;
  } else if (!task.data.shape.attended && prefers_triangles_of_all(task))
    take_triangles(task.data);
  else if (task.batches.size > 0 && task.batches.fresh == 0)
    task.triangular_batches = prefers_triangle(task.data, TriangleUse::kGradient);
  SharedPacked<real> shared;
  const auto make = [&](std::ptrdiff_t run, int threads) {
    return std::make_unique<Loop<real>>(task, run, threads, shared);
  };
  return Training<real, Loop<real>>(task, Loop<real>::width(task), make).run();
}

template TrainingEnd train<float>(TrainingTask<float>&);
template TrainingEnd train<double>(TrainingTask<double>&);

}  // namespace mhfast
