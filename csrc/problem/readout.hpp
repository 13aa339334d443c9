// What turns attended tokens into outputs, U of a classifier or V of a layer: all that code shared
// by both kinds of model must know about it.
#pragma once

#include <cmath>

#include "data.hpp"

namespace mhfast {

struct Readout {
  TensorName name;
  int rows, columns;    // of one head's parameter
  double divisor;       // of the sum over heads
  bool targets_packed;  // targets are packed with the tokens
  double flops;         // of a query row and head besides scores and softmax
};

inline Readout readout_of(const Shape& s) {
  if (s.is_layer()) return {kV, s.d, s.p, 1.0, true, 2.0 * s.T * s.d + 6.0 * s.d * s.p};
  return {kU, s.q, s.d, std::sqrt(double(s.H)), false, 0.0};
}

}  // namespace mhfast
