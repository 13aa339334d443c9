// The choice of the instruction set: made once, outside every loop.
#pragma once

#include <string>
#include <vector>

#include "../kernels/table.hpp"

namespace mhfast {

/// Names, best first: those in this build, and those of them that this processor can run.
std::vector<std::string> compiled_instruction_sets();
std::vector<std::string> available_instruction_sets();

/// The active set: the best available one unless `select_instruction_set` was called.
const InstructionSet& active_instruction_set();

/// Throws std::invalid_argument, listing the available ones, if `name` is unknown or cannot run
/// here.
void select_instruction_set(const std::string& name);

template <class real>
const Kernels<real>& active_kernels();

}  // namespace mhfast
