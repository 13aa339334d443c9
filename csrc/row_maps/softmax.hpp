// A[s] = exp(S[s]) / sum of exp(S[t]).
#pragma once

#include "row_map.hpp"

namespace mhfast::row_maps {

struct Softmax {
  static constexpr RowKind kKind = RowKind::kSoftmax;
};

}  // namespace mhfast::row_maps
