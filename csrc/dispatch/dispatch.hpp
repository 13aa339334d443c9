// Which instruction set runs: chosen once, outside every loop.
#pragma once

#include <string>
#include <vector>

#include "../kernels/table.hpp"

namespace mhfast {

/// Names, best first: what this build contains, and what of it this processor can run.
std::vector<std::string> compiled_instruction_sets();
std::vector<std::string> available_instruction_sets();

/// The active set: the best available one unless `select_instruction_set` was called.
const InstructionSet& active_instruction_set();

/// Throws std::invalid_argument, naming what there is, when `name` is unknown or cannot run here.
void select_instruction_set(const std::string& name);

template <class real>
const Kernels<real>& active_kernels();

}  // namespace mhfast
