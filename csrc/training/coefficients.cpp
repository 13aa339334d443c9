#include "coefficients.hpp"

#include <algorithm>
#include <cmath>

#include "../runtime/tuning.hpp"
#include "records.hpp"

namespace mhfast {
namespace {

/// Part of the size of its terms that a sum of squares must be, so that it has the digits of one
/// of entries of U, but for four.
constexpr double kLeft = 1e-4;

/// Columns of phi that are multiplied at a time.
constexpr std::ptrdiff_t kColumns = 256;

/// Numbers of all runs, in double.
template <class real>
void convert(const real* from, std::ptrdiff_t size, double* to) {
  for (std::ptrdiff_t i = 0; i < size; ++i) to[i] = double(from[i]);
}

/// Whether so many steps in coefficients save more than it takes to enter them.
template <class real>
bool pays(const Shape& s) {
  const double lanes = active_kernels<real>().lanes, doubles = active_kernels<double>().lanes;
  const double n = double(s.n), features = double(AttendedRows(s, 1).features);
  const double readout = double(s.H) * s.q * s.d;
  const double of_step = (2 * n * features + kUpdateColumns * readout) / lanes - n * n / doubles;
  const double converted = sizeof(real) == sizeof(double) ? 0.0 : n * features;
  const double entering = kGramCycles * n * n * features / doubles + kConversionCycles * converted;
  return n < features && kCoefficientSteps * of_step > entering;
}

}  // namespace

template <class real>
bool Coefficients<real>::serve(const TrainingTask<real>& task) {
  const Shape& s = task.data.shape;
  const Optimizer& o = task.optimizer;
  if (!task.coefficients.taken || !s.attended || s.is_layer() || forced_plan()) return false;
  if (!o.with_rule([](const auto& rule) { return rule.kIsLinear; })) return false;
  if (o.decays(task.wrt) || std::isfinite(o.clip) || o.project != Projection::kNone) return false;
  if (task.constraints[kU].any() || task.exponents.any() || task.loss.own) return false;
  if (!task.tests.empty() || task.averages.counts || task.data.weighs_rows) return false;
  if (!std::isnan(task.thresholds.grad_norm)) return false;
  for (const Record& r : task.records)
    if (r.quantity == Quantity::kGradNorm) return false;
  const double n = double(s.n), features = double(AttendedRows(s, 1).features);
  const double bytes = sizeof(double) * n * double(task.runs) * (n + features);
  return bytes <= kAttendedBytes && pays<real>(s);
}

template <class real>
Coefficients<real>::Coefficients(const TrainingTask<real>& task)
    : task_(task),
      kernels_(active_kernels<double>()),
      of_tokens_(task.data.shape, active_kernels<real>().lanes),
      n_(task.data.shape.n),
      size_(round_up(of_tokens_.features, kernels_.lanes)),
      row_(round_up(n_ + 1, kernels_.lanes)),
      rows_run_(round_up(n_, kernels_.lanes) * row_),
      phi_run_(task.data.run.x ? n_ * size_ : 0),
      divisor_(std::sqrt(double(task.data.shape.H))),
      known_(task.runs) {
  take_memory();
  take_data();
  for (std::ptrdiff_t r = 0; r < task.runs; ++r) compute(r);
  *task.coefficients.taken = true;
}

template <class real>
void Coefficients<real>::take_memory() {
  const std::ptrdiff_t runs = task_.runs;
  const auto& run = task_.data.run;
  const auto lay_out = [&](Arena layout) {
    own_phi_ = sizeof(real) == sizeof(double)
                   ? nullptr
                   : layout.template take<double>((phi_run_ ? runs : 1) * n_ * size_);
    rows_ = layout.template take<double>(runs * rows_run_);
    theta_ = layout.template take<double>(runs * row_);
    velocity_ = task_.first.at[kU] ? layout.template take<double>(runs * row_) : nullptr;
    sums_ = layout.template take<double>(runs * size_);
    changes_ = layout.template take<real>(runs * size_);
    y_ = layout.template take<double>(all_runs(run.y, runs, n_));
    weight_ =
        task_.data.weight ? layout.template take<double>(all_runs(run.weight, runs, n_)) : nullptr;
    return layout.size();
  };
  lay_out(Arena(block_.reserve(lay_out(Arena()))));
}

/// Features, labels and weights in double.
template <class real>
void Coefficients<real>::take_data() {
  const Data<real>& given = task_.data;
  const std::ptrdiff_t runs = task_.runs;
  if constexpr (sizeof(real) == sizeof(double)) {
    phi_ = given.x;
  } else {
    const std::ptrdiff_t all = (phi_run_ ? runs : 1) * n_, features = of_tokens_.features;
    for (std::ptrdiff_t i = 0; i < all; ++i) {
      double* const to = own_phi_ + i * size_;
      convert(given.x + i * of_tokens_.size, features, to);
      std::fill(to + features, to + size_, 0.0);
    }
    phi_ = own_phi_;
  }
  convert(given.y, all_runs(given.run.y, runs, n_), y_);
  if (given.weight) convert(given.weight, all_runs(given.run.weight, runs, n_), weight_);
}

template <class real>
Data<double> Coefficients<real>::data(std::ptrdiff_t run) const {
  const Data<real>& given = task_.data;
  Data<double> data{};
  data.shape.n = n_;
  data.shape.T = data.shape.q = data.shape.H = 1;
  data.shape.d = int(n_ + 1);
  data.shape.identity_w = true;
  data.self = data.rows_are_tokens = true;
  data.row_map = given.row_map;
  data.x = data.z = rows(run);
  data.y = y_ + run * given.run.y;
  data.weight = weight_ ? weight_ + run * given.run.weight : nullptr;
  data.targets = data.runs = 1;
  return data;
}

/// G of rows phi, without its last factor: blocks of samples as lanes on and above the diagonal,
/// and the others from these. Numbers that are not finite say nothing about the others.
template <class real>
void Coefficients<real>::multiply_rows(const double* phi, double* rows) const {
  const std::ptrdiff_t L = kernels_.lanes, blocks = round_up(n_, L) / L;
  const std::ptrdiff_t block = std::min(kColumns, size_) * L;
  AlignedBuffer buffer;
  double* const packed = Arena(buffer.reserve(blocks * block * sizeof(double))).take<double>(0);
  for (std::ptrdiff_t first = 0; first < size_; first += kColumns) {
    const std::ptrdiff_t columns = std::min(kColumns, size_ - first);
    for (std::ptrdiff_t b = 0; b < blocks; ++b)
      kernels_.pack_lanes(phi + b * L * size_ + first, size_, int(std::min(L, n_ - b * L)), columns,
                          packed + b * block);
    for (std::ptrdiff_t b = 0; b < blocks; ++b) {
      const double* const left = packed + b * block;
      const Product<double> product{{int(L), int(blocks - b), int(columns)},
                                    {left, L},
                                    {left, L, block},
                                    {rows + b * L * (row_ + 1), row_, L},
                                    first > 0};
      kernels_.product(product);
    }
  }
  for (std::ptrdiff_t i = 0; i < n_; ++i)
    for (std::ptrdiff_t j = i; j < n_; ++j) {
      double& product = rows[i * row_ + j];
      if (!std::isfinite(product)) product = 0;
      rows[j * row_ + i] = product;
    }
}

template <class real>
void Coefficients<real>::compute(std::ptrdiff_t run) {
  const Shape& s = task_.data.shape;
  double* const to = rows(run);
  if (run == 0 || phi_run_) {
    multiply_rows(phi(run), to);
    const double factor = computed_heads(s) == s.H ? 1.0 / s.H : 1.0;
    for (std::ptrdiff_t i = 0; i < n_; ++i)
      for (std::ptrdiff_t j = 0; j < n_; ++j) to[i * row_ + j] *= factor;
  } else {
    std::copy_n(rows(0), n_ * row_, to);
  }
  const real* const start = task_.starts.of(run)[kU];
  std::vector<double> outputs(n_);
  find_outputs(run, start, outputs.data());
  Known& known = known_[run];
  for (std::ptrdiff_t i = 0; i < n_; ++i) {
    to[i * row_ + n_] = outputs[i];
    std::fill(to + i * row_ + n_ + 1, to + (i + 1) * row_, 0.0);
    known.most = std::max(known.most, std::sqrt(to[i * row_ + i]));
  }
  const auto take = [&](const double* given, double* all, double last) {
    const bool kept = given && *task_.coefficients.taken;
    std::fill(all, all + row_, 0.0);
    if (kept) std::copy_n(given + run * n_, n_, all);
    all[n_] = last;
  };
  take(task_.coefficients.theta, theta(run), 1.0);
  if (velocity_) take(task_.coefficients.velocity, velocity(run), 0.0);
  find_directions(run);
}

/// Of the readout of all heads, as that of a model with one head at double precision.
template <class real>
void Coefficients<real>::find_outputs(std::ptrdiff_t run, const real* readout, double* to) const {
  const Shape& s = task_.data.shape;
  const std::ptrdiff_t features = of_tokens_.features, L = kernels_.lanes;
  std::vector<double> sum(size_), lanes(n_ * L);
  for (int h = 0; h < s.H / computed_heads(s); ++h)
    for (std::ptrdiff_t k = 0; k < features; ++k) sum[k] += double(readout[h * features + k]);
  for (double& x : sum) x /= divisor_;
  const AttendedArguments<double> product{int(n_),      1, int(size_ / L), phi(run), sum.data(),
                                          lanes.data(), to};
  kernels_.attended_outputs(product);
}

template <class real>
void Coefficients<real>::find_directions(std::ptrdiff_t run) {
  const auto asks = [&](Quantity quantity) {
    const auto is = [=](const Record& r) { return r.quantity == quantity; };
    return std::any_of(task_.records.begin(), task_.records.end(), is);
  };
  const bool cosine = asks(Quantity::kCosine);
  if (!cosine && !asks(Quantity::kParamNorm)) return;
  Known& known = known_[run];
  const real* const start = task_.starts.of(run)[kU];
  const std::ptrdiff_t size = extent(kU, task_.data.shape, 0).all();
  const auto compared = [&](const real* other) {
    PairArguments<real> pair{size, start, other, 0, 0, 0, 0};
    active_kernels<real>().compare(pair);
    return pair;
  };
  known.square = compared(start).a_squares;
  for (const auto& direction : task_.directions) {
    const real* const along = direction.of(run)[kU];
    if (!cosine || !along) return;
    const std::ptrdiff_t at = std::ptrdiff_t(known.along.size());
    known.along.resize(at + n_ + 2);
    find_outputs(run, along, &known.along[at]);
    const PairArguments<real> pair = compared(along);
    known.along[at + n_] = pair.products;
    known.along[at + n_ + 1] = pair.b_squares;
  }
}

/// from + H^(-1/2) sum over i of c_i phi_i, without `from` the sum; `from` itself where all c_i
/// are zero.
template <class real>
void Coefficients<real>::make(std::ptrdiff_t run, const double* coefficients, const real* from,
                              real* to) const {
  const Shape& s = task_.data.shape;
  const std::ptrdiff_t features = of_tokens_.features;
  double* const sum = sums_ + run * size_;  // its own: runs are side by side
  real* const change = changes_ + run * size_;
  const auto is_zero = [](double c) { return c == 0; };
  if (std::all_of(coefficients, coefficients + n_, is_zero)) {
    std::fill_n(change, features, real(0));
  } else {
    kernels_.combine(phi(run), size_, coefficients, int(n_), size_, sum, false);
    for (std::ptrdiff_t k = 0; k < features; ++k) change[k] = real(sum[k] / divisor_);
  }
  for (int h = 0; h < s.H / computed_heads(s); ++h, to += features) {
    if (from)
      for (std::ptrdiff_t k = 0; k < features; ++k) to[k] = from[h * features + k] + change[k];
    else
      std::copy_n(change, features, to);
  }
}

template <class real>
void Coefficients<real>::write_back(std::ptrdiff_t run) const {
  make(run, theta(run), task_.starts.of(run)[kU], task_.model.of(run)[kU]);
  std::copy_n(theta(run), n_, task_.coefficients.theta + run * n_);
  if (!velocity_) return;
  make(run, velocity(run), nullptr, task_.first.of(run)[kU]);
  std::copy_n(velocity(run), n_, task_.coefficients.velocity + run * n_);
}

/// Of U_k, or of its change since step 0.
template <class real>
typename Coefficients<real>::Sum Coefficients<real>::square(std::ptrdiff_t run,
                                                            bool of_change) const {
  const std::ptrdiff_t L = kernels_.lanes;
  const double* const c = theta(run);
  const Known& known = known_[run];
  std::vector<double> change(c, c + row_), lanes(n_ * L), moved(n_);
  change[n_] = 0;
  const AttendedArguments<double> product{
      int(n_), 1, int(row_ / L), rows(run), change.data(), lanes.data(), moved.data()};
  kernels_.attended_outputs(product);
  double sum = 0, sizes = 0;
  for (std::ptrdiff_t i = 0; i < n_; ++i) {
    const double start = of_change ? 0.0 : rows(run)[i * row_ + n_];
    sum += c[i] * (2 * start + moved[i]);
    sizes += std::fabs(c[i]);
  }
  const double start = of_change ? 0.0 : known.square;
  return {start + sum, start + sizes * known.most * sizes * known.most};
}

/// A size or cosines from sums over the samples. False where they would lose digits.
template <class real>
bool Coefficients<real>::record_sum(const Record& record, std::ptrdiff_t run, double* to) const {
  for (int name = 0; name < kTensors; ++name)
    if (name != kU && task_.model.at[name]) return false;
  const bool cosine = record.quantity == Quantity::kCosine;
  const Known& known = known_[run];
  if (cosine &&
      std::ptrdiff_t(known.along.size()) < std::ptrdiff_t(task_.directions.size()) * (n_ + 2))
    return false;
  const auto is_normal = [](double square) { return square > 1e-250 && square < 1e250; };
  const Sum size = square(run, record.quantity == Quantity::kDistance);
  if (!is_normal(size.value) || !(size.value >= kLeft * size.terms)) return false;
  if (!cosine) {
    *to = std::sqrt(size.value);
    return true;
  }
  for (std::size_t at = 0; at < known.along.size(); at += n_ + 2) {
    const double* const of = &known.along[at];
    if (!is_normal(of[n_ + 1])) return false;
    double product = of[n_];
    for (std::ptrdiff_t i = 0; i < n_; ++i) product += theta(run)[i] * of[i];
    *to++ = product / std::sqrt(size.value * of[n_ + 1]);
  }
  return true;
}

template <class real>
void Coefficients<real>::record(const Record& record, std::ptrdiff_t run, std::int64_t row,
                                std::int64_t step) const {
  const std::int64_t at = (run * record.capacity + row) * record.row_size;
  switch (record.quantity) {
    case Quantity::kParamNorm:
    case Quantity::kDistance:
    case Quantity::kCosine:
      if (record_sum(record, run, static_cast<double*>(record.buffer) + at)) return;
      write_back(run);
      break;
    case Quantity::kParameter:
      if (record.tensor == kU)
        return make(run, theta(run), task_.starts.of(run)[kU],
                    static_cast<real*>(record.buffer) + at);
      break;
    default:
      break;
  }
  write_record<real>(task_, record, run, row, step, nullptr);
}

template class Coefficients<float>;
template class Coefficients<double>;

}  // namespace mhfast
