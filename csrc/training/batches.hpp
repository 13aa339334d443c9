// Batches: the samples that each step of training is taken on.
//
// Which samples these are is a function of the seed, the order and the number of the step alone.
// With the numbers b_0, b_1, ... of Philox with the key (seed, 0) from the counter (1, c, 0, 0) on,
// and j(b, m) the integer `below` m that b gives,
//
//   replace   c = k; sample i of the batch of step k is j(b_i, n)
//   shuffle   an epoch is floor(n / B) steps; c = e, the epoch. Starting from the identity, entry i
//             of a permutation changes places with entry i + j(b_i, n - i), i = 0, 1, ... (Fisher
//             and Yates), and the batches of the epoch are its entries in turn. The last n mod B of
//             them are left out.
#pragma once

#include <cstdint>
#include <vector>

#include "../kernels/philox.hpp"
#include "../passes/triangular.hpp"
#include "../problem/data.hpp"
#include "../problem/rescale.hpp"
#include "../runtime/team.hpp"
#include "population.hpp"

namespace mhfast {

enum class Order { kShuffle, kReplace };

/// The batches of a training; size 0: every step is taken on all samples.
struct Batches {
  std::int64_t size = 0;
  std::int64_t fresh = 0;  // not 0: new samples are drawn every so many steps, and all are taken
  Order order = Order::kShuffle;
  std::vector<std::uint64_t> seeds;  // one for all runs, or one for each
};

/// The populations that new samples are drawn from, one for all runs or one for each; none: the
/// caller draws.
template <class real>
struct Populations {
  std::vector<std::shared_ptr<Population<real>>> of_run;
  std::int64_t token = -1;  // not -1: the query row is a copy of this token
};

/// The order of the samples for one seed.
class SampleOrder {
 public:
  SampleOrder(std::int64_t samples, std::int64_t size, Order order, std::uint64_t seed);

  /// The samples of step k, (size). Each number of an epoch is drawn once while steps stay in it.
  void draw(std::int64_t step, std::uint32_t* to);

 private:
  std::uint64_t bits(std::int64_t at, std::int64_t counter);

  const std::int64_t samples_, size_, steps_;  // steps: of an epoch
  const Order order_;
  const std::uint64_t seed_;
  std::vector<std::uint32_t> permutation_;
  std::int64_t epoch_ = -1, drawn_ = 0;  // entries of the permutation that are final
  Philox::Block block_{};
};

/// A copy of the samples of one step, for as many runs as are lanes of one engine: those of a
/// batch, or all that were drawn last.
template <class real>
class BatchData {
 public:
  /// Of `count` runs from `run` on, whose data are `whole`.
  BatchData(const Data<real>& whole, const Batches& batches, std::ptrdiff_t run, int count);

  /// Draws new samples from populations, times powers, instead of copying any; `threads` may share.
  void draw_from(const Populations<real>& populations, const Batches& batches,
                 const Exponents& exponents, std::ptrdiff_t run, int threads);
  /// Gives the triangular factors of the samples in place of their tokens.
  void use_triangles(int threads);
  BatchData(const BatchData&) = delete;
  BatchData& operator=(const BatchData&) = delete;

  const Data<real>& operator*() const { return triangular_ ? **triangular_ : data_; }

  /// What samples are taken of.
  const Data<real>& source() const { return whole_; }

  /// Before a step: takes other samples of the same shape in place of `whole`.
  void replace(const Data<real>& whole) {
    whole_ = whole;
    is_new_ = true;
  }

  /// One member's call: chooses the samples of a step.
  void draw(std::int64_t step);
  /// Copies a member's share of them, the samples from first(member) to first of the next.
  void copy(const Member& member);
  std::ptrdiff_t first(int index, const Member& member) const {
    return data_.shape.n * index / member.count;
  }

 private:
  template <class number>
  void copy_rows(const number* from, std::ptrdiff_t run, std::ptrdiff_t size, const number* to,
                 std::ptrdiff_t to_run, std::ptrdiff_t first, std::ptrdiff_t last);

  void draw_samples(const Member& member);
  void copy_samples(const Member& member);

  Data<real> whole_;
  Data<real> data_;
  const Populations<real>* populations_ = nullptr;
  Exponents exponents_;
  std::vector<std::uint64_t> seeds_;  // of the runs that have samples of their own
  std::ptrdiff_t run_ = 0, scratch_size_ = 0;
  std::vector<double> scratch_;             // (threads, scratch_size_)
  std::int64_t period_ = 1, block_ = -1;    // the samples of which block are to be there
  bool is_new_ = true, has_drawn_ = false;  // new: the samples of the step are not there yet
  std::vector<SampleOrder> orders_;  // one, or one for each run; none where all samples are taken
  std::vector<std::uint32_t> samples_;  // (orders or 1, size)
  std::vector<real> x_, z_, y_, weight_;
  std::vector<std::int32_t> keys_, queries_;
  std::vector<std::int64_t> lengths_;
  std::vector<double> limits_;
  std::unique_ptr<TriangularData<real>> triangular_;
  std::vector<real> triangle_workspace_;  // of every thread
};

}  // namespace mhfast
