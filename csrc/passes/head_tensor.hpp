// The tensor K of all heads of linear attention, see problem/products.hpp, and the gradients by W
// and V from that by K. Entries of M are (feature a of W's rows, output o), pairs (b, c).
//
//   K[b, c][a, o] = sum over heads of W[a, b] V[c, o], scaled, and with b and c exchanged
//   gW[a, b] = sum over o and c of S[a, o][b, c] V[c, o],
//   gV[c, o] = sum over a and b of S[a, o][b, c] W[a, b],   S[a, o] the gradient as (d, d),
//
// symmetric. Products have heads as rows, so that all of them go together.
#pragma once

#include "../problem/products.hpp"
#include "loaded_model.hpp"

namespace mhfast {

template <class real>
class HeadTensor {
 public:
  HeadTensor(const Kernels<real>& kernels, const Shape& shape);

  /// For `threads` threads.
  void lay_out(Arena& layout, int threads);

  /// A member's rows a, from the parameters as the caller holds them.
  void load(const Parameters<real>& parameters, const Member& member) const;
  /// Then, behind a barrier, a member's own copy: [pair][entry of M, padded].
  const real* transpose(const Member& member) const;

 private:
  const Kernels<real>& kernels_;
  const Shape shape_;
  const ProductSizes sizes_;
  const std::ptrdiff_t dL_;
  real* sums_ = nullptr;     // by a: [c][o][b up to dL], not symmetric
  real* w_ = nullptr;        // by a: scaled, [head][b up to dL]
  real* entries_ = nullptr;  // [entry of M][pair]
  std::vector<real*> copies_;
};

/// What chunks leave: rows of pairs for each entry of M, `stride` numbers from chunk to chunk.
template <class real>
struct TensorParts {
  const real* first;
  std::ptrdiff_t stride;
  int chunks;
};

template <class real>
class HeadTensorGradient {
 public:
  HeadTensorGradient(const Kernels<real>& kernels, const Shape& shape);

  void lay_out(Arena& layout);

  /// A member's part; complete for all when it returns. W (H, d, d) and V (H, d, p), or null.
  void reduce(const LoadedModel<real>& model, const TensorParts<real>& parts, real* W, real* V,
              const Member& member) const;

 private:
  void sum(const TensorParts<real>& parts, std::ptrdiff_t entry) const;
  void reduce_w(const LoadedModel<real>& model, int first, int count, real* to) const;
  void reduce_v(const LoadedModel<real>& model, int first, int count, real* to) const;

  const Kernels<real>& kernels_;
  const Shape shape_;
  const ProductSizes sizes_;
  const std::ptrdiff_t dL_;
  real *pairs_ = nullptr, *full_ = nullptr;  // by entry of M: (pairs), then (d, dL), symmetric
  real *left_ = nullptr, *out_ = nullptr;    // of each head, operands and results of products
};

}  // namespace mhfast
