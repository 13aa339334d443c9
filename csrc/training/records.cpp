#include "records.hpp"

#include <algorithm>

#include "../passes/attention_weights.hpp"

namespace mhfast {
namespace {

// Attention weights that are summarised at a time.
constexpr std::ptrdiff_t kBatchWeights = 1 << 18;

/// One run of a task.
template <class real>
struct View {
  const TrainingTask<real>& task;
  std::ptrdiff_t run;
  std::int64_t step;
  Data<real> data;
  Model<const real*> model;

  View(const TrainingTask<real>& of, std::ptrdiff_t r, std::int64_t k)
      : task(of), run(r), step(k), data(at_run(of.given, r, 1)), model{{}, of.rank} {
    const Tensors<real*> tensors = of.model.of(r);
    std::copy(tensors.begin(), tensors.end(), model.at.begin());
  }
  const Shape& shape() const { return data.shape; }
  std::ptrdiff_t size(int name) const { return extent(TensorName(name), shape(), task.rank).all(); }
};

/// Norm of theta - origin over all tensors.
template <class real>
double parameter_norm(const View<real>& view, const Tensors<const real*>& origin) {
  PowerSum sum;
  for (int name = 0; name < kTensors; ++name) {
    const real *theta = view.model.at[name], *from = origin[name];
    if (!theta) continue;
    sum.add(square_sum(view.size(name), [&](std::ptrdiff_t i) {
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
  const auto for_common = [&](const auto& body) {
    for (int name = 0; name < kTensors; ++name)
      if (theta[name] && direction[name]) body(theta[name], direction[name], view.size(name));
  };
  for_common([&](const real* a, const real* b, std::ptrdiff_t size) {
    of_theta.add(square_sum(size, [a](std::ptrdiff_t i) { return a[i]; }));
    of_direction.add(square_sum(size, [b](std::ptrdiff_t i) { return b[i]; }));
  });
  const double theta_norm = of_theta.norm(), direction_norm = of_direction.norm();
  if (theta_norm == 0 || direction_norm == 0) return 0.0;
  const bool plain = squares_are_normal(theta_norm) && squares_are_normal(direction_norm);
  double dot = 0;
  for_common([&](const real* a, const real* b, std::ptrdiff_t size) {
    dot += plain ? sum_in_parts(size, [&](std::ptrdiff_t i) { return double(a[i]) * double(b[i]); })
                 : sum_in_parts(size, [&](std::ptrdiff_t i) {
                     return (double(a[i]) / theta_norm) * (double(b[i]) / direction_norm);
                   });
  });
  return plain ? dot / (theta_norm * direction_norm) : dot;
}

/// Calls body(sample, weights of the sample (H, q, T)) for all samples in order.
template <class real, class Body>
void for_attention(const View<real>& view, const Body& body) {
  const Shape& s = view.shape();
  const std::ptrdiff_t size = std::ptrdiff_t(s.H) * s.q * s.T;
  const std::ptrdiff_t batch = std::max<std::ptrdiff_t>(1, kBatchWeights / size);
  std::vector<real> weights(std::min(batch, s.n) * size);
  for (std::ptrdiff_t first = 0; first < s.n; first += batch) {
    const std::ptrdiff_t last = std::min(first + batch, s.n);
    attention(view.data, view.model, view.task.scale, first, last, 1, weights.data());
    for (std::ptrdiff_t i = first; i < last; ++i) body(i, weights.data() + (i - first) * size);
  }
}

/// The weight of a query row in a mean over attention: that in the loss, and 0 where it sees no
/// key.
template <class real>
double row_weight(const View<real>& view, std::ptrdiff_t sample, int row) {
  return view.data.limit(sample, 0, row) == 0 ? 0.0 : view.data.weight_of(0, sample, row);
}

/// (H): mean of the rows' largest weights over the query rows of all samples, each with its weight.
template <class real>
void attention_max(const View<real>& view, double* out) {
  const Shape& s = view.shape();
  std::fill_n(out, s.H, 0.0);
  double total = 0;
  for_attention(view, [&](std::ptrdiff_t i, const real* weights) {
    for (int t = 0; t < s.q; ++t) {
      const double w = row_weight(view, i, t);
      if (w == 0) continue;
      total += w;
      for (int h = 0; h < s.H; ++h) {
        const real* row = weights + (std::ptrdiff_t(h) * s.q + t) * s.T;
        out[h] += w * double(*std::max_element(row, row + s.T));
      }
    }
  });
  for (int h = 0; h < s.H && total > 0; ++h) out[h] /= total;
}

/// (H, sample groups, token groups): mean over the query rows of the group's samples, each with its
/// weight, of the attention that falls on the token group; 0 for a group without rows.
template <class real>
void attention_groups(const View<real>& view, const Record& record, std::ptrdiff_t run,
                      double* out) {
  const Shape& s = view.shape();
  const int A = record.sample_group_count, B = record.token_group_count;
  std::fill_n(out, std::ptrdiff_t(s.H) * A * B, 0.0);
  std::vector<double> members(A, 0.0);
  for_attention(view, [&](std::ptrdiff_t i, const real* weights) {
    const std::int64_t a = record.sample_groups[run * record.sample_run + i];
    const std::int64_t* tokens = record.token_groups + run * record.token_run + i * s.T;
    for (int t = 0; t < s.q; ++t) {
      const double w = row_weight(view, i, t);
      if (w == 0) continue;
      members[a] += w;
      for (int h = 0; h < s.H; ++h) {
        const real* row = weights + (std::ptrdiff_t(h) * s.q + t) * s.T;
        for (int k = 0; k < s.T; ++k) out[(h * A + a) * B + tokens[k]] += w * double(row[k]);
      }
    }
  });
  for (int h = 0; h < s.H; ++h)
    for (int a = 0; a < A; ++a)
      for (int b = 0; b < B; ++b)
        if (members[a] > 0) out[(h * A + a) * B + b] /= members[a];
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
                  std::int64_t row, std::int64_t step) {
  const View<real> view(task, run, step);
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
      attention(view.data, view.model, task.scale, 0, view.shape().n, 1, entries);
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

template void write_record<float>(const TrainingTask<float>&, const Record&, std::ptrdiff_t,
                                  std::int64_t, std::int64_t);
template void write_record<double>(const TrainingTask<double>&, const Record&, std::ptrdiff_t,
                                   std::int64_t, std::int64_t);

}  // namespace mhfast
