#include "../training/train.hpp"

#include <pybind11/stl.h>

#include <exception>
#include <functional>

#include "optimizers.hpp"
#include "own_loss.hpp"
#include "problem.hpp"
#include "records.hpp"
#include "register.hpp"

namespace mhfast {
namespace {

/// How training ended. An exception from the caller's functions is returned together with the state
/// reached, so that nothing is lost.
struct TrainingResult {
  std::int64_t reached;
  std::vector<StopReason> reasons;  // by run
  std::vector<std::int64_t> rows;   // written, by record
  py::object error;                 // None if there was none
};

/// The caller's Python code as hooks: errors are kept until the threads are done.
class PythonHooks {
 public:
  PythonHooks(const py::object& hook, const py::object& on_progress)
      : hook_(hook), on_progress_(on_progress) {}

  CallbackResult hook(std::int64_t step) {
    return guarded([&] { return hook_(step).cast<bool>(); });
  }

  /// Handles signals, so that Ctrl-C works while the loop runs.
  CallbackResult on_progress(std::int64_t step) {
    return guarded([&] {
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      if (!on_progress_.is_none()) on_progress_(step);
      return false;
    });
  }

  py::object error() const { return error_; }

  /// Calls `body` with the interpreter's lock; a true result ends training, an error aborts it.
  template <class Body>
  CallbackResult guarded(const Body& body) {
    const py::gil_scoped_acquire held;
    try {
      return body() ? CallbackResult::kStop : CallbackResult::kGoOn;
    } catch (py::error_already_set& error) {
      error_ = error.value();
      if (error.trace()) PyException_SetTraceback(error_.ptr(), error.trace().ptr());
    } catch (const py::builtin_exception& error) {  // of checks of values from Python
      error.set_error();
      error_ = py::error_already_set().value();
    } catch (const std::exception& error) {
      error_ = py::module_::import("builtins").attr("RuntimeError")(error.what());
    }
    return CallbackResult::kAbort;
  }

 private:
  const py::object hook_, on_progress_;
  py::object error_ = py::none();
};

Thresholds read_thresholds(const py::dict& in) {
  Thresholds out;
  std::size_t known = 0;
#define MHFAST_STOP(enumerator, name)
#define MHFAST_THRESHOLD(enumerator, name, comparison) \
  if (in.contains(#name)) {                            \
    out.name = in[#name].cast<double>();               \
    ++known;                                           \
  }
#include "../lists/stops.inc"
#undef MHFAST_STOP
#undef MHFAST_THRESHOLD
  if (in.size() != known)
    throw py::value_error("stop: expected thresholds by name, got " + std::string(py::repr(in)));
  return out;
}

/// The tensors that training writes, and what the optimizer keeps of each.
template <class real>
void read_trained(TrainingTask<real>& task, const ModelOfRuns<real>& model,
                  const py::tuple& parameters, const py::tuple& state, unsigned wrt,
                  py::ssize_t runs) {
  const Shape& s = task.data.shape;
  task.rank = model.rank;
  bool any = false;
  const int slots = task.optimizer.slots();
  for (int name = 0; name < kTensors; ++name) {
    const bool trained = wrt >> name & 1, exists = model.parameters.at[name];
    if (trained && !exists)
      throw py::value_error(std::string("wrt: expected tensors of the model, got ") +
                            kTensorNames[name]);
    task.wrt[name] = trained;
    any |= trained;
    const auto shape = tensor_shape(TensorName(name), s, model.rank);
    if (!trained) {  // only read
      task.model.at[name] = const_cast<real*>(model.parameters.at[name]);
      task.model.run[name] = model.parameters.run[name];
      continue;
    }
    const auto theta = write_runs<real>(parameters[name], kTensorNames[name], shape, runs);
    task.model.at[name] = theta.at;
    task.model.run[name] = theta.run;
    const auto kept = state[name].is_none() ? py::tuple() : state[name].cast<py::tuple>();
    if (int(kept.size()) != slots)
      throw py::value_error("state: expected " + std::to_string(slots) +
                            " arrays of each trained tensor, got " + std::to_string(kept.size()));
    OfRuns<real*>* const places[] = {&task.first, &task.second};
    for (int slot = 0; slot < slots; ++slot) {
      const auto array = write_runs<real>(kept[slot], "state", shape, runs);
      places[slot]->at[name] = array.at;
      places[slot]->run[name] = array.run;
    }
  }
  if (!any && task.last_step > task.first_step)
    throw py::value_error("wrt: expected at least one tensor, got none");
}

/// None, or (whether training starts from them, coefficients by run and sample, the optimizer's).
GivenCoefficients read_coefficients(const py::object& in, std::ptrdiff_t n, py::ssize_t runs,
                                    int slots) {
  GivenCoefficients out;
  if (in.is_none()) return out;
  const auto given = in.cast<py::tuple>();
  if (py::ssize_t(given.size()) != 2 + slots || slots > 1)
    throw py::value_error("coefficients: expected arrays as of the readout");
  const ArrayShape shape = runs > 0 ? ArrayShape{runs, py::ssize_t(n)} : ArrayShape{py::ssize_t(n)};
  out.taken = write_array<bool>(given[0], "coefficients", {1});
  out.theta = write_array<double>(given[1], "coefficients", shape);
  if (slots > 0) out.velocity = write_array<double>(given[2], "coefficients", shape);
  return out;
}

/// None, or (first step, iterates by run, means of tensors by name).
Averages read_averages(const py::object& in, const Shape& s, int rank, std::ptrdiff_t runs,
                       py::ssize_t run_axis) {
  Averages out;
  if (in.is_none()) return out;
  const auto given = in.cast<py::tuple>();
  out.first = given[0].cast<std::int64_t>();
  out.counts = write_array<std::int64_t>(given[1], "average", {runs});
  const auto means = given[2].cast<py::tuple>();
  for (int name = 0; name < kTensors; ++name) {
    if (means[name].is_none()) continue;
    const auto array = write_runs<double>(means[name], "average",
                                          tensor_shape(TensorName(name), s, rank), run_axis);
    out.mean.at[name] = array.at;
    out.mean.run[name] = array.run;
  }
  return out;
}

Batches checked_batches(const Batches& batches, std::ptrdiff_t n, std::ptrdiff_t runs) {
  if (batches.size == 0) return batches;
  const bool drawn_from_n = batches.fresh == 0;
  if (batches.size < 0 || (drawn_from_n && batches.size > n) || n > std::ptrdiff_t(UINT32_MAX))
    throw py::value_error("batch: expected 1 to n samples, n below 2^32");
  const std::size_t seeds = batches.seeds.size();
  if (seeds != 1 && seeds != std::size_t(runs))
    throw py::value_error("seed: expected one, or one for each run");
  return batches;
}

/// New samples that a Python function draws, (step) -> samples.
template <class real>
class PythonStream {
 public:
  PythonStream(const py::tuple& first, const py::object& draw, const Shape& model, bool causal,
               RowMap row_map, py::ssize_t runs, Loss loss)
      : draw_(draw), model_(model), causal_(causal), row_map_(row_map), runs_(runs), loss_(loss) {
    take(first);
  }

  const Data<real>& data() const { return samples_.data; }

  /// With the interpreter's lock.
  void next(std::int64_t step) {
    const Data<real> before = samples_.data;
    take(draw_(step).template cast<py::tuple>());
    const Data<real>& now = samples_.data;
    const Shape &s = now.shape, &t = before.shape;
    if (s.n != t.n || s.T != t.T || s.q != t.q || !now.lengths != !before.lengths ||
        !now.x != !before.x || now.run.x != before.run.x || now.run.y != before.run.y ||
        now.run.z != before.run.z || now.run.lengths != before.run.lengths)
      throw py::value_error("stream: expected samples of one shape");
  }

 private:
  void take(const py::tuple& samples) {
    samples_ = read_data<real>(samples, model_, causal_, row_map_, runs_, loss_);
    if (samples_.data.weight) throw py::value_error("stream: expected samples without weights");
    kept_ = samples;
  }

  const py::object draw_;
  const Shape model_;
  const bool causal_;
  const RowMap row_map_;
  const py::ssize_t runs_;
  const Loss loss_;
  py::tuple kept_;  // owns the numbers
  DataOfRuns<real> samples_;
};

std::vector<double> read_rows(const py::handle& object, const char* name, py::ssize_t least,
                              py::ssize_t columns) {
  const auto array = py::array_t<double, py::array::c_style>::ensure(object);
  if (!array || array.ndim() != 2 || array.shape(0) < least || array.shape(1) != columns)
    throw py::value_error(std::string("stream: expected rows of numbers as ") + name);
  return {array.data(), array.data() + array.size()};
}

/// (kind, settings ...), see csrc/training/population.hpp.
template <class real>
std::shared_ptr<Population<real>> read_population(const py::tuple& in, const Shape& s) {
  const auto kind = in[0].cast<std::string>();
  if (kind == "sphere_tokens") return sphere_tokens<real>();
  if (kind == "icl_regression" && s.d > 1)
    return icl_regression<real>(read_rows(in[1], "root", s.d - 1, s.d - 1), in[2].cast<double>());
  if (kind == "planted_attention") {
    const int heads = in[3].cast<int>();
    return planted_attention<real>(read_rows(in[1], "W", heads * s.d, s.d),
                                   read_rows(in[2], "U", heads * s.T, s.d), heads);
  }
  if (kind == "markov_chain") {
    MarkovChain chain{read_rows(in[1], "embedding", 1, s.d), {}, 0, in[3].cast<int>()};
    chain.words = int(chain.embedding.size() / s.d);
    std::ptrdiff_t rows = 1;
    for (int i = 0; i < chain.order; ++i) rows *= chain.words;
    chain.sums = read_rows(in[2], "sums", rows, chain.words - 1);
    return markov_chain<real>(std::move(chain));
  }
  if (kind != "tokenized_mixture") throw py::value_error("stream: expected a known population");
  Mixture mixture;
  mixture.table = read_rows(in[1], "table", 3, s.d);
  mixture.contexts = int(mixture.table.size() / s.d) - 2;
  mixture.relevant = in[2].cast<int>();
  mixture.noise = in[3].cast<double>();
  mixture.bounded = in[4].cast<bool>();
  mixture.random_positions = in[5].cast<bool>();
  return tokenized_mixture<real>(std::move(mixture));
}

/// None, or the token that is the query (-1: none is) and a population, or one for each run.
template <class real>
Populations<real> read_populations(const py::object& in, const Data<real>& data,
                                   std::ptrdiff_t runs) {
  Populations<real> out;
  if (in.is_none()) return out;
  const auto pair = in.cast<py::tuple>();
  out.token = pair[0].cast<std::int64_t>();
  for (const py::handle& one : pair[1])
    out.of_run.push_back(read_population<real>(one.cast<py::tuple>(), data.shape));
  const std::size_t count = out.of_run.size();
  const auto fits = [&](const auto& one) { return one->targets(data.shape) == data.targets; };
  if ((count != 1 && count != std::size_t(runs)) || out.token >= data.shape.T ||
      !std::all_of(out.of_run.begin(), out.of_run.end(), fits) || data.lengths ||
      (out.token >= 0 && (data.self || data.shape.q != 1)))
    throw py::value_error("stream: expected populations like the samples");
  return out;
}

/// None, or (function, index, processes, numbers of the head, samples of each shard): the function
/// takes a new array and a step, and returns the sums and whether some process asks for the end.
Processes read_processes(const py::object& in, PythonHooks& hooks, std::ptrdiff_t n) {
  Processes out;
  if (in.is_none()) return out;
  const auto given = in.cast<py::tuple>();
  const py::object add = given[0];
  out.index = given[1].cast<std::ptrdiff_t>();
  out.count = given[2].cast<std::ptrdiff_t>();
  out.head = given[3].cast<std::ptrdiff_t>();
  out.shards = given[4].cast<std::vector<std::ptrdiff_t>>();
  std::ptrdiff_t samples = 0;
  for (const std::ptrdiff_t count : out.shards) samples += count < 1 ? n : count;
  if (out.index < 0 || out.index >= out.count || out.head < 0 || samples != n)
    throw py::value_error("processes: expected shards of all samples");
  out.add = [add, &hooks](std::vector<double>& numbers, std::int64_t step) {
    return hooks.guarded([&] {
      const py::ssize_t size = py::ssize_t(numbers.size());
      const auto result = add(py::array_t<double>(size, numbers.data()), step).cast<py::tuple>();
      const auto sums = result[0].cast<py::array_t<double, py::array::c_style>>();
      if (sums.size() != size) throw py::value_error("processes: expected as many sums");
      std::copy_n(sums.data(), size, numbers.data());
      return result[1].cast<bool>();
    });
  };
  return out;
}

template <class real>
TrainingResult run_training(TrainingTask<real>& task, const py::object& hook,
                            const py::object& on_progress, PythonStream<real>* stream,
                            const py::object& processes) {
  PythonHooks hooks(hook, on_progress);
  task.processes = read_processes(processes, hooks, task.data.shape.n);
  if (stream) {
    task.fresh = stream->data();
    task.draw = [&, stream](std::int64_t step) {
      const auto draw = [&] {
        stream->next(step);
        return false;
      };
      return hooks.guarded(draw) == CallbackResult::kAbort ? nullptr : &stream->data();
    };
  }
  if (!hook.is_none()) task.hook = [&](std::int64_t step) { return hooks.hook(step); };
  task.on_progress = [&](std::int64_t step) { return hooks.on_progress(step); };
  TrainingEnd end;
  {
    const py::gil_scoped_release released;
    end = train(task);
  }
  TrainingResult result{end.reached, end.reasons, {}, hooks.error()};
  const auto* const own = dynamic_cast<const PythonLoss*>(task.loss.own);
  if (own && result.error.is_none()) result.error = own->error();
  for (const Record& record : task.records) {
    const bool written = end.last_row == LastRow::kAll ||
                         (end.last_row == LastRow::kDue && end.reached % record.every == 0);
    result.rows.push_back(
        std::min(record.capacity, record.row(task.first_step, end.reached) + (written ? 1 : 0)));
  }
  return result;
}

TrainingResult call_train(
    const py::tuple& samples, const py::tuple& parameters, py::ssize_t runs, double scale,
    bool causal, RowMap row_map, Loss loss, unsigned wrt, const py::tuple& starts,
    const OptimizerOfPython& optimizer, const py::tuple& state, std::int64_t batch, Order order,
    const std::vector<std::uint64_t>& seeds, std::int64_t fresh, const py::tuple& constraints,
    const py::object& stream, std::int64_t first, std::int64_t last,
    const std::vector<RecordOfPython>& records, const std::vector<py::tuple>& tests,
    const std::vector<py::tuple>& directions, const py::object& averages,
    const py::object& coefficients, const py::dict& thresholds, const py::object& stopped,
    const py::object& reasons, std::int64_t hook_every, const py::object& hook,
    const py::object& on_progress, const py::object& processes, int threads) {
  return with_type_of(numbers_of(samples), [&](auto zero) -> TrainingResult {
    using real = decltype(zero);
    if (first < 0 || last < first) throw py::value_error("steps: expected 0 <= first <= last");
    if (hook_every < 1) throw py::value_error("hook_every: expected at least 1");
    TrainingTask<real> task{};
    task.runs = std::max<py::ssize_t>(runs, 1);
    task.loss = loss;
    const auto problem = read_problem<real>(samples, parameters, runs, causal, row_map, loss);
    task.data = problem.data;
    const ModelOfRuns<real>& model = problem.model;
    const Shape& s = task.data.shape;
    std::vector<DataOfRuns<real>> sets;  // keeps classes alive
    for (const py::tuple& test : tests) {
      sets.push_back(read_data<real>(test, model.shape, causal, row_map, runs, loss));
      task.tests.push_back(sets.back().data);
    }
    task.optimizer = optimizer.checked(last, runs, wrt);
    task.first_step = first;
    task.last_step = last;
    read_trained(task, model, parameters, state, wrt, runs);
    if (constraints.size() != kTensors)
      throw py::value_error("constraints: expected an entry for each parameter");
    for (int name = 0; name < kTensors; ++name)
      task.constraints[name] =
          read_constraint(constraints[name], extent(TensorName(name), s, model.rank).all());
    task.starts = read_tensors<real>(starts, "starts", s, model.rank, runs);
    for (const py::tuple& direction : directions)
      task.directions.push_back(read_tensors<real>(direction, "directions", s, model.rank, runs));
    task.scale = real(scale);
    task.batches = checked_batches({batch, fresh, order, seeds}, s.n, task.runs);
    std::optional<PythonStream<real>> drawn;
    if (fresh > 0) {
      const auto pair =
          stream.cast<py::tuple>();  // the samples of the first step, a function, populations
      drawn.emplace(pair[0].cast<py::tuple>(), pair[1], model.shape, causal, row_map, runs, loss);
      task.populations = read_populations<real>(pair[2], drawn->data(), task.runs);
      if (drawn->data().shape.n != batch) throw py::value_error("stream: expected batch samples");
    }
    task.averages = read_averages(averages, s, model.rank, task.runs, runs);
    task.coefficients = read_coefficients(coefficients, s.n, runs, task.optimizer.slots());
    const RecordReader reader(s, model.rank, runs, task.tests.size(), task.directions.size(),
                              task.averages.counts ? &task.averages : nullptr);
    for (const RecordOfPython& record : records) task.records.push_back(reader.read<real>(record));
    task.thresholds = read_thresholds(thresholds);
    task.stopped = write_array<std::int64_t>(stopped, "stopped", {task.runs});
    static_assert(sizeof(StopReason) == sizeof(std::int64_t));
    task.reasons =
        reinterpret_cast<StopReason*>(write_array<std::int64_t>(reasons, "reasons", {task.runs}));
    task.hook_every = hook_every;
    task.threads = threads;
    return run_training(task, hook, on_progress, drawn ? &*drawn : nullptr, processes);
  });
}

}  // namespace

void register_training(py::module_& m) {
  register_optimizers(m);
  register_records(m);
  register_enum<Order>(m, "Order", {{"shuffle", Order::kShuffle}, {"replace", Order::kReplace}});
  py::class_<TrainingResult>(m, "TrainingResult")
      .def_readonly("reached", &TrainingResult::reached)
      .def_readonly("reasons", &TrainingResult::reasons)
      .def_readonly("rows", &TrainingResult::rows)
      .def_readonly("error", &TrainingResult::error);
  m.def("train", call_train, py::kw_only(), py::arg("samples"), py::arg("parameters"),
        py::arg("runs"), py::arg("scale"), py::arg("causal"), py::arg("row_map"), py::arg("loss"),
        py::arg("wrt"), py::arg("starts"), py::arg("optimizer"), py::arg("state"), py::arg("batch"),
        py::arg("order"), py::arg("seeds"), py::arg("fresh"), py::arg("constraints"),
        py::arg("stream"), py::arg("first"), py::arg("last"), py::arg("records"), py::arg("tests"),
        py::arg("directions"), py::arg("averages"), py::arg("coefficients"), py::arg("thresholds"),
        py::arg("stopped"), py::arg("reasons"), py::arg("hook_every"), py::arg("hook"),
        py::arg("on_progress"), py::arg("processes"), py::arg("threads"));
}

}  // namespace mhfast
