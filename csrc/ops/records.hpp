// What training records besides the loss: sizes and directions of parameters, attention.
#pragma once

#include "norms.hpp"
#include "train.hpp"

namespace mhfast {

/// Writes row `record.row` of a record other than those of a data set's Totals and the gradient
/// norm.
template <class real>
void write_record(const TrainingTask<real>& task, const Record& record);

}  // namespace mhfast
