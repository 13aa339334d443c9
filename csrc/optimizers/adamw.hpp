// AdamW: Adam, whose decay is a share of theta beside the step; another default.
#pragma once

#include "adam.hpp"

namespace mhfast {

struct AdamW : Adam {};

}  // namespace mhfast
