// The entry of the compiled module.
//
// pybind11 keeps one global state for all interpreters of a process and takes the lock of the
// first: on Python 3.11 an import in a second interpreter deadlocks. From 3.12 on its module
// declares this in its slots (Py_mod_multiple_interpreters), which only interpreters with locks of
// their own check. So the entry checks first, before any code of pybind11 runs.
#define PyInit__core mhfast_start_in_the_main_interpreter

#include "register.hpp"

// What calls share is atomic, belongs to one thread or is only read: no lock is needed around them.
PYBIND11_MODULE(_core, m, pybind11::mod_gil_not_used()) {
  m.doc() = "Compiled core of mhfast: the Python modules beside it check arguments and call it.";
  mhfast::register_lists(m);
  mhfast::register_configuration(m);
  mhfast::register_rows(m);
  mhfast::register_evaluation(m);
  mhfast::register_training(m);
  mhfast::register_learning(m);
  mhfast::register_xla(m);
}

#undef PyInit__core

// NOLINTNEXTLINE(bugprone-reserved-identifier): the name that Python requires
extern "C" PYBIND11_EXPORT PyObject* PyInit__core() {
  if (PyInterpreterState_Get() == PyInterpreterState_Main())
    return mhfast_start_in_the_main_interpreter();
  PyErr_SetString(PyExc_ImportError,
                  "mhfast works in the main interpreter of a process only, and this is a "
                  "sub-interpreter; use a process in its place (under mod_wsgi: "
                  "WSGIApplicationGroup %{GLOBAL})");
  return nullptr;
}
