// Every loss, once: its header, and a line
//
//   X(Type, name)
//
// From these come the enum, the names that Python knows, the kinds of targets and the choice of a
// loss. A loss that is not in the list does not exist: there is no other place to fall back on.
#pragma once

#include "../losses/cotangent.hpp"
#include "../losses/cross_entropy.hpp"
#include "../losses/exponential.hpp"
#include "../losses/linear.hpp"
#include "../losses/logistic.hpp"
#include "../losses/squared.hpp"
#include "../losses/squared_hinge.hpp"

#define MHFAST_LOSSES(X)         \
  X(Logistic, logistic)          \
  X(Exponential, exponential)    \
  X(Linear, linear)              \
  X(Squared, squared)            \
  X(SquaredHinge, squared_hinge) \
  X(CrossEntropy, cross_entropy) \
  X(Cotangent, cotangent)

namespace mhfast {

enum class Loss {
#define MHFAST_ENUMERATOR(Type, name) k##Type,
  MHFAST_LOSSES(MHFAST_ENUMERATOR)
#undef MHFAST_ENUMERATOR
};

struct LossFacts {
  const char* name;
  Loss loss;
  Targets targets;
};

inline constexpr LossFacts kLosses[] = {
#define MHFAST_FACTS(Type, name) {#name, Loss::k##Type, Type::kTargets},
    MHFAST_LOSSES(MHFAST_FACTS)
#undef MHFAST_FACTS
};

constexpr Targets targets_of(Loss loss) { return kLosses[int(loss)].targets; }

/// Whether the loss is one of a row's outputs together.
constexpr bool is_of_rows(Loss loss) { return targets_of(loss) == Targets::kClasses; }

/// Calls body(Type{}) for the loss of single outputs. The caller has seen to it that it is one.
template <class Body>
inline auto with_loss_of_outputs(Loss loss, const Body& body) {
  switch (loss) {
#define MHFAST_CASE(Type, name)                                             \
  case Loss::k##Type:                                                       \
    if constexpr (Type::kTargets != Targets::kClasses) return body(Type{}); \
    break;
    MHFAST_LOSSES(MHFAST_CASE)
#undef MHFAST_CASE
  }
  __builtin_unreachable();
}

}  // namespace mhfast
