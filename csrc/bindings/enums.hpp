// Enumerations as they cross from Python: members of an enum.IntEnum, which is made from a list of
// names. pybind11's own enums compile about thirty functions for each of them, which was a quarter
// of what the compiler did for this folder.
#pragma once

#include <pybind11/pybind11.h>

#include "../training/train.hpp"

namespace mhfast {

namespace py = pybind11;

/// The class of an enumeration, kept by the module once it is registered.
template <class Enum>
inline PyTypeObject* enum_type = nullptr;

/// Makes the class of an enumeration, {name: number}, part of the module.
inline PyTypeObject* make_enum(py::module_& m, const char* name, const py::dict& members) {
  const py::object made = py::module_::import("enum").attr("IntEnum")(
      name, members, py::arg("module") = m.attr("__name__"));
  m.attr(name) = made;
  return reinterpret_cast<PyTypeObject*>(made.inc_ref().ptr());
}

/// Any list of pairs (name, member).
template <class Enum, class Members = std::initializer_list<std::pair<const char*, Enum>>>
void register_enum(py::module_& m, const char* name, const Members& members) {
  py::dict numbers;
  for (const auto& [member, value] : members) numbers[member] = std::int64_t(value);
  enum_type<Enum> = make_enum(m, name, numbers);
}

/// The conversion of one; other integers are refused.
template <class Enum>
struct EnumCaster {
  PYBIND11_TYPE_CASTER(Enum, py::detail::const_name("enum"));

  bool load(const py::handle& from, bool) {
    if (!PyObject_TypeCheck(from.ptr(), enum_type<Enum>)) return false;
    value = Enum(PyLong_AsLongLong(from.ptr()));
    return true;
  }

  static py::handle cast(Enum from, py::return_value_policy, const py::handle&) {
    const py::handle type(reinterpret_cast<PyObject*>(enum_type<Enum>));
    return type(std::int64_t(from)).release();
  }
};

}  // namespace mhfast

#define MHFAST_ENUM(Enum) \
  template <>             \
  struct pybind11::detail::type_caster<mhfast::Enum> : mhfast::EnumCaster<mhfast::Enum> {};
MHFAST_ENUM(BallNorm)
MHFAST_ENUM(LossName)
MHFAST_ENUM(Norm)
MHFAST_ENUM(Order)
MHFAST_ENUM(Polar)
MHFAST_ENUM(Projection)
MHFAST_ENUM(RowMapName)
MHFAST_ENUM(Scope)
MHFAST_ENUM(StopReason)
#undef MHFAST_ENUM
