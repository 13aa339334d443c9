#include "../passes/evaluate.hpp"

#include "../passes/attention_weights.hpp"
#include "../passes/curvature.hpp"
#include "../passes/tangent_rows.hpp"
#include "../problem/alike_heads.hpp"

#include "kept_arrays.hpp"
#include "problem.hpp"
#include "register.hpp"

namespace mhfast {
namespace {

double flops(const Shape& s) {
  return double(s.n) * computed_heads(s) * s.q * (s.flops_of_w() + 8.0 * s.T * s.d);
}

/// A new array, with a leading axis of runs if there are any; `make`: see kept_array.
template <class T>
class Results {
 public:
  Results(const ArrayShape& shape, py::ssize_t runs,
          py::array (*make)(const ArrayShape&) = new_array<T>)
      : array_(make(runs > 0 ? shape.with_leading(runs) : shape)),
        at_(static_cast<T*>(array_.mutable_data())),
        size_(array_.size() / std::max<py::ssize_t>(runs, 1)) {}
  T* of(std::ptrdiff_t run) const { return at_ + run * size_; }
  const py::array& array() const { return array_; }

 private:
  py::array array_;
  T* at_;
  std::ptrdiff_t size_;
};

/// One object for each result, None for those that were not asked for.
template <class T, std::size_t count>
py::tuple arrays_of(const std::array<std::optional<Results<T>>, count>& results) {
  py::tuple arrays(count);
  for (std::size_t i = 0; i < count; ++i)
    arrays[i] = results[i] ? py::object(results[i]->array()) : py::object(py::none());
  return arrays;
}

py::array call_outputs(const py::tuple& samples, const py::tuple& parameters, py::ssize_t runs,
                       double scale, bool causal, RowMap row_map, int threads) {
  return with_type_of(numbers_of(samples), [&](auto zero) -> py::array {
    using real = decltype(zero);
    const auto problem =
        read_problem<real>(samples, parameters, runs, causal, row_map, std::nullopt);
    const auto& model = problem.model;
    const auto& data = problem.data;
    const Shape& s = data.shape;
    Results<real> out(s.is_layer() ? ArrayShape{s.n, s.q, s.p} : ArrayShape{s.n}, runs);
    {
      const py::gil_scoped_release released;
      for_runs(std::max<py::ssize_t>(runs, 1), threads, flops(s), [&](std::ptrdiff_t r, int k) {
        outputs(at_run(data, r, 1), model.of(r), real(scale), k, out.of(r));
      });
    }
    return out.array();
  });
}

py::array call_attention(const py::tuple& samples, const py::tuple& parameters, py::ssize_t runs,
                         double scale, bool causal, RowMap row_map, int threads) {
  return with_type_of(numbers_of(samples), [&](auto zero) -> py::array {
    using real = decltype(zero);
    const auto problem =
        read_problem<real>(samples, parameters, runs, causal, row_map, std::nullopt);
    const auto& model = problem.model;
    const auto& data = problem.data;
    const Shape& s = data.shape;
    Results<real> out({s.n, py::ssize_t(s.H), py::ssize_t(s.q), py::ssize_t(s.T)}, runs);
    {
      const py::gil_scoped_release released;
      for_runs(std::max<py::ssize_t>(runs, 1), threads, flops(s), [&](std::ptrdiff_t r, int k) {
        attention(at_run(data, r, 1), model.of(r), real(scale), 0, s.n, k, out.of(r));
      });
    }
    return out.array();
  });
}

/// wrt: a bit for each tensor in the order of TensorName, then X, the query, and the dictionary.
py::tuple call_value_and_grad(const py::tuple& samples, const py::tuple& parameters,
                              py::ssize_t runs, double scale, bool causal, RowMap row_map,
                              const Loss& loss, unsigned wrt, int threads) {
  return with_type_of(numbers_of(samples), [&](auto zero) -> py::tuple {
    using real = decltype(zero);
    const auto problem = read_problem<real>(samples, parameters, runs, causal, row_map, loss);
    const ModelOfRuns<real>& model = problem.model;
    const Data<real>& data = problem.data;
    const Shape& s = data.shape;
    std::array<std::optional<Results<real>>, kTensors + 2> results;
    for (int name = 0; name < kTensors; ++name)
      if (wrt >> name & 1) {
        if (!model.parameters.at[name] && name != kEmbedding)
          throw py::value_error(std::string("wrt: expected tensors of the model, got ") +
                                kTensorNames[name]);
        results[name].emplace(tensor_shape(TensorName(name), s, model.rank), runs);
      }
    const bool of_inputs = wrt >> kTensors & 3, of_words = wrt >> kEmbedding & 1;
    if (data.has_words() ? of_inputs : of_words)
      throw py::value_error("wrt: expected X and query of tokens, or the embedding of words");
    if (wrt >> kTensors & 1) results[kTensors].emplace(ArrayShape{s.n, s.T, s.d}, runs);
    if (wrt >> (kTensors + 1) & 1) {
      if (data.self || s.shared_query)
        throw py::value_error("wrt: expected an external query for its gradient, got none");
      results[kTensors + 1].emplace(ArrayShape{s.n, s.q, s.d}, runs);
    }
    std::vector<double> values(std::max<py::ssize_t>(runs, 1));
    {
      const py::gil_scoped_release released;
      for_runs(std::ptrdiff_t(values.size()), threads, flops(s), [&](std::ptrdiff_t r, int k) {
        Gradients<real> gradients;
        for (int name = 0; name < kTensors; ++name)
          if (results[name]) gradients.of[name] = results[name]->of(r);
        if (results[kTensors]) gradients.x = results[kTensors]->of(r);
        if (results[kTensors + 1]) gradients.z = results[kTensors + 1]->of(r);
        values[r] =
            value_and_grad(at_run(data, r, 1), model.of(r), real(scale), loss, k, gradients);
      });
    }
    const py::tuple arrays = arrays_of(results);
    if (runs == 0) return py::make_tuple(values[0], arrays);
    return py::make_tuple(py::array_t<double>(py::ssize_t(values.size()), values.data()), arrays);
  });
}

/// Tangent: tensors like parameters, None for those that are zero.
py::tuple call_hvp(const py::tuple& samples, const py::tuple& parameters, const py::tuple& tangent,
                   py::ssize_t runs, double scale, bool causal, RowMap row_map, Loss loss,
                   unsigned wrt, int threads) {
  return with_type_of(numbers_of(samples), [&](auto zero) -> py::tuple {
    using real = decltype(zero);
    const auto problem = read_problem<real>(samples, parameters, runs, causal, row_map, loss);
    const ModelOfRuns<real>& model = problem.model;
    const Data<real>& data = problem.data;
    const Shape& s = data.shape;
    if (data.has_words()) throw py::value_error("X: expected tokens that are no words");
    const auto along = read_tensors<real>(tangent, "tangent", s, model.rank, runs);
    std::array<std::optional<Results<real>>, kTensors> results;
    for (int name = 0; name < kTensors; ++name) {
      const bool exists = model.parameters.at[name];
      if ((wrt >> name & 1 || along.at[name]) && !exists)
        throw py::value_error(std::string("tangent, wrt: expected tensors of the model, got ") +
                              kTensorNames[name]);
      if (wrt >> name & 1)
        results[name].emplace(tensor_shape(TensorName(name), s, model.rank), runs);
    }
    {
      const py::gil_scoped_release released;
      for_runs(std::max<py::ssize_t>(runs, 1), threads, 2 * flops(s), [&](std::ptrdiff_t r, int k) {
        Tensors<real*> out{};
        for (int name = 0; name < kTensors; ++name)
          if (results[name]) out[name] = results[name]->of(r);
        hessian_product(at_run(data, r, 1), model.of(r), along.of(r), real(scale), loss, k, out);
      });
    }
    return arrays_of(results);
  });
}

/// Rows of a tangent kernel (n, q, g, d) of g heads, those of D X of a layer (n, q, p, g, d), and
/// for each run the exponent of the unit of the latter; None if the numbers of the problem are not
/// ordinary.
py::object call_tangent_rows(const py::tuple& samples, const py::tuple& parameters,
                             py::ssize_t runs, double scale, bool causal, RowMap row_map,
                             int first_head, int last_head, bool derivative, int threads) {
  return with_type_of(numbers_of(samples), [&](auto zero) -> py::object {
    using real = decltype(zero);
    const auto problem =
        read_problem<real>(samples, parameters, runs, causal, row_map, std::nullopt);
    const auto& model = problem.model;
    const auto& data = problem.data;
    const Shape& s = data.shape;
    if (data.has_words()) throw py::value_error("X: expected tokens that are no words");
    for (std::ptrdiff_t r = 0; r < std::max<py::ssize_t>(runs, 1); ++r)
      if (!is_ordinary(at_run(data, r, 1), model.of(r), real(scale))) return py::none();
    if (first_head < 0 || last_head <= first_head || last_head > computed_heads(s))
      throw py::value_error("heads: expected a range of the model's");
    const py::ssize_t g = last_head - first_head, q = s.q, d = s.d;
    Results<real> pooled({s.n, q, g, d}, runs, kept_array<real>);
    std::optional<Results<real>> moved;
    if (derivative)
      moved.emplace(s.is_layer() ? ArrayShape{s.n, q, s.p, g, d} : ArrayShape{s.n, q, g, d}, runs,
                    kept_array<real>);
    std::vector<std::int64_t> units(std::max<py::ssize_t>(runs, 1));
    {
      const py::gil_scoped_release released;
      for_runs(std::ptrdiff_t(units.size()), threads, flops(s), [&](std::ptrdiff_t r, int k) {
        units[r] =
            tangent_rows(at_run(data, r, 1), model.of(r), real(scale), k,
                         {first_head, last_head, pooled.of(r), moved ? moved->of(r) : nullptr});
      });
    }
    return py::make_tuple(pooled.array(), moved ? py::object(moved->array()) : py::none(),
                          py::array_t<std::int64_t>(py::ssize_t(units.size()), units.data()));
  });
}

/// K (rows, p, columns, p), and (rows, columns) or None; see join_outputs.
void call_join_outputs(const py::array& K, const py::object& alike, const py::object& of_rows) {
  with_type_of(K, [&](auto zero) {
    using real = decltype(zero);
    real* const at = write_array<real>(K, "K", {-1, -1, -1, -1});
    const ArrayShape shape{K.shape(0), K.shape(2)};
    const auto read = [&](const py::object& x, const char* name) -> const real* {
      return x.is_none() ? nullptr : read_array<real>(x, name, shape);
    };
    join_outputs(shape[0], shape[1], int(K.shape(1)), read(alike, "alike"),
                 read(of_rows, "of_rows"), at);
  });
}

}  // namespace

void register_evaluation(py::module_& m) {
  const py::arg samples("samples"), parameters("parameters"), runs("runs"), scale("scale"),
      causal("causal"), row_map("row_map"), threads("threads"), loss("loss"), wrt("wrt");
  const py::kw_only by_name;
  m.def("outputs", call_outputs, samples, parameters, by_name, runs, scale, causal, row_map,
        threads);
  m.def("attention", call_attention, samples, parameters, by_name, runs, scale, causal, row_map,
        threads);
  // By position too: keywords would take half a microsecond of a call that takes five.
  m.def("value_and_grad", call_value_and_grad, samples, parameters, runs, scale, causal, row_map,
        loss, wrt, threads);
  m.def("tangent_rows", call_tangent_rows, samples, parameters, runs, scale, causal, row_map,
        py::arg("first_head"), py::arg("last_head"), py::arg("derivative"), threads);
  m.def("join_outputs", call_join_outputs, py::arg("K"), py::arg("alike"), py::arg("of_rows"));
  m.def("hvp", call_hvp, samples, parameters, py::arg("tangent"), by_name, runs, scale, causal,
        row_map, loss, wrt, threads);
}

}  // namespace mhfast
