// One training in several processes, each of which has a part of the samples, cut into shards.
//
//   a row of numbers of each shard  ->  their sum  ->  the sum over all processes
//
// Layout of a row of `size()` numbers:
//
//   head | loss | labels that are right | gradients of the trained tensors | a slot of each process
//
// The head is the caller's own. Loss, labels and gradients are a shard's parts of the means over
// all samples; tensors follow each other in the order of their names. A slot has numbers whose
// largest or smallest is asked for; a process writes its own only, so that the sum has them all.
//
// Rows are added in pairs of neighbours, then pairs of these, and so on; the last one waits where
// it has no neighbour. The caller's function adds up processes. Where it does so in the same way,
// and processes have the same power of two of shards, the sum does not depend on their number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace mhfast {

enum class CallbackResult { kGoOn, kStop, kAbort };

struct Processes {
  /// Replaces numbers by their sums over all processes, each of which calls it as often; at a step.
  /// kStop: some process asks for the end of training.
  std::function<CallbackResult(std::vector<double>&, std::int64_t)> add;  // none: there is one
  std::ptrdiff_t index = 0, count = 1;
  std::ptrdiff_t head = 0;             // numbers of the head
  std::vector<std::ptrdiff_t> shards;  // samples of each

  explicit operator bool() const { return bool(add); }
};

class Sums {
 public:
  /// `gradient`: numbers of all trained tensors; `slot`: of each process's slot.
  Sums(const Processes& processes, std::ptrdiff_t gradient, std::ptrdiff_t slot);

  int shards() const { return int(rows_.size()); }
  double& loss(int shard) { return rows_[shard][processes_.head]; }
  double& labels(int shard) { return rows_[shard][processes_.head + 1]; }
  double* gradient(int shard) { return rows_[shard].data() + processes_.head + kMeans; }

  /// Before rows without gradients are added.
  void clear_gradients();
  /// Number i of this process's slot.
  void put(std::ptrdiff_t i, double x) { own_[i] = x; }

  /// Makes row 0 the sum over all shards of all processes.
  CallbackResult add(std::int64_t step);

  /// After that, of number i of all slots.
  double largest(std::ptrdiff_t i) const;
  double smallest(std::ptrdiff_t i) const;

 private:
  static constexpr std::ptrdiff_t kMeans = 2;

  double in_slot(std::ptrdiff_t process, std::ptrdiff_t i) const {
    return rows_[0][slots_ + process * std::ptrdiff_t(own_.size()) + i];
  }

  const Processes& processes_;
  const std::ptrdiff_t gradient_, slots_;  // numbers; where the slots begin
  std::vector<double> own_;
  std::vector<std::vector<double>> rows_;
};

}  // namespace mhfast
