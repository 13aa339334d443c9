#include "../learner/learning.hpp"

#include "arrays.hpp"
#include "register.hpp"

namespace mhfast {
namespace {

using Array = py::array_t<double>;
using Sizes = std::vector<py::ssize_t>;

/// Numbers of rows, each below `end`.
const std::int64_t* read_numbers(const py::handle& object, const char* name, py::ssize_t count,
                                 py::ssize_t end) {
  const std::int64_t* at = read_array<std::int64_t>(object, name, {count});
  for (py::ssize_t i = 0; i < count; ++i)
    if (at[i] < 0 || at[i] >= end)
      throw py::value_error(std::string(name) + ": expected numbers from 0 to " +
                            std::to_string(end - 1) + ", got " + std::to_string(at[i]));
  return at;
}

py::ssize_t length(const py::handle& object, int axis) {
  return py::reinterpret_borrow<py::array>(object).shape(axis);
}

/// X (n, T, d), Y (n, T, p), and the selected rows, None: all.
Examples read_examples(const py::array& X, const py::array& Y, const py::object& rows) {
  Examples e{};
  e.X = read_array<double>(X, "X", {-1, -1, -1});
  e.Y = read_array<double>(Y, "Y", {X.shape(0), X.shape(1), -1});
  if (X.shape(1) == 0 || X.shape(2) == 0 || Y.shape(2) == 0)
    throw py::value_error("X, Y: expected no empty axis but the first, got " +
                          shape_text(ArrayShape(X)) + " and " + shape_text(ArrayShape(Y)));
  e.n = X.shape(0);
  e.T = int(X.shape(1));
  e.d = int(X.shape(2));
  e.p = int(Y.shape(2));
  e.rows = e.n * e.T;
  if (!rows.is_none()) {
    const py::ssize_t all = e.rows;
    read_array<std::int64_t>(rows, "rows", {-1});
    e.rows = length(rows, 0);
    e.listed = read_numbers(rows, "rows", e.rows, all);
  }
  return e;
}

const double* read_sum(const Examples& e, const py::array& sum) {
  return read_array<double>(sum, "sum", {e.d, e.p});
}

int read_support(int support) {
  if (support < 1)
    throw py::value_error("support: expected at least 1, got " + std::to_string(support));
  return support;
}

py::tuple call_fit_rows(const py::array& X, const py::array& Y, const py::object& rows,
                        const py::array& sum, int support, int threads) {
  const Examples e = read_examples(X, Y, rows);
  const double* at = read_sum(e, sum);
  read_support(support);
  Array weights(Sizes{e.rows, e.T}), residuals(Sizes{e.rows});
  double *to_weights = weights.mutable_data(), *to_residuals = residuals.mutable_data();
  {
    const py::gil_scoped_release released;
    fit_rows(e, at, support, threads, to_weights, to_residuals);
  }
  return py::make_tuple(weights, residuals);
}

py::tuple call_sum_equations(const py::array& X, const py::array& Y, const py::object& rows,
                             const py::array& sum, int support, double scale, int threads) {
  const Examples e = read_examples(X, Y, rows);
  const double* at = read_sum(e, sum);
  read_support(support);
  Array moment(Sizes{e.d + e.p, e.d + e.p}), residuals(Sizes{e.rows});
  double *to_moment = moment.mutable_data(), *to_residuals = residuals.mutable_data();
  {
    const py::gil_scoped_release released;
    sum_equations(e, at, support, scale, threads, to_moment, to_residuals);
  }
  return py::make_tuple(moment, residuals);
}

Array call_fact_moment(const py::array& X, const py::array& rows, const py::array& first,
                       const py::array& second, const py::array& value, const py::array& weight,
                       int threads) {
  const Examples e = read_examples(X, X, rows);
  Facts facts{};
  facts.count = e.rows;
  facts.rows = e.listed;
  facts.first = read_numbers(first, "first", e.rows, e.T);
  facts.second = read_numbers(second, "second", e.rows, e.T);
  facts.value = read_array<double>(value, "value", {e.rows});
  facts.weight = read_array<double>(weight, "weight", {e.rows});
  const py::ssize_t width = py::ssize_t(e.d) * e.d + 1;
  Array moment(Sizes{width, width});
  double* to = moment.mutable_data();
  {
    const py::gil_scoped_release released;
    fact_moment(e, facts, threads, to);
  }
  return moment;
}

Array call_layer_equations(const py::array& X, const py::array& Y, const py::array& W,
                           const py::array& V, int threads) {
  const Examples e = read_examples(X, Y, py::none());
  LayerView layer{};
  layer.W = read_array<double>(W, "W", {-1, e.d, e.d});
  layer.H = int(W.shape(0));
  layer.V = read_array<double>(V, "V", {layer.H, e.d, e.p});
  const py::ssize_t width = py::ssize_t(layer.H) * e.d * (e.d + e.p) + 1;
  Array moment(Sizes{width, width});
  double* to = moment.mutable_data();
  {
    const py::gil_scoped_release released;
    layer_equations(e, layer, threads, to);
  }
  return moment;
}

}  // namespace

void register_learning(py::module_& m) {
  const py::arg X("X"), Y("Y"), rows("rows"), V_sum("V_sum"), support("support"),
      threads("threads");
  m.def("fit_rows", call_fit_rows, X, Y, rows, V_sum, support, threads);
  m.def("sum_equations", call_sum_equations, X, Y, rows, V_sum, support, py::arg("scale"), threads);
  m.def("fact_moment", call_fact_moment, X, rows, py::arg("first"), py::arg("second"),
        py::arg("value"), py::arg("weight"), threads);
  m.def("layer_equations", call_layer_equations, X, Y, py::arg("W"), py::arg("V"), threads);
}

}  // namespace mhfast
