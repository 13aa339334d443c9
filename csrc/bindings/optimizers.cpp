#include "optimizers.hpp"

#include <pybind11/stl.h>

#include "../training/step.hpp"

#include <algorithm>
#include <optional>

namespace mhfast {
namespace {

struct RuleOfPython {
  AnyRule rule;
};

template <class Value>
void read_field(const py::kwargs& given, const char* name, Value& out) {
  if (!given.contains(name))
    throw py::type_error(std::string(name) + ": expected a value by name, got none");
  try {
    out = given[name].cast<Value>();
  } catch (const py::cast_error&) {
    throw py::type_error(std::string(name) + ": expected a value of its kind, got " +
                         std::string(py::repr(given[name])));
  }
}

template <class Rule>
RuleOfPython read_rule(const py::kwargs& given) {
  Rule rule;
  std::size_t known = 0;
  Rule::fields([&](const char* name, auto member) {
    read_field(given, name, rule.*member);
    ++known;
  });
  if (given.size() != known)
    throw py::type_error("expected only the fields of the optimizer, got " +
                         std::string(py::repr(given)));
  return {rule};
}

/// A rule from its fields, each given by name, and nothing else.
RuleOfPython make_rule(const std::string& type, const py::kwargs& given) {
#define MHFAST_RULE(Type, name) \
  if (type == #Type) return read_rule<Type>(given);
  MHFAST_OPTIMIZERS(MHFAST_RULE)
#undef MHFAST_RULE
  throw py::value_error("rule: expected the name of an optimizer, got '" + type + "'");
}

py::dict fields_of(const RuleOfPython& of) {
  py::dict out;
  std::visit(
      [&](const auto& rule) {
        std::decay_t<decltype(rule)>::fields(
            [&](const char* name, auto member) { out[name] = rule.*member; });
      },
      of.rule);
  return out;
}

const char* name_of(const RuleOfPython& of) {
  static constexpr const char* kNames[] = {
#define MHFAST_RULE(Type, name) #Type,
      MHFAST_OPTIMIZERS(MHFAST_RULE)
#undef MHFAST_RULE
  };
  return kNames[of.rule.index()];
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

OptimizerOfPython make_optimizer(const RuleOfPython& rule, const py::tuple& lr,
                                 const py::tuple& schedule, const Tensors<double>& l2, double clip,
                                 std::optional<Projection> project, const Tensors<double>& radius,
                                 Scope project_by, BallNorm project_norm, double project_power,
                                 const py::object& since) {
  OptimizerOfPython out;
  out.settings.rule = rule.rule;
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

/// A parameter (heads, rows, columns) with its gradient and what the optimizer keeps of it.
template <class real>
Trained<real> read_tensor(TensorName name, const py::handle& theta, const py::handle& gradient,
                          const py::tuple& state, int slots, double lr) {
  const ArrayShape any{-1, -1, -1};
  Trained<real> out{};
  out.name = name;
  out.theta = write_array<real>(theta, "parameters", any);
  const auto array = py::reinterpret_borrow<py::array>(theta);
  const ArrayShape shape(array);
  out.heads = int(shape[0]);
  out.rows = int(shape[1]);
  out.columns = int(shape[2]);
  out.size = shape[1] * shape[2];
  out.gradient = write_array<real>(gradient, "gradients", shape);
  if (int(state.size()) != slots)
    throw py::value_error("state: expected " + std::to_string(slots) + " arrays of each parameter");
  if (slots > 0) out.first = write_array<real>(state[0], "state", shape);
  if (slots > 1) out.second = write_array<real>(state[1], "state", shape);
  out.lr = {lr};
  return out;
}

/// Parameters are stepped in place, `names` are their places among TensorName; gradients are
/// overwritten.
void call_step(const OptimizerOfPython& optimizer, const std::vector<unsigned>& names,
               const py::list& parameters, const py::list& gradients, const py::list& state,
               const py::list& constraints, std::int64_t step, double loss) {
  const std::size_t count = names.size();
  if (count == 0 || parameters.size() != count || gradients.size() != count ||
      state.size() != count || constraints.size() != count)
    throw py::value_error("names: expected one for each parameter, gradient, state and constraint");
  unsigned wrt = 0;
  for (const unsigned name : names) {
    if (name >= kTensors) throw py::value_error("names: expected parameters");
    wrt |= 1U << name;
  }
  const Optimizer settings = optimizer.checked(step + 1, 0, wrt);
  with_type_of(parameters[0], [&](auto zero) {
    using real = decltype(zero);
    std::vector<Trained<real>> tensors;
    tensors.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
      tensors.push_back(read_tensor<real>(TensorName(names[i]), parameters[i], gradients[i],
                                          state[i].cast<py::tuple>(), settings.slots(),
                                          settings.lr[names[i]][0]));
      Trained<real>& read = tensors.back();
      read.constraint = read_constraint(constraints[i], read.heads * read.size);
    }
    const py::gil_scoped_release released;
    take_step(settings, tensors, step, loss);
  });
}

}  // namespace

Constraint read_constraint(const py::handle& in, std::ptrdiff_t entries) {
  Constraint out;
  if (in.is_none()) return out;
  const auto given = in.cast<py::tuple>();
  const auto read = [&](int place, std::ptrdiff_t& count) {
    const std::int64_t* at = read_array<std::int64_t>(given[place], "constraints", {-1});
    count = py::reinterpret_borrow<py::array>(given[place]).shape(0);
    return at;
  };
  std::ptrdiff_t members = 0;
  out.kept = read(0, out.kept_count);
  out.members = read(1, members);
  out.ends = read(2, out.groups);
  out.over_heads = given[3].cast<bool>();
  const auto inside = [entries](std::int64_t i) { return i >= 0 && i < entries; };
  if (!std::all_of(out.kept, out.kept + out.kept_count, inside) ||
      !std::all_of(out.members, out.members + members, inside) ||
      !std::is_sorted(out.kept, out.kept + out.kept_count) ||
      !std::is_sorted(out.ends, out.ends + out.groups) ||
      (out.groups > 0 && (out.ends[0] < 1 || out.ends[out.groups - 1] != members)))
    throw py::value_error("constraints: expected entries of the parameter, in groups");
  return out;
}

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
  py::class_<RuleOfPython>(m, "Rule")
      .def(py::init(&make_rule), py::arg("type"))
      .def_property_readonly("type", &name_of)
      .def_property_readonly("fields", &fields_of);
  py::class_<OptimizerOfPython>(m, "Optimizer")
      .def(py::init(&make_optimizer), py::kw_only(), py::arg("rule"), py::arg("lr"),
           py::arg("schedule"), py::arg("l2"), py::arg("clip"), py::arg("project"),
           py::arg("radius"), py::arg("project_by"), py::arg("project_norm"),
           py::arg("project_power"), py::arg("since"))
      .def_property_readonly(
          "rule", [](const OptimizerOfPython& o) { return RuleOfPython{o.settings.rule}; })
      .def_readonly("lr", &OptimizerOfPython::lr)
      .def_readonly("schedule", &OptimizerOfPython::schedule);
  m.def("step", call_step, py::arg("optimizer"), py::kw_only(), py::arg("names"),
        py::arg("parameters"), py::arg("gradients"), py::arg("state"), py::arg("constraints"),
        py::arg("step"), py::arg("loss"));
}

}  // namespace mhfast
