#include "../ops/train.hpp"

#include <pybind11/stl.h>

#include <exception>
#include <functional>
#include <map>

#include "problem.hpp"
#include "register.hpp"

namespace mhfast {
namespace {

/// The caller's Python code as hooks: errors are kept and thrown once the threads are done.
class PythonHooks {
 public:
  /// `before_hook` is called first, so that the caller finds its arrays and lists up to date.
  PythonHooks(const py::object& hook, const py::object& tick, std::function<void()> before_hook)
      : hook_(hook), tick_(tick), before_hook_(std::move(before_hook)) {}

  HookAnswer hook(std::int64_t step) {
    return guarded([&] {
      before_hook_();
      return hook_(step).cast<bool>();
    });
  }

  /// Lets signals in, so that Ctrl-C works while the loop runs.
  HookAnswer tick(std::int64_t step) {
    return guarded([&] {
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      if (!tick_.is_none()) tick_(step);
      return false;
    });
  }

  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  template <class Body>
  HookAnswer guarded(const Body& body) {
    const py::gil_scoped_acquire held;
    try {
      return body() ? HookAnswer::kStop : HookAnswer::kGoOn;
    } catch (...) {
      error_ = std::current_exception();
      return HookAnswer::kAbort;
    }
  }

  const py::object hook_, tick_;
  const std::function<void()> before_hook_;
  std::exception_ptr error_;
};

/// The value of a name, or an error that lists the names.
template <class Value>
Value read_name(const std::map<std::string, Value>& names, const std::string& name,
                const char* argument) {
  const auto found = names.find(name);
  if (found != names.end()) return found->second;
  std::string list;
  for (const auto& [known, value] : names) list += (list.empty() ? "" : ", ") + known;
  throw py::value_error(std::string(argument) + ": expected one of " + list + ", got '" + name +
                        "'");
}

Scope read_scope(const py::handle& name, const char* argument) {
  return read_name<Scope>(
      {{"tensor", Scope::kTensor}, {"head", Scope::kHead}, {"all", Scope::kAll}},
      name.cast<std::string>(), argument);
}

Optimizer read_optimizer(const py::dict& in, std::int64_t last, py::ssize_t runs) {
  static const std::map<std::string, Method> methods = {
      {"gradient_descent", Method::kGradientDescent},
      {"normalized_gradient_descent", Method::kNormalized},
      {"polyak_step", Method::kPolyak},
      {"momentum", Method::kMomentum},
      {"adam", Method::kAdam},
      {"mirror_descent", Method::kMirror}};
  const auto number = [&](const char* key) { return in[key].cast<double>(); };
  Optimizer out;
  out.method = read_name(methods, in["name"].cast<std::string>(), "optimizer");
  out.lr = read_array<double>(in["lr"], "lr", {std::max<py::ssize_t>(runs, 1)});
  out.l2 = number("l2");
  out.clip = number("clip");
  out.eps = number("eps");
  out.by = read_scope(in["by"], "by");
  out.beta1 = out.method == Method::kMomentum ? number("beta") : number("beta1");
  out.beta2 = number("beta2");
  out.nesterov = in["nesterov"].cast<bool>();
  out.weight_decay = number("weight_decay");
  out.since = read_array<std::int64_t>(in["since"], "since", {std::max<py::ssize_t>(runs, 1)});
  out.target = number("target");
  out.factor = number("factor");
  out.max_lr = number("max_lr");
  out.power = number("p");
  out.normalized = in["normalized"].cast<bool>();
  if (out.method == Method::kMirror && !(out.power > 1))
    throw py::value_error("p: expected a number above 1");
  const py::object project = in["project"];
  if (!project.is_none()) {
    out.project =
        read_name<Projection>({{"ball", Projection::kBall}, {"sphere", Projection::kSphere}},
                              project.cast<std::string>(), "project");
    out.radius = number("radius");
    out.project_by = read_scope(in["project_by"], "project_by");
  }
  const py::object schedule = in["schedule"];
  if (!schedule.is_none()) {
    out.schedule = read_array<double>(schedule, "schedule", {-1});
    const auto length = py::reinterpret_borrow<py::array>(schedule).shape(0);
    if (length < last)
      throw py::value_error("schedule: expected at least " + std::to_string(last) +
                            " entries, one for each step, got " + std::to_string(length));
  }
  return out;
}

/// Values in [0, count) of an int64 array, or an error.
void check_groups(const std::int64_t* groups, std::int64_t size, std::int64_t count,
                  const char* name) {
  for (std::int64_t i = 0; i < size; ++i)
    if (groups[i] < 0 || groups[i] >= count)
      throw py::value_error(std::string(name) + ": expected values from 0 to " +
                            std::to_string(count - 1) + ", got " + std::to_string(groups[i]));
}

/// What a record's buffer holds a row of, and the groups that it is by.
class RecordReader {
 public:
  RecordReader(const Shape& s, int rank, py::ssize_t runs, std::size_t tests,
               std::size_t directions)
      : s_(s), rank_(rank), runs_(runs), tests_(tests), directions_(directions) {}

  /// (name, set, every, buffer) or, for attention_groups, (..., sample_groups, token_groups).
  template <class real>
  Record read(const py::tuple& in) const {
    static const std::map<std::string, Quantity> quantities = {
        {"loss", Quantity::kLoss},
        {"accuracy", Quantity::kAccuracy},
        {"margin", Quantity::kMargin},
        {"grad_norm", Quantity::kGradNorm},
        {"param_norm", Quantity::kParamNorm},
        {"distance", Quantity::kDistance},
        {"cosine", Quantity::kCosine},
        {"attention", Quantity::kAttention},
        {"attention_max", Quantity::kAttentionMax},
        {"attention_groups", Quantity::kAttentionGroups}};
    const std::string name = in[0].cast<std::string>();
    Record out{};
    out.set = in[1].cast<int>();
    out.every = in[2].cast<std::int64_t>();
    if (out.every < 1) throw py::value_error("record: expected every >= 1");
    const auto* tensor = std::find(std::begin(kTensorNames), std::end(kTensorNames), name);
    if (tensor != std::end(kTensorNames)) {
      out.quantity = Quantity::kParameter;
      out.tensor = TensorName(tensor - kTensorNames);
    } else {
      out.quantity = read_name(quantities, name, "record");
    }
    const bool of_a_set = out.quantity == Quantity::kLoss || out.quantity == Quantity::kAccuracy ||
                          out.quantity == Quantity::kMargin;
    if (out.set < -1 || out.set >= int(tests_) || (out.set >= 0 && !of_a_set))
      throw py::value_error("record: no such data set for this quantity");
    const std::string label = "record " + name;
    const py::object buffer = in[3];
    const auto room = [&](std::vector<py::ssize_t> shape, auto zero) {
      using T = decltype(zero);
      shape.insert(shape.begin(), -1);
      if (runs_ > 0) shape.insert(shape.begin(), runs_);
      out.buffer = write_array<T>(buffer, label.c_str(), shape);
      const auto array = py::reinterpret_borrow<py::array>(buffer);
      out.capacity = array.shape(runs_ > 0 ? 1 : 0);
      out.row_size = 1;
      for (int axis = runs_ > 0 ? 2 : 1; axis < array.ndim(); ++axis)
        out.row_size *= array.shape(axis);
    };
    switch (out.quantity) {
      case Quantity::kParameter:
        room(tensor_shape(out.tensor, s_, rank_), real{});
        break;
      case Quantity::kAttention:
        room({s_.n, s_.H, s_.q, s_.T}, real{});
        break;
      case Quantity::kAttentionMax:
        room({s_.H}, double{});
        break;
      case Quantity::kCosine:
        room({py::ssize_t(directions_)}, double{});
        break;
      case Quantity::kAttentionGroups: {
        room({s_.H, -1, -1}, double{});
        const auto array = py::reinterpret_borrow<py::array>(buffer);
        out.sample_group_count = int(array.shape(array.ndim() - 2));
        out.token_group_count = int(array.shape(array.ndim() - 1));
        const auto samples = read_runs<std::int64_t>(in[4], "sample_groups", {s_.n}, runs_);
        const auto tokens = read_runs<std::int64_t>(in[5], "token_groups", {s_.n, s_.T}, runs_);
        out.sample_groups = samples.at;
        out.sample_run = samples.run;
        out.token_groups = tokens.at;
        out.token_run = tokens.run;
        const auto entries = [&](std::ptrdiff_t run, std::int64_t size) {
          return run > 0 ? runs_ * size : size;
        };
        check_groups(samples.at, entries(samples.run, s_.n), out.sample_group_count,
                     "sample_groups");
        check_groups(tokens.at, entries(tokens.run, std::int64_t(s_.n) * s_.T),
                     out.token_group_count, "token_groups");
        break;
      }
      default:
        room({}, double{});
    }
    return out;
  }

 private:
  const Shape& s_;
  const int rank_;
  const py::ssize_t runs_;
  const std::size_t tests_, directions_;
};

Thresholds read_thresholds(const py::dict& in) {
  Thresholds out;
  const std::map<std::string, double Thresholds::*> names = {{"loss", &Thresholds::loss},
                                                             {"grad_norm", &Thresholds::grad_norm},
                                                             {"accuracy", &Thresholds::accuracy},
                                                             {"margin", &Thresholds::margin}};
  for (const auto& [key, value] : in)
    out.*read_name(names, key.cast<std::string>(), "stop") = value.cast<double>();
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
    if (state[name].is_none()) continue;
    const auto slots = py::reinterpret_borrow<py::tuple>(py::object(state[name]));
    const auto read_slot = [&](const py::handle& slot, OfRuns<real*>& to) {
      if (slot.is_none()) return;
      const auto array = write_runs<real>(slot, "state", shape, runs);
      to.at[name] = array.at;
      to.run[name] = array.run;
    };
    read_slot(slots[0], task.first);
    read_slot(slots[1], task.second);
  }
  if (!any) throw py::value_error("wrt: expected at least one tensor, got none");
  const bool one = task.optimizer.method == Method::kMomentum,
             two = task.optimizer.method == Method::kAdam;
  for (int name = 0; name < kTensors; ++name)
    if (task.wrt[name] &&
        (((one || two) && !task.first.at[name]) || (two && !task.second.at[name])))
      throw py::value_error("state: expected what the optimizer keeps for each trained tensor");
}

template <class real>
py::tuple run_training(TrainingTask<real>& task, const py::object& hook, const py::object& tick,
                       py::dict& optimizer) {
  const auto reasons = optimizer["reasons"].cast<py::list>();
  const auto tell_reasons = [&] {
    for (std::size_t r = 0; r < task.reasons.size(); ++r)
      if (!task.reasons[r].empty()) reasons[r] = task.reasons[r];
  };
  PythonHooks hooks(hook, tick, tell_reasons);
  if (!hook.is_none()) task.hook = [&](std::int64_t step) { return hooks.hook(step); };
  task.tick = [&](std::int64_t step) { return hooks.tick(step); };
  TrainingEnd end;
  {
    const py::gil_scoped_release released;
    end = train(task);
  }
  std::vector<std::int64_t> rows;
  for (const Record& record : task.records) {
    const bool written = end.last_row == LastRow::kAll ||
                         (end.last_row == LastRow::kDue && end.reached % record.every == 0);
    rows.push_back(
        std::min(record.capacity, record.row(task.first_step, end.reached) + (written ? 1 : 0)));
  }
  optimizer["reached"] = end.reached;
  optimizer["rows"] = rows;
  tell_reasons();
  hooks.rethrow();
  return py::make_tuple(end.reached, end.reasons);
}

py::tuple call_train(const py::tuple& in, const py::tuple& parameters, const py::tuple& starts,
                     py::ssize_t runs, double scale, bool causal, const std::string& loss_name,
                     unsigned wrt, py::dict optimizer, const py::tuple& state, std::int64_t first,
                     std::int64_t last, const py::list& records, const py::list& tests,
                     const py::list& directions, const py::dict& thresholds,
                     const py::object& stopped, std::int64_t hook_every, const py::object& hook,
                     const py::object& tick, int threads) {
  return with_type_of(in[0], [&](auto zero) -> py::tuple {
    using real = decltype(zero);
    if (first < 0 || last < first) throw py::value_error("steps: expected 0 <= first <= last");
    if (hook_every < 1) throw py::value_error("hook_every: expected at least 1");
    TrainingTask<real> task{};
    task.runs = std::max<py::ssize_t>(runs, 1);
    task.loss = read_loss(loss_name);
    const auto model = read_model<real>(parameters, features_of(in), runs);
    const auto data = read_data<real>(in, model.shape, task.loss, causal, runs, true);
    task.data = data.data;
    const Shape& s = task.data.shape;
    std::vector<DataOfRuns<real>> sets;  // keeps classes alive
    for (const auto& item : tests) {
      sets.push_back(
          read_data<real>(item.cast<py::tuple>(), model.shape, task.loss, causal, runs, true));
      task.tests.push_back(sets.back().data);
    }
    task.optimizer = read_optimizer(optimizer, last, runs);
    read_trained(task, model, parameters, state, wrt, runs);
    task.starts = read_tensors<real>(starts, "starts", s, model.rank, runs);
    for (const auto& item : directions)
      task.directions.push_back(
          read_tensors<real>(item.cast<py::tuple>(), "directions", s, model.rank, runs));
    task.scale = real(scale);
    task.first_step = first;
    task.last_step = last;
    const RecordReader reader(s, model.rank, runs, task.tests.size(), task.directions.size());
    for (const auto& item : records)
      task.records.push_back(reader.read<real>(item.cast<py::tuple>()));
    task.thresholds = read_thresholds(thresholds);
    task.stopped = write_array<std::int64_t>(stopped, "stopped", {task.runs});
    task.reasons.resize(task.runs);
    task.hook_every = hook_every;
    task.threads = threads;
    return run_training(task, hook, tick, optimizer);
  });
}

}  // namespace

void register_training(py::module_& m) { m.def("train", call_train); }

}  // namespace mhfast
