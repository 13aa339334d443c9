// What a slab's samples know of their words, found once for all heads.
//
//   distinct words   keys and how many tokens each is, where the weights of words are looked up
//   rows of words    the query rows of each word, where D is added to pairs by permutations
//
// See WordsOfUnits in kernels/table.hpp for what kernels do with them.
#pragma once

#include "strategy.hpp"

namespace mhfast {

/// The lists of one thread's slab.
template <class real>
class WordLists {
 public:
  /// `rows` query rows go together.
  WordLists(const PassState<real>& state, int rows);

  void lay_out(Arena& layout, std::size_t units);

  /// Completes the slab's words.
  void find(Slab<real>& slab) const;

 private:
  void find_distinct(Slab<real>& slab) const;
  void find_rows(Slab<real>& slab) const;

  const PassState<real>& state_;
  const int columns_;  // query rows, up to whole vectors
  const bool merges_, has_rows_;
  const std::ptrdiff_t rows_unit_;  // numbers of a unit's rows of words
  std::int32_t *keys_ = nullptr, *times_ = nullptr, *counts_ = nullptr;
  std::int32_t* place_ = nullptr;  // of each word among the distinct ones
  double* log_times_ = nullptr;
  std::int32_t *first_rows_ = nullptr, *rounds_ = nullptr, *round_of_ = nullptr;
};

}  // namespace mhfast
