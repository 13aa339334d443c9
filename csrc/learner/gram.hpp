// Sums of outer products of rows that are read in portions: all normal equations and second moments
// are computed here. Rows are held in panels of kGramColumns columns; the order of summation is the
// same for every number of threads, and memory beyond the results is bounded.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace mhfast {

/// Rows of a matrix: `items` of them, each of `rows_per_item` rows of `width` numbers.
struct RowSource {
  std::int64_t items;
  int rows_per_item, width;
  double flops_per_item;  // to compute the rows, for the number of threads
  /// Writes the rows of an item, `stride` numbers apart, as member `member` of the team. Must not
  /// throw. Columns that it leaves out are 0.
  std::function<void(std::int64_t item, int member, double* rows, std::ptrdiff_t stride)> fill;
};

/// Columns of the rows; `begin` is a multiple of kGramColumns.
struct Columns {
  int begin, width;

  bool operator==(const Columns& other) const {
    return begin == other.begin && width == other.width;
  }
};

/// out (left.width, right.width) = sum over all rows r of r[left] r[right]ᵀ
struct CrossMoment {
  Columns left, right;
  double* out;
};

/// Threads that cross_moments will use for this source, so that a workspace can be allocated for
/// each.
int gram_threads(const RowSource& source, const std::vector<CrossMoment>& moments, int threads);

void cross_moments(const RowSource& source, const std::vector<CrossMoment>& moments, int threads);

/// The same for the one moment of all columns, out (width, width).
int gram_threads(const RowSource& source, int threads);
void gram_matrix(const RowSource& source, int threads, double* out);

}  // namespace mhfast
