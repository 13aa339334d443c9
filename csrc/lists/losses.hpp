// Every loss, once: its header, and a line
//
//   X(Type, name)
//
// From these come the enum, the names that Python knows, the kinds of targets, the parameters and
// the choice of a loss. A loss that is not in the list does not exist: there is no other place to
// fall back on.
#pragma once

#include <type_traits>

#include "../losses/correlation.hpp"
#include "../losses/cotangent.hpp"
#include "../losses/cross_entropy.hpp"
#include "../losses/exponential.hpp"
#include "../losses/hinge.hpp"
#include "../losses/huber.hpp"
#include "../losses/linear.hpp"
#include "../losses/logistic.hpp"
#include "../losses/negative_log.hpp"
#include "../losses/own.hpp"
#include "../losses/polynomial_tail.hpp"
#include "../losses/quantile.hpp"
#include "../losses/soft_cross_entropy.hpp"
#include "../losses/squared.hpp"
#include "../losses/squared_hinge.hpp"

#define MHFAST_LOSSES(X)                  \
  X(Logistic, logistic)                   \
  X(Exponential, exponential)             \
  X(Linear, linear)                       \
  X(Squared, squared)                     \
  X(SquaredHinge, squared_hinge)          \
  X(Hinge, hinge)                         \
  X(PolynomialTail, polynomial_tail)      \
  X(NegativeLog, negative_log)            \
  X(Correlation, correlation)             \
  X(Huber, huber)                         \
  X(Quantile, quantile)                   \
  X(CrossEntropy, cross_entropy)          \
  X(SoftCrossEntropy, soft_cross_entropy) \
  X(Cotangent, cotangent)                 \
  X(Own, own)

namespace mhfast {

enum class LossName {
#define MHFAST_ENUMERATOR(Type, name) k##Type,
  MHFAST_LOSSES(MHFAST_ENUMERATOR)
#undef MHFAST_ENUMERATOR
};

class OwnLoss;
class OwnLossResults;

/// A loss with its parameter, which those without one ignore, or the caller's function.
struct Loss {
  LossName name;
  double parameter = 0;
  OwnLoss* own = nullptr;
  const OwnLossResults* results = nullptr;  // of the function, where all outputs are known
};

template <class Type>
inline constexpr bool kHasParameter = !std::is_empty_v<Type>;

/// The loss as an object of its type.
template <class Type>
constexpr Type loss_of([[maybe_unused]] double parameter) {
  if constexpr (kHasParameter<Type>)
    return Type{parameter};
  else
    return Type{};
}

struct LossFacts {
  const char* name;
  LossName loss;
  Targets targets;
};

inline constexpr LossFacts kLosses[] = {
#define MHFAST_FACTS(Type, name) {#name, LossName::k##Type, Type::kTargets},
    MHFAST_LOSSES(MHFAST_FACTS)
#undef MHFAST_FACTS
};

constexpr Targets targets_of(Loss loss) { return kLosses[int(loss.name)].targets; }

/// Whether the loss is one of a row's outputs together.
constexpr bool is_of_rows(Loss loss) { return are_of_rows(targets_of(loss)); }

/// Calls body(object) for the loss of single outputs. The caller has checked that it is one.
template <class Body>
inline auto with_loss_of_outputs(Loss loss, const Body& body) {
  switch (loss.name) {
#define MHFAST_CASE(Type, name)                                                               \
  case LossName::k##Type:                                                                     \
    if constexpr (are_of_outputs(Type::kTargets)) return body(loss_of<Type>(loss.parameter)); \
    break;
    MHFAST_LOSSES(MHFAST_CASE)
#undef MHFAST_CASE
  }
  __builtin_unreachable();
}

}  // namespace mhfast
