// Of one sample and head, with U = slope U_h for a classifier and G V_h^T for a layer:
//
//   dL/dX += A^T U + D^T (Z W),   dL/dZ += D X W^T
//
// Works on one sample and one head at a time, so only their A and D are stored.
#include "inputs.hpp"

#include <algorithm>
#include <cmath>

#include "evaluate.hpp"
#include "float_mode.hpp"

namespace mhfast {
namespace {

/// One thread's arrays for one sample and one head.
template <class real>
struct Room {
  real *xt, *zt, *ut, *p, *s, *c, *limits, *row_readouts;  // as scores_rows takes them
  real *readout, *u, *zw, *e, *g;  // U (q, d), Z W (q, d), D X (q, d), slopes of the outputs (q, p)
};

template <class real>
class InputGradients {
 public:
  InputGradients(const Data<real>& data, const Parameters<real>& parameters, Loss loss, real* gx,
                 real* gz)
      : data_(data),
        parameters_(parameters),
        loss_(loss),
        gx_(gx),
        gz_(gz),
        total_(data.total_weight(0, loss)) {}

  double run(int threads);

 private:
  const real* queries(std::ptrdiff_t i) const {
    const Shape& s = data_.shape;
    return s.shared_query ? parameters_.prompt : data_.z + i * s.q * s.d;
  }
  Room<real> take_room(Layout& layout) const;
  double measure(std::ptrdiff_t i, const real* f, Room<real>& room) const;
  void differentiate(std::ptrdiff_t i, Room<real>& room) const;
  void add_head(std::ptrdiff_t i, int h, Room<real>& room) const;

  const Kernels<real>& kernels_ = active_kernels<real>();
  const Data<real>& data_;
  const Parameters<real>& parameters_;
  const Loss loss_;
  real *gx_, *gz_;
  const double total_;
  std::vector<real> w_;  // scaled
};

template <class real>
Room<real> InputGradients<real>::take_room(Layout& layout) const {
  const Shape& s = data_.shape;
  const std::size_t L = kernels_.lanes, qL = round_up(s.q, L), TL = round_up(s.T, L);
  const std::size_t q = s.q, d = s.d, T = s.T;
  Room<real> room{};
  room.xt = layout.take<real>(d * TL);
  room.zt = data_.self ? room.xt : layout.take<real>(d * qL);
  room.ut = layout.take<real>(d * qL);
  room.p = layout.take<real>(d * qL);
  room.s = layout.take<real>(T * qL);
  room.c = layout.take<real>(T * qL);
  room.limits = layout.take<real>(qL);
  room.row_readouts = layout.take<real>(qL);
  room.readout = layout.take<real>(1);
  room.u = layout.take<real>(q * d);
  room.zw = layout.take<real>(q * d);
  room.e = layout.take<real>(q * d);
  room.g = layout.take<real>(q * std::max(1, s.p));
  return room;
}

/// Weighted loss of a sample from its outputs; writes their slopes to room.g.
template <class real>
double InputGradients<real>::measure(std::ptrdiff_t i, const real* f, Room<real>& room) const {
  const Shape& s = data_.shape;
  if (!s.is_layer()) {
    const double w = data_.weight_of(0, i, 0);
    room.g[0] = 0;
    if (w == 0) return 0;  // left out, whatever the output is
    const auto term = loss_term<ScalarMath>(loss_, double(f[i]), double(data_.y[i]), true);
    room.g[0] = real(term.slope * w / (total_ * std::sqrt(double(s.H))));
    return w * term.value;
  }
  double value = 0;
  const std::ptrdiff_t row_targets = data_.targets / s.q;
  for (int t = 0; t < s.q; ++t) {
    const double w = data_.weight_of(0, i, t);
    real* g = room.g + std::ptrdiff_t(t) * s.p;
    if (w == 0) {
      std::fill_n(g, s.p, real(0));
      continue;
    }
    const RowLoss row =
        row_loss(loss_, f + (i * s.q + t) * s.p, data_.y + i * data_.targets + t * row_targets, 1,
                 s.p, true, [&](int o, double slope) { g[o] = real(slope * w / total_); });
    value += w * row.value;
  }
  return value;
}

template <class real>
void InputGradients<real>::add_head(std::ptrdiff_t i, int h, Room<real>& room) const {
  const Shape& s = data_.shape;
  const std::ptrdiff_t d = s.d, qL = round_up(s.q, kernels_.lanes);
  const real* x = data_.x + i * s.T * d;
  const real* w = w_.data() + h * d * d;
  if (s.is_layer()) {
    const real* v = parameters_.V + h * d * s.p;
    kernels_.small_product(
        {s.q, s.d, s.p, 1, room.g, s.p, 1, v, 1, s.p, room.u, d, 1, real(1), false});
  } else {
    const real* u = parameters_.U + h * s.q * d;
    std::transform(u, u + s.q * d, room.u, [&](real entry) { return room.g[0] * entry; });
  }
  kernels_.pack_rows(room.u, s.q, s.d, int(qL), room.ut);
  ScoreArguments<real> in{};
  in.T = s.T;
  in.q = s.q;
  in.d = s.d;
  in.units = 1;
  in.w = w;
  in.ut = room.ut;
  in.ut_k = qL;
  in.x = room.xt;
  in.z = room.zt;
  in.limits = data_.is_limited() ? room.limits : nullptr;
  in.p = room.p;
  in.s = room.s;
  in.c = room.c;
  in.readout = room.readout;
  in.row_readouts = room.row_readouts;
  in.mode = RowMode::kDerivative;
  kernels_.scores_rows(in);
  real* gz = gz_ ? gz_ + i * s.q * d : data_.self && gx_ ? gx_ + i * s.T * d : nullptr;
  if (gx_) {
    real* gx = gx_ + i * s.T * d;
    kernels_.small_product(
        {s.q, s.d, s.d, 1, queries(i), d, 1, w, d, 1, room.zw, d, 1, real(1), false});
    kernels_.small_product(
        {s.T, s.d, s.q, 1, room.s, qL, 1, room.u, d, 1, gx, d, 1, real(1), true});
    kernels_.small_product(
        {s.T, s.d, s.q, 1, room.c, qL, 1, room.zw, d, 1, gx, d, 1, real(1), true});
  }
  if (!gz) return;
  kernels_.small_product({s.q, s.d, s.T, 1, room.c, 1, qL, x, d, 1, room.e, d, 1, real(1), false});
  kernels_.small_product({s.q, s.d, s.d, 1, room.e, d, 1, w, 1, d, gz, d, 1, real(1), true});
}

template <class real>
void InputGradients<real>::differentiate(std::ptrdiff_t i, Room<real>& room) const {
  const Shape& s = data_.shape;
  const int L = kernels_.lanes, qL = int(round_up(s.q, L)), TL = int(round_up(s.T, L));
  kernels_.pack_rows(data_.x + i * s.T * s.d, s.T, s.d, TL, room.xt);
  if (room.zt != room.xt) kernels_.pack_rows(queries(i), s.q, s.d, qL, room.zt);
  if (data_.is_limited()) data_.write_limits(i, 0, s.q, qL, room.limits);
  if (gx_) std::fill_n(gx_ + i * s.T * s.d, std::ptrdiff_t(s.T) * s.d, real(0));
  if (gz_) std::fill_n(gz_ + i * s.q * s.d, std::ptrdiff_t(s.q) * s.d, real(0));
  const std::ptrdiff_t slopes = s.is_layer() ? std::ptrdiff_t(s.q) * s.p : 1;
  if (std::all_of(room.g, room.g + slopes, [](real slope) { return slope == 0; })) return;
  for (int h = 0; h < s.H; ++h) add_head(i, h, room);
}

template <class real>
double InputGradients<real>::run(int threads) {
  const Shape& s = data_.shape;
  const std::ptrdiff_t size_W = extent(kW, s, 0).all();
  w_.resize(size_W);
  std::transform(parameters_.W, parameters_.W + size_W, w_.begin(),
                 [this](real entry) { return parameters_.scale * entry; });
  std::vector<real> f(s.n * (s.is_layer() ? std::ptrdiff_t(s.q) * s.p : 1));
  Model<const real*> model{};
  model.at[kW] = parameters_.W;
  model.at[kU] = parameters_.U;
  model.at[kV] = parameters_.V;
  model.at[kPrompt] = parameters_.prompt;
  outputs(data_, model, parameters_.scale, threads, f.data());

  const double flops = double(s.n) * s.H * s.q * (6.0 * s.d * s.d + 12.0 * s.T * s.d);
  const int members = useful_threads(threads, s.n, flops);
  std::vector<Room<real>> rooms(members);
  Block block;
  const auto lay_out = [&](Layout layout) {
    for (Room<real>& room : rooms) room = take_room(layout);
    return layout.size();
  };
  lay_out(Layout(block.reserve(lay_out(Layout()))));
  std::vector<double> values(s.n);
  std::atomic<std::ptrdiff_t> next{0};
  run_short_team(members, flops / 1e9, [&](const Member& member) {
    const FlushToZero flush;
    Room<real>& room = rooms[member.index];
    for (std::ptrdiff_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < s.n;) {
      values[i] = measure(i, f.data(), room);
      differentiate(i, room);
    }
  });
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / total_;
}

}  // namespace

template <class real>
double input_gradients(const Data<real>& data, const Parameters<real>& parameters, Loss loss,
                       int threads, real* gx, real* gz) {
  return InputGradients<real>(data, parameters, loss, gx, gz).run(threads);
}

template double input_gradients<float>(const Data<float>&, const Parameters<float>&, Loss, int,
                                       float*, float*);
template double input_gradients<double>(const Data<double>&, const Parameters<double>&, Loss, int,
                                        double*, double*);

}  // namespace mhfast
