#include "../ops/train.hpp"

#include <pybind11/stl.h>

#include <exception>
#include <map>

#include "arrays.hpp"
#include "register.hpp"

namespace mhfast {
namespace {

/// The caller's Python code as hooks: errors are kept and thrown once the threads are done.
class PythonHooks {
 public:
  PythonHooks(const py::object& hook, const py::object& tick) : hook_(hook), tick_(tick) {}

  HookAnswer hook(std::int64_t step) {
    return guarded([&] { return hook_(step).cast<bool>(); });
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
  std::exception_ptr error_;
};

Optimizer read_optimizer(const py::dict& in, std::int64_t last) {
  Optimizer out;
  const std::string name = in["name"].cast<std::string>(), by = in["by"].cast<std::string>();
  if (name != "gradient_descent" && name != "normalized_gradient_descent")
    throw py::value_error(
        "optimizer: expected gradient_descent or normalized_gradient_descent, "
        "got '" +
        name + "'");
  out.normalized = name == "normalized_gradient_descent";
  out.lr = in["lr"].cast<double>();
  out.eps = in["eps"].cast<double>();
  out.l2 = in["l2"].cast<double>();
  out.clip = in["clip"].cast<double>();
  if (by == "tensor")
    out.by = Scope::kTensor;
  else if (by == "head")
    out.by = Scope::kHead;
  else if (by == "all")
    out.by = Scope::kAll;
  else
    throw py::value_error("by: expected tensor, head or all, got '" + by + "'");
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

Quantity read_quantity(const std::string& name) {
  static const std::map<std::string, Quantity> names = {
      {"loss", Quantity::kLoss},
      {"accuracy", Quantity::kAccuracy},
      {"margin", Quantity::kMargin},
      {"grad_norm", Quantity::kGradNorm},
      {"param_norm", Quantity::kParamNorm},
      {"distance", Quantity::kDistance},
      {"cosine", Quantity::kCosine},
      {"W", Quantity::kW},
      {"U", Quantity::kU},
      {"attention", Quantity::kAttention},
      {"attention_max", Quantity::kAttentionMax},
      {"attention_groups", Quantity::kAttentionGroups}};
  const auto found = names.find(name);
  if (found == names.end()) throw py::value_error("record: unknown quantity '" + name + "'");
  return found->second;
}

/// Values in [0, count) of an int64 array, or an error.
void check_groups(const std::int64_t* groups, std::int64_t size, std::int64_t count,
                  const char* name) {
  for (std::int64_t i = 0; i < size; ++i)
    if (groups[i] < 0 || groups[i] >= count)
      throw py::value_error(std::string(name) + ": expected values from 0 to " +
                            std::to_string(count - 1) + ", got " + std::to_string(groups[i]));
}

/// (name, set, every, buffer) or, for attention_groups, (..., sample_groups, token_groups).
template <class real>
Record read_record(const py::tuple& in, const Shape& s, std::size_t tests, std::size_t directions) {
  Record out{};
  out.quantity = read_quantity(in[0].cast<std::string>());
  out.set = in[1].cast<int>();
  out.every = in[2].cast<std::int64_t>();
  if (out.every < 1) throw py::value_error("record: expected every >= 1");
  const bool of_a_set = out.quantity == Quantity::kLoss || out.quantity == Quantity::kAccuracy ||
                        out.quantity == Quantity::kMargin;
  if (out.set < -1 || out.set >= int(tests) || (out.set >= 0 && !of_a_set))
    throw py::value_error("record: no such data set for this quantity");
  const py::object buffer = in[3];
  const auto room = py::reinterpret_borrow<py::array>(buffer);
  out.rows = room.ndim() ? room.shape(0) : 0;
  switch (out.quantity) {
    case Quantity::kW:
      out.buffer = write_array<real>(buffer, "record W", {-1, s.H, s.d, s.d});
      break;
    case Quantity::kU:
      out.buffer = write_array<real>(buffer, "record U", {-1, s.H, s.q, s.d});
      break;
    case Quantity::kAttention:
      out.buffer = write_array<real>(buffer, "record attention", {-1, s.n, s.H, s.q, s.T});
      break;
    case Quantity::kAttentionMax:
      out.buffer = write_array<double>(buffer, "record attention_max", {-1, s.H});
      break;
    case Quantity::kCosine:
      out.buffer = write_array<double>(buffer, "record cosine", {-1, py::ssize_t(directions)});
      break;
    case Quantity::kAttentionGroups: {
      out.buffer = write_array<double>(buffer, "record attention_groups", {-1, s.H, -1, -1});
      out.sample_group_count = int(room.shape(2));
      out.token_group_count = int(room.shape(3));
      out.sample_groups = read_array<std::int64_t>(in[4], "sample_groups", {s.n});
      out.token_groups = read_array<std::int64_t>(in[5], "token_groups", {s.n, s.T});
      check_groups(out.sample_groups, s.n, out.sample_group_count, "sample_groups");
      check_groups(out.token_groups, s.n * s.T, out.token_group_count, "token_groups");
      break;
    }
    default:
      out.buffer = write_array<double>(buffer, "record", {-1});
  }
  return out;
}

Thresholds read_thresholds(const py::dict& in) {
  Thresholds out;
  for (const auto& [key, value] : in) {
    const std::string name = key.cast<std::string>();
    const double limit = value.cast<double>();
    if (name == "loss")
      out.loss = limit;
    else if (name == "grad_norm")
      out.grad_norm = limit;
    else if (name == "accuracy")
      out.accuracy = limit;
    else if (name == "margin")
      out.margin = limit;
    else
      throw py::value_error("stop: expected loss, grad_norm, accuracy or margin, got '" + name +
                            "'");
  }
  return out;
}

template <class real>
py::tuple run_training(TrainingTask<real>& task, const py::object& hook, const py::object& tick,
                       py::dict& optimizer) {
  PythonHooks hooks(hook, tick);
  if (!hook.is_none()) task.hook = [&](std::int64_t step) { return hooks.hook(step); };
  task.tick = [&](std::int64_t step) { return hooks.tick(step); };
  TrainingEnd end;
  {
    const py::gil_scoped_release released;
    end = train(task);
  }
  std::vector<std::int64_t> rows;
  for (const Record& record : task.records) rows.push_back(record.row);
  optimizer["reached"] = end.reached;
  optimizer["rows"] = rows;
  hooks.rethrow();
  return py::make_tuple(end.reached, end.reason);
}

py::tuple call_train(const py::object& X, const py::object& Z, const py::object& y,
                     const py::object& weight, const py::object& W, const py::object& U,
                     const py::object& W0, const py::object& U0, double scale,
                     const std::string& loss, bool wrt_W, bool wrt_U, py::dict optimizer,
                     std::int64_t first, std::int64_t last, const py::list& records,
                     const py::list& tests, const py::list& directions, const py::dict& thresholds,
                     std::int64_t hook_every, const py::object& hook, const py::object& tick,
                     int threads) {
  return with_type_of(X, [&](auto zero) -> py::tuple {
    using real = decltype(zero);
    if (!py::isinstance<py::array>(W) || py::reinterpret_borrow<py::array>(W).ndim() != 3)
      throw py::value_error("W: expected an array of shape (H, d, d)");
    const py::ssize_t H = py::reinterpret_borrow<py::array>(W).shape(0);
    TrainingTask<real> task{};
    task.data = read_data<real>(X, Z, y, weight, H);
    const Shape& s = task.data.shape;
    if (s.n == 0) throw py::value_error("X: expected at least one sample, got none");
    if (first < 0 || last < first) throw py::value_error("steps: expected 0 <= first <= last");
    if (!wrt_W && !wrt_U) throw py::value_error("wrt: expected W, U or both, got neither");
    if (hook_every < 1) throw py::value_error("hook_every: expected at least 1");
    task.loss = read_loss(loss);
    check_labels(task.data, task.loss);
    for (const auto& item : tests) {
      const auto test = item.cast<py::tuple>();
      task.tests.push_back(read_data<real>(test[0], test[1], test[2], test[3], H));
      const Shape& t = task.tests.back().shape;
      if (t.d != s.d || t.q != s.q || t.n == 0)
        throw py::value_error("test: expected samples with q = " + std::to_string(s.q) +
                              " and d = " + std::to_string(s.d) +
                              ", got n = " + std::to_string(t.n) + ", q = " + std::to_string(t.q) +
                              ", d = " + std::to_string(t.d));
      check_labels(task.tests.back(), task.loss);
    }
    task.W = write_array<real>(W, "W", {H, s.d, s.d});
    task.U = write_array<real>(U, "U", {H, s.q, s.d});
    task.W0 = read_array<real>(W0, "W0", {H, s.d, s.d});
    task.U0 = read_array<real>(U0, "U0", {H, s.q, s.d});
    for (const auto& item : directions) {
      const auto pair = item.cast<py::tuple>();
      const py::object dW = pair[0], dU = pair[1];
      task.directions.push_back(
          {dW.is_none() ? nullptr : read_array<real>(dW, "directions", {H, s.d, s.d}),
           dU.is_none() ? nullptr : read_array<real>(dU, "directions", {H, s.q, s.d})});
    }
    task.scale = real(scale);
    task.wrt_W = wrt_W;
    task.wrt_U = wrt_U;
    task.optimizer = read_optimizer(optimizer, last);
    task.first = first;
    task.last = last;
    for (const auto& item : records)
      task.records.push_back(
          read_record<real>(item.cast<py::tuple>(), s, task.tests.size(), task.directions.size()));
    task.thresholds = read_thresholds(thresholds);
    task.hook_every = hook_every;
    task.threads = threads;
    return run_training(task, hook, tick, optimizer);
  });
}

}  // namespace

void register_training(py::module_& m) { m.def("train", call_train); }

}  // namespace mhfast
