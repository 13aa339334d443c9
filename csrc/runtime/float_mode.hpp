// Flush-to-zero for one thread and one scope.
//
// Training in saturation fills arrays with numbers below the normal range, with which ordinary code
// is ten times slower. Inside gradient and training calls they count as zero; the caller's mode is
// restored on every exit from the scope.
#pragma once

#include <cstdint>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace mhfast {

class FlushToZero {
#if defined(__SSE__)
  using Mode = unsigned;
  static constexpr Mode kFlush = 0x8040;  // results (bit 15) and operands (bit 6)
  static Mode mode() { return _mm_getcsr(); }
  static void set_mode(Mode value) { _mm_setcsr(value); }
#elif defined(__aarch64__)
  using Mode = std::uint64_t;
  static constexpr Mode kFlush = Mode(1) << 24;
  static Mode mode() {
    Mode value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void set_mode(Mode value) { asm volatile("msr fpcr, %0" ::"r"(value)); }
#else
  using Mode = unsigned;
  static constexpr Mode kFlush = 0;
  static Mode mode() { return 0; }
  static void set_mode(Mode) {}
#endif

 public:
  FlushToZero() : callers_(mode()) { set_mode(callers_ | kFlush); }
  ~FlushToZero() { set_mode(callers_); }
  FlushToZero(const FlushToZero&) = delete;
  FlushToZero& operator=(const FlushToZero&) = delete;

  /// Calls `body` in the caller's mode, so that foreign code never runs in ours.
  template <class Body>
  void suspended(const Body& body) const {
    struct Scope {
      explicit Scope(Mode callers) { set_mode(callers); }
      ~Scope() { set_mode(mode() | kFlush); }
    } const scope(callers_);
    body();
  }

  /// The same for code that has no FlushToZero at hand: a scope without flushing.
  class Paused {
   public:
    Paused() : before_(mode()) { set_mode(before_ & ~kFlush); }
    ~Paused() { set_mode(before_); }
    Paused(const Paused&) = delete;
    Paused& operator=(const Paused&) = delete;

   private:
    const Mode before_;
  };

 private:
  const Mode callers_;
};

}  // namespace mhfast
