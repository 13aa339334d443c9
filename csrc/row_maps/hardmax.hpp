// All weight on the largest logit; keys that share it share the weight equally. Its derivative by
// the logits is 0.
#pragma once

#include "row_map.hpp"

namespace mhfast::row_maps {

struct Hardmax {
  static constexpr RowKind kKind = RowKind::kLargest;
};

}  // namespace mhfast::row_maps
