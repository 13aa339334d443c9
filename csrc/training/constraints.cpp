#include "constraints.hpp"

namespace mhfast {
namespace {

/// Where a member's share of `count` things begins; that of the next one is where it ends.
std::ptrdiff_t part_of(std::ptrdiff_t count, int index, const Member& member) {
  return count * index / member.count;
}

}  // namespace

template <class real>
Subspace<real>::Subspace(const Constraint& constraint, const real* theta, int width)
    : constraint_(constraint), width_(width), values_(constraint.kept_count * width) {
  for (std::ptrdiff_t i = 0; i < constraint.kept_count; ++i)
    std::copy_n(theta + constraint.kept[i] * width, width, values_.begin() + i * width);
}

/// Calls body(first member, one beyond the last) for a member's share of the groups.
template <class real>
template <class Body>
void Subspace<real>::for_groups(const Member& member, const Body& body) const {
  const Constraint& c = constraint_;
  const std::ptrdiff_t last = part_of(c.groups, member.index + 1, member);
  for (std::ptrdiff_t k = part_of(c.groups, member.index, member); k < last; ++k)
    body(c.members + (k == 0 ? 0 : c.ends[k - 1]), c.members + c.ends[k]);
}

template <class real>
void Subspace<real>::project(real* gradient, const Member& member) const {
  const std::int64_t* const kept = constraint_.kept;
  const std::ptrdiff_t last = part_of(constraint_.kept_count, member.index + 1, member);
  for (std::ptrdiff_t i = part_of(constraint_.kept_count, member.index, member); i < last; ++i)
    std::fill_n(gradient + kept[i] * width_, width_, real(0));
  for_groups(member, [&](const std::int64_t* first, const std::int64_t* end) {
    for (int l = 0; l < width_; ++l) {
      double sum = 0;
      for (auto i = first; i < end; ++i) sum += double(gradient[*i * width_ + l]);
      const real mean = real(sum / double(end - first));
      for (auto i = first; i < end; ++i) gradient[*i * width_ + l] = mean;
    }
  });
}

template <class real>
void Subspace<real>::hold(real* theta, const Member& member) const {
  const std::int64_t* const kept = constraint_.kept;
  const std::ptrdiff_t last = part_of(constraint_.kept_count, member.index + 1, member);
  for (std::ptrdiff_t i = part_of(constraint_.kept_count, member.index, member); i < last; ++i)
    std::copy_n(values_.begin() + i * width_, width_, theta + kept[i] * width_);
  for_groups(member, [&](const std::int64_t* first, const std::int64_t* end) {
    for (auto i = first + 1; i < end; ++i)
      std::copy_n(theta + *first * width_, width_, theta + *i * width_);
  });
}

template <class real>
void Subspace<real>::clear_kept(real* gradient, std::ptrdiff_t first, std::ptrdiff_t last) const {
  const std::int64_t* const end = constraint_.kept + constraint_.kept_count;
  for (auto i = std::lower_bound(constraint_.kept, end, first); i < end && *i < last; ++i)
    std::fill_n(gradient + *i * width_, width_, real(0));
}

template class Subspace<float>;
template class Subspace<double>;

}  // namespace mhfast
