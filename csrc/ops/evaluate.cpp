#include "evaluate.hpp"

#include <algorithm>
#include <cmath>

#include "float_mode.hpp"

namespace mhfast {
namespace {

// Scratch that a thread keeps between calls; more than this is given back at once.
constexpr std::size_t kKeptScratch = std::size_t(32) << 20;

/// The calling thread's block, for the length of one call.
class CallScratch {
 public:
  CallScratch() = default;
  ~CallScratch() {
    if (kept().size() > kKeptScratch) kept().release();
  }
  CallScratch(const CallScratch&) = delete;
  CallScratch& operator=(const CallScratch&) = delete;
  Block& block() const { return kept(); }

 private:
  static Block& kept() {
    thread_local Block block;
    return block;
  }
};

/// x *= factor exp(log_factor), also where these alone would underflow.
template <class real>
void multiply(real* x, std::ptrdiff_t size, double factor, double log_factor) {
  if (std::isinf(log_factor)) return;  // x is zero
  const double half = std::exp(log_factor / 2);
  for (std::ptrdiff_t i = 0; i < size; ++i) x[i] = real(double(x[i]) * half * factor * half);
}

}  // namespace

template <class real>
void outputs(const Data<real>& data, const Parameters<real>& parameters, int threads, real* out) {
  if (data.shape.n == 0) return;
  CallScratch scratch;
  Engine<real> engine(data, Loss::kLinear, {}, threads, scratch.block());
  engine.write_outputs(out);
  run_team(engine.threads(), [&](const Member& member) {
    engine.load_parameters(parameters, member);
    member.wait();
    engine.run_chunks(Pass::kOutputs, member);
  });
}

template <class real>
double value_and_grad(const Data<real>& data, const Parameters<real>& parameters, Loss loss,
                      int threads, real* gW, real* gU) {
  CallScratch scratch;
  typename Engine<real>::Options options;
  options.gradient = gW || gU;
  options.wrt_W = gW != nullptr;
  options.wrt_U = gU != nullptr;
  options.gaps = options.gradient;
  Engine<real> engine(data, loss, options, threads, scratch.block());
  const Shape& s = data.shape;
  double value = 0;
  bool scaled = false;
  run_team(engine.threads(), [&](const Member& member) {
    const FlushToZero flush;
    engine.load_parameters(parameters, member);
    member.wait();
    engine.run_chunks(options.gradient ? Pass::kGradient : Pass::kLoss, member);
    member.wait();
    if (member.index == 0) {
      value = engine.totals().loss;
      scaled = options.gradient && engine.needs_scaling(false);
      if (scaled) engine.restart();
    }
    if (!options.gradient) return;
    member.wait();
    if (scaled) {
      engine.run_chunks(Pass::kScaledGradient, member);
      member.wait();
    }
    engine.reduce_gradient(gW, gU, member);
    if (!scaled) return;
    const std::ptrdiff_t dd = std::ptrdiff_t(s.d) * s.d, qd = std::ptrdiff_t(s.q) * s.d;
    for (int h = member.index; h < s.H; h += member.count) {
      if (gW)
        flush.suspended([&] { multiply(gW + h * dd, dd, engine.share(), engine.log_scale_W(h)); });
      if (gU)
        flush.suspended([&] { multiply(gU + h * qd, qd, engine.share(), engine.log_scale_U()); });
    }
  });
  return value;
}

template <class real>
void attention(const Data<real>& data, const real* W, real scale, std::ptrdiff_t first,
               std::ptrdiff_t last, int threads, real* out) {
  const Shape& s = data.shape;
  const Kernels<real>& kernels = active_kernels<real>();
  const int qL = int(round_up(s.q, kernels.lanes)), TL = int(round_up(s.T, kernels.lanes));
  const std::ptrdiff_t dd = std::ptrdiff_t(s.d) * s.d, n = last - first;
  const int members =
      useful_threads(threads, n, double(n) * s.H * s.q * (2.0 * dd + 2.0 * s.T * s.d + 40.0 * s.T));

  struct Room {
    real *x, *z, *p, *s;
  };
  std::vector<Room> rooms(members);
  real* w = nullptr;
  const auto lay_out = [&](Layout layout) {
    w = layout.take<real>(s.H * dd);
    for (Room& room : rooms) {
      room.x = layout.template take<real>(std::ptrdiff_t(s.d) * TL);
      room.z = data.self ? room.x : layout.template take<real>(std::ptrdiff_t(s.d) * qL);
      room.p = layout.template take<real>(std::ptrdiff_t(s.d) * qL);
      room.s = layout.template take<real>(std::ptrdiff_t(s.T) * qL);
    }
    return layout.size();
  };
  CallScratch scratch;
  lay_out(Layout(scratch.block().reserve(lay_out(Layout()))));
  std::transform(W, W + s.H * dd, w, [scale](real x) { return scale * x; });

  std::atomic<std::ptrdiff_t> next{first};
  run_team(members, [&](const Member& member) {
    const Room& room = rooms[member.index];
    for (std::ptrdiff_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < last;) {
      kernels.pack_rows(data.x + i * s.T * s.d, s.T, s.d, TL, TL, room.x);
      if (!data.self) kernels.pack_rows(data.z + i * s.q * s.d, s.q, s.d, qL, qL, room.z);
      for (int h = 0; h < s.H; ++h) {
        kernels.scores_rows({s.T, s.q, s.d, 1, w + h * dd, nullptr, room.x, room.z, room.p, room.s,
                             nullptr, 0, nullptr, nullptr, nullptr, nullptr, RowMode::kAttention});
        real* to = out + ((i - first) * s.H + h) * s.q * s.T;
        for (int t = 0; t < s.q; ++t)
          for (int k = 0; k < s.T; ++k) *to++ = room.s[std::ptrdiff_t(k) * qL + t];
      }
    }
  });
}

#define MHFAST_INSTANTIATE(real)                                                              \
  template void outputs<real>(const Data<real>&, const Parameters<real>&, int, real*);        \
  template double value_and_grad<real>(const Data<real>&, const Parameters<real>&, Loss, int, \
                                       real*, real*);                                         \
  template void attention<real>(const Data<real>&, const real*, real, std::ptrdiff_t,         \
                                std::ptrdiff_t, int, real*);
MHFAST_INSTANTIATE(float)
MHFAST_INSTANTIATE(double)

}  // namespace mhfast
