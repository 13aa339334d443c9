// From gradients to steps: what every optimizer does with the trained tensors.
//
//   g += l2 theta  ->  clip by the global norm  ->  normalize, or momentum  ->  step  ->  project
//
// where g is the projection of the gradient onto the subspace of the tensor's constraint, and theta
// is held in it at the end (constraints.hpp).
//
// Learning rates, their schedules, l2 and radii are those of each tensor.
//
// Tensors hold one run's numbers, or vectors with one number for each of as many runs as there are
// lanes; then norms, rates and projections are those of each lane.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <variant>
#include <vector>

#include "../dispatch/dispatch.hpp"
#include "../lists/optimizers.hpp"
#include "../runtime/team.hpp"
#include "balls.hpp"
#include "directions.hpp"
#include "trained.hpp"

namespace mhfast {

enum class Projection { kNone, kBall, kSphere };

template <class First, class... Rest>
struct VariantOfRest {
  using Type = std::variant<Rest...>;
};

/// One of the optimizers, with its settings.
#define MHFAST_TYPE(Type, name) , Type
using AnyRule = VariantOfRest<void MHFAST_OPTIMIZERS(MHFAST_TYPE)>::Type;
#undef MHFAST_TYPE

/// The kernel of a rule's step.
#define MHFAST_STEP(Type, name)                             \
  template <class real>                                     \
  auto step_of(const Kernels<real>& kernels, const Type&) { \
    return kernels.step_##name;                             \
  }
MHFAST_OPTIMIZERS(MHFAST_STEP)
#undef MHFAST_STEP

/// A rule, and what all rules have. Parameters that are not trained need no lr.
struct Optimizer {
  AnyRule rule;
  Tensors<const double*> lr{};        // by run
  Tensors<const double*> schedule{};  // factor of lr by step, or null
  Tensors<double> l2{};
  double clip = std::numeric_limits<double>::infinity();
  const std::int64_t* since = nullptr;  // by run: the step before which its slots were zero
  Projection project = Projection::kNone;
  Tensors<double> radius{};  // infinite: not projected
  Scope project_by = Scope::kTensor;
  BallNorm project_norm = BallNorm::kFro;
  double project_power = 2;  // of kPower

  /// Calls body(rule) with the rule's own type.
  template <class Body>
  auto with_rule(const Body& body) const {
    return std::visit(body, rule);
  }
  int slots() const {
    return with_rule([](const auto& r) { return r.kSlots; });
  }
  bool needs_loss() const {
    return with_rule([](const auto& r) { return r.kNeedsLoss; });
  }
  bool ignores_scale() const {
    return with_rule([](const auto& r) { return r.ignores_scale(); });
  }
  Scope norm_scope() const {
    return with_rule([](const auto& r) { return r.norm_scope(); });
  }
  bool decays(const std::array<bool, kTensors>& trained) const {
    for (int name = 0; name < kTensors; ++name)
      if (trained[name] && l2[name] != 0) return true;
    return false;
  }
};

template <class real>
class Descent {
 public:
  /// `width` is 1, or the number of lanes for runs side by side.
  Descent(const Optimizer& optimizer, int width, bool wants_norms);

  void add(const Trained<real>& tensor);
  /// After the last tensor: scratch for teams of up to so many threads.
  void prepare(int threads);
  std::vector<Trained<real>>& tensors() { return tensors_; }

  // Each called by all members of a team, with a barrier after it.
  /// With barriers of its own where there are constraints.
  void scan(const Member& member);
  /// The step itself, with barriers of its own, after choose_rates.
  void update(const Member& member);
  void make_directions(const Member& member);
  void apply(const Member& member);
  void measure_parameters(const Member& member);
  void project(const Member& member);

  // One member's: after scan; after make_directions; after measure_parameters.
  bool is_finite(int lane) const;
  double gradient_norm(int lane) const;
  void choose_rates(std::int64_t step, const std::vector<std::int64_t>& since,
                    const std::vector<double>& losses, const std::vector<char>& frozen);
  void choose_directions() { directions_->choose(scaled_); }
  void choose_projections();

  bool directs() const { return directions_ != nullptr; }
  bool projects() const { return optimizer_.project != Projection::kNone; }
  bool needs_losses() const { return optimizer_.needs_loss(); }
  /// Whether entries of several heads are tied: their gradients are then added up.
  bool ties_heads() const { return ties_heads_; }
  /// The stored gradient lacks the factors whose logarithms are in log_scales.
  void set_scaled(bool scaled) { scaled_ = scaled; }

 private:
  using Norms = std::vector<PowerSum> Trained<real>::*;
  void measure(const real* x, std::ptrdiff_t size, double power, PowerSum* out) const {
    mhfast::measure(kernels_, width_, x, size, power, out);
  }
  PowerSum whole_norm(Norms norms, int lane, double& log_scale) const;
  double divided(double rate, const PowerSum& norm, double log_scale, double kept) const;
  template <class Rule>
  void choose_rates_of(const Rule& rule, std::int64_t step, const std::vector<std::int64_t>& since,
                       const std::vector<double>& losses);
  void choose_normalized(Trained<real>& tensor, int lane, double rate, double kept,
                         const PowerSum& whole, double whole_scale);
  void project_nearest(Trained<real>& tensor, int first, int heads, double* scratch) const;
  void fill(Trained<real>& tensor, int lane, double rate);
  template <class Body>
  void constrain(const Member& member, const Body& body);

  /// What every step asks of the rule: the norm that the gradient is divided by, if any.
  struct Norm {
    bool divides = false, dual = false;  // dual: of another power than 2
    double power = 2, eps = 0;
    Scope by = Scope::kTensor;
  };

  Optimizer optimizer_;
  const Norm norm_;
  const Kernels<real>& kernels_;
  const int width_;
  const bool wants_norms_, step_needs_norm_;
  std::vector<Trained<real>> tensors_;
  std::unique_ptr<Directions<real>> directions_;  // for rules that replace the gradient
  std::vector<std::vector<double>> scratch_;      // of each member, for projections other than fro
  bool scaled_ = false;
  bool one_lr_ = true;  // all tensors have the same, in the same place
  bool constrained_ = false, ties_heads_ = false;
  std::vector<char> frozen_;
  std::vector<double> kept_, own_;
};

}  // namespace mhfast
