// AdamW: the step of Adam, which has the decoupled decay; only the default differs.
#pragma once

#include "adam.hpp"

namespace mhfast {

struct AdamW : Adam {};

}  // namespace mhfast
