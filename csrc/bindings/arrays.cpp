#include "arrays.hpp"

namespace mhfast {

std::string shape_text(const ArrayShape& shape) {
  std::string text = "(";
  for (int i = 0; i < shape.size(); ++i)
    text += (i ? ", " : "") + (shape[i] < 0 ? std::string("any") : std::to_string(shape[i]));
  return text + (shape.size() == 1 ? ",)" : ")");
}

namespace {

template <class T>
py::array checked_array(const py::handle& object, const char* name, const ArrayShape& shape) {
  if (!py::isinstance<py::array_t<T>>(object))
    throw py::type_error(std::string(name) + ": expected an array of " +
                         std::string(py::str(py::dtype::of<T>())) + ", got " +
                         std::string(py::str(py::type::handle_of(object))));
  py::array array = py::reinterpret_borrow<py::array>(object);
  bool fits = array.ndim() == shape.size();
  for (int i = 0; fits && i < shape.size(); ++i) fits = shape[i] < 0 || array.shape(i) == shape[i];
  if (!fits)
    throw py::value_error(std::string(name) + ": expected shape " + shape_text(shape) + ", got " +
                          shape_text(ArrayShape(array)));
  constexpr int kLayout = int(py::array::c_style) | int(py::detail::npy_api::NPY_ARRAY_ALIGNED_);
  if ((array.flags() & kLayout) != kLayout)
    throw py::value_error(std::string(name) + ": expected a C-contiguous, aligned array");
  return array;
}

py::ssize_t numbers(const py::array& array, py::ssize_t runs) {
  return array.size() / std::max<py::ssize_t>(runs, 1);
}

}  // namespace

template <class T>
const T* read_array(const py::handle& object, const char* name, const ArrayShape& shape) {
  return static_cast<const T*>(checked_array<T>(object, name, shape).data());
}

template <class T>
T* write_array(const py::handle& object, const char* name, const ArrayShape& shape) {
  return static_cast<T*>(checked_array<T>(object, name, shape).mutable_data());
}

template <class T>
RunArray<const T*> read_runs(const py::handle& object, const char* name, const ArrayShape& shape,
                             py::ssize_t runs) {
  const bool has_runs = runs > 0 && py::isinstance<py::array>(object) &&
                        py::reinterpret_borrow<py::array>(object).ndim() == shape.size() + 1;
  const py::array array =
      checked_array<T>(object, name, has_runs ? shape.with_leading(runs) : shape);
  return {static_cast<const T*>(array.data()), has_runs ? numbers(array, runs) : 0};
}

template <class T>
RunArray<T*> write_runs(const py::handle& object, const char* name, const ArrayShape& shape,
                        py::ssize_t runs) {
  py::array array = checked_array<T>(object, name, runs > 0 ? shape.with_leading(runs) : shape);
  return {static_cast<T*>(array.mutable_data()), runs > 0 ? numbers(array, runs) : 0};
}

template <class T>
py::array new_array(const ArrayShape& shape) {
  const auto& numpy = py::detail::npy_api::get();
  const auto array = py::reinterpret_steal<py::array>(
      numpy.PyArray_NewFromDescr_(numpy.PyArray_Type_, py::dtype::of<T>().release().ptr(),
                                  shape.size(), shape.begin(), nullptr, nullptr, 0, nullptr));
  if (!array) throw py::error_already_set();
  return array;
}

#define MHFAST_INSTANTIATE(T)                                                                 \
  template const T* read_array<T>(const py::handle&, const char*, const ArrayShape&);         \
  template T* write_array<T>(const py::handle&, const char*, const ArrayShape&);              \
  template RunArray<const T*> read_runs<T>(const py::handle&, const char*, const ArrayShape&, \
                                           py::ssize_t);                                      \
  template RunArray<T*> write_runs<T>(const py::handle&, const char*, const ArrayShape&,      \
                                      py::ssize_t);
MHFAST_INSTANTIATE(float)
MHFAST_INSTANTIATE(double)
MHFAST_INSTANTIATE(std::int32_t)
MHFAST_INSTANTIATE(std::int64_t)
MHFAST_INSTANTIATE(bool)
#undef MHFAST_INSTANTIATE

template py::array new_array<float>(const ArrayShape&);
template py::array new_array<double>(const ArrayShape&);

}  // namespace mhfast
