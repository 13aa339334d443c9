// What turns attended tokens into outputs, U of a classifier or V of a layer: all that code shared
// by both kinds of model must know about it.
#pragma once

#include <cmath>

#include "data.hpp"

namespace mhfast {

struct Readout {
  TensorName name;
  int rows, columns;       // of one head's parameter
  std::ptrdiff_t outputs;  // of a sample
  double divisor;          // of the sum over heads
};

inline Readout readout_of(const Shape& s) {
  if (s.is_layer()) return {kV, s.d, s.p, std::ptrdiff_t(s.q) * s.p, 1.0};
  return {kU, s.q, s.d, 1, std::sqrt(double(s.H))};
}

}  // namespace mhfast
