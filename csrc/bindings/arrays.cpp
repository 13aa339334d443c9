#include "arrays.hpp"

#include <cmath>

namespace mhfast {

std::string shape_text(const std::vector<py::ssize_t>& shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i)
    text += (i ? ", " : "") + (shape[i] < 0 ? std::string("any") : std::to_string(shape[i]));
  return text + (shape.size() == 1 ? ",)" : ")");
}

namespace {

template <class real>
py::array checked_array(const py::handle& object, const char* name,
                        const std::vector<py::ssize_t>& shape) {
  if (!py::isinstance<py::array_t<real>>(object))
    throw py::type_error(std::string(name) + ": expected an array of " +
                         std::string(py::str(py::dtype::of<real>())) + ", got " +
                         std::string(py::str(py::type::handle_of(object))));
  py::array array = py::reinterpret_borrow<py::array>(object);
  bool fits = array.ndim() == py::ssize_t(shape.size());
  for (std::size_t i = 0; fits && i < shape.size(); ++i)
    fits = shape[i] < 0 || array.shape(i) == shape[i];
  if (!fits)
    throw py::value_error(std::string(name) + ": expected shape " + shape_text(shape) + ", got " +
                          shape_text({array.shape(), array.shape() + array.ndim()}));
  constexpr int kLayout = py::array::c_style | py::detail::npy_api::NPY_ARRAY_ALIGNED_;
  if ((array.flags() & kLayout) != kLayout)
    throw py::value_error(std::string(name) + ": expected a C-contiguous, aligned array");
  return array;
}

}  // namespace

template <class real>
const real* read_array(const py::handle& object, const char* name,
                       const std::vector<py::ssize_t>& shape) {
  return static_cast<const real*>(checked_array<real>(object, name, shape).data());
}

template <class real>
real* write_array(const py::handle& object, const char* name,
                  const std::vector<py::ssize_t>& shape) {
  return static_cast<real*>(checked_array<real>(object, name, shape).mutable_data());
}

template <class real>
Data<real> read_data(const py::handle& X, const py::handle& Z, const py::handle& y,
                     const py::handle& weight, py::ssize_t heads) {
  Data<real> data{};
  data.x = read_array<real>(X, "X", {-1, -1, -1});
  const auto shape = py::reinterpret_borrow<py::array>(X);
  const py::ssize_t n = shape.shape(0), T = shape.shape(1), d = shape.shape(2);
  constexpr py::ssize_t kMost = 1 << 30;  // axes other than samples are counted in int
  if (T < 1 || d < 1 || heads < 1 || T > kMost || d > kMost || heads > kMost)
    throw py::value_error("X: expected at least one token, one feature and one head, got shape " +
                          shape_text({n, T, d}) + " and H = " + std::to_string(heads));
  py::ssize_t q = T;
  data.self = Z.is_none();
  data.z = data.x;
  if (!data.self) {
    data.z = read_array<real>(Z, "query", {n, -1, d});
    q = py::reinterpret_borrow<py::array>(Z).shape(1);
    if (q < 1 || q > kMost) throw py::value_error("query: expected at least one row, got none");
  }
  data.shape = {n, int(T), int(q), int(d), int(heads)};
  if (!y.is_none()) data.y = read_array<real>(y, "y", {n});
  if (!weight.is_none()) data.weight = read_array<real>(weight, "weight", {n});
  return data;
}

template <class real>
Parameters<real> read_parameters(const Shape& s, const py::handle& W, const py::handle& U,
                                 double scale) {
  return {read_array<real>(W, "W", {s.H, s.d, s.d}),
          U.is_none() ? nullptr : read_array<real>(U, "U", {s.H, s.q, s.d}), real(scale)};
}

template <class real>
void check_labels(const Data<real>& data, Loss loss) {
  if (loss == Loss::kSquared) return;
  for (std::ptrdiff_t i = 0; i < data.shape.n; ++i)
    if (std::fabs(data.y[i]) != real(1))
      throw py::value_error("y: expected labels +1 or -1, got " +
                            std::string(py::repr(py::float_(double(data.y[i])))) + " at index " +
                            std::to_string(i));
}

Loss read_loss(const std::string& name) {
  if (name == "logistic") return Loss::kLogistic;
  if (name == "exponential") return Loss::kExponential;
  if (name == "linear") return Loss::kLinear;
  if (name == "squared") return Loss::kSquared;
  throw py::value_error("loss: expected logistic, exponential, linear or squared, got '" + name +
                        "'");
}

#define MHFAST_INSTANTIATE(real)                                                               \
  template const real* read_array<real>(const py::handle&, const char*,                        \
                                        const std::vector<py::ssize_t>&);                      \
  template real* write_array<real>(const py::handle&, const char*,                             \
                                   const std::vector<py::ssize_t>&);                           \
  template Data<real> read_data<real>(const py::handle&, const py::handle&, const py::handle&, \
                                      const py::handle&, py::ssize_t);                         \
  template Parameters<real> read_parameters<real>(const Shape&, const py::handle&,             \
                                                  const py::handle&, double);                  \
  template void check_labels<real>(const Data<real>&, Loss);
MHFAST_INSTANTIATE(float)
MHFAST_INSTANTIATE(double)

template const std::int64_t* read_array<std::int64_t>(const py::handle&, const char*,
                                                      const std::vector<py::ssize_t>&);

}  // namespace mhfast
