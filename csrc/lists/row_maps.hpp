// Every row map, once: its header, and a line
//
//   X(Type, name)
//
// From these come the enum, the names that Python knows and the choice of the kernels' functions.
#pragma once

#include "../row_maps/hardmax.hpp"
#include "../row_maps/linear.hpp"
#include "../row_maps/relu.hpp"
#include "../row_maps/sigmoid.hpp"
#include "../row_maps/softmax.hpp"
#include "../row_maps/softmax1.hpp"

#define MHFAST_ROW_MAPS(X) \
  X(Softmax, softmax)      \
  X(Linear, linear)        \
  X(Relu, relu)            \
  X(Softmax1, softmax1)    \
  X(Sigmoid, sigmoid)      \
  X(Hardmax, hardmax)

namespace mhfast {

enum class RowMapName {
#define MHFAST_ENUMERATOR(Type, name) k##Type,
  MHFAST_ROW_MAPS(MHFAST_ENUMERATOR)
#undef MHFAST_ENUMERATOR
};

/// A row map and, for a map of entries, whether its weights are divided by the tokens of the row.
struct RowMap {
  RowMapName name = RowMapName::kSoftmax;
  bool by_tokens = false;

  bool is_softmax() const { return name == RowMapName::kSoftmax; }
};

}  // namespace mhfast
