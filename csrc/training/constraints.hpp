// Linear constraints on a trained tensor: entries that keep their values, and groups of entries
// that stay equal.
//
// A step stays in the subspace of the constraint because its gradient is replaced by the orthogonal
// projection onto it: 0 at entries that are kept, the mean at those of a group, summed in double
// and in their order. After the step kept entries get their values again, which decay and mirror
// maps move, and entries of a group those of its first, which they equal up to rounding at most.
//
// Entries are counted over all heads of one run; each is `width` numbers, one for each lane.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../runtime/team.hpp"

namespace mhfast {

struct Constraint {
  const std::int64_t* kept = nullptr;  // ascending
  std::ptrdiff_t kept_count = 0;
  const std::int64_t* members = nullptr;  // of one group after the other
  const std::int64_t* ends = nullptr;     // where groups end among the members
  std::ptrdiff_t groups = 0;
  bool over_heads = false;  // some group has entries of several heads

  bool any() const { return kept_count + groups > 0; }
};

/// A constraint on one tensor, with the values of the kept entries at theta as it is now.
template <class real>
class Subspace {
 public:
  Subspace() = default;
  Subspace(const Constraint& constraint, const real* theta, int width);

  bool any() const { return constraint_.any(); }

  /// A member's share of the entries, over all heads; with a barrier before and after it.
  void project(real* gradient, const Member& member) const;
  void hold(real* theta, const Member& member) const;

  /// Sets kept entries among `first` to `last` to 0.
  void clear_kept(real* gradient, std::ptrdiff_t first, std::ptrdiff_t last) const;

 private:
  template <class Body>
  void for_groups(const Member& member, const Body& body) const;

  Constraint constraint_;
  int width_ = 1;
  std::vector<real> values_;
};

}  // namespace mhfast
