#include "strategy.hpp"

#include "attended_pass.hpp"
#include "classifier_slabs.hpp"
#include "layer_rows.hpp"
#include "layer_slabs.hpp"
#include "product_pass.hpp"
#include "tiles.hpp"

namespace mhfast {

template <class real>
PassState<real>::PassState(const Data<real>& data_, std::optional<Loss> loss_,
                           const PassOptions& options_, const Plan& plan_, int threads_)
    : kernels(active_kernels<real>()),
      data(data_),
      loss(loss_),
      options(options_),
      plan(plan_),
      lanes(plan_, kernels.lanes),
      width(lanes.entries_in_sample),
      threads(threads_),
      own(data.shape, loss_, sizeof(real) == sizeof(double)),
      model(kernels, data.shape, plan, width, data.has_weights_of_words()),
      gradients(kernels, data.shape, plan, options, width),
      scales(data.shape.H, kernels.lanes, plan.chunks, options.gaps),
      totals(plan.chunks) {
  if (loss) shares.weigh(data, data.shape.n, *loss, width, kernels.lanes);
}

template <class real>
void ChunkPass<real>::run(Pass pass, const Member& member) {
  const Plan& plan = state_.plan;
  // The larger chunks first, so that the threads finish at nearly the same time.
  const auto begin = [&](std::ptrdiff_t chunk) {
    return plan.units / plan.chunks * chunk + std::min(chunk, plan.units % plan.chunks);
  };
  for (;;) {
    const int chunk = next_chunk_.fetch_add(1, std::memory_order_relaxed);
    if (chunk >= plan.chunks) return;
    state_.totals[chunk] = LaneTotals();
    if (state_.options.gathers_scales(pass)) state_.scales.begin_chunk(chunk);
    run_units(pass, chunk, begin(chunk), begin(chunk + 1), member.index);
    if (state_.own.failed() || (member.index == 0 && state_.interrupted && state_.interrupted()))
      next_chunk_.store(plan.chunks, std::memory_order_relaxed);
  }
}

template <class real>
std::unique_ptr<Strategy<real>> make_strategy(PassState<real>& state) {
  const bool layer = state.data.shape.is_layer();
  if (state.plan.kind == PlanKind::kAttended) return std::make_unique<AttendedPass<real>>(state);
  if (state.plan.kind == PlanKind::kProducts) return std::make_unique<ProductPass<real>>(state);
  if (state.plan.kind == PlanKind::kTiles) return std::make_unique<TilePass<real>>(state);
  if (layer && (state.plan.kind == PlanKind::kRows || state.plan.kind == PlanKind::kWords))
    return std::make_unique<LayerRowPass<real>>(state);
  if (layer) return std::make_unique<LayerSlabs<real>>(state);
  return std::make_unique<ClassifierSlabs<real>>(state);
}

#define MHFAST_INSTANTIATE(real)   \
  template struct PassState<real>; \
  template class ChunkPass<real>;  \
  template std::unique_ptr<Strategy<real>> make_strategy<real>(PassState<real>&);
MHFAST_INSTANTIATE(float)
MHFAST_INSTANTIATE(double)
#undef MHFAST_INSTANTIATE

}  // namespace mhfast
