// Arrays as they cross from Python: exact type, shape and layout, or a clear error. Nothing is
// converted or copied here; the Python face has done that.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "../ops/engine.hpp"

namespace mhfast {

namespace py = pybind11;

/// "(2, 3)"
std::string shape_text(const std::vector<py::ssize_t>& shape);

/// Data of an array that must have this shape (-1: any length) and be C-contiguous, aligned and of
/// type real. Throws py::type_error or py::value_error naming `name`.
template <class real>
const real* read_array(const py::handle& object, const char* name,
                       const std::vector<py::ssize_t>& shape);

/// The same for an array to be written.
template <class real>
real* write_array(const py::handle& object, const char* name,
                  const std::vector<py::ssize_t>& shape);

/// A data set and the shape of its classifier: X (n, T, d), Z None or (n, q, d), W (H, d, d),
/// y None or (n,), weight None or (n,).
template <class real>
Data<real> read_data(const py::handle& X, const py::handle& Z, const py::handle& y,
                     const py::handle& weight, py::ssize_t heads);

/// W (H, d, d) and U (H, q, d), or None for U.
template <class real>
Parameters<real> read_parameters(const Shape& shape, const py::handle& W, const py::handle& U,
                                 double scale);

/// Throws py::value_error unless all labels are ones of a margin loss (+-1), or the loss takes any.
template <class real>
void check_labels(const Data<real>& data, Loss loss);

Loss read_loss(const std::string& name);

/// Calls body(float{}) or body(double{}), by the type of X.
template <class Body>
auto with_type_of(const py::handle& X, const Body& body) {
  if (py::isinstance<py::array_t<float>>(X)) return body(float{});
  if (py::isinstance<py::array_t<double>>(X)) return body(double{});
  throw py::type_error("X: expected a float32 or float64 array");
}

}  // namespace mhfast
