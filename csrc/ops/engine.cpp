#include "engine.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace mhfast {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Multiply-adds count two; an exponential about twenty.
double flops(const Shape& s) {
  return double(s.n) * s.H * s.q * (4.0 * s.d * s.d + 8.0 * s.T * s.d + 20.0 * s.T);
}

// Flops a second and lane below which a thread can only have been kept from its work.
constexpr double kLeisurelyFlops = 5e8;

}  // namespace

template <class real>
Engine<real>::Engine(const Data<real>& data, Loss loss, const Options& options, int threads,
                     Block& block)
    : kernels_(active_kernels<real>()),
      data_(data),
      loss_(loss),
      options_(options),
      plan_(make_plan(data.shape, sizeof(real), kernels_.lanes)),
      leisurely_seconds_(flops(data.shape) / (kLeisurelyFlops * kernels_.lanes)),
      threads_(useful_threads(threads,
                              plan_.kind == PlanKind::kTiles
                                  ? std::int64_t(plan_.slab) * data.shape.H * plan_.parts
                                  : plan_.chunks,
                              flops(data.shape))) {
  const Shape& s = data_.shape;
  const std::ptrdiff_t L = kernels_.lanes;
  const bool samples = plan_.samples_are_lanes();
  const std::ptrdiff_t qL = round_up(s.q, L), TL = round_up(s.T, L);
  key_size_ = s.d * (samples ? s.T * L : TL);
  query_size_ = s.d * (samples ? s.q * L : qL);
  weights_size_ = s.T * (samples ? s.q * L : qL);
  ut_size_ = s.d * (samples ? s.q : qL);
  rows_size_ = samples ? s.q * L : qL;
  partial_size_ = partial_gradient_size(s, plan_, int(L));

  total_weight_ = double(s.n);
  if (data_.weight) {
    total_weight_ = 0;
    for (std::ptrdiff_t i = 0; i < s.n; ++i) total_weight_ += double(data_.weight[i]);
  }
  chunk_totals_.resize(plan_.chunks);
  if (options_.gaps) {
    chunk_scales_.resize(std::size_t(plan_.chunks) * (s.H + 1));
    scales_.heads.resize(s.H);
  }
  rooms_.resize(threads_);
  packed_chunks_.assign(plan_.chunks, 0);
  Layout measure;
  lay_out(measure);
  Layout layout(block.reserve(measure.size()));
  lay_out(layout);
}

template <class real>
void Engine<real>::lay_out(Layout& layout) {
  const Shape& s = data_.shape;
  const std::ptrdiff_t L = kernels_.lanes;
  const bool samples = plan_.samples_are_lanes();
  const std::size_t H = s.H, lanes_of_unit = samples ? L : 1;
  const std::size_t slab = std::min<std::ptrdiff_t>(plan_.slab, plan_.units);
  const std::size_t held = slab * lanes_of_unit;  // samples of a slab
  const std::size_t heads_kept = options_.gradient && plan_.keep ? H : 1;

  w_scaled_ = layout.take<real>(H * s.d * s.d);
  ut_ = layout.take<real>(H * ut_size_);
  const bool tiles = plan_.kind == PlanKind::kTiles;
  const std::size_t packed_units = options_.keep_packed && !tiles ? plan_.units : 0;
  packed_x_ = layout.take<real>(packed_units * key_size_);
  packed_z_ = data_.self ? packed_x_ : layout.take<real>(packed_units * query_size_);
  partial_ = layout.take<real>(options_.gradient ? plan_.chunks * partial_size_ : 0);
  if (tiles) return lay_out_tiles(layout);
  for (Room& room : rooms_) {
    room.x = options_.keep_packed ? nullptr : layout.take<real>(slab * key_size_);
    room.z = options_.keep_packed || data_.self ? room.x : layout.take<real>(slab * query_size_);
    room.p = layout.take<real>(slab * query_size_);
    room.s = layout.take<real>(heads_kept * slab * weights_size_);
    room.c = layout.take<real>(heads_kept * slab * weights_size_);
    room.readout = layout.take<real>(held);
    room.row_readouts = layout.take<real>(rows_size_);
    room.row_gaps = layout.take<real>(rows_size_);
    room.gap = layout.take<real>(options_.gaps ? H * held : 0);
    room.phi = layout.take<double>(held);
    room.slope = layout.take<double>(held);
    room.log_slope = layout.take<double>(held);
    room.factors = layout.take<real>(held);
    if (!options_.gradient) continue;
    const std::size_t dL = round_up(s.d, L);
    const std::size_t row = plan_.features_are_lanes() ? held * dL : slab * s.d * L;
    room.gx = layout.take<real>(row * s.T);
    room.e = layout.take<real>(row * s.q);
  }
}

template <class real>
void Engine<real>::load_parameters(const Parameters<real>& parameters, const Member& member) {
  const Shape& s = data_.shape;
  const std::ptrdiff_t dd = std::ptrdiff_t(s.d) * s.d, qd = std::ptrdiff_t(s.q) * s.d;
  const int padded = plan_.samples_are_lanes() ? s.q : int(round_up(s.q, kernels_.lanes));
  const bool scaled = parameters.scale != real(1);
  if (member.index == 0) {
    w_ = scaled ? w_scaled_ : parameters.W;
    scale_ = parameters.scale;
  }
  for (int h = member.index; h < s.H; h += member.count) {
    kernels_.pack_rows(parameters.U + h * qd, s.q, s.d, padded, ut_ + h * ut_size_);
    if (scaled)
      for (std::ptrdiff_t i = h * dd; i < (h + 1) * dd; ++i)
        w_scaled_[i] = parameters.scale * parameters.W[i];
  }
}

template <class real>
void Engine<real>::run_chunks(Pass pass, const Member& member) {
  if (plan_.kind == PlanKind::kTiles) return run_tiles(pass, member);
  for (;;) {
    const int chunk = next_chunk_.fetch_add(1, std::memory_order_relaxed);
    if (chunk >= plan_.chunks) return;
    run_chunk(pass, chunk, rooms_[member.index]);
    if (member.index == 0 && interrupted_ && interrupted_())
      next_chunk_.store(plan_.chunks, std::memory_order_relaxed);
  }
}

template <class real>
void Engine<real>::pack(const real* from, int rows, const Slab& slab, real* to) const {
  const Shape& s = data_.shape;
  const int L = kernels_.lanes, padded = int(round_up(rows, L));
  const std::ptrdiff_t size = std::ptrdiff_t(rows) * s.d;
  from += slab.first_sample * size;
  for (int u = 0; u < slab.units; ++u) {
    if (plan_.samples_are_lanes())
      kernels_.pack_samples(from + u * L * size, std::min(L, slab.samples - u * L), rows, s.d,
                            to + u * size * L);
    else
      kernels_.pack_rows(from + u * size, rows, s.d, padded, to + std::ptrdiff_t(u) * s.d * padded);
  }
}

template <class real>
typename Engine<real>::Slab Engine<real>::open_slab(int chunk, std::ptrdiff_t first,
                                                    std::ptrdiff_t last, Room& room) const {
  const Shape& s = data_.shape;
  const std::ptrdiff_t samples_per_unit = plan_.samples_are_lanes() ? kernels_.lanes : 1;
  Slab slab{first * samples_per_unit, int(last - first), 0, nullptr, nullptr};
  slab.samples = int(std::min(last * samples_per_unit, s.n) - slab.first_sample);
  real* x = options_.keep_packed ? packed_x_ + first * key_size_ : room.x;
  real* z = data_.self ? x : options_.keep_packed ? packed_z_ + first * query_size_ : room.z;
  if (!options_.keep_packed || !packed_chunks_[chunk]) {
    pack(data_.x, s.T, slab, x);
    if (!data_.self) pack(data_.z, s.q, slab, z);
  }
  slab.x = x;
  slab.z = z;
  return slab;
}

template <class real>
void Engine<real>::score(RowMode mode, int head, const Slab& slab, Room& room, real* gap) const {
  const Shape& s = data_.shape;
  const bool kept = plan_.keep && mode != RowMode::kReadout;
  const std::ptrdiff_t at = kept ? head * (slab.units * weights_size_) : 0;
  const ScoreArguments<real> arguments{s.T,
                                       s.q,
                                       s.d,
                                       slab.units,
                                       w_ + std::ptrdiff_t(head) * s.d * s.d,
                                       ut_ + head * ut_size_,
                                       slab.x,
                                       slab.z,
                                       room.p,
                                       room.s + at,
                                       room.c + at,
                                       weights_size_,
                                       room.readout,
                                       gap,
                                       room.row_readouts,
                                       room.row_gaps,
                                       mode};
  (plan_.samples_are_lanes() ? kernels_.scores_samples : kernels_.scores_rows)(arguments);
}

/// Loss and slope of `samples` samples from their outputs.
template <class real>
void Engine<real>::measure_loss(Totals& totals, std::ptrdiff_t first, int samples,
                                const double* phi, double* slope, double* log_slope) const {
  for (int i = 0; i < samples; ++i) {
    const double y = double(data_.y[first + i]);
    const double weight = data_.weight ? double(data_.weight[first + i]) : 1.0;
    const LossTerm term = loss_term(loss_, phi[i], y);
    totals.loss += weight * term.value;
    totals.correct += y * phi[i] > 0 ? weight : 0.0;
    totals.margin = std::min(totals.margin, y * phi[i]);
    slope[i] = term.slope * weight * share();
    if (options_.gaps) log_slope[i] = term.log_slope + std::log(weight);
  }
}

template <class real>
void Engine<real>::gather_scales(int chunk, const Slab& slab, const Room& room) {
  const int H = data_.shape.H, held = samples_held(slab);
  double* scales = chunk_scales_.data() + std::size_t(chunk) * (H + 1);
  for (int i = 0; i < slab.samples; ++i) {
    scales[H] = std::max(scales[H], room.log_slope[i]);
    for (int h = 0; h < H; ++h)
      scales[h] = std::max(scales[h], room.log_slope[i] + double(room.gap[h * held + i]));
  }
}

/// Keys of the slab times a factor for each sample, into room.gx.
template <class real>
void Engine<real>::scale_keys(const Slab& slab, const double* factors, Room& room) const {
  const Shape& s = data_.shape;
  const int L = kernels_.lanes;
  const std::ptrdiff_t size = std::ptrdiff_t(s.T) * s.d;
  if (plan_.features_are_lanes()) {
    const int padded = int(round_up(s.d, L));
    for (int i = 0; i < slab.samples; ++i)
      kernels_.scale_rows(data_.x + (slab.first_sample + i) * size, real(factors[i]), s.T, s.d,
                          padded, room.gx + std::ptrdiff_t(i) * s.T * padded);
    return;
  }
  for (int i = 0; i < slab.units * L; ++i)
    room.factors[i] = i < slab.samples ? real(factors[i]) : real(0);
  for (int u = 0; u < slab.units; ++u)
    kernels_.scale_samples(slab.x + u * size * L, room.factors + u * L, size,
                           room.gx + u * size * L);
}

/// Adds one head's gradient of the slab to the chunk's; a or dd may be null.
template <class real>
void Engine<real>::accumulate(int chunk, int head, const Slab& slab, const real* a, const real* dd,
                              Room& room, bool add) const {
  const Shape& s = data_.shape;
  const std::ptrdiff_t row = gradient_row();
  real* gW = partial_ + chunk * partial_size_ + head * (s.d * row);
  real* gU = partial_ + chunk * partial_size_ + s.H * (s.d * row) + head * (s.q * row);
  const bool features = plan_.features_are_lanes();
  GradientArguments<real> in{s.T,
                             s.q,
                             s.d,
                             features ? slab.samples : slab.units,
                             a,
                             dd,
                             room.gx,
                             features ? data_.z + slab.first_sample * s.q * s.d : slab.z,
                             room.e,
                             a ? gU : nullptr,
                             dd ? gW : nullptr,
                             add};
  if (!features) return kernels_.gradients_samples(in);
  if (!plan_.samples_are_lanes()) return kernels_.gradients_features_of_rows(in);
  // Samples were lanes: a block of them is what one product can sum over.
  const int L = kernels_.lanes;
  for (int block = 0; block < slab.units; ++block) {
    in.units = std::min(L, slab.samples - block * L);
    kernels_.gradients_features_of_samples(in);
    if (a) in.a += weights_size_;
    if (dd) in.dd += weights_size_;
    in.gx += L * s.T * row;
    in.z += L * s.q * s.d;
    in.add = true;
  }
}

/// Gradients of a slab whose loss is known.
template <class real>
void Engine<real>::differentiate(Pass pass, int chunk, const Slab& slab, Room& room, bool add) {
  const Shape& s = data_.shape;
  const int held = samples_held(slab);
  const bool scaled = pass == Pass::kScaledGradient;
  if (!scaled) scale_keys(slab, room.slope, room);
  for (int h = 0; h < s.H; ++h) {
    const std::ptrdiff_t at = plan_.keep ? h * (slab.units * weights_size_) : 0;
    const real *a = options_.wrt_U ? room.s + at : nullptr,
               *dd = options_.wrt_W ? room.c + at : nullptr;
    const real* gap = options_.gaps ? room.gap + h * held : nullptr;
    if (!plan_.keep)
      score(scaled ? RowMode::kScaled : RowMode::kDerivative, h, slab, room,
            options_.gaps ? room.gap + h * held : nullptr);
    if (!scaled) {
      accumulate(chunk, h, slab, a, dd, room, add);
      continue;
    }
    double* factors = room.phi;  // the outputs are not needed any more
    if (dd) {
      for (int i = 0; i < slab.samples; ++i)
        factors[i] = std::copysign(relative(double(gap[i]), scales_.heads[h], room.log_slope[i]),
                                   room.slope[i]);
      scale_keys(slab, factors, room);
      accumulate(chunk, h, slab, nullptr, dd, room, add);
    }
    if (a) {
      for (int i = 0; i < slab.samples; ++i)
        factors[i] = std::copysign(relative(0.0, scales_.slope, room.log_slope[i]), room.slope[i]);
      scale_keys(slab, factors, room);
      accumulate(chunk, h, slab, a, nullptr, room, add);
    }
  }
}

template <class real>
void Engine<real>::run_chunk(Pass pass, int chunk, Room& room) {
  const Shape& s = data_.shape;
  const std::ptrdiff_t first = plan_.units * chunk / plan_.chunks,
                       last = plan_.units * (chunk + 1) / plan_.chunks;
  const bool gradient = pass == Pass::kGradient || pass == Pass::kScaledGradient;
  // Weights that are not kept are computed again later; here they matter only for their gaps.
  const RowMode mode = !gradient || !(plan_.keep || options_.gaps) ? RowMode::kReadout
                       : pass == Pass::kScaledGradient             ? RowMode::kScaled
                                                                   : RowMode::kDerivative;
  const double scale = 1.0 / std::sqrt(double(s.H));
  chunk_totals_[chunk] = Totals{0, 0, kInfinity};
  if (options_.gaps && pass == Pass::kGradient)
    std::fill_n(chunk_scales_.begin() + std::ptrdiff_t(chunk) * (s.H + 1), s.H + 1, -kInfinity);
  for (std::ptrdiff_t unit = first; unit < last; unit += plan_.slab) {
    const Slab slab = open_slab(chunk, unit, std::min(unit + plan_.slab, last), room);
    const int held = samples_held(slab);
    std::fill_n(room.phi, slab.samples, 0.0);
    for (int h = 0; h < s.H; ++h) {
      score(mode, h, slab, room, options_.gaps && gradient ? room.gap + h * held : nullptr);
      for (int i = 0; i < slab.samples; ++i) room.phi[i] += double(room.readout[i]);
    }
    for (int i = 0; i < slab.samples; ++i) room.phi[i] *= scale;
    if (outputs_)
      for (int i = 0; i < slab.samples; ++i) outputs_[slab.first_sample + i] = real(room.phi[i]);
    if (pass == Pass::kOutputs) continue;
    measure_loss(chunk_totals_[chunk], slab.first_sample, slab.samples, room.phi, room.slope,
                 room.log_slope);
    if (options_.gaps && pass == Pass::kGradient) gather_scales(chunk, slab, room);
    if (gradient) differentiate(pass, chunk, slab, room, unit > first);
  }
  packed_chunks_[chunk] = 1;
}

template <class real>
void Engine<real>::reduce_gradient(real* gW, real* gU, const Member& member) {
  const Shape& s = data_.shape;
  const std::ptrdiff_t row = gradient_row();
  const auto reduce =
      plan_.features_are_lanes() ? kernels_.reduce_features : kernels_.reduce_samples;
  for (int h = member.index; h < s.H; h += member.count) {
    if (gW) {
      real* out = gW + std::ptrdiff_t(h) * s.d * s.d;
      reduce({partial_ + h * (s.d * row), partial_size_, plan_.chunks, s.d, s.d, out});
      if (scale_ != real(1))
        for (int i = 0; i < s.d * s.d; ++i) out[i] *= scale_;
    }
    if (gU)
      reduce({partial_ + s.H * (s.d * row) + h * (s.q * row), partial_size_, plan_.chunks, s.q, s.d,
              gU + std::ptrdiff_t(h) * s.q * s.d});
  }
}

template <class real>
Totals Engine<real>::totals() const {
  Totals sum{0, 0, kInfinity};
  for (const Totals& t : chunk_totals_) {
    sum.loss += t.loss;
    sum.correct += t.correct;
    sum.margin = std::min(sum.margin, t.margin);
  }
  sum.loss /= total_weight_;
  sum.correct /= total_weight_;
  return sum;
}

template <class real>
bool Engine<real>::needs_scaling(bool together) {
  // Above this, entries 1e-8 (float) or 1e-16 (double) times the largest still are normal numbers.
  constexpr double kUnderflow = sizeof(real) == 4 ? -50.0 : -600.0;
  const int H = data_.shape.H;
  std::fill(scales_.heads.begin(), scales_.heads.end(), -kInfinity);
  scales_.slope = -kInfinity;
  for (int c = 0; c < plan_.chunks; ++c) {
    const double* of_chunk = chunk_scales_.data() + std::size_t(c) * (H + 1);
    for (int h = 0; h < H; ++h) scales_.heads[h] = std::max(scales_.heads[h], of_chunk[h]);
    scales_.slope = std::max(scales_.slope, of_chunk[H]);
  }
  if (together)
    std::fill(scales_.heads.begin(), scales_.heads.end(),
              *std::max_element(scales_.heads.begin(), scales_.heads.end()));
  for (double& scale : scales_.heads) scale = std::rint(scale);
  scales_.slope = std::rint(scales_.slope);
  const auto underflows = [](double x) { return x < kUnderflow && x > -kInfinity; };
  return (options_.wrt_U && underflows(scales_.slope)) ||
         (options_.wrt_W && std::any_of(scales_.heads.begin(), scales_.heads.end(), underflows));
}

template class Engine<float>;
template class Engine<double>;

}  // namespace mhfast
