#include "train.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>

#include "float_mode.hpp"
#include "records.hpp"

namespace mhfast {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kTickInterval = std::chrono::milliseconds(50);
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// A trained tensor, its gradient and what the step needs to know of it, head by head.
template <class real>
struct Tensor {
  real* theta;
  real* gradient;
  std::ptrdiff_t size;                // of one head
  std::vector<SquareSum> loss_norms;  // of the gradient as stored
  std::vector<SquareSum> step_norms;  // of gradient + l2 theta
  std::vector<double> log_scales;     // log of the true gradient over the stored one
  std::vector<double> multipliers;    // theta loses this times the stored gradient
};

/// One training run: what its threads share. Members of the team call `body`; whatever only the
/// first member writes is read by the others after a barrier.
template <class real>
class Loop {
 public:
  explicit Loop(TrainingTask<real>& task);

  TrainingEnd run() {
    run_team(engine_->threads(), [this](const Member& member) { body(member); });
    return {step_, reason_};
  }

 private:
  void body(const Member& member);
  void step(const Member& member, const FlushToZero& flush);
  bool evaluate(const Member& member);
  void choose_scales();
  void scan_gradients(const Member& member);
  void decide(const FlushToZero& flush);
  void choose_multipliers();
  SquareSum whole_norm(std::vector<SquareSum> Tensor<real>::* norms, double& log_scale) const;
  double gradient_norm() const;
  void evaluate_tests(const Member& member);
  void record();
  void update(const Member& member);

  HookAnswer ask(const std::function<HookAnswer(std::int64_t)>& hook, const FlushToZero& flush);
  bool tick_is_due();
  void end(const std::string& reason);
  bool is_due(const Record& r) const;
  Parameters<real> parameters() const { return {task_.W, task_.U, task_.scale}; }

  TrainingTask<real>& task_;
  Block engine_block_, gradient_block_;
  std::unique_ptr<Engine<real>> engine_;
  std::vector<std::unique_ptr<Block>> test_blocks_;
  std::vector<std::unique_ptr<Engine<real>>> tests_;
  std::vector<Tensor<real>> tensors_;
  real *gW_ = nullptr, *gU_ = nullptr;
  bool records_norm_ = false;  // or stops at one
  bool step_needs_norm_ = false;
  bool scaled_ = false;                 // the stored gradient lacks the factors in log_scales
  const FlushToZero* flush_ = nullptr;  // the first member's

  std::int64_t step_;
  Totals totals_;
  bool interrupted_ = false, ended_ = false, recording_ = false;
  bool alone_ = false;  // the first member takes the next steps by itself
  std::vector<char> test_due_;
  std::string reason_;
  TeamOrAlone pace_;
  Clock::time_point last_tick_ = Clock::now(), last_step_ = Clock::now();
};

template <class real>
Loop<real>::Loop(TrainingTask<real>& task) : task_(task), step_(task.first) {
  const Optimizer& optimizer = task.optimizer;
  const Shape& s = task.data.shape;
  for (const Record& r : task.records) records_norm_ |= r.quantity == Quantity::kGradNorm;
  records_norm_ |= !std::isnan(task.thresholds.grad_norm);
  step_needs_norm_ = optimizer.normalized || std::isfinite(optimizer.clip);

  typename Engine<real>::Options options;
  options.gradient = true;
  options.wrt_W = task.wrt_W;
  options.wrt_U = task.wrt_U;
  options.gaps = optimizer.normalized && optimizer.l2 == 0;
  options.keep_packed = true;
  engine_ =
      std::make_unique<Engine<real>>(task.data, task.loss, options, task.threads, engine_block_);
  const auto interrupted = [this] {
    if (!interrupted_ && tick_is_due())
      interrupted_ = ask(task_.tick, *flush_) == HookAnswer::kAbort;
    return interrupted_;
  };
  engine_->on_chunk(interrupted);
  typename Engine<real>::Options forward;
  forward.keep_packed = true;
  for (const Data<real>& test : task.tests) {
    test_blocks_.push_back(std::make_unique<Block>());
    tests_.push_back(std::make_unique<Engine<real>>(test, task.loss, forward, engine_->threads(),
                                                    *test_blocks_.back()));
    tests_.back()->on_chunk(interrupted);
  }
  test_due_.resize(tests_.size());

  const std::ptrdiff_t size_W = std::ptrdiff_t(s.d) * s.d, size_U = std::ptrdiff_t(s.q) * s.d;
  const auto lay_out = [&](Layout layout) {
    if (task.wrt_W) gW_ = layout.template take<real>(s.H * size_W);
    if (task.wrt_U) gU_ = layout.template take<real>(s.H * size_U);
    return layout.size();
  };
  lay_out(Layout(gradient_block_.reserve(lay_out(Layout()))));
  const auto add_tensor = [&](real* theta, real* gradient, std::ptrdiff_t size) {
    const std::vector<SquareSum> norms(s.H);
    const std::vector<double> numbers(s.H, 0.0);
    tensors_.push_back({theta, gradient, size, norms, norms, numbers, numbers});
  };
  if (task.wrt_W) add_tensor(task.W, gW_, size_W);
  if (task.wrt_U) add_tensor(task.U, gU_, size_U);
}

template <class real>
void Loop<real>::body(const Member& member) {
  const FlushToZero flush;
  const bool leader = member.index == 0;
  if (leader) flush_ = &flush;
  engine_->load_parameters(parameters(), member);
  member.wait();
  while (!ended_) {
    step(member, flush);
    member.wait();
    if (!alone_) continue;
    // The others sleep at the barrier while the first member goes on alone.
    if (leader)
      while (!ended_ && pace_.alone()) step(Member{0, 1, nullptr}, flush);
    member.wait();
  }
}

/// One step, or the last record. Members that share it end it together.
template <class real>
void Loop<real>::step(const Member& member, const FlushToZero& flush) {
  const bool leader = member.index == 0;
  const bool complete = evaluate(member);
  if (complete) {
    member.wait();
    if (leader) {
      decide(flush);
      if (engine_->threads() > 1) {
        const auto now = Clock::now();
        pace_.report(std::chrono::duration<double>(now - last_step_).count());
        last_step_ = now;
        if (member.count > 1) alone_ = !ended_ && pace_.alone();
      }
    }
    member.wait();
    evaluate_tests(member);
    if (recording_ && !interrupted_) {
      if (leader) record();
      member.wait();
    }
  }
  if (interrupted_ || ended_) {
    member.wait();  // all have seen why
    if (leader && interrupted_) end("aborted");
    if (member.count > 1 && leader) alone_ = false;
    return;
  }
  update(member);
  engine_->load_parameters(parameters(), member);
  if (leader) {
    ++step_;
    engine_->restart();
  }
}

/// Loss and gradient at theta_k. False when the pass was interrupted.
template <class real>
bool Loop<real>::evaluate(const Member& member) {
  const bool loss_only = step_ == task_.last && !records_norm_;
  engine_->run_chunks(loss_only ? Pass::kLoss : Pass::kGradient, member);
  member.wait();
  if (interrupted_) return false;
  if (member.index == 0) {
    totals_ = engine_->totals();
    if (engine_->gathers_gaps() && !loss_only) choose_scales();
  }
  if (loss_only) return true;
  if (engine_->gathers_gaps()) {
    member.wait();
    if (scaled_) {
      engine_->run_chunks(Pass::kScaledGradient, member);
      member.wait();
      if (interrupted_) return false;
    }
  }
  engine_->reduce_gradient(gW_, gU_, member);
  scan_gradients(member);
  return true;
}

/// Decides whether a gradient that is to be normalized must have its largest factors taken out.
template <class real>
void Loop<real>::choose_scales() {
  scaled_ = engine_->needs_scaling(task_.optimizer.by != Scope::kHead);
  if (scaled_) engine_->restart();
  for (Tensor<real>& tensor : tensors_)
    for (int h = 0; h < task_.data.shape.H; ++h)
      tensor.log_scales[h] =
          !scaled_ ? 0.0
                   : std::log(engine_->share()) + (tensor.gradient == gW_ ? engine_->log_scale_W(h)
                                                                          : engine_->log_scale_U());
}

/// Measures a member's heads of the gradient and adds l2 theta to them.
template <class real>
void Loop<real>::scan_gradients(const Member& member) {
  const double l2 = task_.optimizer.l2;
  for (Tensor<real>& tensor : tensors_)
    for (int h = member.index; h < task_.data.shape.H; h += member.count) {
      real* g = tensor.gradient + h * tensor.size;
      const real* theta = tensor.theta + h * tensor.size;
      const auto entry = [g](std::ptrdiff_t i) { return g[i]; };
      if (records_norm_ || step_needs_norm_) {
        tensor.loss_norms[h] = square_sum(tensor.size, entry);
      } else {  // only whether all entries are finite
        double sum = 0;
        for (std::ptrdiff_t i = 0; i < tensor.size; ++i) sum += double(g[i]) * 0.0;
        tensor.loss_norms[h] = {sum, 1};
      }
      tensor.step_norms[h] = tensor.loss_norms[h];
      if (l2 == 0) continue;
      for (std::ptrdiff_t i = 0; i < tensor.size; ++i) g[i] = real(g[i] + l2 * theta[i]);
      if (step_needs_norm_) tensor.step_norms[h] = square_sum(tensor.size, entry);
    }
}

/// Norm over all tensors and heads, divided by exp(log_scale), the largest of their scales.
template <class real>
SquareSum Loop<real>::whole_norm(std::vector<SquareSum> Tensor<real>::* norms,
                                 double& log_scale) const {
  log_scale = scaled_ ? -kInfinity : 0.0;
  if (scaled_)
    for (const Tensor<real>& tensor : tensors_)
      for (const double scale : tensor.log_scales) log_scale = std::max(log_scale, scale);
  SquareSum sum;
  for (const Tensor<real>& tensor : tensors_)
    for (std::size_t h = 0; h < tensor.log_scales.size(); ++h) {
      SquareSum part = (tensor.*norms)[h];
      if (part.is_zero()) continue;
      part.largest *= std::exp(tensor.log_scales[h] - log_scale);
      sum.add(part);
    }
  return sum;
}

template <class real>
double Loop<real>::gradient_norm() const {
  double log_scale = 0;
  const double norm = whole_norm(&Tensor<real>::loss_norms, log_scale).norm();
  return norm == 0 ? norm : norm * std::exp(log_scale);
}

/// The first member's part of a step: hooks, whether to end here, what is due, how far to step.
template <class real>
void Loop<real>::decide(const FlushToZero& flush) {
  const bool at_end = step_ == task_.last;
  const Thresholds& limits = task_.thresholds;
  bool finite = std::isfinite(totals_.loss);
  if (!(at_end && !records_norm_))
    for (const Tensor<real>& tensor : tensors_)
      for (const SquareSum& norm : tensor.loss_norms) finite &= std::isfinite(norm.norm());
  if (tick_is_due() && ask(task_.tick, flush) == HookAnswer::kAbort) end("aborted");
  if (!finite) end("nonfinite");
  if (totals_.loss <= limits.loss) end("loss");
  if (totals_.correct >= limits.accuracy) end("accuracy");
  if (totals_.margin >= limits.margin) end("margin");
  if (!std::isnan(limits.grad_norm) && gradient_norm() <= limits.grad_norm) end("grad_norm");
  if (at_end) end("steps");
  if (task_.hook && reason_ != "aborted" && (ended_ || step_ % task_.hook_every == 0)) {
    const HookAnswer answer = ask(task_.hook, flush);
    if (answer == HookAnswer::kAbort) end("aborted");
    if (answer == HookAnswer::kStop) end("hook");
  }
  recording_ = false;
  std::fill(test_due_.begin(), test_due_.end(), 0);
  for (const Record& r : task_.records) {
    if (!is_due(r)) continue;
    recording_ = true;
    if (r.set >= 0 && !test_due_[r.set]) {
      test_due_[r.set] = 1;
      tests_[r.set]->restart();
    }
  }
  if (!ended_) choose_multipliers();
}

/// theta loses rate * gradient, clipped, or divided by the norm of its group.
template <class real>
void Loop<real>::choose_multipliers() {
  const Optimizer& o = task_.optimizer;
  const double rate = o.lr * (o.schedule ? o.schedule[step_] : 1.0);
  double whole_scale = 0, kept = 1;  // what clipping leaves
  SquareSum whole;
  if (step_needs_norm_) {
    whole = whole_norm(&Tensor<real>::step_norms, whole_scale);
    const double norm = whole.is_zero() ? 0.0 : whole.norm() * std::exp(whole_scale);
    if (norm > o.clip) kept = o.clip / norm;
  }
  if (!o.normalized) {
    for (Tensor<real>& tensor : tensors_)
      std::fill(tensor.multipliers.begin(), tensor.multipliers.end(), rate * kept);
    return;
  }
  // rate / (norm + eps), for a norm stored without exp(log_scale); a zero gradient does not move.
  const auto divide = [&](const SquareSum& norm, double log_scale) {
    if (norm.is_zero()) return 0.0;
    if (o.eps == 0) return rate / norm.norm();
    const double actual = kept * norm.norm() * std::exp(log_scale);
    return rate * (actual / (actual + o.eps)) / norm.norm();
  };
  for (Tensor<real>& tensor : tensors_) {
    SquareSum all_heads;
    for (const SquareSum& norm : tensor.step_norms) all_heads.add(norm);
    for (std::size_t h = 0; h < tensor.multipliers.size(); ++h) {
      const double scale = tensor.log_scales[h];
      switch (o.by) {
        case Scope::kTensor:
          tensor.multipliers[h] = divide(all_heads, scale);
          break;
        case Scope::kHead:
          tensor.multipliers[h] = divide(tensor.step_norms[h], scale);
          break;
        case Scope::kAll:
          tensor.multipliers[h] = divide(whole, whole_scale);
          if (scaled_) tensor.multipliers[h] *= std::exp(scale - whole_scale);
          break;
      }
    }
  }
}

template <class real>
void Loop<real>::evaluate_tests(const Member& member) {
  for (std::size_t i = 0; i < tests_.size(); ++i) {
    if (!test_due_[i]) continue;
    tests_[i]->load_parameters(parameters(), member);
    member.wait();
    tests_[i]->run_chunks(Pass::kLoss, member);
    member.wait();
    if (interrupted_) return;
  }
}

template <class real>
void Loop<real>::record() {
  for (Record& r : task_.records) {
    if (!is_due(r) || r.row >= r.rows) continue;
    const Totals totals = r.set < 0 ? totals_ : tests_[r.set]->totals();
    double* numbers = static_cast<double*>(r.buffer);
    switch (r.quantity) {
      case Quantity::kLoss:
        numbers[r.row] = totals.loss;
        break;
      case Quantity::kAccuracy:
        numbers[r.row] = totals.correct;
        break;
      case Quantity::kMargin:
        numbers[r.row] = totals.margin;
        break;
      case Quantity::kGradNorm:
        numbers[r.row] = gradient_norm();
        break;
      default:
        write_record(task_, r);
    }
    ++r.row;
  }
}

template <class real>
void Loop<real>::update(const Member& member) {
  for (Tensor<real>& tensor : tensors_)
    for (int h = member.index; h < task_.data.shape.H; h += member.count) {
      const double multiplier = tensor.multipliers[h];
      real* theta = tensor.theta + h * tensor.size;
      const real* g = tensor.gradient + h * tensor.size;
      for (std::ptrdiff_t i = 0; i < tensor.size; ++i)
        theta[i] = real(double(theta[i]) - multiplier * double(g[i]));
    }
}

template <class real>
HookAnswer Loop<real>::ask(const std::function<HookAnswer(std::int64_t)>& hook,
                           const FlushToZero& flush) {
  HookAnswer answer = HookAnswer::kGoOn;
  flush.suspended([&] { answer = hook(step_); });
  return answer;
}

template <class real>
bool Loop<real>::tick_is_due() {
  if (!task_.tick) return false;
  const auto now = Clock::now();
  if (now - last_tick_ < kTickInterval) return false;
  last_tick_ = now;
  return true;
}

/// The first reason counts, but for an error of the caller's code, which outranks all.
template <class real>
void Loop<real>::end(const std::string& reason) {
  if (!ended_ || reason == "aborted") reason_ = reason;
  ended_ = true;
}

template <class real>
bool Loop<real>::is_due(const Record& r) const {
  return step_ % r.every == 0 || (ended_ && reason_ != "aborted");
}

}  // namespace

template <class real>
TrainingEnd train(TrainingTask<real>& task) {
  Loop<real> loop(task);
  return loop.run();
}

template TrainingEnd train<float>(TrainingTask<float>&);
template TrainingEnd train<double>(TrainingTask<double>&);

}  // namespace mhfast
