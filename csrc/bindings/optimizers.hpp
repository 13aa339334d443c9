// Optimizers as they cross from Python: a rule by its name and fields, and what all rules have.
#pragma once

#include "arrays.hpp"

namespace mhfast {

/// The settings of an optimizer, with the arrays that it points to: lr and schedule hold one, or
/// None, for each parameter.
struct OptimizerOfPython {
  Optimizer settings;
  py::tuple lr, schedule;
  py::object since;

  /// For training parameters `wrt` in `runs` runs (0: one without a run axis) up to step `last`.
  Optimizer checked(std::int64_t last, py::ssize_t runs, unsigned wrt) const;
};

/// None, or (kept, members, ends, over_heads) of a tensor of so many entries, see
/// csrc/training/constraints.hpp.
Constraint read_constraint(const py::handle& in, std::ptrdiff_t entries);

void register_optimizers(py::module_& m);

}  // namespace mhfast
