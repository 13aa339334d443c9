// Where only the readout is trained, attention stays as it is, and so do the attended tokens A_h X
// of every sample. Outputs are then linear in numbers that are known:
//
//   classifier   H^(-1/2) sum over h of <U_h, A_h X>   a row for each sample, of all A_h X
//   layer        sum over h of A_h X V_h               a row for each query row, of those of A_h X
//
// that is, rows of features times the readout as one matrix, (features, outputs of a row). Heads
// that attend alike (see alike_heads.hpp) share theirs, which are multiplied with the sum of
// readouts.
#pragma once

#include "alike_heads.hpp"

namespace mhfast {

/// The rows of all samples, each padded by zeros to whole vectors.
struct AttendedRows {
  std::ptrdiff_t of_sample, count;
  std::ptrdiff_t features_of_head, features;  // of a row
  std::ptrdiff_t size;                        // features with the padding

  AttendedRows(const Shape& s, int lanes)
      : of_sample(s.output_rows()),
        count(s.n * of_sample),
        features_of_head(s.is_layer() ? s.d : std::ptrdiff_t(s.q) * s.d),
        features(computed_heads(s) * features_of_head),
        size(round_up(features, lanes)) {}

  /// From sample to sample.
  std::ptrdiff_t sample_size() const { return of_sample * size; }
  /// Of so many runs, in numbers of `number` bytes.
  double bytes(double runs, std::size_t number) const {
    return runs * double(count) * double(size) * double(number);
  }
};

}  // namespace mhfast
