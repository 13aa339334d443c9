// Sums of outer products of rows that are read in portions: all normal equations and second moments
// are computed here.
#pragma once

#include <cstdint>
#include <functional>

namespace mhfast {

/// Rows of a matrix: `items` of them, each of `rows_per_item` rows of `width` numbers.
struct RowSource {
  std::int64_t items;
  int rows_per_item, width;
  double flops_per_item;  // to compute the rows, for the number of threads
  /// Writes the rows of an item, `stride` numbers apart, as member `member` of the team. Must not
  /// throw.
  std::function<void(std::int64_t item, int member, double* rows, std::ptrdiff_t stride)> fill;
};

/// Threads that gram_matrix will use for this source, so that a workspace can be allocated for
/// each.
int gram_threads(const RowSource& source, int threads);

/// out (width, width) = sum over all rows r of r rᵀ. Memory beyond that is bounded, the order of
/// summation is the same for every number of threads.
void gram_matrix(const RowSource& source, int threads, double* out);

}  // namespace mhfast
