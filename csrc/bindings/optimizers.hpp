// Optimizers as they cross from Python: a class for the settings of each rule, with its fields by
// name, and one for what all rules have.
#pragma once

#include "arrays.hpp"

namespace mhfast {

/// The settings of an optimizer, with the arrays that it points to.
struct OptimizerOfPython {
  Optimizer settings;
  py::object lr, schedule, since;
  std::int64_t scheduled = 0;  // steps that the schedule has entries for

  /// For training of so many runs (0: one without a run axis) up to step `last`.
  Optimizer checked(std::int64_t last, py::ssize_t runs) const;
};

void register_optimizers(py::module_& m);

}  // namespace mhfast
