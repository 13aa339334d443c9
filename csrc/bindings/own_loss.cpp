#include "own_loss.hpp"

#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <vector>

#include "../runtime/float_mode.hpp"

namespace mhfast {
namespace {

std::vector<py::ssize_t> shape_of(const OwnLossCall& call) {
  if (call.p == 0) return {call.rows};
  return {call.rows, call.p};
}

/// A new array, which the function may keep.
template <class real>
py::array new_array(const OwnLossCall& call, const double* numbers) {
  py::array_t<real> array(shape_of(call));
  std::transform(numbers, numbers + call.count(), array.mutable_data(),
                 [](double x) { return real(x); });
  return array;
}

py::array array_of(const OwnLossCall& call, const double* numbers) {
  return call.is_double ? new_array<double>(call, numbers) : new_array<float>(call, numbers);
}

/// Copies one result of the function, which must be real and of the outputs' shape.
void read_result(const py::handle& given, const char* what, const OwnLossCall& call, double* to) {
  const auto array = py::array::ensure(given);
  if (!array) throw py::error_already_set();
  const auto shape = shape_of(call);
  const bool fits = array.ndim() == py::ssize_t(shape.size()) &&
                    std::equal(shape.begin(), shape.end(), array.shape());
  if (!fits || array.dtype().kind() != 'f')
    throw py::value_error(std::string("loss: expected ") + what + " of the shape of the outputs, " +
                          std::string(py::str(py::tuple(py::cast(shape)))) +
                          ", and a floating-point dtype, got " +
                          std::string(py::str(array.attr("shape"))) + " of dtype " +
                          std::string(py::str(array.dtype())));
  const auto numbers =
      py::array_t<double, py::array::c_style | py::array::forcecast>::ensure(array);
  if (!numbers) throw py::error_already_set();
  std::copy_n(numbers.data(), call.count(), to);
}

void call_function(const py::object& function, const OwnLossCall& call) {
  const py::object result = function(array_of(call, call.outputs), array_of(call, call.targets));
  const bool is_tuple = py::isinstance<py::tuple>(result);
  const std::size_t parts = is_tuple ? py::len(result) : 0;
  if (call.curvatures && parts == 2)
    throw py::value_error(
        "loss: expected the function to return (values, derivatives, second derivatives) where a "
        "Hessian is computed, got two arrays");
  if (parts != 2 && parts != 3)
    throw py::type_error(
        "loss: expected the function to return (values, derivatives), perhaps with second "
        "derivatives, got " +
        (is_tuple ? "a tuple of " + std::to_string(parts)
                  : std::string(py::str(py::type::of(result).attr("__name__")))));
  read_result(result[py::int_(0)], "values", call, call.values);
  read_result(result[py::int_(1)], "derivatives", call, call.derivatives);
  if (call.curvatures)
    read_result(result[py::int_(2)], "second derivatives", call, call.curvatures);
}

}  // namespace

bool PythonLoss::call(const OwnLossCall& call) noexcept {
  const FlushToZero::Paused paused;
  const py::gil_scoped_acquire held;
  if (failed_.load(std::memory_order_relaxed)) return false;
  py::object failure;
  try {
    call_function(function_, call);
    return true;
  } catch (py::error_already_set& error) {
    failure = error.value();
    if (error.trace()) PyException_SetTraceback(failure.ptr(), error.trace().ptr());
  } catch (const py::builtin_exception& error) {
    error.set_error();
    failure = py::error_already_set().value();
  } catch (const std::bad_alloc&) {
    failure = py::module_::import("builtins").attr("MemoryError")();
  } catch (const std::exception& error) {
    failure = py::module_::import("builtins").attr("RuntimeError")(error.what());
  }
  if (!failed_.exchange(true)) error_ = std::move(failure);
  return false;
}

bool CompiledLoss::call(const OwnLossCall& call) noexcept {
  using Loss = void (*)(std::intptr_t, const double*, const double*, double*, double*, void*);
  using LossWithCurvature =
      void (*)(std::intptr_t, const double*, const double*, double*, double*, double*, void*);
  const FlushToZero::Paused paused;
  if (has_curvature_)
    reinterpret_cast<LossWithCurvature>(address_)(call.count(), call.outputs, call.targets,
                                                  call.values, call.derivatives, call.curvatures,
                                                  user_data_);
  else
    reinterpret_cast<Loss>(address_)(call.count(), call.outputs, call.targets, call.values,
                                     call.derivatives, user_data_);
  return true;
}

void register_own_loss(py::module_& m) {
  py::class_<OwnLoss>(m, "OwnLoss");
  py::class_<PythonLoss, OwnLoss>(m, "PythonLoss")
      .def(py::init<py::object>(), py::arg("function"))
      .def_property_readonly("error", &PythonLoss::error);
  py::class_<CompiledLoss, OwnLoss>(m, "CompiledLoss")
      .def(py::init<std::uintptr_t, std::uintptr_t, bool>(), py::arg("address"),
           py::arg("user_data"), py::arg("has_curvature"))
      .def_property_readonly("has_curvature", &CompiledLoss::has_curvature);
}

}  // namespace mhfast
