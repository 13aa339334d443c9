// The last products of a gradient, by what lies along their lanes: the problems themselves, or the
// features.
#pragma once

#include "strategy.hpp"

namespace mhfast {

template <class real>
class GradientLanes {
 public:
  virtual ~GradientLanes() = default;

  /// Numbers of a slab's keys, by `units` units, and of one query row of each of its samples.
  virtual std::ptrdiff_t row_size(std::ptrdiff_t units) const = 0;

  /// Numbers of the scratch for D X of a slab of units with so many query rows.
  std::ptrdiff_t scratch_size(std::ptrdiff_t units, int rows) const;

  /// Keys of the slab times a factor for each entry, into `to`.
  virtual const real* scale_keys(const Slab<real>& slab, const real* factors, real* to) const = 0;

  /// Adds one head's gradient of the slab to the chunk's, from A and D (either may be null) and the
  /// keys, one of which is multiplied by the derivatives; `e` is scratch.
  virtual void accumulate(int chunk, int head, const Slab<real>& slab, const real* a,
                          const real* dd, const real* keys, real* e) const = 0;

 protected:
  explicit GradientLanes(const PassState<real>& state) : state_(state) {}

  /// What these products have in common.
  GradientArguments<real> arguments(int chunk, int head, const Slab<real>& slab, const real* a,
                                    const real* dd, const real* keys, real* e) const;

  const PassState<real>& state_;
};

template <class real>
std::unique_ptr<GradientLanes<real>> make_gradient_lanes(const PassState<real>& state);

}  // namespace mhfast
