// Which rows of arrays are bitwise the same.
//
// A row is the bytes that each of several arrays holds for it: rows that differ in the sign of a
// zero are different, and a NaN is the same as one with its bits. Rows are numbered in the order in
// which they come first, by a hash table with open addressing: rows of equal hash are compared, so
// that the result is exact whatever the hash is. One thread; memory 8 bytes for each slot, of which
// there are 2 to 4 for each different row that is allowed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mhfast {

/// An array (count, width) of bytes.
struct ByteRows {
  const unsigned char* at;
  std::ptrdiff_t width;
};

/// Writes the number of each of `count` rows to `numbers`, and to `first` where each number comes
/// first. Returns false as soon as there are more than `most` different rows, and at once if
/// `probe` > 0 and so many rows, spread over all of them, are all different.
bool number_rows(const std::vector<ByteRows>& parts, std::ptrdiff_t count, std::ptrdiff_t most,
                 std::ptrdiff_t probe, std::int32_t* numbers, std::vector<std::int64_t>& first);

}  // namespace mhfast
