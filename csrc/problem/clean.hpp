// A data set whose NaN and infinite numbers cannot spread: rows of weight 0 have no influence on
// losses and gradients, and masked keys none on the rows that do not see them, whatever they hold.
// Where the caller gives the derivatives by the outputs, rows whose derivatives are all 0 count as
// rows of weight 0.
//
// A weight of exactly 0 keeps out what is finite, but 0 times NaN, or times what overflows, is NaN.
// So rows of weight 0 see no key, which makes their attention and its derivative zeros that are
// written, not computed. Tokens and queries that are not finite become zeros in a copy, and the
// rows that see them, or consist of them, get the limit NaN, which makes all results of these rows
// NaN.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "data.hpp"

namespace mhfast {

template <class real>
class CleanData {
 public:
  /// `data` of `runs` runs, which must stay; a copy of what it holds is made only where needed.
  /// `derivatives`: y are those of the loss by the outputs.
  CleanData(const Data<real>& data, std::ptrdiff_t runs, bool derivatives = false)
      : data_(data), runs_(runs), derivatives_(derivatives && data.y) {
    if (data.limits) return;
    const bool has_idle = has_zero_weight() || has_zero_derivatives();
    if (!data.shape.causal && !has_idle) return;
    const bool bad_x = clean(data.x, data.run.x, data.x_rows(), x_);
    const bool bad_z = data.has_z() && clean(data.z, data.run.z, data.shape.n * data.shape.q, z_);
    if (!bad_x && !bad_z && !has_idle) return;
    find_limits();
    if (bad_x) data_.x = x_.data();
    if (bad_z) data_.z = z_.data();
    if (data.self) data_.z = data_.x;
  }
  CleanData(const CleanData&) = delete;
  CleanData& operator=(const CleanData&) = delete;

  const Data<real>& operator*() const { return data_; }

 private:
  bool has_zero_weight() const {
    if (!data_.weight) return false;
    const std::ptrdiff_t of_run = data_.shape.n * (data_.weighs_rows ? data_.shape.q : 1);
    for (std::ptrdiff_t r = 0; r < (data_.run.weight ? runs_ : 1); ++r) {
      const real* weight = data_.weight + r * data_.run.weight;
      if (std::any_of(weight, weight + of_run, [](real w) { return w == 0; })) return true;
    }
    return false;
  }

  /// Whether the derivatives of the loss by the outputs of a row are all zero; of a classifier, of
  /// the sample, as all of its rows make one output.
  bool is_idle(std::ptrdiff_t run_index, std::ptrdiff_t sample, int row) const {
    const int p = data_.shape.row_outputs(), output_row = row % data_.shape.output_rows();
    const real* y =
        data_.y + run_index * data_.run.y + sample * data_.targets + std::ptrdiff_t(output_row) * p;
    return std::all_of(y, y + p, [](real derivative) { return derivative == 0; });
  }

  bool has_zero_derivatives() const {
    if (!derivatives_) return false;
    const int rows = data_.shape.output_rows();
    for (std::ptrdiff_t r = 0; r < (data_.run.y ? runs_ : 1); ++r)
      for (std::ptrdiff_t i = 0; i < data_.shape.n; ++i)
        for (int t = 0; t < rows; ++t)
          if (is_idle(r, i, t)) return true;
    return false;
  }

  static bool is_finite(const real* row, std::ptrdiff_t d) {
    constexpr int kSums = 16;  // side by side
    real zeros[kSums] = {};    // NaN if an entry is not finite
    std::ptrdiff_t k = 0;
    for (; k + kSums <= d; k += kSums)
      for (int i = 0; i < kSums; ++i) zeros[i] += row[k + i] * real(0);
    for (; k < d; ++k) zeros[0] += row[k] * real(0);
    return std::all_of(zeros, zeros + kSums, [](real zero) { return zero == 0; });
  }

  /// Copies an array of `count` rows without those that are not finite. False: there are none, and
  /// no copy is made.
  bool clean(const real* from, std::ptrdiff_t of_run, std::ptrdiff_t count,
             std::vector<real>& to) const {
    const int d = data_.shape.d;
    const std::ptrdiff_t all = (of_run ? (runs_ - 1) * of_run : 0) + count * d;
    for (std::ptrdiff_t r = 0; r < (of_run ? runs_ : 1); ++r)
      for (std::ptrdiff_t i = 0; i < count; ++i) {
        const std::ptrdiff_t at = r * of_run + i * d;
        if (i == 0 && is_finite(from + at, count * d)) break;
        if (is_finite(from + at, d)) continue;
        if (to.empty()) to.assign(from, from + all);
        std::fill_n(to.begin() + at, d, real(0));
      }
    return !to.empty();
  }

  void find_limits() {
    const Shape& s = data_.shape;
    const auto& run = data_.run;
    const bool apart =
        run.x || run.z || run.keys || run.weight || run.lengths || (derivatives_ && run.y != 0);
    const std::ptrdiff_t of_run = s.n * s.q;
    limits_.resize((apart ? runs_ : 1) * of_run);
    for (std::ptrdiff_t r = 0; r < (apart ? runs_ : 1); ++r)
      for (std::ptrdiff_t i = 0; i < s.n; ++i) {
        int finite = 0;  // keys before the first that is not
        while (finite < s.T && is_finite(data_.key(i, int(r), finite), s.d)) ++finite;
        for (int t = 0; t < s.q; ++t) {
          double& limit = limits_[r * of_run + i * s.q + t];
          const bool idle =
              data_.weight_of(int(r), i, t) == 0 || (derivatives_ && is_idle(r, i, t));
          limit = idle ? 0.0 : data_.limit(i, int(r), t);
          if (limit > 0 && (finite < limit || !is_finite_query(int(r), i, t)))
            limit = std::numeric_limits<double>::quiet_NaN();
        }
      }
    data_.limits = limits_.data();
    data_.run.limits = apart ? of_run : 0;
  }

  bool is_finite_query(int run_index, std::ptrdiff_t sample, int row) const {
    const Shape& s = data_.shape;
    return s.shared_query || is_finite(data_.query(sample, run_index, row), s.d);
  }

  Data<real> data_;
  std::ptrdiff_t runs_;
  bool derivatives_;
  std::vector<real> x_, z_;
  std::vector<double> limits_;
};

}  // namespace mhfast
