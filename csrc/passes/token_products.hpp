// X^T X of all samples, computed once for the steps of linear attention: see problem/products.hpp.
#pragma once

#include "../problem/data.hpp"
#include "../problem/products.hpp"
#include "../runtime/scratch.hpp"

namespace mhfast {

/// Data with products in the place of the tokens, which are query rows still.
template <class real>
class TokenProducts {
 public:
  /// Of `runs` runs. `data` must stay.
  TokenProducts(const Data<real>& data, std::ptrdiff_t runs, int threads);
  TokenProducts(const TokenProducts&) = delete;
  TokenProducts& operator=(const TokenProducts&) = delete;

  /// What that takes.
  static double bytes(const Data<real>& data, std::ptrdiff_t runs);

  const Data<real>& operator*() const { return data_; }

 private:
  void write(std::ptrdiff_t run, std::ptrdiff_t sample, real* workspace) const;

  const Data<real> given_;
  const ProductSizes sizes_;
  Data<real> data_;
  AlignedBuffer block_;
  real* products_;  // (runs or 1, n, row)
};

}  // namespace mhfast
