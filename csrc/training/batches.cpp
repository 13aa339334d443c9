#include "batches.hpp"

#include <algorithm>
#include <numeric>

#include "../runtime/tuning.hpp"

namespace mhfast {

SampleOrder::SampleOrder(std::int64_t samples, std::int64_t size, Order order, std::uint64_t seed)
    : samples_(samples), size_(size), steps_(samples / size), order_(order), seed_(seed) {
  if (order == Order::kShuffle) permutation_.resize(samples);
}

/// Number `at` of the stream of a counter; numbers are requested one after the other.
std::uint64_t SampleOrder::bits(std::int64_t at, std::int64_t counter) {
  if (at % 4 == 0)
    block_ = Philox::block({std::uint64_t(at / 4 + 1), std::uint64_t(counter), 0, 0}, {seed_, 0});
  return block_[at % 4];
}

void SampleOrder::draw(std::int64_t step, std::uint32_t* to) {
  if (order_ == Order::kReplace) {
    for (std::int64_t i = 0; i < size_; ++i)
      to[i] = std::uint32_t(below(std::uint64_t(samples_), bits(i, step)));
    return;
  }
  const std::int64_t epoch = step / steps_, begin = step % steps_ * size_;
  if (epoch != epoch_) {
    std::iota(permutation_.begin(), permutation_.end(), 0u);
    epoch_ = epoch;
    drawn_ = 0;
  }
  for (; drawn_ < begin + size_; ++drawn_) {
    const std::uint64_t left = std::uint64_t(samples_ - drawn_);
    std::swap(permutation_[drawn_], permutation_[drawn_ + below(left, bits(drawn_, epoch))]);
  }
  std::copy_n(permutation_.begin() + begin, size_, to);
}

template <class real>
BatchData<real>::BatchData(const Data<real>& whole, const Batches& batches, std::ptrdiff_t run,
                           int count)
    : whole_(whole), data_(whole) {
  const bool all = batches.fresh > 0, own = !all && batches.seeds.size() > 1;
  for (int l = 0; !all && l < (own ? count : 1); ++l)
    orders_.emplace_back(whole.shape.n, batches.size, batches.order,
                         batches.seeds[own ? run + l : 0]);
  samples_.resize((own ? count : 1) * batches.size);
  if (all) std::iota(samples_.begin(), samples_.end(), 0u);
  data_.shape.n = batches.size;
  const Shape& s = data_.shape;
  // Memory for `size` numbers of each sample, for each run where runs differ.
  const auto make = [&](auto& workspace, const auto* from, std::ptrdiff_t& stride,
                        std::ptrdiff_t size) {
    const bool apart = own || stride != 0;
    stride = from && apart ? s.n * size : 0;
    if (from) workspace.resize((apart ? count : 1) * s.n * size);
    return from ? workspace.data() : nullptr;
  };
  const std::ptrdiff_t qd = std::ptrdiff_t(s.q) * s.d;
  const bool has_z = whole.has_z();
  if (whole.has_words()) {  // the dictionary stays
    const bool apart = whole.queries != whole.keys;
    data_.keys = make(keys_, whole.keys, data_.run.keys, s.T);
    data_.queries = make(queries_, apart ? whole.queries : nullptr, data_.run.queries, s.q);
    if (whole.queries && !apart) {
      data_.queries = data_.keys;
      data_.run.queries = data_.run.keys;
    }
  } else {
    data_.x = make(x_, whole.x, data_.run.x, std::ptrdiff_t(s.T) * s.d);
  }
  data_.z = make(z_, has_z ? whole.z : nullptr, data_.run.z, qd);
  data_.y = make(y_, whole.y, data_.run.y, whole.targets);
  data_.weight = make(weight_, whole.weight, data_.run.weight, whole.weighs_rows ? s.q : 1);
  data_.lengths = make(lengths_, whole.lengths, data_.run.lengths, 1);
  data_.limits = make(limits_, whole.limits, data_.run.limits, s.q);
  if (whole.self) {
    data_.z = data_.x;
    data_.run.z = data_.run.x;
  }
}

template <class real>
void BatchData<real>::draw_from(const Populations<real>& populations, const Batches& batches,
                                const Exponents& exponents, std::ptrdiff_t run, int threads) {
  populations_ = &populations;
  exponents_ = exponents;
  run_ = run;
  period_ = batches.fresh;
  for (int l = 0; l < (data_.run.x ? data_.runs : 1); ++l)
    seeds_.push_back(batches.seeds[batches.seeds.size() > 1 ? run + l : 0]);
  for (const auto& population : populations.of_run)
    scratch_size_ = std::max(scratch_size_, population->scratch(data_.shape));
  scratch_.resize(threads * scratch_size_);
}

template <class real>
void BatchData<real>::use_triangles(int threads) {
  triangular_ = std::make_unique<TriangularData<real>>(data_, data_.runs);
  triangle_workspace_.resize(threads * triangular_->workspace_size());
}

/// A member's share of the samples of a block.
template <class real>
void BatchData<real>::draw_samples(const Member& member) {
  const Shape& s = data_.shape;
  const std::ptrdiff_t Td = std::ptrdiff_t(s.T) * s.d, qd = std::ptrdiff_t(s.q) * s.d;
  const bool has_z = !z_.empty();
  double* scratch = &scratch_[member.index * scratch_size_];
  for (std::size_t r = 0; r < seeds_.size(); ++r) {
    const auto& of_run = populations_->of_run;
    const Population<real>& population = *of_run[of_run.size() > 1 ? run_ + r : 0];
    const std::ptrdiff_t begin = first(member.index, member), end = first(member.index + 1, member);
    for (std::ptrdiff_t i = begin; i < end; ++i) {
      real* x = &x_[(r * s.n + i) * Td];
      real* z = has_z ? &z_[(r * s.n + i) * qd] : nullptr;
      real* y = &y_[(r * s.n + i) * data_.targets];
      population.draw(SampleNumbers(seeds_[r], block_, i), s, scratch, x, z, y);
      if (populations_->token >= 0 && z) std::copy_n(x + populations_->token * s.d, s.d, z);
    }
    if (begin == end) continue;
    population.label(end - begin, s, &x_[(r * s.n + begin) * Td],
                     &y_[(r * s.n + begin) * data_.targets]);
    const auto scale = [&](real* rows, std::ptrdiff_t size, int exponent) {
      if (exponent != 0) scale_by_power<real>(rows, (end - begin) * size, exponent, rows);
    };
    scale(&x_[(r * s.n + begin) * Td], Td, exponents_.x);
    if (has_z) scale(&z_[(r * s.n + begin) * qd], qd, exponents_.z);
  }
}

template <class real>
void BatchData<real>::draw(std::int64_t step) {
  if (populations_) {
    is_new_ = step / period_ != block_;
    block_ = step / period_;
    return;
  }
  is_new_ = !has_drawn_ || !orders_.empty();
  has_drawn_ = true;
  const std::ptrdiff_t size = data_.shape.n;
  for (std::size_t o = 0; o < orders_.size(); ++o) orders_[o].draw(step, &samples_[o * size]);
}

namespace {

/// Asks for what a later copy reads: rows lie apart, so that each would wait for its first lines.
template <class number>
void prefetch(const number* row, std::ptrdiff_t size) {
  const char* const at = reinterpret_cast<const char*>(row);
  const std::ptrdiff_t bytes =
      std::min<std::ptrdiff_t>(size * std::ptrdiff_t(sizeof(number)), kPrefetchBytes);
  for (std::ptrdiff_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i);
}

}  // namespace

template <class real>
template <class number>
void BatchData<real>::copy_rows(const number* from, std::ptrdiff_t run, std::ptrdiff_t size,
                                const number* to, std::ptrdiff_t to_run, std::ptrdiff_t first,
                                std::ptrdiff_t last) {
  if (!to) return;
  number* out = const_cast<number*>(to);  // into memory of ours
  for (int r = 0; r < (to_run ? data_.runs : 1); ++r) {
    const std::uint32_t* samples = &samples_[orders_.size() > 1 ? r * data_.shape.n : 0];
    const auto row = [&](std::ptrdiff_t i) {
      return from + r * run + std::ptrdiff_t(samples[i]) * size;
    };
    for (std::ptrdiff_t i = first; i < last; ++i) {
      if (i + kPrefetchRows < last) prefetch(row(i + kPrefetchRows), size);
      std::copy_n(row(i), size, out + r * to_run + i * size);
    }
  }
}

template <class real>
void BatchData<real>::copy(const Member& member) {
  if (!is_new_) return;
  if (populations_)
    draw_samples(member);
  else
    copy_samples(member);
  if (triangular_)
    triangular_->compute(first(member.index, member), first(member.index + 1, member),
                         &triangle_workspace_[member.index * triangular_->workspace_size()]);
}

template <class real>
void BatchData<real>::copy_samples(const Member& member) {
  const Shape& s = data_.shape;
  const std::ptrdiff_t begin = first(member.index, member), end = first(member.index + 1, member);
  const auto copy = [&](const auto* from, std::ptrdiff_t run, std::ptrdiff_t size, const auto* to,
                        std::ptrdiff_t to_run) {
    copy_rows(from, run, size, to, to_run, begin, end);
  };
  if (whole_.has_words()) {
    copy(whole_.keys, whole_.run.keys, s.T, data_.keys, data_.run.keys);
    if (!queries_.empty())
      copy(whole_.queries, whole_.run.queries, s.q, data_.queries, data_.run.queries);
  } else {
    copy(whole_.x, whole_.run.x, std::ptrdiff_t(s.T) * s.d, data_.x, data_.run.x);
  }
  if (whole_.has_z()) copy(whole_.z, whole_.run.z, std::ptrdiff_t(s.q) * s.d, data_.z, data_.run.z);
  copy(whole_.y, whole_.run.y, whole_.targets, data_.y, data_.run.y);
  copy(whole_.weight, whole_.run.weight, whole_.weighs_rows ? s.q : 1, data_.weight,
       data_.run.weight);
  copy(whole_.lengths, whole_.run.lengths, 1, data_.lengths, data_.run.lengths);
  copy(whole_.limits, whole_.run.limits, s.q, data_.limits, data_.run.limits);
}

template class BatchData<float>;
template class BatchData<double>;

}  // namespace mhfast
