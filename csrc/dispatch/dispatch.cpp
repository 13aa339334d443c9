#include "dispatch.hpp"

#include <atomic>
#include <stdexcept>

// The one list of instruction sets, best first: the build defines MHFAST_SETS as a sequence of
// X(name), one for each object it compiled from kernels/instance.cpp.
namespace mhfast {

#define X(name)                        \
  namespace name {                     \
  extern const InstructionSet kTables; \
  }
MHFAST_SETS
#undef X

namespace {

#define X(name) &name::kTables,
const InstructionSet* const kCompiled[] = {MHFAST_SETS};
#undef X

bool runs_here(const std::string& name) {
#if defined(__x86_64__) || defined(__i386__)
  // One feature at a time: compilers disagree on the names of microarchitecture levels. The query
  // includes the operating system's support for the registers.
  if (name == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (name == "avx512")
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("fma");
#endif
  (void)name;
  return true;
}

const InstructionSet* best() {
  for (const InstructionSet* set : kCompiled)
    if (runs_here(set->name)) return set;
  return nullptr;  // not reached: the last set is the baseline of the architecture
}

std::atomic<const InstructionSet*>& active() {
  static std::atomic<const InstructionSet*> set{best()};
  return set;
}

std::string list(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

std::vector<std::string> compiled_instruction_sets() {
  std::vector<std::string> names;
  for (const InstructionSet* set : kCompiled) names.emplace_back(set->name);
  return names;
}

std::vector<std::string> available_instruction_sets() {
  std::vector<std::string> names;
  for (const InstructionSet* set : kCompiled)
    if (runs_here(set->name)) names.emplace_back(set->name);
  return names;
}

const InstructionSet& active_instruction_set() { return *active().load(std::memory_order_relaxed); }

void select_instruction_set(const std::string& name) {
  for (const InstructionSet* set : kCompiled) {
    if (name != set->name) continue;
    if (!runs_here(name))
      throw std::invalid_argument("instruction set: '" + name +
                                  "' is compiled in but this processor cannot run it; available: " +
                                  list(available_instruction_sets()));
    active().store(set, std::memory_order_relaxed);
    return;
  }
  throw std::invalid_argument("instruction set: expected one of " +
                              list(available_instruction_sets()) + ", got '" + name + "'");
}

template <>
const Kernels<float>& active_kernels<float>() {
  return active_instruction_set().f32;
}
template <>
const Kernels<double>& active_kernels<double>() {
  return active_instruction_set().f64;
}

}  // namespace mhfast
