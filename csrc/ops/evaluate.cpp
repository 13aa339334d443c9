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

/// Whether some head's gradient is so small that parts of it may have been flushed to zero.
template <class real>
bool is_faint(const real* gradient, int heads, std::ptrdiff_t size) {
  constexpr real kFaint = sizeof(real) == 4 ? real(1e-18) : real(1e-240);
  for (int h = 0; h < heads; ++h, gradient += size) {
    real largest = 0;
    for (std::ptrdiff_t i = 0; i < size; ++i) largest = std::max(largest, std::fabs(gradient[i]));
    if (largest > 0 && largest < kFaint) return true;
  }
  return false;
}

/// Loss and gradient; `careful`: right also where their factors underflow, at twice the cost there.
template <class real>
double evaluate(const Data<real>& data, const Parameters<real>& parameters, Loss loss, int threads,
                real* gW, real* gU, bool careful) {
  CallScratch scratch;
  typename Engine<real>::Options options;
  options.gradient = gW || gU;
  options.wrt_W = gW != nullptr;
  options.wrt_U = gU != nullptr;
  options.gaps = careful;
  Engine<real> engine(data, loss, options, threads, scratch.block());
  const Shape& s = data.shape;
  bool scaled = false;
  run_short_team(engine.threads(), engine.leisurely_seconds(), [&](const Member& member) {
    const FlushToZero flush;
    engine.load_parameters(parameters, member);
    member.wait();
    engine.run_chunks(options.gradient ? Pass::kGradient : Pass::kLoss, member);
    if (!options.gradient) return;
    member.wait();
    if (careful) {
      if (member.index == 0) {
        scaled = engine.needs_scaling(false);
        if (scaled) engine.restart();
      }
      member.wait();
      if (scaled) {
        engine.run_chunks(Pass::kScaledGradient, member);
        member.wait();
      }
    }
    engine.reduce_gradient(gW, gU, member);
    if (!scaled) return;
    const std::ptrdiff_t dd = std::ptrdiff_t(s.d) * s.d, qd = std::ptrdiff_t(s.q) * s.d;
    flush.suspended([&] {
      for (int h = member.index; h < s.H; h += member.count) {
        if (gW) multiply(gW + h * dd, dd, engine.share(), engine.log_scale_W(h));
        if (gU) multiply(gU + h * qd, qd, engine.share(), engine.log_scale_U());
      }
    });
  });
  return engine.totals().loss;
}

}  // namespace

template <class real>
void outputs(const Data<real>& data, const Parameters<real>& parameters, int threads, real* out) {
  if (data.shape.n == 0) return;
  CallScratch scratch;
  Engine<real> engine(data, Loss::kLinear, {}, threads, scratch.block());
  engine.write_outputs(out);
  run_short_team(engine.threads(), engine.leisurely_seconds(), [&](const Member& member) {
    engine.load_parameters(parameters, member);
    member.wait();
    engine.run_chunks(Pass::kOutputs, member);
  });
}

template <class real>
double value_and_grad(const Data<real>& data, const Parameters<real>& parameters, Loss loss,
                      int threads, real* gW, real* gU) {
  const double value = evaluate(data, parameters, loss, threads, gW, gU, false);
  const Shape& s = data.shape;
  if ((gW && is_faint(gW, s.H, std::ptrdiff_t(s.d) * s.d)) ||
      (gU && is_faint(gU, s.H, std::ptrdiff_t(s.q) * s.d)))
    evaluate(data, parameters, loss, threads, gW, gU, true);
  return value;
}

template <class real>
void attention(const Data<real>& data, const real* W, real scale, std::ptrdiff_t first,
               std::ptrdiff_t last, int threads, real* out) {
  const Shape& s = data.shape;
  const Kernels<real>& kernels = active_kernels<real>();
  const int qL = int(round_up(s.q, kernels.lanes)), TL = int(round_up(s.T, kernels.lanes));
  const std::ptrdiff_t dd = std::ptrdiff_t(s.d) * s.d, n = last - first;
  const double flops = double(n) * s.H * s.q * (2.0 * dd + 2.0 * s.T * s.d + 40.0 * s.T);
  const int members = useful_threads(threads, n, flops);

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
  run_short_team(members, flops / 1e9, [&](const Member& member) {
    const Room& room = rooms[member.index];
    for (std::ptrdiff_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < last;) {
      kernels.pack_rows(data.x + i * s.T * s.d, s.T, s.d, TL, room.x);
      if (!data.self) kernels.pack_rows(data.z + i * s.q * s.d, s.q, s.d, qL, room.z);
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
