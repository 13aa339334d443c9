#include "word_lists.hpp"

#include <cmath>

namespace mhfast {
namespace {

/// All bits where x is negative, else none: of random words a branch would be taken at random.
std::int32_t bits_if_negative(std::int32_t x) { return x >> 31; }

/// Whether all rows of a sample that see keys see the same ones, so that equal words are merged.
template <class real>
bool merges_words(const Data<real>& data) {
  return data.has_weights_of_words() && !data.shape.causal && !data.limits;
}

template <class real>
bool needs_rows(const PassState<real>& state, int columns) {
  const PassOptions& options = state.options;
  return state.data.has_words() && !state.data.shape.shared_query && options.gradient &&
         options.wrt_W && columns <= state.kernels.permuted.rows &&
         state.gradients.weight_row() <= state.kernels.permuted.words;
}

}  // namespace

template <class real>
WordLists<real>::WordLists(const PassState<real>& state, int rows)
    : state_(state),
      columns_(int(round_up(rows, state.kernels.lanes))),
      merges_(merges_words(state.data)),
      has_rows_(needs_rows(state, columns_)),
      rows_unit_(state.gradients.weight_row() + std::ptrdiff_t(columns_) * rows) {}

template <class real>
void WordLists<real>::lay_out(Arena& layout, std::size_t units) {
  const Shape& s = state_.data.shape;
  const std::size_t merged = merges_ ? 1 : 0, has_rows = has_rows_ ? 1 : 0;
  keys_ = layout.take<std::int32_t>(merged * units * s.T);
  times_ = layout.take<std::int32_t>(merged * units * s.T);
  counts_ = layout.take<std::int32_t>(merged * units);
  place_ = layout.take<std::int32_t>(merged * s.words);
  log_times_ = layout.take<double>(merged * (s.T + 1));
  first_rows_ = layout.take<std::int32_t>(has_rows * units * rows_unit_);
  rounds_ = layout.take<std::int32_t>(has_rows * units);
  round_of_ = layout.take<std::int32_t>(has_rows * columns_);
  for (int times = 0; log_times_ && merges_ && times <= s.T; ++times)
    log_times_[times] = std::log(double(times));
}

template <class real>
void WordLists<real>::find(Slab<real>& slab) const {
  if (has_rows_) find_rows(slab);
  if (merges_) find_distinct(slab);
}

/// The words of each sample's keys, in the order in which they come first.
template <class real>
void WordLists<real>::find_distinct(Slab<real>& slab) const {
  const Data<real>& data = state_.data;
  const std::ptrdiff_t T = data.shape.T;
  std::fill_n(place_, data.shape.words, -1);
  for (int u = 0; u < slab.units; ++u) {
    const std::int32_t* tokens = slab.words.keys + u * slab.words.keys_unit;
    std::int32_t *keys = keys_ + u * T, *times = times_ + u * T, count = 0;
    // A sample that sees no token has limits of 0 and any key.
    const int seen = std::max(1, int(data.limit(slab.first_sample + u, 0, 0)));
    std::fill_n(times, seen, 0);
    for (int k = 0; k < seen; ++k) {
      const std::int32_t before = place_[tokens[k]], is_new = bits_if_negative(before);
      const std::int32_t at = (before & ~is_new) | (count & is_new);
      place_[tokens[k]] = at;
      keys[at] = tokens[k];
      ++times[at];
      count -= is_new;
    }
    for (int k = 0; k < count; ++k) place_[keys[k]] = -1;
    counts_[u] = count;
  }
  slab.words.keys = keys_;
  slab.words.keys_unit = T;
  slab.words.times = times_;
  slab.words.counts = counts_;
  slab.words.log_times = log_times_;
}

/// The query rows of each word: the first of them, and by rounds the others.
template <class real>
void WordLists<real>::find_rows(Slab<real>& slab) const {
  const std::ptrdiff_t words = state_.gradients.weight_row();
  for (int u = 0; u < slab.units; ++u) {
    const std::int32_t* queries = slab.words.queries + u * slab.words.queries_unit;
    std::int32_t *first_rows = first_rows_ + u * rows_unit_, *others = first_rows + words;
    std::int32_t rounds = 0;
    std::fill_n(first_rows, words, -1);
    for (int t = 0; t < slab.rows; ++t) {
      const std::int32_t before = first_rows[queries[t]], is_new = bits_if_negative(before);
      const std::int32_t first = (before & ~is_new) | (t & is_new);
      const std::int32_t round = (round_of_[first] + 1) & ~is_new;
      first_rows[queries[t]] = first;
      round_of_[first] = round;
      if (round == rounds) std::fill_n(others + rounds++ * columns_, columns_, -1);
      others[round * columns_ + first] = t;
    }
    rounds_[u] = rounds;
  }
  slab.words.first_rows = first_rows_;
  slab.words.rows_unit = rows_unit_;
  slab.words.rounds = rounds_;
}

template class WordLists<float>;
template class WordLists<double>;

}  // namespace mhfast
