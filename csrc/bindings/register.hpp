// One function for each concept of the extension module.
#pragma once

#include <pybind11/pybind11.h>

namespace mhfast {

void register_lists(pybind11::module_& m);          // names and enums of losses, optimizers, ...
void register_configuration(pybind11::module_& m);  // instruction sets, threads, plans
void register_rows(pybind11::module_& m);           // rows that are the same, padding
void register_evaluation(pybind11::module_& m);     // outputs, attention, value_and_grad
void register_training(pybind11::module_& m);       // train
void register_learning(pybind11::module_& m);       // sums over the examples of a layer
void register_xla(pybind11::module_& m);            // the function that JAX calls

}  // namespace mhfast
