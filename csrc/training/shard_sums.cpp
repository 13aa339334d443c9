#include "shard_sums.hpp"

#include <algorithm>

namespace mhfast {

template <class real>
void ShardSums<real>::put_gradients(int shard, const std::vector<Trained<real>>& tensors,
                                    const Member& member) {
  double* row = sums_.gradient(shard);
  for (const Trained<real>& tensor : tensors) {
    for (int h = member.index; h < tensor.heads; h += member.count)
      std::copy_n(tensor.gradient + h * tensor.size, tensor.size, row + h * tensor.size);
    row += tensor.heads * tensor.size;
  }
}

template <class real>
CallbackResult ShardSums<real>::add(Pass kind, const std::vector<Engine<real>*>& shards,
                                    std::int64_t step, const FlushToZero& flush) {
  using Task = TrainingTask<real>;
  const int scales = heads_ + 1;
  const bool gathers =
      shards[0]->gathers_gaps() && (kind == Pass::kScales || kind == Pass::kGradient);
  double margin = kInfinity;
  for (int i = 0; i < sums_.shards(); ++i) {
    const Totals of_shard = shards[i]->totals();
    sums_.loss(i) = of_shard.loss;
    sums_.labels(i) = of_shard.correct;
    margin = std::min(margin, of_shard.margin);
    if (gathers) shards[i]->gather_scales();
  }
  sums_.put(Task::kMarginInSlot, margin);
  for (int part = 0; gathers && part < scales; ++part) {
    double largest = -kInfinity;
    for (const Engine<real>* shard : shards)
      largest = std::max(largest, shard->gathered_scale(part));
    sums_.put(Task::kScalesInSlot + part, largest);
  }
  if (!is_gradient(kind)) sums_.clear_gradients();
  CallbackResult result = CallbackResult::kGoOn;
  flush.suspended([&] { result = sums_.add(step); });
  if (result == CallbackResult::kAbort) return result;
  totals_ = {sums_.loss(0), sums_.labels(0), sums_.smallest(Task::kMarginInSlot)};
  for (int part = 0; gathers && part < scales; ++part)
    for (Engine<real>* shard : shards)
      shard->replace_scale(part, sums_.largest(Task::kScalesInSlot + part));
  return result;
}

template <class real>
void ShardSums<real>::take_gradients(std::vector<Trained<real>>& tensors, const Member& member) {
  const double* sum = sums_.gradient(0);
  for (Trained<real>& tensor : tensors) {
    for (int h = member.index; h < tensor.heads; h += member.count)
      std::transform(sum + h * tensor.size, sum + (h + 1) * tensor.size,
                     tensor.gradient + h * tensor.size, [](double x) { return real(x); });
    sum += tensor.heads * tensor.size;
  }
}

template class ShardSums<float>;
template class ShardSums<double>;

}  // namespace mhfast
