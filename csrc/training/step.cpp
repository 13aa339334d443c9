#include "step.hpp"

#include "../runtime/float_mode.hpp"

namespace mhfast {

template <class real>
void take_step(const Optimizer& optimizer, const std::vector<Trained<real>>& tensors,
               std::int64_t step, double loss) {
  const FlushToZero flush;
  const Member alone{0, 1, nullptr};
  Descent<real> descent(optimizer, 1, false);
  for (const Trained<real>& tensor : tensors) descent.add(tensor);
  descent.prepare(1);
  descent.scan(alone);
  descent.choose_rates(step, {optimizer.since[0]}, {loss}, {0});
  descent.update(alone);
}

template void take_step<float>(const Optimizer&, const std::vector<Trained<float>>&, std::int64_t,
                               double);
template void take_step<double>(const Optimizer&, const std::vector<Trained<double>>&, std::int64_t,
                                double);

}  // namespace mhfast
