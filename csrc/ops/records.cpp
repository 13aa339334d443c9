#include "records.hpp"

#include <algorithm>

#include "evaluate.hpp"

namespace mhfast {
namespace {

// Attention weights that are summarised at a time.
constexpr std::ptrdiff_t kBatchWeights = 1 << 18;

std::ptrdiff_t size_W(const Shape& s) { return std::ptrdiff_t(s.H) * s.d * s.d; }
std::ptrdiff_t size_U(const Shape& s) { return std::ptrdiff_t(s.H) * s.q * s.d; }

/// Norm of theta - origin over both tensors.
template <class real>
double parameter_norm(const TrainingTask<real>& task, const real* W0, const real* U0) {
  const Shape& s = task.data.shape;
  SquareSum sum = square_sum(
      size_W(s), [&](std::ptrdiff_t i) { return double(task.W[i]) - (W0 ? double(W0[i]) : 0.0); });
  sum.add(square_sum(
      size_U(s), [&](std::ptrdiff_t i) { return double(task.U[i]) - (U0 ? double(U0[i]) : 0.0); }));
  return sum.norm();
}

/// Cosine of theta and a direction over the tensors that the direction has; 0 where either is zero.
template <class real>
double cosine(const TrainingTask<real>& task,
              const typename TrainingTask<real>::Direction& direction) {
  const Shape& s = task.data.shape;
  SquareSum theta, along;
  const auto measure = [&](const real* a, const real* b, std::ptrdiff_t size) {
    if (!b) return;
    theta.add(square_sum(size, [a](std::ptrdiff_t i) { return a[i]; }));
    along.add(square_sum(size, [b](std::ptrdiff_t i) { return b[i]; }));
  };
  measure(task.W, direction.W, size_W(s));
  measure(task.U, direction.U, size_U(s));
  const double theta_norm = theta.norm(), along_norm = along.norm();
  if (theta_norm == 0 || along_norm == 0) return 0.0;
  double dot = 0;
  const auto add_products = [&](const real* a, const real* b, std::ptrdiff_t size) {
    if (!b) return;
    for (std::ptrdiff_t i = 0; i < size; ++i)
      dot += (double(a[i]) / theta_norm) * (double(b[i]) / along_norm);
  };
  add_products(task.W, direction.W, size_W(s));
  add_products(task.U, direction.U, size_U(s));
  return dot;
}

/// Calls body(sample, weights of the sample (H, q, T)) for all samples in order.
template <class real, class Body>
void for_attention(const TrainingTask<real>& task, const Body& body) {
  const Shape& s = task.data.shape;
  const std::ptrdiff_t size = std::ptrdiff_t(s.H) * s.q * s.T;
  const std::ptrdiff_t batch = std::max<std::ptrdiff_t>(1, kBatchWeights / size);
  std::vector<real> weights(std::min(batch, s.n) * size);
  for (std::ptrdiff_t first = 0; first < s.n; first += batch) {
    const std::ptrdiff_t last = std::min(first + batch, s.n);
    attention(task.data, task.W, task.scale, first, last, 1, weights.data());
    for (std::ptrdiff_t i = first; i < last; ++i) body(i, weights.data() + (i - first) * size);
  }
}

/// (H): mean over samples and query rows of the row's largest weight.
template <class real>
void attention_max(const TrainingTask<real>& task, double* out) {
  const Shape& s = task.data.shape;
  std::fill_n(out, s.H, 0.0);
  for_attention(task, [&](std::ptrdiff_t, const real* weights) {
    for (int h = 0; h < s.H; ++h)
      for (int t = 0; t < s.q; ++t, weights += s.T)
        out[h] += double(*std::max_element(weights, weights + s.T));
  });
  for (int h = 0; h < s.H; ++h) out[h] /= double(s.n) * s.q;
}

/// (H, sample groups, token groups): mean over the group's samples and query rows of the weight
/// that falls on the token group; 0 for a group without samples.
template <class real>
void attention_groups(const TrainingTask<real>& task, const Record& record, double* out) {
  const Shape& s = task.data.shape;
  const int A = record.sample_group_count, B = record.token_group_count;
  std::fill_n(out, std::ptrdiff_t(s.H) * A * B, 0.0);
  std::vector<double> members(A, 0.0);
  for_attention(task, [&](std::ptrdiff_t i, const real* weights) {
    const std::int64_t a = record.sample_groups[i];
    const std::int64_t* tokens = record.token_groups + i * s.T;
    members[a] += 1;
    for (int h = 0; h < s.H; ++h)
      for (int t = 0; t < s.q; ++t)
        for (int k = 0; k < s.T; ++k) out[(h * A + a) * B + tokens[k]] += double(*weights++);
  });
  for (int h = 0; h < s.H; ++h)
    for (int a = 0; a < A; ++a)
      for (int b = 0; b < B; ++b)
        if (members[a] > 0) out[(h * A + a) * B + b] /= members[a] * s.q;
}

}  // namespace

template <class real>
void write_record(const TrainingTask<real>& task, const Record& record) {
  const Shape& s = task.data.shape;
  double* numbers = static_cast<double*>(record.buffer);
  real* entries = static_cast<real*>(record.buffer);
  switch (record.quantity) {
    case Quantity::kParamNorm:
      numbers[record.row] = parameter_norm<real>(task, nullptr, nullptr);
      break;
    case Quantity::kDistance:
      numbers[record.row] = parameter_norm(task, task.W0, task.U0);
      break;
    case Quantity::kCosine: {
      double* row = numbers + record.row * std::int64_t(task.directions.size());
      for (const auto& direction : task.directions) *row++ = cosine(task, direction);
      break;
    }
    case Quantity::kW:
      std::copy_n(task.W, size_W(s), entries + record.row * size_W(s));
      break;
    case Quantity::kU:
      std::copy_n(task.U, size_U(s), entries + record.row * size_U(s));
      break;
    case Quantity::kAttention: {
      const std::ptrdiff_t size = s.n * s.H * s.q * s.T;
      attention(task.data, task.W, task.scale, 0, s.n, 1, entries + record.row * size);
      break;
    }
    case Quantity::kAttentionMax:
      attention_max(task, numbers + record.row * s.H);
      break;
    case Quantity::kAttentionGroups:
      attention_groups(
          task, record,
          numbers + record.row * s.H * record.sample_group_count * record.token_group_count);
      break;
    case Quantity::kLoss:
    case Quantity::kAccuracy:
    case Quantity::kMargin:
    case Quantity::kGradNorm:
      break;  // written by the loop, which has them
  }
}

template void write_record<float>(const TrainingTask<float>&, const Record&);
template void write_record<double>(const TrainingTask<double>&, const Record&);

}  // namespace mhfast
