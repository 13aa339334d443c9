#include "register.hpp"

PYBIND11_MODULE(_core, m) {
  m.doc() = "Compiled core of mhfast: the Python modules beside it check arguments and call it.";
  mhfast::register_lists(m);
  mhfast::register_configuration(m);
  mhfast::register_evaluation(m);
  mhfast::register_training(m);
  mhfast::register_learning(m);
}
