#include "../ops/evaluate.hpp"

#include "arrays.hpp"
#include "register.hpp"

namespace mhfast {
namespace {

py::ssize_t heads_of(const py::handle& W) {
  if (!py::isinstance<py::array>(W)) throw py::type_error("W: expected an array");
  const auto array = py::reinterpret_borrow<py::array>(W);
  if (array.ndim() != 3)
    throw py::value_error("W: expected shape (H, d, d), got " +
                          shape_text({array.shape(), array.shape() + array.ndim()}));
  return array.shape(0);
}

py::array call_outputs(const py::object& X, const py::object& Z, const py::object& W,
                       const py::object& U, double scale, int threads) {
  return with_type_of(X, [&](auto zero) -> py::array {
    using real = decltype(zero);
    const auto data = read_data<real>(X, Z, py::none(), py::none(), heads_of(W));
    const auto parameters = read_parameters<real>(data.shape, W, U, scale);
    py::array_t<real> out(data.shape.n);
    real* to = out.mutable_data();
    const py::gil_scoped_release released;
    outputs(data, parameters, threads, to);
    return out;
  });
}

py::array call_attention(const py::object& X, const py::object& Z, const py::object& W,
                         double scale, int threads) {
  return with_type_of(X, [&](auto zero) -> py::array {
    using real = decltype(zero);
    const auto data = read_data<real>(X, Z, py::none(), py::none(), heads_of(W));
    const auto parameters = read_parameters<real>(data.shape, W, py::none(), scale);
    const Shape& s = data.shape;
    py::array_t<real> out({s.n, py::ssize_t(s.H), py::ssize_t(s.q), py::ssize_t(s.T)});
    real* to = out.mutable_data();
    const py::gil_scoped_release released;
    attention(data, parameters.W, parameters.scale, 0, s.n, threads, to);
    return out;
  });
}

py::tuple call_value_and_grad(const py::object& X, const py::object& Z, const py::object& y,
                              const py::object& weight, const py::object& W, const py::object& U,
                              double scale, const std::string& loss_name, bool wrt_W, bool wrt_U,
                              int threads) {
  return with_type_of(X, [&](auto zero) -> py::tuple {
    using real = decltype(zero);
    const auto data = read_data<real>(X, Z, y, weight, heads_of(W));
    const auto parameters = read_parameters<real>(data.shape, W, U, scale);
    const Loss loss = read_loss(loss_name);
    const Shape& s = data.shape;
    if (s.n == 0) throw py::value_error("X: expected at least one sample, got none");
    check_labels(data, loss);
    py::object gW = py::none(), gU = py::none();
    real *to_W = nullptr, *to_U = nullptr;
    if (wrt_W) {
      py::array_t<real> array({s.H, s.d, s.d});
      to_W = array.mutable_data();
      gW = std::move(array);
    }
    if (wrt_U) {
      py::array_t<real> array({s.H, s.q, s.d});
      to_U = array.mutable_data();
      gU = std::move(array);
    }
    double value = 0;
    {
      const py::gil_scoped_release released;
      value = value_and_grad(data, parameters, loss, threads, to_W, to_U);
    }
    return py::make_tuple(value, gW, gU);
  });
}

}  // namespace

void register_evaluation(py::module_& m) {
  m.def("outputs", call_outputs);
  m.def("attention", call_attention);
  m.def("value_and_grad", call_value_and_grad);
}

}  // namespace mhfast
