// Philox4x64-10: random bits as a function of a key and a counter, without a state in between.
//
// J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3"
// (SC 2011). Ten rounds; in each, with 128-bit products p = M0 c0 and q = M1 c2,
//
//   c <- (high(q) ^ c1 ^ k0, low(q), high(p) ^ c3 ^ k1, low(p)),    k <- k + (W0, W1).
//
// Integers only, so the bits are the same everywhere. They are those of numpy.random.Philox, which
// adds 1 to c0 before each block of four numbers.
#pragma once

#include <array>
#include <cstdint>

namespace mhfast {

__extension__ typedef unsigned __int128 Wide;

/// The ten rounds on counters c, numbers or vectors of them; multiply(factor, x, high, low). Always
/// inlined, as `block` is: kernels of every instruction set use them, and share no copy.
template <class Number, class Multiply>
__attribute__((always_inline)) inline void philox_rounds(Number (&c)[4], std::uint64_t k0,
                                                         std::uint64_t k1,
                                                         const Multiply& multiply) {
  constexpr std::uint64_t kM0 = 0xD2E7470EE14C6C93, kM1 = 0xCA5A826395121157;
  constexpr std::uint64_t kW0 = 0x9E3779B97F4A7C15, kW1 = 0xBB67AE8584CAA73B;
  for (int round = 0; round < 10; ++round, k0 += kW0, k1 += kW1) {
    Number p_high, p_low, q_high, q_low;
    multiply(kM0, c[0], p_high, p_low);
    multiply(kM1, c[2], q_high, q_low);
    c[0] = q_high ^ c[1] ^ k0;
    c[1] = q_low;
    c[2] = p_high ^ c[3] ^ k1;
    c[3] = p_low;
  }
}

struct Philox {
  using Key = std::array<std::uint64_t, 2>;
  using Block = std::array<std::uint64_t, 4>;

  __attribute__((always_inline)) static Block block(const Block& counter, const Key& k) {
    std::uint64_t c[4] = {counter[0], counter[1], counter[2], counter[3]};
    philox_rounds(
        c, k[0], k[1],
        [](std::uint64_t factor, std::uint64_t x, std::uint64_t& high, std::uint64_t& low) {
          const Wide product = Wide(factor) * x;
          high = std::uint64_t(product >> 64);
          low = std::uint64_t(product);
        });
    return {c[0], c[1], c[2], c[3]};
  }
};

/// An integer from 0 to count - 1, the high part of bits times count: uniform up to count / 2^64.
inline std::uint64_t below(std::uint64_t count, std::uint64_t bits) {
  return std::uint64_t(Wide(bits) * count >> 64);
}

}  // namespace mhfast
