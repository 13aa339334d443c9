// What the passes over a process's shards have left, added up over all shards of all processes.
#pragma once

#include <vector>

#include "../passes/engine.hpp"
#include "../runtime/float_mode.hpp"
#include "train.hpp"
#include "trained.hpp"

namespace mhfast {

template <class real>
class ShardSums {
 public:
  explicit ShardSums(const TrainingTask<real>& task)
      : heads_(task.data.shape.H), sums_(task.sums()) {}

  int shards() const { return sums_.shards(); }

  /// A member's heads: takes the gradient of one shard.
  void put_gradients(int shard, const std::vector<Trained<real>>& tensors, const Member& member);

  /// One member's, with the engine of each shard after a pass of this kind: adds all up, and gives
  /// the engines the scales of all samples. Gradients are added after the passes that compute them.
  CallbackResult add(Pass kind, const std::vector<Engine<real>*>& shards, std::int64_t step,
                     const FlushToZero& flush);

  /// After that: the totals, and a member's heads of the gradient, over all samples.
  const Totals& totals() const { return totals_; }
  void take_gradients(std::vector<Trained<real>>& tensors, const Member& member);

 private:
  const int heads_;
  Sums sums_;
  Totals totals_;
};

}  // namespace mhfast
