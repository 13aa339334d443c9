#include "../problem/distinct.hpp"

#include <pybind11/stl.h>

#include <limits>

#include "../problem/padding.hpp"
#include "arrays.hpp"
#include "register.hpp"

namespace mhfast {
namespace {

/// (numbers, first), or None. Arrays may be of any type; their first axes have the same length.
py::object distinct_rows(const std::vector<py::array>& arrays, py::ssize_t most,
                         py::ssize_t probe) {
  if (arrays.empty() || arrays.front().ndim() == 0)
    throw py::value_error("arrays: expected at least one, with an axis");
  const py::ssize_t count = arrays.front().shape(0);
  if (count > std::numeric_limits<std::int32_t>::max()) return py::none();
  std::vector<ByteRows> parts;
  for (const py::array& array : arrays) {
    if (array.ndim() == 0 || array.shape(0) != count || !(array.flags() & py::array::c_style))
      throw py::value_error("arrays: expected C-contiguous ones of " + std::to_string(count) +
                            " rows, got " + shape_text(ArrayShape(array)));
    parts.push_back(
        {static_cast<const unsigned char*>(array.data()), count ? array.nbytes() / count : 0});
  }
  py::array_t<std::int32_t> numbers(count);
  std::int32_t* to = numbers.mutable_data();
  std::vector<std::int64_t> first;
  bool found = false;
  {
    const py::gil_scoped_release released;
    found = number_rows(parts, count, most, probe, to, first);
  }
  if (!found) return py::none();
  return py::make_tuple(numbers,
                        py::array_t<std::int64_t>(py::ssize_t(first.size()), first.data()));
}

/// Whether integers (n,) are in least ... most.
bool all_in_range(const py::array& x, std::int64_t least, std::int64_t most) {
  return all_within(read_array<std::int64_t>(x, "x", {-1}), x.shape(0), least, most);
}

/// Tokens (..., T, d) of any type with zeros beyond lengths (...), or None if they have them.
py::object with_padding(const py::array& tokens, const py::array_t<std::int64_t>& lengths) {
  const int lead = int(tokens.ndim()) - 2;
  if (lead < 0 || lengths.ndim() != lead ||
      !std::equal(lengths.shape(), lengths.shape() + lead, tokens.shape()) ||
      !(tokens.flags() & lengths.flags() & py::array::c_style))
    throw py::value_error("X: expected C-contiguous tokens of " + shape_text(ArrayShape(lengths)) +
                          " samples, got " + shape_text(ArrayShape(tokens)));
  const py::ssize_t T = tokens.shape(lead), row = tokens.itemsize() * tokens.shape(lead + 1);
  const std::int64_t* of_samples = lengths.data();
  if (!all_within(of_samples, lengths.size(), 0, T))
    throw py::value_error("lengths: expected integers in [0, " + std::to_string(T) + "]");
  const PaddedTokens given{static_cast<const unsigned char*>(tokens.data()), lengths.size(), T, row,
                           of_samples};
  if (given.are_zero()) return py::none();
  py::array padded(tokens.dtype(),
                   std::vector<py::ssize_t>(tokens.shape(), tokens.shape() + tokens.ndim()));
  given.copy(static_cast<unsigned char*>(padded.mutable_data()));
  return padded;
}

}  // namespace

void register_rows(py::module_& m) {
  m.def("distinct_rows", distinct_rows, py::arg("arrays"), py::kw_only(), py::arg("most"),
        py::arg("probe"));
  m.def("all_within", all_in_range, py::arg("x"), py::arg("least"), py::arg("most"));
  m.def("with_padding", with_padding, py::arg("tokens"), py::arg("lengths"));
}

}  // namespace mhfast
