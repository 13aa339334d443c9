// What training records of one run besides the loss: sizes and directions of parameters, attention.
#pragma once

#include "train.hpp"

namespace mhfast {

/// Writes the row of `run` of a record other than those of a data set's Totals and the gradient
/// norm, from the parameters as they are in the task, those of `step`. `weights`: their attention
/// (n, H, q, T), which may be in its place in the record, or null: it is computed.
template <class real>
void write_record(const TrainingTask<real>& task, const Record& record, std::ptrdiff_t run,
                  std::int64_t row, std::int64_t step, const real* weights);

/// The place of the row of `run` in a record of attention weights.
template <class real>
real* attention_at(const Record& record, std::ptrdiff_t run, std::int64_t row) {
  return static_cast<real*>(record.buffer) + (run * record.capacity + row) * record.row_size;
}

/// Repeats a row of a run, or writes NaN where there is none before it (`from` is negative).
template <class real>
void repeat_row(const Record& record, std::ptrdiff_t run, std::int64_t from, std::int64_t to);

/// Whether a record is of parameters, which runs side by side keep elsewhere meanwhile.
inline bool is_of_parameters(Quantity quantity) {
  return is_of(quantity) != QuantityOf::kDataSet && is_of(quantity) != QuantityOf::kGradient;
}

}  // namespace mhfast
