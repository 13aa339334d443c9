#include "gradient_scales.hpp"

#include <cmath>

namespace mhfast {

GradientScales::GradientScales(int heads, int lanes, int chunks, bool gathered)
    : heads_(heads), lanes_(lanes), chunks_(chunks), size_(std::ptrdiff_t(heads + 1) * lanes) {
  if (!gathered) return;
  by_chunk_.resize(chunks * size_);
  scales_.resize(size_);
}

void GradientScales::begin_chunk(int chunk) {
  std::fill_n(by_chunk_.begin() + chunk * size_, size_, -kInfinity);
}

void GradientScales::gather(int runs) {
  const int L = lanes_;
  std::copy_n(by_chunk_.data(), size_, scales_.data());
  for (int c = 1; c < chunks_; ++c)
    for (std::ptrdiff_t i = 0; i < size_; ++i)
      scales_[i] = std::max(scales_[i], by_chunk_[c * size_ + i]);
  if (runs == 0)  // lanes are samples, or parts of them
    for (auto lanes = scales_.begin(); lanes != scales_.end(); lanes += L)
      std::fill_n(lanes, L, *std::max_element(lanes, lanes + L));
}

bool GradientScales::needs_scaling(const PassOptions& options, int runs, bool together,
                                   double underflow) {
  const int H = heads_, L = lanes_;
  const auto underflows = [=](double x) { return x < underflow && x > -kInfinity; };
  bool needed = false;
  for (int l = 0; l < L; ++l) {
    double largest = -kInfinity;
    for (int h = 0; h < H; ++h) largest = std::max(largest, scales_[h * L + l]);
    for (int h = 0; h <= H; ++h) {
      double& scale = scales_[h * L + l];
      scale = std::rint(together && h < H ? largest : scale);
      const bool counts = h < H ? options.wrt_W : options.wrt_readout;
      needed |= counts && (runs == 0 || l < runs) && underflows(scale);
    }
  }
  return needed;
}

}  // namespace mhfast
