// Models and data sets as they cross from Python.
#pragma once

#include <memory>
#include <optional>

#include "arrays.hpp"

namespace mhfast {

/// A data set of one or more runs; classes are kept here as numbers of the model's type.
template <class real>
struct DataOfRuns {
  Data<real> data;  // of run 0
  std::shared_ptr<std::vector<real>> classes;
};

/// Parameters in their order, None where there is none, and the shape that they imply,
/// without samples and tokens.
template <class real>
struct ModelOfRuns {
  OfRuns<const real*> parameters;
  int rank;
  Shape shape;  // n, T and q are not known yet, except q of a prompt

  Model<const real*> of(std::ptrdiff_t run) const { return {parameters.of(run), rank}; }
};

/// What holds the numbers of samples: X, or where tokens are words (dictionary, ids), the former.
inline py::object numbers_of(const py::tuple& samples) {
  const py::object X = samples[0];
  return py::isinstance<py::tuple>(X) ? py::object(X[py::int_(0)]) : X;
}

/// A model and the samples that it is asked about.
template <class real>
struct ProblemOfRuns {
  ModelOfRuns<real> model;
  Data<real> data;  // of run 0
  std::shared_ptr<std::vector<real>> classes;
};

/// (X, query, y, weight, lengths), where X may be (dictionary (words, d), ids (n, T)), and the
/// query (the same dictionary, ids (n, q)) then; sets n, T and q of the model's shape. Checks
/// targets and lengths. Without a loss y and weight are left alone.
template <class real>
DataOfRuns<real> read_data(const py::tuple& samples, const Shape& model, bool causal,
                           RowMap row_map, py::ssize_t runs, std::optional<Loss> loss);

template <class real>
ProblemOfRuns<real> read_problem(const py::tuple& samples, const py::tuple& parameters,
                                 py::ssize_t runs, bool causal, RowMap row_map,
                                 std::optional<Loss> loss);

/// Tensors of the model's shapes, None where there are none.
template <class real>
OfRuns<const real*> read_tensors(const py::tuple& in, const char* argument, const Shape& shape,
                                 int rank, py::ssize_t runs);

/// Shape of a tensor, without runs.
ArrayShape tensor_shape(TensorName name, const Shape& shape, int rank);

}  // namespace mhfast
