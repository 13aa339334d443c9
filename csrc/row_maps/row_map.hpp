// What a row map is: a class that says how a row of logits becomes attention weights.
//
//   struct Name {
//     static constexpr RowKind kKind = ...;
//     // A map of entries, A[s] = f(S[s]) or, divided by the tokens that the row sees, f(S[s]) / N:
//     static constexpr bool kByTokens = ...;  // whether it is divided unless said otherwise
//     template <class Math>
//     static Number value(Number s);       // f, NaN where s is
//     template <class Math>
//     static Number derivative(Number s);  // f'
//     template <class Math>
//     static Number curvature(Number s);   // f''
//   };
//
// The derivative of a map of entries by a logit needs no other entry of the row, so that nothing
// cancels in saturation. The other kinds are in kernels/softmax.hpp and kernels/row_maps.hpp.
//
// Math computes on one number for each lane: Number, exp, absolute, select(mask, yes, no).
//
// Included by kernels: nothing here may have external linkage once Math is a kernel's.
#pragma once

namespace mhfast {

/// Exponentials over their sum; the same with a logit 0 of value 0 that is no key's; a function of
/// each entry; all weight on the largest logit.
enum class RowKind { kSoftmax, kSoftmaxWithZero, kEntries, kLargest };

}  // namespace mhfast
