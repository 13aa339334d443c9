#include "engine.hpp"

#include <algorithm>
#include <cmath>

#include "tuning.hpp"

namespace mhfast {
namespace {

/// Of all runs. Multiply-adds count two; an exponential about twenty.
double flops(const Shape& s, int runs) {
  const double layer = s.is_layer() ? 2.0 * s.T * s.d + 6.0 * s.d * s.p : 0.0;
  return double(s.n) * runs * s.H * s.q * (4.0 * s.d * s.d + 8.0 * s.T * s.d + 20.0 * s.T + layer);
}

}  // namespace

template <class real>
Engine<real>::Engine(const Data<real>& data, std::optional<Loss> loss, const Options& options,
                     int threads)
    : kernels_(active_kernels<real>()),
      data_(data),
      loss_(loss),
      options_(options),
      plan_(make_plan(data.shape, registers_of(kernels_), options.runs_are_lanes)),
      width_(plan_.runs_are_lanes() ? kernels_.lanes : 1),
      expected_seconds_(flops(data.shape, data.runs) / (kSlowFlops * kernels_.lanes)),
      threads_(useful_threads(threads,
                              plan_.kind == PlanKind::kTiles
                                  ? std::int64_t(plan_.slab) * data.shape.H * plan_.parts
                                  : plan_.chunks,
                              flops(data.shape, data.runs))) {
  const Shape& s = data_.shape;
  const std::ptrdiff_t L = kernels_.lanes;
  const bool lanes = plan_.problems_are_lanes();
  const std::ptrdiff_t qL = round_up(s.q, L), TL = round_up(s.T, L);
  const std::ptrdiff_t rows = s.is_layer() ? plan_.tile : s.q;
  key_size_ = s.d * (lanes ? s.T * L : TL);
  query_size_ = s.d * (lanes ? s.q * L : qL);
  target_size_ = s.is_layer() ? data_.targets * L : 0;
  rows_size_ = lanes ? rows * L : round_up(rows, L);
  weights_size_ = s.T * rows_size_;
  parameter_ = width_;
  ut_size_ = parameter_ *
             (s.is_layer() ? s.p * (lanes ? s.d : round_up(s.d, L)) : s.d * (lanes ? s.q : qL));
  part_ = partial_gradient(s, plan_.kind, int(L));

  weigh_as_part_of(data_);
  read_samples(0, s.n);
  chunk_totals_.resize(plan_.chunks);
  if (options_.gaps) {
    chunk_scales_.resize(std::size_t(plan_.chunks) * (s.H + 1) * L);
    scales_.resize(std::size_t(s.H + 1) * L);
  }
  rooms_.resize(std::max(threads_, options_.members));
}

/// What the loss of a run is divided by, and what the derivative of a model's output is, where the
/// samples are drawn from `whole`.
template <class real>
void Engine<real>::weigh_as_part_of(const Data<real>& whole) {
  if (!loss_) return;
  const Shape& s = data_.shape;
  const double part = s.n == whole.shape.n ? 1.0 : double(s.n) / double(whole.shape.n);
  total_weights_.resize(width_);
  total_labels_.resize(width_);
  shares_.resize(kernels_.lanes);
  for (int lane = 0; lane < width_; ++lane) {
    const int run = std::min(lane, data_.runs - 1);
    total_weights_[lane] = part * whole.total_weight(run, *loss_);
    total_labels_[lane] = part * whole.total_labels(run, *loss_);
  }
  for (int l = 0; l < kernels_.lanes; ++l) {
    const double total = total_weights_[width_ > 1 ? l : 0];
    shares_[l] = 1.0 / (s.is_layer() ? total : total * std::sqrt(double(s.H)));
  }
  if (s.is_layer()) return;
  const std::size_t held = s.n * width_ + kernels_.lanes;  // whole vectors are read from anywhere
  labels_.resize(held);
  weights_.resize(held);
  if (data_.weight && options_.gaps) log_weights_.resize(held);
}

template <class real>
void Engine<real>::read_samples(std::ptrdiff_t first, std::ptrdiff_t last) {
  if (!loss_ || data_.shape.is_layer()) return;
  for (std::ptrdiff_t e = first * width_; e < last * width_; ++e) {
    const std::ptrdiff_t sample = e / width_;
    const int run = std::min(int(e % width_), data_.runs - 1);
    labels_[e] = double(data_.y[run * data_.run.y + sample]);
    weights_[e] = data_.weight_of(run, sample, 0);
    if (!log_weights_.empty()) log_weights_[e] = std::log(weights_[e]);
  }
}

template <class real>
void Engine<real>::bind(Block& block) {
  Layout measure;
  lay_out(measure);
  Layout layout(block.reserve(measure.size()));
  lay_out(layout);
}

template <class real>
void Engine<real>::lay_out(Layout& layout) {
  const Shape& s = data_.shape;
  const std::ptrdiff_t L = kernels_.lanes;
  const std::size_t H = s.H, lanes_of_unit = plan_.problems_are_lanes() ? L : 1;
  const std::size_t slab = std::min<std::ptrdiff_t>(plan_.slab, plan_.units);
  const std::size_t held = round_up(slab * lanes_of_unit, L);  // entries of a slab
  const std::size_t heads_kept = options_.gradient && plan_.keep ? H : 1;
  const std::size_t shared_query = s.shared_query ? 1 : 0;

  w_scaled_ = layout.take<real>(H * s.d * s.d * parameter_);
  ut_ = layout.take<real>(H * ut_size_);
  shared_product_ = layout.take<real>(shared_query * H * s.q * s.d);
  shared_p_ = layout.take<real>(shared_query * H * query_size_);
  shared_e_ = layout.take<real>(shared_query * options_.gradient * H * s.q * s.d * parameter_);
  partial_ = layout.take<real>(options_.gradient ? plan_.chunks * part_.size : 0);
  if (plan_.kind == PlanKind::kTiles) return lay_out_tiles(layout);
  if (is_layer_by_rows()) return lay_out_layer_rows(layout);
  for (Room& room : rooms_) {
    room.x = packed_ ? nullptr : layout.take<real>(slab * key_size_);
    room.z =
        packed_ || data_.self || s.shared_query ? room.x : layout.take<real>(slab * query_size_);
    room.y = packed_ ? nullptr : layout.take<real>(slab * target_size_);
    room.limits = layout.take<real>(data_.is_limited() ? slab * rows_size_ : 0);
    room.p = layout.take<real>(slab * query_size_);
    room.s = layout.take<real>(heads_kept * slab * weights_size_);
    room.c = layout.take<real>((s.is_layer() ? 1 : heads_kept) * slab * weights_size_);
    room.readout = layout.take<real>((s.is_layer() ? 1 : H) * held);
    room.row_readouts = layout.take<real>(rows_size_);
    room.row_gaps = layout.take<real>(rows_size_);
    room.gap = layout.take<real>(options_.gaps ? H * held : 0);
    room.phi = layout.take<double>(held);
    room.log_slope = layout.take<double>(held);
    room.slope = layout.take<real>(held);
    room.factors = layout.take<real>(held);
    if (s.is_layer()) lay_out_layer(layout, room);
    if (!options_.gradient) continue;
    const std::size_t dL = round_up(s.d, L);
    const std::size_t row = plan_.features_are_lanes() ? held * dL : slab * s.d * L;
    room.gx = layout.take<real>(row * s.T);
    room.e = layout.take<real>(row * s.q);
  }
}

template <class real>
std::shared_ptr<Packed<real>> Engine<real>::make_packed() const {
  if (plan_.kind == PlanKind::kTiles || is_layer_by_rows()) return nullptr;
  const bool external = !data_.self && !data_.shape.shared_query;
  auto packed = std::make_shared<Packed<real>>();
  const auto lay_out = [&](Layout layout) {
    packed->x = layout.template take<real>(plan_.units * key_size_);
    packed->z = external ? layout.template take<real>(plan_.units * query_size_) : packed->x;
    packed->y = layout.template take<real>(data_.y ? plan_.units * target_size_ : 0);
    return layout.size();
  };
  lay_out(Layout(packed->block.reserve(lay_out(Layout()))));
  return packed;
}

/// Packs units `first` to `last` of arrays (n, rows, columns).
template <class real>
void Engine<real>::pack(const real* from, std::ptrdiff_t run, int rows, int columns,
                        std::ptrdiff_t first, std::ptrdiff_t last, real* to) const {
  const int L = kernels_.lanes, padded = int(round_up(rows, L));
  const std::ptrdiff_t size = std::ptrdiff_t(rows) * columns;
  for (std::ptrdiff_t u = first; u < last; ++u) {
    if (plan_.samples_are_lanes()) {
      const int valid = int(std::min<std::ptrdiff_t>(L, data_.shape.n - u * L));
      kernels_.pack_lanes(from + u * L * size, size, valid, size, to);
      to += size * L;
    } else if (plan_.runs_are_lanes()) {
      // What all share, the lanes without a run have as well: others may use the result.
      kernels_.pack_lanes(from + u * size, run, run == 0 ? L : data_.runs, size, to);
      to += size * L;
    } else {
      kernels_.pack_rows(from + u * size, rows, columns, padded, to);
      to += std::ptrdiff_t(columns) * padded;
    }
  }
}

template <class real>
void Engine<real>::pack_all(const Member& member) {
  if (!packed_) return;
  const Shape& s = data_.shape;
  const std::ptrdiff_t first = plan_.units * member.index / member.count,
                       last = plan_.units * (member.index + 1) / member.count;
  pack(data_.x, data_.run.x, s.T, s.d, first, last, packed_->x + first * key_size_);
  if (packed_->z != packed_->x)
    pack(data_.z, data_.run.z, s.q, s.d, first, last, packed_->z + first * query_size_);
  if (target_size_ && data_.y)
    pack(data_.y, data_.run.y, int(data_.targets), 1, first, last,
         packed_->y + first * target_size_);
}

template <class real>
void Engine<real>::load_parameters(const Parameters<real>& parameters, const Member& member) {
  const Shape& s = data_.shape;
  const std::ptrdiff_t dd = std::ptrdiff_t(s.d) * s.d * parameter_;
  const bool scaled = parameters.scale != real(1);
  if (member.index == 0) {
    w_ = scaled ? w_scaled_ : parameters.W;
    v_ = parameters.V;
    scale_ = parameters.scale;
    prompt_ = parameters.prompt;
  }
  // A classifier's U (q, d) or a layer's V (d, p), transposed.
  const real* readout = s.is_layer() ? parameters.V : parameters.U;
  const int rows = s.is_layer() ? s.d : s.q, columns = s.is_layer() ? s.p : s.d;
  const int padded = plan_.problems_are_lanes() ? rows : int(round_up(rows, kernels_.lanes));
  for (int h = member.index; h < s.H; h += member.count) {
    if (s.shared_query) load_shared_product(parameters, h);
    const real* from = readout + std::ptrdiff_t(h) * rows * columns * parameter_;
    if (plan_.runs_are_lanes())
      kernels_.transpose_lanes(from, rows, columns, ut_ + h * ut_size_);
    else
      kernels_.pack_rows(from, rows, columns, padded, ut_ + h * ut_size_);
    if (is_layer_by_rows()) {
      const int pL = int(round_up(s.p, kernels_.lanes));
      kernels_.scale_rows(from, real(1), s.d, s.p, pL, v_rows_ + std::ptrdiff_t(h) * s.d * pL);
    }
    if (scaled)
      for (std::ptrdiff_t i = h * dd; i < (h + 1) * dd; ++i)
        w_scaled_[i] = parameters.scale * parameters.W[i];
  }
}

/// Z W of one head, Z being the query rows of all samples, as scores would compute it for a unit.
template <class real>
void Engine<real>::load_shared_product(const Parameters<real>& parameters, int head) {
  const Shape& s = data_.shape;
  const int width = int(parameter_);
  const real* w = parameters.W + std::ptrdiff_t(head) * s.d * s.d * width;
  real* to = shared_p_ + head * query_size_;
  const bool by_rows = !plan_.problems_are_lanes();
  const std::ptrdiff_t row = by_rows ? s.d : 1, column = by_rows ? 1 : s.q;
  real* product = plan_.runs_are_lanes() ? to : shared_product_ + head * std::ptrdiff_t(s.q) * s.d;
  kernels_.small_product({s.q, s.d, s.d, width, parameters.prompt, s.d, 1, w, s.d, 1, product, row,
                          column, parameters.scale, false});
  if (plan_.samples_are_lanes())
    kernels_.pack_lanes(product, 0, kernels_.lanes, std::ptrdiff_t(s.q) * s.d, to);
  else if (by_rows)
    kernels_.pack_rows(product, s.q, s.d, int(round_up(s.q, kernels_.lanes)), to);
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
void Engine<real>::run_chunk(Pass pass, int chunk, Room& room) {
  const Shape& s = data_.shape;
  // The larger chunks first: what is left at the end is shared better.
  const auto begin = [&](std::ptrdiff_t c) {
    return plan_.units / plan_.chunks * c + std::min(c, plan_.units % plan_.chunks);
  };
  const std::ptrdiff_t first = begin(chunk), last = begin(chunk + 1);
  chunk_totals_[chunk] = LaneTotals();
  const std::ptrdiff_t scales = std::ptrdiff_t(s.H + 1) * kernels_.lanes;
  if (gathers_scales(pass)) std::fill_n(chunk_scales_.begin() + chunk * scales, scales, -kInfinity);
  for (std::ptrdiff_t unit = first; is_layer_by_rows() && unit < last; ++unit) {
    Slab tile = open_layer_tile(unit, room);
    tile.first = unit == first;
    run_layer_tile(pass, chunk, tile, room);
  }
  if (is_layer_by_rows()) return;
  for (std::ptrdiff_t unit = first; unit < last; unit += plan_.slab) {
    Slab slab = open_slab(unit, std::min(unit + plan_.slab, last), room);
    slab.first = unit == first;
    const int step = s.is_layer() ? plan_.tile : s.q;
    for (int row = 0; row < s.q; row += step) {
      slab.first_row = row;
      slab.rows = std::min(step, s.q - row);
      if (data_.is_limited()) find_limits(slab, room);
      if (s.is_layer())
        run_layer_slab(pass, chunk, slab, room);
      else
        run_classifier_slab(pass, chunk, slab, room);
    }
  }
}

template <class real>
typename Engine<real>::Slab Engine<real>::open_slab(std::ptrdiff_t first, std::ptrdiff_t last,
                                                    Room& room) const {
  const Shape& s = data_.shape;
  const std::ptrdiff_t samples_per_unit = plan_.samples_are_lanes() ? kernels_.lanes : 1;
  Slab slab{
      first * samples_per_unit, int(last - first), 0, nullptr, nullptr, nullptr, 0, s.q, s.T, true};
  slab.samples = int(std::min(last * samples_per_unit, s.n) - slab.first_sample);
  if (packed_) {
    slab.x = packed_->x + first * key_size_;
    slab.z = data_.self ? slab.x : packed_->z + first * query_size_;
    slab.y = packed_->y + first * target_size_;
  } else {
    pack(data_.x, data_.run.x, s.T, s.d, first, last, room.x);
    if (room.z != room.x) pack(data_.z, data_.run.z, s.q, s.d, first, last, room.z);
    if (target_size_ && data_.y)
      pack(data_.y, data_.run.y, int(data_.targets), 1, first, last, room.y);
    slab.x = room.x;
    slab.z = room.z;
    slab.y = room.y;
  }
  return slab;
}

/// Keys that each row of the slab sees, in the layout of a row of scores.
template <class real>
void Engine<real>::find_limits(const Slab& slab, Room& room) const {
  const Shape& s = data_.shape;
  const int L = kernels_.lanes;
  real* to = room.limits;
  if (plan_.problems_are_lanes()) {
    for (int u = 0; u < slab.units; ++u)
      for (int t = 0; t < slab.rows; ++t)
        for (int l = 0; l < L; ++l) {
          const int entry = u * L + l;
          const bool is_sample = entry < entries(slab);
          *to++ = real(is_sample
                           ? data_.limit(sample_of(slab, entry), run_of(entry), slab.first_row + t)
                           : s.T);
        }
    return;
  }
  for (int i = 0; i < slab.samples; ++i, to += rows_size_)
    data_.write_limits(slab.first_sample + i, 0, s.q, int(rows_size_), to);
}

template <class real>
ScoreArguments<real> Engine<real>::scores(RowMode mode, int head, const Slab& slab, Room& room,
                                          real* gap, bool kept) const {
  const Shape& s = data_.shape;
  const int L = kernels_.lanes;
  const bool lanes = plan_.problems_are_lanes();
  const std::ptrdiff_t at = kept ? head * (slab.units * weights_size_) : 0;
  const std::ptrdiff_t row = lanes ? std::ptrdiff_t(slab.first_row) * L : 0;
  const ScoreOperands<real> operands{w_ + std::ptrdiff_t(head) * s.d * s.d * parameter_,
                                     slab.x,
                                     slab.z + row * s.d,
                                     data_.is_limited() ? room.limits : nullptr,
                                     ut_ + head * ut_size_,
                                     lanes ? s.q * parameter_ : rows_size_,
                                     plan_.runs_are_lanes()};
  const ScoreMemory<real> memory{room.p,
                                 room.s + at,
                                 room.c + (s.is_layer() ? 0 : at),
                                 room.readout + (s.is_layer() ? 0 : head * entries_held(slab)),
                                 room.row_readouts,
                                 room.row_gaps};
  ScoreArguments<real> in = score_arguments(mode, s.d, {slab.keys, slab.rows, slab.units}, operands,
                                            memory, weights_size_);
  in.gap = gap;
  if (s.shared_query) {
    in.shared_p = shared_p_ + head * query_size_ + row;
    in.shared_p_k = query_size_ / s.d;
  }
  return in;
}

template <class real>
void Engine<real>::run_scores(const ScoreArguments<real>& arguments) const {
  const auto kernel = plan_.runs_are_lanes()      ? kernels_.scores_runs
                      : plan_.samples_are_lanes() ? kernels_.scores_samples
                                                  : kernels_.scores_rows;
  kernel(arguments);
}

template <class real>
void Engine<real>::gather_scales(int chunk, const Slab& slab, const Room& room) {
  const int H = data_.shape.H, held = entries_held(slab);
  kernels_.gather_scales({held, H, room.log_slope, room.gap, held,
                          chunk_scales_.data() + std::ptrdiff_t(chunk) * (H + 1) * kernels_.lanes});
}

/// Factors of a scaled pass for the slab's entries, see FactorArguments.
template <class real>
const real* Engine<real>::scaled_factors(const Slab& slab, const real* gaps,
                                         const double* log_scale, const real* signs,
                                         Room& room) const {
  kernels_.scaled_factors(
      {entries_held(slab), gaps, log_scale, room.log_slope, signs, room.factors});
  return room.factors;
}

/// Keys of the slab times a factor for each entry.
template <class real>
const real* Engine<real>::scale_keys(const Slab& slab, const real* factors, Room& room) const {
  const Shape& s = data_.shape;
  const int L = kernels_.lanes;
  const std::ptrdiff_t size = std::ptrdiff_t(s.T) * s.d;
  if (plan_.features_are_lanes()) {
    const int padded = int(round_up(s.d, L));
    for (int i = 0; i < slab.samples; ++i)
      kernels_.scale_rows(data_.x + (slab.first_sample + i) * size, factors[i], slab.keys, s.d,
                          padded, room.gx + std::ptrdiff_t(i) * s.T * padded);
    return room.gx;
  }
  for (int u = 0; u < slab.units; ++u)
    kernels_.scale_samples(slab.x + u * size * L, factors + u * L, size, room.gx + u * size * L);
  return room.gx;
}

/// Adds one head's gradient of the slab to the chunk's; a or dd may be null.
template <class real>
void Engine<real>::accumulate(int chunk, int head, const Slab& slab, const real* a, const real* dd,
                              const real* gx, Room& room) const {
  const Shape& s = data_.shape;
  const bool features = plan_.features_are_lanes();
  real* partial = partial_ + chunk * part_.size;
  GradientArguments<real> in{};
  in.T = slab.keys;
  in.q = slab.rows;
  in.d = s.d;
  in.units = features ? slab.samples : slab.units;
  in.a = a;
  in.dd = dd;
  in.gx = gx;
  in.e = room.e;
  if (a) in.gu = partial + part_.readout_at + head * part_.readout_head;
  if (dd && s.shared_query)
    in.ge = partial + head * part_.weight_head + slab.first_row * part_.weight_row;
  else if (dd)
    in.gw = partial + head * part_.weight_head;
  // The rows of a slab of a layer follow each other; a tile of rows may be a chunk's first unit.
  const bool follows = slab.first_row > 0 && !is_layer_by_rows();
  in.add = !slab.first || (follows && !s.shared_query);
  if (!features) {
    in.z = slab.z + std::ptrdiff_t(slab.first_row) * s.d * kernels_.lanes;
    return kernels_.gradients_samples(in);
  }
  if (!s.shared_query) in.z = data_.z + (slab.first_sample * s.q + slab.first_row) * s.d;
  if (!plan_.samples_are_lanes()) return kernels_.gradients_features_of_rows(in);
  // Samples were lanes: a block of them is what one product can sum over.
  const int L = kernels_.lanes;
  for (int block = 0; block < slab.units; ++block) {
    in.units = std::min(L, slab.samples - block * L);
    kernels_.gradients_features_of_samples(in);
    if (a) in.a += weights_size_;
    if (dd) in.dd += weights_size_;
    in.gx += L * s.T * part_.weight_row;
    if (in.z) in.z += L * s.q * s.d;
    in.add = true;
  }
}

template <class real>
void Engine<real>::reduce_gradient(const Gradient& gradient, const Member& member) {
  const Shape& s = data_.shape;
  const int readout_rows = s.is_layer() ? s.d : s.q, readout_columns = s.is_layer() ? s.p : s.d;
  const auto reduce = [&](const real* partial, int rows, int columns, real* out) {
    if (plan_.runs_are_lanes()) {
      std::copy_n(partial, std::ptrdiff_t(rows) * columns * parameter_, out);
      return;
    }
    (plan_.features_are_lanes() ? kernels_.reduce_features : kernels_.reduce_samples)(
        {partial, part_.size, plan_.chunks, rows, columns, out});
  };
  const std::ptrdiff_t dd = std::ptrdiff_t(s.d) * s.d, qd = std::ptrdiff_t(s.q) * s.d;
  const int width = int(parameter_);
  for (int h = member.index; h < s.H; h += member.count) {
    const real* of_weight = partial_ + h * part_.weight_head;
    if (s.shared_query && options_.wrt_W) {
      real* e = shared_e_ + h * qd * width;
      reduce(of_weight, s.q, s.d, e);
      if (gradient.W)
        kernels_.small_product({s.d, s.d, s.q, width, prompt_, 1, s.d, e, s.d, 1,
                                gradient.W + h * dd * width, s.d, 1, scale_, false});
    } else if (gradient.W) {
      real* out = gradient.W + h * dd * width;
      reduce(of_weight, s.d, s.d, out);
      if (scale_ != real(1))
        for (std::ptrdiff_t i = 0; i < dd * width; ++i) out[i] *= scale_;
    }
    if (gradient.readout)
      reduce(partial_ + part_.readout_at + h * part_.readout_head, readout_rows, readout_columns,
             gradient.readout + std::ptrdiff_t(h) * readout_rows * readout_columns * width);
  }
  if (!gradient.prompt) return;
  member.wait();
  if (member.index > 0) return;
  for (int h = 0; h < s.H; ++h)
    kernels_.small_product({s.q, s.d, s.d, width, shared_e_ + h * qd * width, s.d, 1,
                            w_ + h * dd * width, 1, s.d, gradient.prompt, s.d, 1, real(1), h > 0});
}

template <class real>
Totals Engine<real>::totals(int lane) const {
  Totals sum{0, 0, kInfinity};
  const auto add = [&sum](const LaneTotals& chunk, int l) {
    sum.loss += chunk.loss[l];
    sum.correct += chunk.correct[l];
    sum.margin = std::min(sum.margin, chunk.margin[l]);
  };
  for (const LaneTotals& chunk : chunk_totals_) {
    if (width_ > 1)
      add(chunk, lane);
    else
      for (int l = 0; l < kernels_.lanes; ++l) add(chunk, l);
  }
  sum.loss /= total_weights_[lane];
  sum.correct /= total_labels_[lane];
  return sum;
}

template <class real>
bool Engine<real>::needs_scaling(bool together) {
  // Above this, entries 1e-8 (float) or 1e-16 (double) times the largest still are normal numbers.
  constexpr double kUnderflow = sizeof(real) == 4 ? -50.0 : -600.0;
  const int H = data_.shape.H, L = kernels_.lanes;
  const std::ptrdiff_t size = std::ptrdiff_t(H + 1) * L;
  std::copy_n(chunk_scales_.data(), size, scales_.data());
  for (int c = 1; c < plan_.chunks; ++c)
    for (std::ptrdiff_t i = 0; i < size; ++i)
      scales_[i] = std::max(scales_[i], chunk_scales_[c * size + i]);
  if (width_ == 1)  // lanes are samples, or parts of them
    for (auto lanes = scales_.begin(); lanes != scales_.end(); lanes += L)
      std::fill_n(lanes, L, *std::max_element(lanes, lanes + L));
  const auto underflows = [](double x) { return x < kUnderflow && x > -kInfinity; };
  bool needed = false;
  for (int l = 0; l < L; ++l) {
    double largest = -kInfinity;
    for (int h = 0; h < H; ++h) largest = std::max(largest, scales_[h * L + l]);
    for (int h = 0; h <= H; ++h) {
      double& scale = scales_[h * L + l];
      scale = std::rint(together && h < H ? largest : scale);
      const bool counts = h < H ? options_.wrt_W : options_.wrt_readout;
      needed |= counts && (width_ == 1 || l < data_.runs) && underflows(scale);
    }
  }
  return needed;
}

template class Engine<float>;
template class Engine<double>;

}  // namespace mhfast
