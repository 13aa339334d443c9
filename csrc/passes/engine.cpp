#include "engine.hpp"

#include "../problem/attended.hpp"
#include "../problem/products.hpp"
#include "../runtime/tuning.hpp"

namespace mhfast {
namespace {

/// Of all runs. Multiply-adds count two; an exponential about twenty.
double flops(const Shape& s, int runs) {
  if (s.attended) {
    const AttendedRows rows(s, 1);
    return 4.0 * double(rows.count) * double(rows.features) * s.row_outputs();
  }
  if (s.products) {
    const ProductSizes of(s, 1);
    return double(s.n) * (4.0 * double(of.pairs) * double(of.entries) + 4.0 * s.q * s.d * s.p);
  }
  const double scores = s.flops_of_w() + 8.0 * s.T * s.d + 20.0 * s.T;
  return double(s.n) * runs * s.H * s.q * (scores + readout_of(s).flops);
}

/// Pieces of work that threads share.
std::int64_t pieces(const Plan& plan, const Shape& s) {
  if (plan.kind != PlanKind::kTiles) return plan.chunks;
  return std::int64_t(plan.slab) * s.H * plan.parts;
}

template <class real>
Plan plan_of(const Data<real>& data, std::optional<Loss> loss, const PassOptions& options) {
  Plan plan = make_plan(data.shape, registers_of(active_kernels<real>()), options.runs_are_lanes);
  if (loss && loss->own && loss->own->is_slow()) {  // called at least once for a chunk
    const double calls = std::max(1.0, plan.cycles[int(plan.kind)] / kOwnLossCycles);
    plan.chunks = int(std::min<double>(plan.chunks, calls));
  }
  return plan;
}

}  // namespace

template <class real>
Engine<real>::Engine(const Data<real>& data, std::optional<Loss> loss, const Options& options,
                     int threads)
    : Engine(data, loss, options, plan_of(data, loss, options), threads) {}

template <class real>
Engine<real>::Engine(const Data<real>& data, std::optional<Loss> loss, const Options& options,
                     const Plan& plan, int threads)
    : threads_(useful_threads(threads, pieces(plan, data.shape), flops(data.shape, data.runs))),
      expected_seconds_(flops(data.shape, data.runs) / (kSlowFlops * active_kernels<real>().lanes)),
      state_(data, loss, options, plan, std::max(threads_, options.members)),
      strategy_(make_strategy(state_)) {}

template <class real>
void Engine<real>::bind(AlignedBuffer& block) {
  Arena measure;
  lay_out(measure);
  Arena layout(block.reserve(measure.size()));
  lay_out(layout);
}

template <class real>
void Engine<real>::lay_out(Arena& layout) {
  if (!has_attended()) state_.model.lay_out(layout);
  state_.gradients.lay_out(layout);
  strategy_->lay_out(layout);
}

template <class real>
void Engine<real>::load_parameters(const Parameters<real>& parameters, const Member& member) {
  if (!has_attended())
    state_.model.load(parameters, state_.data.has_words() ? state_.data.x : nullptr, member);
  strategy_->load(parameters, member);
}

template <class real>
Totals Engine<real>::totals(int lane) const {
  Totals sum{0, 0, kInfinity};
  const auto add = [&sum](const LaneTotals& chunk, int l) {
    sum.loss += chunk.loss[l];
    sum.correct += chunk.correct[l];
    sum.margin = std::min(sum.margin, chunk.margin[l]);
  };
  for (const LaneTotals& chunk : state_.totals) {
    if (state_.width > 1)
      add(chunk, lane);
    else
      for (int l = 0; l < state_.lanes.lanes; ++l) add(chunk, l);
  }
  sum.loss /= state_.shares.weights[lane];
  sum.correct /= state_.shares.labels[lane];
  return sum;
}

template <class real>
bool Engine<real>::finds_attention() const {
  const Plan& plan = state_.plan;
  const Shape& s = state_.data.shape;
  if (!state_.options.gradient || has_projections(s) || has_keys_first(s)) return false;
  if (plan.kind == PlanKind::kRows && s.is_layer()) return true;
  const bool slabs = plan.kind == PlanKind::kSamples || plan.kind == PlanKind::kHybrid ||
                     plan.kind == PlanKind::kRows;
  return slabs && plan.keep && plan.tile == s.q;
}

template <class real>
bool Engine<real>::needs_scaling(bool together) {
  // Above this, entries 1e-8 (float) or 1e-16 (double) times the largest still are normal numbers.
  constexpr double kUnderflow = sizeof(real) == 4 ? -50.0 : -600.0;
  return state_.scales.needs_scaling(state_.options, lanes_of_runs(), together, kUnderflow);
}

template class Engine<float>;
template class Engine<double>;

}  // namespace mhfast
