#include "attended_tokens.hpp"

#include "../runtime/float_mode.hpp"
#include "../runtime/tuning.hpp"
#include "attention_weights.hpp"
#include "evaluate.hpp"
#include "loadable_model.hpp"

namespace mhfast {
namespace {

/// Some query rows of one sample, which are then an external query, with their limits in `limits`.
template <class real>
Data<real> at_rows(const Data<real>& sample, int first, int rows, std::vector<double>& limits) {
  Data<real> data = sample;
  data.shape.q = rows;
  if (sample.is_limited()) {
    for (int t = 0; t < rows; ++t) limits.push_back(sample.limit(0, 0, first + t));
    data.limits = limits.data();
    data.run.limits = 0;
  }
  if (sample.queries) data.queries = sample.queries + first;
  if (!sample.has_words() && !sample.shape.shared_query)
    data.z = sample.z + std::ptrdiff_t(first) * sample.shape.d;
  data.self = false;
  return data;
}

}  // namespace

template <class real>
AttendedTokens<real>::AttendedTokens(const Data<real>& data, std::ptrdiff_t runs, bool apart)
    : given_(data), rows_(data.shape, active_kernels<real>().lanes), data_(data) {
  const std::ptrdiff_t of_run = rows_.count * rows_.size;
  const auto lay_out = [&](Arena layout) {
    x_ = layout.take<real>((apart ? runs : 1) * of_run);
    return layout.size();
  };
  lay_out(Arena(block_.reserve(lay_out(Arena()))));
  data_.x = x_;
  data_.run.x = apart ? of_run : 0;
  data_.shape.attended = true;
}

template <class real>
double AttendedTokens<real>::bytes(const Data<real>& data, std::ptrdiff_t runs, bool apart) {
  const AttendedRows rows(data.shape, active_kernels<real>().lanes);
  return rows.bytes(apart ? double(runs) : 1.0, sizeof(real));
}

template <class real>
void AttendedTokens<real>::compute(std::ptrdiff_t run, const Model<const real*>& model, real scale,
                                   int threads) {
  Data<real> data = at_run(given_, run, 1);
  data.shape.H = computed_heads(given_.shape);
  const Shape& s = data.shape;
  // Without readouts, which are not needed, and with W multiplied out once.
  Model<const real*> scores{{}, model.rank};
  for (const TensorName name : kOfScores) scores.at[name] = model.at[name];
  AlignedBuffer block;
  const LoadableModel<real> loadable(s, scores, scale, false, block);
  if (model.is_factored() && s.rank == 0) {
    scores = {{}, 0};
    scores.at[kW] = loadable.parameters.W;
    scores.at[kPrompt] = model.at[kPrompt];
  }
  real* const to = x_ + run * data_.run.x;
  for (std::ptrdiff_t row = 0; row < rows_.count && rows_.features < rows_.size; ++row)
    std::fill(to + row * rows_.size + rows_.features, to + (row + 1) * rows_.size, real(0));
  // Of several samples or, where one has more weights than are held, of some of its rows.
  const std::ptrdiff_t of_row = std::ptrdiff_t(s.H) * s.T, of_sample = of_row * s.q;
  const std::ptrdiff_t samples = std::max<std::ptrdiff_t>(1, kAttendedWeights / of_sample);
  const int rows = int(std::clamp<std::ptrdiff_t>(kAttendedWeights / of_row, 1, s.q));
  std::vector<Part> parts;
  for (std::ptrdiff_t i = 0; i < s.n; i += samples)
    for (int t = 0; t < s.q; t += rows)
      parts.push_back({i, std::min(samples, s.n - i), t, std::min(rows, s.q - t)});
  for_runs(
      std::ptrdiff_t(parts.size()), threads, flops_of(samples * rows),
      [&](std::ptrdiff_t i, int inner) { compute_part(data, parts[i], scores, scale, inner, to); });
}

template <class real>
void AttendedTokens<real>::compute_part(const Data<real>& of_run, const Part& part,
                                        const Model<const real*>& given, real scale, int threads,
                                        real* to) const {
  const Kernels<real>& kernels = active_kernels<real>();
  Data<real> data = at_samples(of_run, part.first_sample, part.samples);
  Model<const real*> model = given;
  std::vector<double> limits;
  const int d = data.shape.d, T = data.shape.T, H = data.shape.H;
  if (part.rows < data.shape.q) {
    data = at_rows(data, part.first_row, part.rows, limits);
    if (model.at[kPrompt]) model.at[kPrompt] += std::ptrdiff_t(part.first_row) * d;
  }
  const std::ptrdiff_t size = std::ptrdiff_t(part.rows) * T;
  std::vector<real> weights(part.samples * H * size), words(data.has_words() ? T * d : 0);
  attention(data, model, scale, 0, part.samples, threads, weights.data());
  const FlushToZero flush;                         // of denormal weights, as in steps
  const int L = kernels.lanes, whole = d / L * L;  // features in whole vectors, which are faster
  const std::ptrdiff_t row = data.shape.is_layer() ? rows_.size : d;
  const real* of_head = weights.data();
  for (std::ptrdiff_t i = 0; i < part.samples; ++i) {
    const real* x = data.key(i, 0, 0);
    if (data.has_words()) {
      for (int k = 0; k < T; ++k) std::copy_n(data.key(i, 0, k), d, words.data() + k * d);
      x = words.data();
    }
    real* const sample = to + (part.first_sample + i) * rows_.sample_size() + part.first_row * row;
    for (int h = 0; h < H; ++h, of_head += size) {
      real* const out = sample + h * rows_.features_of_head;
      if (whole > 0)
        kernels.product({{1, whole / L, T, 1, part.rows},
                         {of_head, 1, 0, T},
                         {x, d, L, 0, 0},
                         {out, 0, L, row}});
      if (whole < d)
        kernels.batched_gemm({part.rows, d - whole, T, 1, of_head, T, 1, x + whole, d, 1,
                              out + whole, row, 1, real(1), false});
    }
  }
}

template class AttendedTokens<float>;
template class AttendedTokens<double>;

}  // namespace mhfast
