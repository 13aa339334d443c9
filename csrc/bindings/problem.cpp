#include "problem.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace mhfast {
namespace {

constexpr py::ssize_t kMax = 1 << 30;  // axes other than samples are counted in int

/// Length of an axis counted from the last one.
py::ssize_t length_of(const py::handle& object, const char* name, int from_last) {
  if (!py::isinstance<py::array>(object))
    throw py::type_error(std::string(name) + ": expected an array");
  const auto array = py::reinterpret_borrow<py::array>(object);
  if (array.ndim() < from_last + 1)
    throw py::value_error(std::string(name) + ": expected more axes, got shape " +
                          shape_text(ArrayShape(array)));
  const py::ssize_t length = array.shape(array.ndim() - 1 - from_last);
  if (length < 1 || length > kMax)
    throw py::value_error(std::string(name) + ": expected no axis of length 0, got shape " +
                          shape_text(ArrayShape(array)));
  return length;
}

template <class T>
std::string number_text(T number) {
  return std::string(py::repr(py::float_(double(number))));
}

std::string at_index(std::ptrdiff_t i, std::ptrdiff_t of_sample, std::ptrdiff_t n) {
  std::string text = " at index ";
  const std::ptrdiff_t sample = i / of_sample % n, run = i / of_sample / n;
  if (run > 0) text += std::to_string(run) + ", ";
  text += std::to_string(sample);
  return of_sample > 1 ? text + ", " + std::to_string(i % of_sample) : text;
}

/// How to convert labels 0 and 1, which other libraries use, to those expected here.
template <class real>
const char* repair(const real* y, std::ptrdiff_t count) {
  return std::all_of(y, y + count, [](real label) { return label == 0 || label == 1; })
             ? "; 2 * y - 1 makes them of 0 and 1"
             : "";
}

template <class real>
void check_labels(const real* y, std::ptrdiff_t count, std::ptrdiff_t of_sample, std::ptrdiff_t n) {
  for (std::ptrdiff_t i = 0; i < count; ++i)
    if (std::fabs(y[i]) != real(1))
      throw py::value_error("y: expected labels +1 or -1, got " + number_text(y[i]) +
                            at_index(i, of_sample, n) + repair(y, count));
}

template <class real>
void check_nonnegative(const real* y, std::ptrdiff_t count, std::ptrdiff_t of_sample,
                       std::ptrdiff_t n) {
  for (std::ptrdiff_t i = 0; i < count; ++i)
    if (!(y[i] >= 0 && y[i] <= std::numeric_limits<real>::max()))
      throw py::value_error("y: expected finite targets >= 0, got " + number_text(y[i]) +
                            at_index(i, of_sample, n));
}

/// Rows of p probabilities.
template <class real>
void check_probabilities(const real* y, std::ptrdiff_t rows, const Shape& s) {
  constexpr double kRounding = 1e-5;  // of probabilities computed in float32
  for (std::ptrdiff_t i = 0; i < rows; ++i) {
    double sum = 0;
    for (int o = 0; o < s.p; ++o) sum += double(y[i * s.p + o]);
    if (!(std::fabs(sum - 1) <= kRounding))
      throw py::value_error("y: expected probabilities that sum to 1 in each row, got the sum " +
                            number_text(sum) + at_index(i, s.q, s.n));
  }
}

template <class real>
std::shared_ptr<std::vector<real>> read_classes(const std::int64_t* y, std::ptrdiff_t count,
                                                const Shape& s) {
  auto classes = std::make_shared<std::vector<real>>(count);
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    if (y[i] < 0 || y[i] >= s.p)
      throw py::value_error("y: expected classes from 0 to " + std::to_string(s.p - 1) + ", got " +
                            std::to_string(y[i]) + at_index(i, s.q, s.n));
    (*classes)[i] = real(y[i]);
  }
  return classes;
}

}  // namespace

ArrayShape tensor_shape(TensorName name, const Shape& s, int rank) {
  const Extent e = extent(name, s, rank);
  if (name == kPrompt || name == kEmbedding) return {e.rows, e.columns};
  return {e.heads, e.rows, e.columns};
}

namespace {

/// d is the number of features of X.
template <class real>
ModelOfRuns<real> read_model(const py::tuple& parameters, py::ssize_t d, py::ssize_t runs) {
  if (parameters.size() != kTensors)
    throw py::value_error("parameters: expected an entry for each parameter");
  ModelOfRuns<real> model{};
  const auto has = [&](TensorName name) { return !parameters[name].is_none(); };
  const auto length = [&](TensorName name, int from_last) {
    return int(length_of(parameters[name], kTensorNames[name], from_last));
  };
  if (has(kW) && has(kQ)) throw py::value_error("parameters: expected either W or Q");
  if (int(has(kU)) + has(kV) + has(kValueA) > 1 || has(kValueA) != has(kValueB))
    throw py::value_error("parameters: expected either U, V or A and B");
  Shape& s = model.shape;
  s.d = int(d);
  s.H = 1;  // unless one of these has heads
  for (const TensorName name : {kValueA, kV, kU, kQ, kW})
    if (has(name)) s.H = length(name, 2);
  s.rank = model.rank = has(kQ) ? length(kQ, 0) : 0;
  s.value_rank = has(kValueA) ? length(kValueA, 0) : 0;
  if (!has(kU)) s.p = has(kV) ? length(kV, 0) : has(kValueB) ? length(kValueB, 0) : s.d;
  s.identity_w = !has(kW) && !has(kQ);
  s.identity_v = !has(kU) && !has(kV) && !has(kValueA);
  s.q = has(kPrompt) ? length(kPrompt, 1) : has(kU) ? length(kU, 1) : 0;
  s.shared_query = has(kPrompt);
  for (int name = 0; name < kTensors; ++name) {
    if (!has(TensorName(name))) continue;
    const auto array = read_runs<real>(parameters[name], kTensorNames[name],
                                       tensor_shape(TensorName(name), s, model.rank), runs);
    model.parameters.at[name] = array.at;
    model.parameters.run[name] = array.run;
  }
  return model;
}

/// The number of tokens of each sample, or None.
template <class real>
void read_lengths(const py::handle& object, Data<real>& data, py::ssize_t runs) {
  const Shape& s = data.shape;
  if (object.is_none()) return;
  const auto lengths = read_runs<std::int64_t>(object, "lengths", {s.n}, runs);
  data.lengths = lengths.at;
  data.run.lengths = lengths.run;
  for (std::ptrdiff_t i = 0; i < (lengths.run ? runs : 1) * s.n; ++i)
    if (lengths.at[i] < 0 || lengths.at[i] > s.T)
      throw py::value_error("lengths: expected integers from 0 to " + std::to_string(s.T) +
                            ", got " + std::to_string(lengths.at[i]) + at_index(i, 1, s.n));
}

/// Words (n, rows), -1: any number; returns n.
py::ssize_t read_ids(const py::handle& object, const char* name, py::ssize_t n, py::ssize_t rows,
                     int words, py::ssize_t runs, RunArray<const std::int32_t*>& out) {
  out = read_runs<std::int32_t>(object, name, {n, rows}, runs);
  const auto array = py::reinterpret_borrow<py::array>(object);
  const bool fits = std::all_of(out.at, out.at + array.size(),
                                [words](std::int32_t word) { return word >= 0 && word < words; });
  if (!fits) throw py::value_error(std::string(name) + ": expected words of the dictionary");
  return array.shape(array.ndim() - 2);
}

/// Tokens that are words (dictionary, words of the tokens), and query rows that are words, in place
/// of X and an external query. None as the query is self-attention.
template <class real>
void read_words(const py::tuple& X, const py::tuple& in, Data<real>& data, py::ssize_t runs) {
  if (X.size() != 2) throw py::value_error("X: expected a dictionary and words");
  Shape& s = data.shape;
  s.words = int(length_of(X[0], "embedding", 1));
  const auto dictionary = read_runs<real>(X[0], "embedding", {s.words, s.d}, runs);
  data.x = dictionary.at;
  data.run.x = dictionary.run;
  data.runs = 1;
  RunArray<const std::int32_t*> words;
  s.n = read_ids(X[1], "ids", -1, -1, s.words, runs, words);
  s.T = int(length_of(X[1], "ids", 0));
  data.keys = words.at;
  data.run.keys = words.run;
  data.self = in[1].is_none() && !s.shared_query;
  if (data.self) {
    if (s.q != 0 && s.q != s.T) throw py::value_error("X: expected as many tokens as U has rows");
    s.q = s.T;
    data.z = data.x;
    data.run.z = data.run.x;
    data.queries = data.keys;
    data.run.queries = data.run.keys;
  } else if (!in[1].is_none()) {
    if (s.shared_query) throw py::value_error("query: expected none for a model with a prompt");
    const py::object queries = py::tuple(in[1])[1];
    if (s.q == 0) s.q = int(length_of(queries, "query", 0));
    read_ids(queries, "query", s.n, s.q, s.words, runs, words);
    data.queries = words.at;
    data.run.queries = words.run;
  }
  read_lengths(in[4], data, runs);
}

/// Which keys the rows see, and on which side they are queries: all of a data set but y and weight.
template <class real>
void read_inputs(const py::tuple& in, Data<real>& data, py::ssize_t runs) {
  Shape& s = data.shape;
  if (py::isinstance<py::tuple>(in[0])) return read_words(py::tuple(in[0]), in, data, runs);
  const auto X = read_runs<real>(in[0], "X", {-1, -1, s.d}, runs);
  const auto array = py::reinterpret_borrow<py::array>(py::object(in[0]));
  s.n = array.shape(array.ndim() - 3);
  s.T = int(length_of(in[0], "X", 1));
  data.x = X.at;
  data.run.x = X.run;
  const bool external = !in[1].is_none();
  data.self = !external && !s.shared_query;
  data.runs = 1;
  if (external && s.shared_query)
    throw py::value_error("query: expected none for a model with a prompt");
  data.z = data.x;
  data.run.z = data.run.x;
  if (external) {
    if (s.q == 0) s.q = int(length_of(in[1], "query", 1));
    const auto Z = read_runs<real>(in[1], "query", {s.n, s.q, s.d}, runs);
    data.z = Z.at;
    data.run.z = Z.run;
  } else if (data.self) {
    if (s.q != 0 && s.q != s.T)
      throw py::value_error("X: expected shape " + shape_text({s.n, s.q, s.d}) + ", got " +
                            shape_text({s.n, s.T, s.d}));
    s.q = s.T;
  }
  read_lengths(in[4], data, runs);
}

/// Targets of the kind that the loss takes; classes are kept in `out`.
template <class real>
void read_targets(const py::tuple& in, Loss loss, py::ssize_t runs, DataOfRuns<real>& out) {
  Data<real>& data = out.data;
  const Shape& s = data.shape;
  const Targets targets = targets_of(loss);
  if (is_of_rows(loss) && !s.is_layer())
    throw py::value_error(std::string("loss: expected one of a single output, got '") +
                          kLosses[int(loss.name)].name + "'");
  if (targets == Targets::kClasses) {
    const auto y = read_runs<std::int64_t>(in[2], "y", {s.n, s.q}, runs);
    out.classes = read_classes<real>(y.at, (y.run ? runs : 1) * s.n * s.q, s);
    data.targets = s.q;
    data.y = out.classes->data();
    data.run.y = y.run;
    return;
  }
  const auto y = s.is_layer() ? read_runs<real>(in[2], "y", {s.n, s.q, s.p}, runs)
                              : read_runs<real>(in[2], "y", {s.n}, runs);
  data.y = y.at;
  data.run.y = y.run;
  const py::ssize_t samples = (y.run ? runs : 1) * s.n;
  if (targets == Targets::kSigns) check_labels(y.at, samples * data.targets, data.targets, s.n);
  if (targets == Targets::kNonnegative || targets == Targets::kProbabilities)
    check_nonnegative(y.at, samples * data.targets, data.targets, s.n);
  if (targets == Targets::kProbabilities) check_probabilities(y.at, samples * s.q, s);
}

template <class real>
void read_weight(const py::handle& object, Data<real>& data, py::ssize_t runs) {
  const Shape& s = data.shape;
  const auto weight = py::reinterpret_borrow<py::array>(object);
  // (n,), (R, n), (n, q) or (R, n, q); where a layer's (R, n) and (n, q) are alike, it is (n, q).
  const auto is = [&](py::ssize_t rows, py::ssize_t columns) {
    return weight.ndim() == 2 && weight.shape(0) == rows && weight.shape(1) == columns;
  };
  const bool has_runs =
      runs > 0 && (weight.ndim() == 3 || (is(runs, s.n) && !(s.is_layer() && is(s.n, s.q))));
  data.weighs_rows = weight.ndim() == (has_runs ? 3 : 2);
  if (data.weighs_rows && !s.is_layer())
    throw py::value_error("weight: expected one number for each sample");
  const auto read = data.weighs_rows ? read_runs<real>(object, "weight", {s.n, s.q}, runs)
                                     : read_runs<real>(object, "weight", {s.n}, runs);
  data.weight = read.at;
  data.run.weight = read.run;
}

}  // namespace

template <class real>
DataOfRuns<real> read_data(const py::tuple& in, const Shape& model, bool causal, RowMap row_map,
                           py::ssize_t runs, std::optional<Loss> loss) {
  if (in.size() != 5) throw py::value_error("samples: expected X, query, y, weight and lengths");
  DataOfRuns<real> out{};
  Data<real>& data = out.data;
  data.shape = model;
  data.shape.causal = causal;
  data.row_map = row_map;
  read_inputs(in, data, runs);
  if (!prefers_factors(data.shape)) data.shape.rank = 0;
  const Shape& s = data.shape;
  data.targets = s.is_layer() ? py::ssize_t(s.q) * s.p : 1;
  if (!loss) return out;
  if (s.n == 0) throw py::value_error("X: expected at least one sample, got none");
  read_targets(in, *loss, runs, out);
  if (!in[3].is_none()) read_weight(in[3], data, runs);
  for (std::ptrdiff_t r = 0; r < std::max<py::ssize_t>(runs, 1); ++r)
    if (!(at_run(data, r, 1).total_weight(0, *loss) > 0))
      throw py::value_error("lengths: expected a row with a positive weight within them, got none");
  return out;
}

template <class real>
ProblemOfRuns<real> read_problem(const py::tuple& samples, const py::tuple& parameters,
                                 py::ssize_t runs, bool causal, RowMap row_map,
                                 std::optional<Loss> loss) {
  if (samples.empty()) throw py::value_error("samples: expected X, query, y, weight and lengths");
  const auto model = read_model<real>(parameters, length_of(numbers_of(samples), "X", 0), runs);
  const auto data = read_data<real>(samples, model.shape, causal, row_map, runs, loss);
  return {model, data.data, data.classes};
}

template <class real>
OfRuns<const real*> read_tensors(const py::tuple& in, const char* argument, const Shape& s,
                                 int rank, py::ssize_t runs) {
  OfRuns<const real*> out;
  for (int name = 0; name < kTensors; ++name) {
    if (in[name].is_none()) continue;
    const auto array =
        read_runs<real>(in[name], argument, tensor_shape(TensorName(name), s, rank), runs);
    out.at[name] = array.at;
    out.run[name] = array.run;
  }
  return out;
}

#define MHFAST_INSTANTIATE(real)                                                                   \
  template OfRuns<const real*> read_tensors<real>(const py::tuple&, const char*, const Shape&,     \
                                                  int, py::ssize_t);                               \
  template DataOfRuns<real> read_data<real>(const py::tuple&, const Shape&, bool, RowMap,          \
                                            py::ssize_t, std::optional<Loss>);                     \
  template ProblemOfRuns<real> read_problem<real>(const py::tuple&, const py::tuple&, py::ssize_t, \
                                                  bool, RowMap, std::optional<Loss>);
MHFAST_INSTANTIATE(float)
MHFAST_INSTANTIATE(double)
#undef MHFAST_INSTANTIATE

}  // namespace mhfast
