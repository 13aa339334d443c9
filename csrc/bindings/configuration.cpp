#include <omp.h>
#include <pybind11/stl.h>
#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstdlib>

#include "../passes/triangular.hpp"
#include "../problem/attended.hpp"
#include "../problem/products.hpp"
#include "../runtime/tuning.hpp"
#include "arrays.hpp"
#include "register.hpp"

namespace mhfast {
namespace {

const char* compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "gcc " __VERSION__;
#endif
}

/// File of the OpenMP runtime that serves this process.
std::string openmp_runtime() {
#if defined(__unix__) || defined(__APPLE__)
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&omp_get_max_threads), &info) && info.dli_fname)
    return info.dli_fname;
#endif
  return "unknown";
}

py::dict config() {
  py::dict result;
  result["compiler"] = compiler();
  result["isas_compiled"] = compiled_instruction_sets();
  result["isas_available"] = available_instruction_sets();
  result["isa"] = active_instruction_set().name;
  result["threads"] = default_threads();
  result["openmp"] = _OPENMP;  // date of the standard
  result["openmp_runtime"] = openmp_runtime();
  result["pybind11"] =
      PYBIND11_TOSTRING(PYBIND11_VERSION_MAJOR) "." PYBIND11_TOSTRING(PYBIND11_VERSION_MINOR);
  return result;
}

/// p = 0: a classifier; runs side by side, 0: one.
py::dict explain(std::ptrdiff_t n, int T, int q, int d, int H, int p, bool identity_w,
                 bool identity_v, bool shared_query, int words, int rank, RowMap row_map,
                 bool causal, std::ptrdiff_t runs, const std::string& dtype) {
  const Registers registers = dtype == "float32" ? registers_of(active_kernels<float>())
                                                 : registers_of(active_kernels<double>());
  const int bytes = registers.bytes, lanes = registers.lanes;
  Shape shape{n, T, q, d, H, p, shared_query, identity_w, identity_v, words, causal, rank};
  const auto keys = [&](TriangleUse use) { return prefers_triangle(shape, row_map, use) ? d : T; };
  if (!prefers_factors(shape)) shape.rank = 0;
  const int of_call = keys(TriangleUse::kGradient), of_training = keys(TriangleUse::kTraining);
  const double product_bytes = double(n) * double(ProductSizes(shape, lanes).row) * bytes *
                               double(std::max<std::ptrdiff_t>(runs, 1));
  const bool takes_products =
      product_bytes <= kProductBytes && prefers_products(shape, row_map, registers, runs);
  shape.T = of_training;
  const PlanKind of_steps =
      takes_products ? PlanKind::kProducts
                     : make_plan(shape, registers, prefers_runs(shape, registers, runs)).kind;
  const AttendedRows attended(shape, lanes);
  const double attended_bytes = attended.bytes(double(std::max<std::ptrdiff_t>(runs, 1)), bytes);
  const bool keeps_attended = readout_of(shape).rows > 0 && attended_bytes <= kAttendedBytes &&
                              prefers_attended(shape, registers, runs);
  shape.T = runs > 1 ? of_training : of_call;
  const bool runs_are_lanes = prefers_runs(shape, registers, runs);
  if (runs_are_lanes) shape.rank = 0;
  const Plan plan = make_plan(shape, registers, runs_are_lanes);
  py::dict result, cycles;
  for (int kind = 0; kind < kPlanKinds; ++kind)
    cycles[plan_name(PlanKind(kind))] = plan.cycles[kind];
  result["plan"] = plan_name(plan.kind);
  result["predicted_cycles"] = cycles;
  result["readout_plan"] = plan_name(keeps_attended ? PlanKind::kAttended : plan.kind);
  result["attended_bytes"] = keeps_attended ? attended_bytes : 0.0;
  result["training_plan"] = plan_name(of_steps);
  result["product_bytes"] = takes_products ? product_bytes : 0.0;
  result["keys"] = of_call;
  result["training_keys"] = of_training;
  result["lanes"] = lanes;
  result["units"] = plan.units;
  result["chunks"] = plan.chunks;
  result["slab"] = plan.slab;
  result["weights_kept"] = plan.keep;
  std::ptrdiff_t gradients = partial_gradient(shape, plan.kind, lanes).size * plan.chunks;
  if (has_row_gradients(shape, plan.kind))
    gradients += shape.H * shape.n * shape.q * row_gradient_size(shape, lanes);
  result["gradient_bytes"] = gradients * bytes;
  return result;
}

template <class real>
py::array exponentials(const py::object& x) {
  const auto array = py::reinterpret_borrow<py::array>(x);
  const real* from = read_array<real>(x, "x", {-1});
  py::array_t<real> out(array.shape(0));
  active_kernels<real>().exponentials(from, array.shape(0), out.mutable_data());
  return out;
}

/// Floating-point operations per second of independent multiply-adds, all threads together.
double peak_flops(const std::string& dtype, int threads, double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto chains = dtype == "float32" ? active_kernels<float>().multiply_adds
                                         : active_kernels<double>().multiply_adds;
  const py::gil_scoped_release released;
  double total = 0;
  run_team(threads > 0 ? threads : default_threads(), [&](const Member& member) {
    constexpr std::int64_t kRounds = 20000;
    chains(kRounds);
    const auto start = Clock::now();
    double fastest = 0;
    member.wait();
    do {
      const auto before = Clock::now();
      const double flops = chains(kRounds);
      const double taken = std::chrono::duration<double>(Clock::now() - before).count();
      fastest = std::max(fastest, flops / taken);
    } while (std::chrono::duration<double>(Clock::now() - start).count() < seconds);
#pragma omp critical(mhfast_peak)
    total += fastest;
  });
  return total;
}

}  // namespace

void register_configuration(py::module_& m) {
  if (const char* name = std::getenv("MHFAST_ISA")) {
    try {
      if (*name) select_instruction_set(name);
    } catch (const std::invalid_argument& error) {
      throw py::import_error(std::string("MHFAST_ISA: ") + error.what());
    }
  }
  m.attr("WORDS_OF_TOKEN") = kWordsOfToken;
  m.def("config", config);
  m.def("available_isas", available_instruction_sets);
  m.def("compiled_isas", compiled_instruction_sets);
  m.def("active_isa", [] { return active_instruction_set().name; });
  m.def("select_isa", select_instruction_set, py::arg("name"));
  m.def("set_num_threads", set_default_threads, py::arg("k"));
  m.def("get_num_threads", default_threads);
  m.def("force_plan", force_plan, py::arg("name"));
  m.def("force_keys", force_keys, py::arg("name"));
  m.def("explain", explain, py::kw_only(), py::arg("n"), py::arg("T"), py::arg("q"), py::arg("d"),
        py::arg("H"), py::arg("p"), py::arg("identity_w"), py::arg("identity_v"),
        py::arg("shared_query"), py::arg("words"), py::arg("rank"), py::arg("row_map"),
        py::arg("causal"), py::arg("runs"), py::arg("dtype_name"));
  m.def(
      "exp",
      [](const py::object& x) {
        return with_type_of(x, [&](auto zero) { return exponentials<decltype(zero)>(x); });
      },
      py::arg("x"));
  m.def("peak_flops", peak_flops, py::kw_only(), py::arg("dtype_name"), py::arg("threads"),
        py::arg("seconds"));
}

}  // namespace mhfast
