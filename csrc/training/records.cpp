#include "records.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../dispatch/dispatch.hpp"
#include "../passes/attention_weights.hpp"
#include "../problem/alike_heads.hpp"
#include "norms.hpp"

namespace mhfast {
namespace {

/// One run of a task.
template <class real>
struct View {
  const TrainingTask<real>& task;
  std::ptrdiff_t run;
  std::int64_t step;
  const real* weights;  // attention (n, H, q, T), or null
  Data<real> data;
  Model<const real*> model;

  View(const TrainingTask<real>& of, std::ptrdiff_t r, std::int64_t k, const real* attention)
      : task(of),
        run(r),
        step(k),
        weights(attention),
        data(at_run(of.given, r, 1)),
        model{{}, of.rank} {
    const Tensors<real*> tensors = of.model.of(r);
    std::copy(tensors.begin(), tensors.end(), model.at.begin());
  }
  const Shape& shape() const { return data.shape; }
  std::ptrdiff_t size(int name) const { return extent(TensorName(name), shape(), task.rank).all(); }
};

template <class real>
PairArguments<real> compared(const real* a, const real* b, std::ptrdiff_t size) {
  PairArguments<real> pair{size, a, b, 0, 0, 0, 0};
  active_kernels<real>().compare(pair);
  return pair;
}

/// Squares of value(0), ..., value(size - 1), whose sum this is unless they leave the range of
/// double. A NaN or infinite entry makes the norm NaN or infinite.
template <class Value>
PowerSum square_sum(double sum, std::ptrdiff_t size, const Value& value) {
  if (std::isnan(sum) || (sum > 1e-250 && sum < 1e250)) return {1, sum};
  double largest = 0;
  for (std::ptrdiff_t i = 0; i < size; ++i) largest = std::max(largest, std::fabs(value(i)));
  if (largest == 0 || std::isinf(largest)) return {largest, 1};
  double scaled = 0;
  for (std::ptrdiff_t i = 0; i < size; ++i) scaled += (value(i) / largest) * (value(i) / largest);
  return {largest, scaled};
}

/// Norm of theta - origin over all tensors.
template <class real>
double parameter_norm(const View<real>& view, const Tensors<const real*>& origin) {
  PowerSum sum;
  for (int name = 0; name < kTensors; ++name) {
    const real *theta = view.model.at[name], *from = origin[name];
    if (!theta) continue;
    const std::ptrdiff_t size = view.size(name);
    const PairArguments<real> pair = compared(theta, from ? from : theta, size);
    sum.add(square_sum(from ? pair.differences : pair.a_squares, size, [&](std::ptrdiff_t i) {
      return double(theta[i]) - (from ? double(from[i]) : 0.0);
    }));
  }
  return sum.norm();
}

/// Cosine of theta and a direction over the tensors that the direction has, each one of theta; 0
/// where either is zero.
template <class real>
double cosine(const View<real>& view, const Tensors<const real*>& direction) {
  const Tensors<const real*>& theta = view.model.at;
  PowerSum of_theta, of_direction;
  double products = 0;
  const auto for_common = [&](const auto& body) {
    for (int name = 0; name < kTensors; ++name)
      if (theta[name] && direction[name]) body(theta[name], direction[name], view.size(name));
  };
  for_common([&](const real* a, const real* b, std::ptrdiff_t size) {
    const PairArguments<real> pair = compared(a, b, size);
    of_theta.add(square_sum(pair.a_squares, size, [a](std::ptrdiff_t i) { return double(a[i]); }));
    of_direction.add(
        square_sum(pair.b_squares, size, [b](std::ptrdiff_t i) { return double(b[i]); }));
    products += pair.products;
  });
  const double theta_norm = of_theta.norm(), direction_norm = of_direction.norm();
  if (theta_norm == 0 || direction_norm == 0) return 0.0;
  if (squares_are_normal(theta_norm) && squares_are_normal(direction_norm))
    return products / (theta_norm * direction_norm);
  double cosine = 0;
  for_common([&](const real* a, const real* b, std::ptrdiff_t size) {
    for (std::ptrdiff_t i = 0; i < size; ++i)
      cosine += (double(a[i]) / theta_norm) * (double(b[i]) / direction_norm);
  });
  return cosine;
}

/// The weight of a query row in a mean over attention: that in the loss, and 0 where it sees no
/// key.
template <class real>
double row_weight(const View<real>& view, std::ptrdiff_t sample, int row) {
  return view.data.limit(sample, 0, row) == 0 ? 0.0 : view.data.weight_of(0, sample, row);
}

/// The largest of `count` > 0 weights; NaN if the first is.
template <class real>
real largest(const real* weights, int count) {
  constexpr int kChains = 16;
  if (count < kChains) return *std::max_element(weights, weights + count);
  real most[kChains];
  std::fill_n(most, kChains, weights[0]);
  int k = 0;
  for (; k + kChains <= count; k += kChains)
    for (int j = 0; j < kChains; ++j) most[j] = weights[k + j] > most[j] ? weights[k + j] : most[j];
  for (; k < count; ++k) most[0] = weights[k] > most[0] ? weights[k] : most[0];
  return *std::max_element(most, most + kChains);
}

/// Of the heads that attend differently: of each block and each sample in it calls body(block, row,
/// its weight in a mean, sample) for the rows that have a weight, and then done(block, sample).
template <class real, class Body, class Done>
void for_attended_rows(const View<real>& view, const Body& body, const Done& done) {
  const auto of_block = [&](const AttentionBlock<real>& block) {
    for (int i = 0; i < block.samples; ++i) {
      for (int t = 0; t < block.rows; ++t)
        if (const double w = row_weight(view, block.sample + i, block.first_row + t); w != 0)
          body(block, block.row(i, t), w, i);
      done(block, i);
    }
  };
  const Shape& s = view.shape();
  if (!view.weights) {
    Data<real> data = view.data;
    data.shape.H = computed_heads(s);
    return for_attention<real>(data, view.model, view.task.scale, 0, s.n, 1, of_block);
  }
  const int tile = rows_of_blocks(view.data);  // so that sums have the same parts
  AttentionBlock<real> block{};
  block.samples = 1;
  block.keys = s.T;
  block.of_row = s.T;
  for (block.sample = 0; block.sample < s.n; ++block.sample)
    for (block.first_row = 0; block.first_row < s.q; block.first_row += tile)
      for (block.head = 0; block.head < s.H; ++block.head) {
        block.rows = std::min(tile, s.q - block.first_row);
        block.at = view.weights + ((block.sample * s.H + block.head) * s.q + block.first_row) *
                                      std::ptrdiff_t(s.T);
        of_block(block);
      }
}

/// (H): mean of the rows' largest weights over the query rows of all samples, each with its weight.
template <class real>
void attention_max(const View<real>& view, double* out) {
  const Shape& s = view.shape();
  std::fill_n(out, s.H, 0.0);
  double total = 0;
  for_attended_rows(
      view,
      [&](const AttentionBlock<real>& block, const real* row, double w, int) {
        if (block.head == 0) total += w;
        real most = largest(row, block.keys);
        if (block.keys < s.T && most < 0) most = 0;  // of the keys beyond
        out[block.head] += w * double(most);
      },
      [](const AttentionBlock<real>&, int) {});
  for (int h = 0; h < s.H && total > 0; ++h) out[h] /= total;
  std::fill(out + std::min(computed_heads(s), s.H), out + s.H, *out);
}

/// Sums of numbers of keys over groups of these, several of each group side by side, as an addition
/// waits for the one before.
class GroupSums {
 public:
  explicit GroupSums(int groups) : groups_(groups), sums_(std::ptrdiff_t(kChains) * groups) {}

  /// Adds `factor` times `count` values to those of their groups, `to`.
  template <class real>
  void add(const real* values, const std::int64_t* group, int count, double factor, double* to) {
    std::fill(sums_.begin(), sums_.end(), 0.0);
    double *const a = sums_.data(), *const b = a + groups_, *const c = b + groups_,
                  *const d = c + groups_;
    int k = 0;
    for (; k + kChains <= count; k += kChains) {
      a[group[k]] += factor * double(values[k]);
      b[group[k + 1]] += factor * double(values[k + 1]);
      c[group[k + 2]] += factor * double(values[k + 2]);
      d[group[k + 3]] += factor * double(values[k + 3]);
    }
    for (; k < count; ++k) a[group[k]] += factor * double(values[k]);
    for (int g = 0; g < groups_; ++g) to[g] += (a[g] + b[g]) + (c[g] + d[g]);
  }

 private:
  static constexpr int kChains = 4;
  const int groups_;
  std::vector<double> sums_;
};

/// (H, sample groups, token groups): mean over the query rows of the group's samples, each with its
/// weight, of the attention that falls on the token group; 0 for a group without rows.
template <class real>
void attention_groups(const View<real>& view, const Record& record, std::ptrdiff_t run,
                      double* out) {
  const Shape& s = view.shape();
  const int A = record.sample_group_count, B = record.token_group_count;
  std::fill_n(out, std::ptrdiff_t(s.H) * A * B, 0.0);
  std::vector<double> members(A, 0.0);
  const auto group = [&](const AttentionBlock<real>& block, int i) {
    return record.sample_groups[run * record.sample_run + block.sample + i];
  };
  GroupSums groups(B);
  const auto add = [&](const AttentionBlock<real>& block, int i, const auto* values, double w) {
    groups.add(values, record.token_groups + run * record.token_run + (block.sample + i) * s.T,
               block.keys, w, out + (block.head * A + group(block, i)) * B);
  };
  // By keys first, over the rows of a sample in a block: that is faster than by groups.
  std::vector<double> sums(s.T);
  for_attended_rows(
      view,
      [&](const AttentionBlock<real>& block, const real* row, double w, int i) {
        if (block.head == 0) members[group(block, i)] += w;
        if (s.q == 1) return add(block, i, row, w);
        for (int k = 0; k < block.keys; ++k) sums[k] += w * double(row[k]);
      },
      [&](const AttentionBlock<real>& block, int i) {
        if (s.q == 1) return;
        add(block, i, sums.data(), 1.0);
        std::fill_n(sums.begin(), block.keys, 0.0);
      });
  for (int h = 0; h < s.H; ++h)
    for (int a = 0; a < A; ++a)
      for (int b = 0; b < B; ++b)
        if (members[a] > 0) out[(h * A + a) * B + b] /= members[a];
  for (int h = computed_heads(s); h < s.H; ++h) std::copy_n(out, A * B, out + h * A * B);
}

/// The mean of a tensor with theta_k; NaN before there is one.
template <class real>
void average(const View<real>& view, TensorName name, double* out) {
  const Averages& averages = view.task.averages;
  const std::int64_t count = averages.counts[view.run] + 1;
  const double* mean = averages.mean.of(view.run)[name];
  const real* theta = view.model.at[name];
  const bool begun = view.step >= averages.first;
  for (std::ptrdiff_t i = 0; i < view.size(name); ++i)
    out[i] = begun ? Averages::added(mean[i], theta[i], count) : Thresholds::kNone;
}

}  // namespace

template <class real>
void write_record(const TrainingTask<real>& task, const Record& record, std::ptrdiff_t run,
                  std::int64_t row, std::int64_t step, const real* weights) {
  const View<real> view(task, run, step, weights);
  const std::int64_t at = (run * record.capacity + row) * record.row_size;
  double* numbers = static_cast<double*>(record.buffer) + at;
  real* entries = static_cast<real*>(record.buffer) + at;
  switch (record.quantity) {
    case Quantity::kParamNorm:
      *numbers = parameter_norm(view, {});
      break;
    case Quantity::kDistance:
      *numbers = parameter_norm(view, task.starts.of(run));
      break;
    case Quantity::kCosine:
      for (const auto& direction : task.directions) *numbers++ = cosine(view, direction.of(run));
      break;
    case Quantity::kParameter:
      std::copy_n(view.model.at[record.tensor], view.size(record.tensor), entries);
      break;
    case Quantity::kAverage:
      average(view, record.tensor, numbers);
      break;
    case Quantity::kAttention:
      if (!weights)
        attention(view.data, view.model, task.scale, 0, view.shape().n, 1, entries);
      else if (weights != entries)
        std::copy_n(weights, record.row_size, entries);
      break;
    case Quantity::kAttentionMax:
      attention_max(view, numbers);
      break;
    case Quantity::kAttentionGroups:
      attention_groups(view, record, run, numbers);
      break;
    case Quantity::kLoss:
    case Quantity::kAccuracy:
    case Quantity::kMargin:
    case Quantity::kGradNorm:
      break;  // written by the loop, which has them
  }
}

template <class real>
void repeat_row(const Record& record, std::ptrdiff_t run, std::int64_t from, std::int64_t to) {
  const bool is_real =
      record.quantity == Quantity::kParameter || record.quantity == Quantity::kAttention;
  const std::int64_t bytes = record.row_size * (is_real ? sizeof(real) : sizeof(double));
  char* rows = static_cast<char*>(record.buffer) + run * record.capacity * bytes;
  if (from < 0)
    std::memset(rows + to * bytes, 0xff, bytes);  // all NaN
  else
    std::copy_n(rows + from * bytes, bytes, rows + to * bytes);
}

template void write_record<float>(const TrainingTask<float>&, const Record&, std::ptrdiff_t,
                                  std::int64_t, std::int64_t, const float*);
template void write_record<double>(const TrainingTask<double>&, const Record&, std::ptrdiff_t,
                                   std::int64_t, std::int64_t, const double*);
template void repeat_row<float>(const Record&, std::ptrdiff_t, std::int64_t, std::int64_t);
template void repeat_row<double>(const Record&, std::ptrdiff_t, std::int64_t, std::int64_t);

}  // namespace mhfast
