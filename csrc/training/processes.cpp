#include "processes.hpp"

#include <algorithm>

namespace mhfast {

Sums::Sums(const Processes& processes, std::ptrdiff_t gradient, std::ptrdiff_t slot)
    : processes_(processes),
      gradient_(gradient),
      slots_(processes.head + kMeans + gradient),
      own_(slot),
      rows_(processes.shards.size(), std::vector<double>(slots_ + processes.count * slot)) {}

void Sums::clear_gradients() {
  for (int i = 0; i < shards(); ++i) std::fill_n(gradient(i), gradient_, 0.0);
}

CallbackResult Sums::add(std::int64_t step) {
  const int count = shards();
  for (int apart = 1; apart < count; apart *= 2)
    for (int i = 0; i + apart < count; i += 2 * apart)
      for (std::ptrdiff_t j = processes_.head; j < slots_; ++j) rows_[i][j] += rows_[i + apart][j];
  std::vector<double>& sum = rows_[0];
  std::fill_n(sum.begin(), processes_.head, 0.0);
  std::fill(sum.begin() + slots_, sum.end(), 0.0);
  const std::ptrdiff_t slot = std::ptrdiff_t(own_.size());
  std::copy(own_.begin(), own_.end(), sum.begin() + slots_ + processes_.index * slot);
  return processes_.add(sum, step);
}

double Sums::largest(std::ptrdiff_t i) const {
  double most = in_slot(0, i);
  for (std::ptrdiff_t p = 1; p < processes_.count; ++p) most = std::max(most, in_slot(p, i));
  return most;
}

double Sums::smallest(std::ptrdiff_t i) const {
  double least = in_slot(0, i);
  for (std::ptrdiff_t p = 1; p < processes_.count; ++p) least = std::min(least, in_slot(p, i));
  return least;
}

}  // namespace mhfast
