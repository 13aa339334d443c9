// Directions of steepest descent: what replaces the gradient before the step is taken.
//
// A step has two phases more, `make` by heads and `choose` by one member (see loop.hpp).
#pragma once

#include "../optimizers/steepest_descent.hpp"
#include "../runtime/team.hpp"
#include "trained.hpp"

namespace mhfast {

template <class real>
class Directions {
 public:
  /// Of all these tensors, for a team of up to so many threads.
  Directions(const SteepestDescent& rule, int width, std::vector<Trained<real>>& tensors,
             int threads);

  /// A member's heads: momentum into `first`, the direction of the head alone into `gradient`, its
  /// dual norm. `kept` of each lane is what clipping leaves; frozen lanes keep their momentum.
  void make(const std::vector<double>& kept, const std::vector<char>& frozen, const Member& member);

  /// One member's: from rates that are learning rates to those of the heads' directions.
  void choose(bool scaled);

 private:
  struct Head {
    int tensor, head;
  };
  void mix(Trained<real>& tensor, int head, const std::vector<double>& kept,
           const std::vector<char>& frozen) const;
  void make_spectral(Trained<real>& tensor, int head, double* scratch) const;
  void keep_largest(real* g, std::ptrdiff_t size) const;
  void choose_of(const std::vector<Head>& group, int lane, bool scaled);

  const SteepestDescent rule_;
  const Kernels<real>& kernels_;
  const int width_;
  std::vector<Trained<real>>& tensors_;
  std::vector<std::vector<Head>> groups_;     // heads with one norm
  std::vector<std::vector<double>> scratch_;  // of each member, in "spectral"
};

}  // namespace mhfast
