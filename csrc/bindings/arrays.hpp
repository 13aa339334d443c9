// Arrays as they cross from Python: exact type, shape and layout, or a clear error. Nothing but
// classes is converted or copied here; the Python layer has done that.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "../training/train.hpp"

namespace mhfast {

namespace py = pybind11;

/// "(2, 3)"
std::string shape_text(const std::vector<py::ssize_t>& shape);

/// Data of an array that must have this shape (-1: any length) and be C-contiguous, aligned and of
/// type T. Throws py::type_error or py::value_error naming `name`.
template <class T>
const T* read_array(const py::handle& object, const char* name,
                    const std::vector<py::ssize_t>& shape);

/// The same for an array to be written.
template <class T>
T* write_array(const py::handle& object, const char* name, const std::vector<py::ssize_t>& shape);

/// An array of runs: that of run r begins `run` numbers after that of run r - 1; 0: all share one.
template <class Pointer>
struct RunArray {
  Pointer at = nullptr;
  std::ptrdiff_t run = 0;
};

/// An array of this shape, which with `runs` (0: no run axis) may have a leading axis of runs.
template <class T>
RunArray<const T*> read_runs(const py::handle& object, const char* name,
                             std::vector<py::ssize_t> shape, py::ssize_t runs);

/// An array to be written; with runs it must have the leading axis.
template <class T>
RunArray<T*> write_runs(const py::handle& object, const char* name, std::vector<py::ssize_t> shape,
                        py::ssize_t runs);

/// Calls body(float{}) or body(double{}), by the type of X.
template <class Body>
auto with_type_of(const py::handle& X, const Body& body) {
  if (py::isinstance<py::array_t<float>>(X)) return body(float{});
  if (py::isinstance<py::array_t<double>>(X)) return body(double{});
  throw py::type_error("X: expected a float32 or float64 array");
}

}  // namespace mhfast
