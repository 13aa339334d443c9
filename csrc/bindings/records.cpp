#include "records.hpp"

namespace mhfast {
namespace {

/// Values in [0, count) of an int64 array, or an error.
void check_groups(const std::int64_t* groups, std::int64_t size, std::int64_t count,
                  const char* name) {
  for (std::int64_t i = 0; i < size; ++i)
    if (groups[i] < 0 || groups[i] >= count)
      throw py::value_error(std::string(name) + ": expected values from 0 to " +
                            std::to_string(count - 1) + ", got " + std::to_string(groups[i]));
}

/// What is recorded under a name.
void read_name(const std::string& name, Record& out) {
#define MHFAST_QUANTITY(enumerator, text, of) \
  if (name == text) {                         \
    out.quantity = Quantity::enumerator;      \
    return;                                   \
  }
#include "../lists/quantities.inc"
#undef MHFAST_QUANTITY
  for (int tensor = 0; tensor < kTensors; ++tensor) {
    const std::string parameter = kTensorNames[tensor];
    if (name != parameter && name != parameter + "_average") continue;
    out.quantity = name == parameter ? Quantity::kParameter : Quantity::kAverage;
    out.tensor = TensorName(tensor);
    return;
  }
  throw py::value_error("record: expected the name of a quantity or a parameter, got '" + name +
                        "'");
}

}  // namespace

template <class T>
void RecordReader::take_buffer(const RecordOfPython& in, const ArrayShape& row, Record& out) const {
  const ArrayShape of_run = row.with_leading(-1);
  out.buffer = write_array<T>(in.buffer, ("record " + in.name).c_str(),
                              runs_ > 0 ? of_run.with_leading(runs_) : of_run);
  const auto array = py::reinterpret_borrow<py::array>(in.buffer);
  out.capacity = array.shape(runs_ > 0 ? 1 : 0);
  out.row_size = 1;
  for (int axis = runs_ > 0 ? 2 : 1; axis < array.ndim(); ++axis) out.row_size *= array.shape(axis);
}

void RecordReader::take_groups(const RecordOfPython& in, Record& out) const {
  const auto array = py::reinterpret_borrow<py::array>(in.buffer);
  out.sample_group_count = int(array.shape(array.ndim() - 2));
  out.token_group_count = int(array.shape(array.ndim() - 1));
  const auto samples = read_runs<std::int64_t>(in.sample_groups, "sample_groups", {s_.n}, runs_);
  const auto tokens = read_runs<std::int64_t>(in.token_groups, "token_groups", {s_.n, s_.T}, runs_);
  out.sample_groups = samples.at;
  out.sample_run = samples.run;
  out.token_groups = tokens.at;
  out.token_run = tokens.run;
  const auto entries = [&](std::ptrdiff_t run, std::int64_t size) {
    return run > 0 ? runs_ * size : size;
  };
  check_groups(samples.at, entries(samples.run, s_.n), out.sample_group_count, "sample_groups");
  check_groups(tokens.at, entries(tokens.run, std::int64_t(s_.n) * s_.T), out.token_group_count,
               "token_groups");
}

template <class real>
Record RecordReader::read(const RecordOfPython& in) const {
  Record out{};
  read_name(in.name, out);
  out.set = in.dataset;
  out.every = in.every;
  if (out.every < 1) throw py::value_error("record: expected every >= 1");
  if (out.set < -1 || out.set >= int(tests_) ||
      (out.set >= 0 && is_of(out.quantity) != QuantityOf::kDataSet))
    throw py::value_error("record: no such data set for this quantity");
  switch (out.quantity) {
    case Quantity::kParameter:
      take_buffer<real>(in, tensor_shape(out.tensor, s_, rank_), out);
      break;
    case Quantity::kAverage:
      if (!averages_ || !averages_->mean.at[out.tensor])
        throw py::value_error("record: expected an average that is kept");
      take_buffer<double>(in, tensor_shape(out.tensor, s_, rank_), out);
      break;
    case Quantity::kAttention:
      take_buffer<real>(in, {s_.n, s_.H, s_.q, s_.T}, out);
      break;
    case Quantity::kAttentionMax:
      take_buffer<double>(in, {s_.H}, out);
      break;
    case Quantity::kCosine:
      take_buffer<double>(in, {py::ssize_t(directions_)}, out);
      break;
    case Quantity::kAttentionGroups:
      take_buffer<double>(in, {s_.H, -1, -1}, out);
      take_groups(in, out);
      break;
    case Quantity::kLoss:
    case Quantity::kAccuracy:
    case Quantity::kMargin:
    case Quantity::kGradNorm:
    case Quantity::kParamNorm:
    case Quantity::kDistance:
      take_buffer<double>(in, {}, out);
      break;
  }
  return out;
}

template Record RecordReader::read<float>(const RecordOfPython&) const;
template Record RecordReader::read<double>(const RecordOfPython&) const;

void register_records(py::module_& m) {
  py::class_<RecordOfPython>(m, "Record")
      .def(py::init<std::string, int, std::int64_t, py::object, py::object, py::object>(),
           py::kw_only(), py::arg("name"), py::arg("dataset"), py::arg("every"), py::arg("buffer"),
           py::arg("sample_groups") = py::none(), py::arg("token_groups") = py::none());
}

}  // namespace mhfast
