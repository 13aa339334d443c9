// Arrays as they cross from Python: exact type, shape and layout, or a clear error. Nothing but
// classes is converted or copied here; the Python layer has done that.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <initializer_list>
#include <string>

#include "enums.hpp"

namespace mhfast {

namespace py = pybind11;

/// The lengths of the axes of an array, where they are made and read without allocation: small
/// calls have a dozen of them.
class ArrayShape {
 public:
  ArrayShape(std::initializer_list<py::ssize_t> lengths)
      : ArrayShape(lengths.begin(), int(lengths.size())) {}
  /// The shape that an array has, of which at most the first axes are kept.
  explicit ArrayShape(const py::array& array)
      : ArrayShape(array.shape(), int(std::min<py::ssize_t>(array.ndim(), kMaxAxes))) {}

  int size() const { return size_; }
  py::ssize_t operator[](int axis) const { return lengths_[axis]; }
  const py::ssize_t* begin() const { return lengths_; }
  const py::ssize_t* end() const { return lengths_ + size_; }
  /// This shape with a leading axis.
  ArrayShape with_leading(py::ssize_t length) const {
    ArrayShape longer{length};
    for (const py::ssize_t next : *this) longer.lengths_[longer.size_++] = next;
    return longer;
  }

 private:
  static constexpr int kMaxAxes = 8;

  ArrayShape(const py::ssize_t* lengths, int size) : size_(size) {
    std::copy_n(lengths, size, lengths_);
  }

  int size_;
  py::ssize_t lengths_[kMaxAxes];
};

/// "(2, 3)"
std::string shape_text(const ArrayShape& shape);

/// Data of an array that must have this shape (-1: any length) and be C-contiguous, aligned and of
/// type T. Throws py::type_error or py::value_error naming `name`.
template <class T>
const T* read_array(const py::handle& object, const char* name, const ArrayShape& shape);

/// The same for an array to be written.
template <class T>
T* write_array(const py::handle& object, const char* name, const ArrayShape& shape);

/// An array of runs: that of run r begins `run` numbers after that of run r - 1; 0: all share one.
template <class Pointer>
struct RunArray {
  Pointer at = nullptr;
  std::ptrdiff_t run = 0;
};

/// An array of this shape, which with `runs` (0: no run axis) may have a leading axis of runs.
template <class T>
RunArray<const T*> read_runs(const py::handle& object, const char* name, const ArrayShape& shape,
                             py::ssize_t runs);

/// An array to be written; with runs it must have the leading axis.
template <class T>
RunArray<T*> write_runs(const py::handle& object, const char* name, const ArrayShape& shape,
                        py::ssize_t runs);

/// A new C-contiguous array, not initialized.
template <class T>
py::array new_array(const ArrayShape& shape);

/// Calls body(float{}) or body(double{}), by the type of X.
template <class Body>
auto with_type_of(const py::handle& X, const Body& body) {
  if (py::isinstance<py::array_t<float>>(X)) return body(float{});
  if (py::isinstance<py::array_t<double>>(X)) return body(double{});
  throw py::type_error("X: expected a float32 or float64 array");
}

}  // namespace mhfast
