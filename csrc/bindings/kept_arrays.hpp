// Arrays for a moment, whose memory the process keeps for the next of them.
#pragma once

#include "arrays.hpp"

namespace mhfast {

/// A new C-contiguous array, not initialized. Its memory is taken from blocks that such arrays left
/// behind, and left there when it is released: pages that the allocator gives back to the system
/// and gets again, cleared, cost more than most of what is computed in them. Blocks of at most
/// kKeptArrays bytes together are kept.
template <class T>
py::array kept_array(const ArrayShape& shape);

}  // namespace mhfast
