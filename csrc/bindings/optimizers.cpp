#include "optimizers.hpp"

#include <pybind11/stl.h>

#include <optional>

namespace mhfast {
namespace {

/// A rule from its fields, each given by name, and nothing else.
template <class Rule>
Rule make_rule(const py::kwargs& given) {
  Rule rule;
  std::size_t known = 0;
  Rule::fields([&](const char* name, auto member) {
    if (!given.contains(name))
      throw py::type_error(std::string(name) + ": expected a value by name, got none");
    using Value = std::decay_t<decltype(rule.*member)>;
    try {
      rule.*member = given[name].template cast<Value>();
    } catch (const py::cast_error&) {
      throw py::type_error(std::string(name) + ": expected a value of its kind, got " +
                           std::string(py::repr(given[name])));
    }
    ++known;
  });
  if (given.size() != known)
    throw py::type_error("expected only the fields of the optimizer, got " +
                         std::string(py::repr(given)));
  return rule;
}

template <class Rule>
void register_rule(py::module_& m, const char* type) {
  py::class_<Rule> bound(m, type);
  bound.def(py::init(&make_rule<Rule>));
  py::list names;
  Rule::fields([&](const char* name, auto member) {
    names.append(name);
    bound.def_property_readonly(name, [member](const Rule& rule) { return rule.*member; });
  });
  bound.attr("fields") = py::tuple(names);
  bound.attr("slots") = int(Rule::kSlots);
}

/// Arrays of one axis, one or none for each parameter.
Tensors<const double*> read_each(const py::tuple& arrays, const char* name) {
  if (arrays.size() != kTensors)
    throw py::value_error(std::string(name) + ": expected an entry for each parameter");
  Tensors<const double*> out{};
  for (int tensor = 0; tensor < kTensors; ++tensor)
    if (!arrays[tensor].is_none()) out[tensor] = read_array<double>(arrays[tensor], name, {-1});
  return out;
}

OptimizerOfPython make_optimizer(const AnyRule& rule, const py::tuple& lr,
                                 const py::tuple& schedule, const Tensors<double>& l2, double clip,
                                 std::optional<Projection> project, const Tensors<double>& radius,
                                 Scope project_by, BallNorm project_norm, double project_power,
                                 const py::object& since) {
  OptimizerOfPython out;
  out.settings.rule = rule;
  out.lr = lr;
  out.schedule = schedule;
  out.settings.lr = read_each(lr, "lr");
  out.settings.schedule = read_each(schedule, "schedule");
  out.settings.l2 = l2;
  out.settings.clip = clip;
  out.settings.project = project.value_or(Projection::kNone);
  out.settings.radius = radius;
  out.settings.project_by = project_by;
  out.settings.project_norm = project_norm;
  out.settings.project_power = project_power;
  out.since = since;
  out.settings.since = read_array<std::int64_t>(since, "since", {-1});
  return out;
}

}  // namespace

Optimizer OptimizerOfPython::checked(std::int64_t last, py::ssize_t runs, unsigned wrt) const {
  read_array<std::int64_t>(since, "since", {std::max<py::ssize_t>(runs, 1)});
  for (int tensor = 0; tensor < kTensors; ++tensor) {
    if (!(wrt >> tensor & 1)) continue;
    read_array<double>(lr[tensor], "lr", {std::max<py::ssize_t>(runs, 1)});
    if (!settings.schedule[tensor]) continue;
    const py::ssize_t scheduled = py::reinterpret_borrow<py::array>(schedule[tensor]).shape(0);
    if (scheduled < last)
      throw py::value_error("schedule: expected at least " + std::to_string(last) +
                            " entries, one for each step, got " + std::to_string(scheduled));
  }
  return settings;
}

void register_optimizers(py::module_& m) {
#define MHFAST_RULE(Type, name) register_rule<Type>(m, #Type);
  MHFAST_OPTIMIZERS(MHFAST_RULE)
#undef MHFAST_RULE
  py::class_<OptimizerOfPython>(m, "Optimizer")
      .def(py::init(&make_optimizer), py::kw_only(), py::arg("rule"), py::arg("lr"),
           py::arg("schedule"), py::arg("l2"), py::arg("clip"), py::arg("project"),
           py::arg("radius"), py::arg("project_by"), py::arg("project_norm"),
           py::arg("project_power"), py::arg("since"))
      .def_property_readonly("rule", [](const OptimizerOfPython& o) { return o.settings.rule; })
      .def_readonly("lr", &OptimizerOfPython::lr)
      .def_readonly("schedule", &OptimizerOfPython::schedule);
}

}  // namespace mhfast
