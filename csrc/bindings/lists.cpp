// The lists, for Python: enums, kinds of targets, parameters, quantities, kernels.
#include "arrays.hpp"
#include "own_loss.hpp"
#include "register.hpp"

namespace mhfast {
namespace {

const char* text(Targets targets) {
  switch (targets) {
    case Targets::kSigns:
      return "signs";
    case Targets::kReals:
      return "reals";
    case Targets::kNonnegative:
      return "nonnegative";
    case Targets::kClasses:
      return "classes";
    case Targets::kProbabilities:
      return "probabilities";
    case Targets::kDerivatives:
      return "derivatives";
    case Targets::kOwn:
      return "own";
  }
  return "";
}

const char* text(QuantityOf of) {
  switch (of) {
    case QuantityOf::kDataSet:
      return "data set";
    case QuantityOf::kGradient:
      return "gradient";
    case QuantityOf::kParameters:
      return "parameters";
    case QuantityOf::kAttentionWeights:
      return "attention";
  }
  return "";
}

/// Whether weights are divided by the tokens by default; None for a map that is not of entries.
template <class Type>
py::object divides_by_tokens() {
  if constexpr (Type::kKind == RowKind::kEntries)
    return py::bool_(Type::kByTokens);
  else
    return py::none();
}

py::tuple kernel_names() {
  py::list names;
#define MHFAST_KERNEL(result, name, ...) names.append(#name);
#include "../lists/kernels.inc"
#undef MHFAST_KERNEL
#define MHFAST_STEP(Type, name) names.append("step_" #name);
  MHFAST_OPTIMIZERS(MHFAST_STEP)
#undef MHFAST_STEP
  return py::tuple(names);
}

/// Name and default of the parameter of a loss, None of one without.
template <class Type>
py::object parameter_of_loss() {
  if constexpr (kHasParameter<Type>) {
    const auto [parameter] = Type{};
    return py::make_tuple(Type::kParameter, parameter);
  } else {
    return py::none();
  }
}

py::dict lists() {
  py::dict parameters, losses, loss_parameters, row_maps, quantities, optimizers;
#define MHFAST_PARAMETER(enumerator, name, letters, ...) parameters[name] = letters;
#include "../lists/parameters.inc"
#undef MHFAST_PARAMETER
  for (const LossFacts& loss : kLosses) losses[loss.name] = text(loss.targets);
#define MHFAST_LOSS_PARAMETER(Type, name) loss_parameters[#name] = parameter_of_loss<Type>();
  MHFAST_LOSSES(MHFAST_LOSS_PARAMETER)
#undef MHFAST_LOSS_PARAMETER
#define MHFAST_ROW_MAP(Type, name) row_maps[#name] = divides_by_tokens<row_maps::Type>();
  MHFAST_ROW_MAPS(MHFAST_ROW_MAP)
#undef MHFAST_ROW_MAP
#define MHFAST_QUANTITY(enumerator, name, of) quantities[name] = text(QuantityOf::of);
#include "../lists/quantities.inc"
#undef MHFAST_QUANTITY
#define MHFAST_SLOTS(Type, name) optimizers[#name] = Type::kSlots;
  MHFAST_OPTIMIZERS(MHFAST_SLOTS)
#undef MHFAST_SLOTS
  py::list thresholds;
#define MHFAST_STOP(enumerator, name)
#define MHFAST_THRESHOLD(enumerator, name, comparison) thresholds.append(#name);
#include "../lists/stops.inc"
#undef MHFAST_STOP
#undef MHFAST_THRESHOLD
  py::dict all;
  all["parameters"] = parameters;
  all["losses"] = losses;
  all["loss_parameters"] = loss_parameters;
  all["row_maps"] = row_maps;
  all["quantities"] = quantities;
  all["optimizers"] = optimizers;
  all["thresholds"] = py::tuple(thresholds);
  all["kernels"] = kernel_names();
  return all;
}

}  // namespace

void register_lists(py::module_& m) {
  std::vector<std::pair<const char*, LossName>> losses;
  for (const LossFacts& one : kLosses) losses.emplace_back(one.name, one.loss);
  register_enum<LossName>(m, "LossName", losses);
  register_own_loss(m);
  py::class_<Loss>(m, "Loss")
      .def(py::init([](LossName name, double parameter) { return Loss{name, parameter}; }),
           py::arg("name"), py::arg("parameter") = 0.0)
      .def(py::init([](OwnLoss& own) { return Loss{LossName::kOwn, 0.0, &own}; }), py::arg("own"),
           py::keep_alive<1, 2>())
      .def_readonly("name", &Loss::name)
      .def_readonly("parameter", &Loss::parameter)
      .def_readonly("own", &Loss::own);
#define MHFAST_ROW_MAP(Type, name) {#name, RowMapName::k##Type},
  register_enum<RowMapName>(m, "RowMapName", {MHFAST_ROW_MAPS(MHFAST_ROW_MAP)});
#undef MHFAST_ROW_MAP
  py::class_<RowMap>(m, "RowMap")
      .def(py::init([](RowMapName name, bool by_tokens) { return RowMap{name, by_tokens}; }),
           py::arg("name"), py::arg("by_tokens") = false)
      .def_readonly("name", &RowMap::name)
      .def_readonly("by_tokens", &RowMap::by_tokens);
  register_enum<StopReason>(m, "StopReason",
                            {
#define MHFAST_STOP(enumerator, name) {#name, StopReason::enumerator},
#define MHFAST_THRESHOLD(enumerator, name, comparison) MHFAST_STOP(enumerator, name)
#include "../lists/stops.inc"
#undef MHFAST_STOP
#undef MHFAST_THRESHOLD
                            });
  register_enum<Scope>(m, "Scope",
                       {{"tensor", Scope::kTensor}, {"head", Scope::kHead}, {"all", Scope::kAll}});
  register_enum<Norm>(
      m, "Norm",
      {{"max", Norm::kMax}, {"l1", Norm::kL1}, {"fro", Norm::kFro}, {"spectral", Norm::kSpectral}});
  register_enum<Polar>(m, "Polar",
                       {{"exact", Polar::kExact}, {"newton_schulz", Polar::kNewtonSchulz}});
  register_enum<BallNorm>(m, "BallNorm",
                          {{"fro", BallNorm::kFro},
                           {"nuclear", BallNorm::kNuclear},
                           {"spectral", BallNorm::kSpectral},
                           {"power", BallNorm::kPower}});
  register_enum<Projection>(m, "Projection",
                            {{"ball", Projection::kBall}, {"sphere", Projection::kSphere}});
  m.def("lists", lists);
}

}  // namespace mhfast
