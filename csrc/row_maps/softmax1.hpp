// A[s] = exp(S[s]) / (1 + sum of exp(S[t])): softmax with a further logit 0 whose value is 0.
#pragma once

#include "row_map.hpp"

namespace mhfast::row_maps {

struct Softmax1 {
  static constexpr RowKind kKind = RowKind::kSoftmaxWithZero;
};

}  // namespace mhfast::row_maps
