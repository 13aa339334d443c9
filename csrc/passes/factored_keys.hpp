// Keys through the factors of W = Q K^T, of long samples: with Z query rows and X tokens of a
// sample
//
//   S = (Z Q) (X K)^T      by Q  Z^T (D (X K))      by K  X^T (D^T (Z Q))
//
// so that A and D meet r numbers of a key in the place of d. X K is computed once, and D^T (Z Q) is
// summed over the query rows before X is multiplied with it.
//
// One thread's arrays, of one sample and some heads: X K by rows (T, rL) and transposed (r, TL),
// and D^T (Z Q) (T, rL); of a tile of query rows Z Q transposed (r, rows), and Z Q and D (X K) by
// rows.
#pragma once

#include "../problem/data.hpp"
#include "../runtime/scratch.hpp"

namespace mhfast {

template <class real>
class FactoredKeys {
 public:
  FactoredKeys() = default;
  FactoredKeys(const Kernels<real>& kernels, const Shape& shape)
      : kernels_(&kernels),
        d_(shape.d),
        r_(shape.rank),
        rL_(int(round_up(shape.rank, kernels.lanes))),
        TL_(int(odd_vectors(shape.T, kernels.lanes))) {}

  /// For so many heads and query rows, a multiple of the lanes, at a time.
  void lay_out(Arena& layout, std::size_t heads, std::size_t rows, bool gradient) {
    transposed_ = layout.take<real>(heads * r_ * TL_);
    by_rows_ = layout.take<real>(gradient ? heads * size() : 0);
    sums_ = layout.take<real>(gradient ? heads * size() : 0);
    queries_ = layout.take<real>(r_ * rows);
    query_rows_ = layout.take<real>(gradient ? rows * rL_ : 0);
    projected_ = layout.take<real>(gradient ? rows * rL_ : 0);
    gradient_ = gradient;
  }

  /// X K of a head, from X transposed (d, TL); sums are 0 from now on.
  void load(int head, int keys, const real* xt, const real* k) const {
    const int L = kernels_->lanes;
    real* const to = transposed_ + std::ptrdiff_t(head) * r_ * TL_;
    kernels_->product({{r_, int(round_up(keys, L)) / L, d_}, {k, r_}, {xt, TL_, L}, {to, TL_, L}});
    if (!gradient_) return;
    kernels_->pack_rows(to, r_, TL_, rL_, by_rows_ + of_head(head));
    std::fill_n(sums_ + of_head(head), std::ptrdiff_t(keys) * rL_, real(0));
  }
  /// (X K)^T, from feature to feature TL numbers.
  const real* transposed(int head) const { return transposed_ + std::ptrdiff_t(head) * r_ * TL_; }

  /// (Z Q)^T (r, rows) of a tile, `rows` whole vectors, from Z transposed, its rows `z_row` apart.
  const real* load_queries(const real* q, const real* zt, std::ptrdiff_t z_row, int rows) const {
    const int L = kernels_->lanes;
    kernels_->product({{r_, rows / L, d_}, {q, r_}, {zt, z_row, L}, {queries_, rows, L}});
    return queries_;
  }

  /// Of `factor` D (keys, rows) of a tile, `row` numbers from key to key: adds D^T (Z Q) to the
  /// sums and returns D (X K) (rows, rL). `queries`: (Z Q)^T as above.
  const real* add(int head, int keys, int rows, const real* dd, std::ptrdiff_t row,
                  const real* queries, real factor = 1) const {
    const int L = kernels_->lanes, N = rL_ / L, qL = int(round_up(rows, L));
    kernels_->product(
        {{rows, N, keys}, {dd, row}, {by_rows_ + of_head(head), rL_, L}, {projected_, rL_, L}});
    kernels_->pack_rows(queries, r_, qL, rL_, query_rows_);
    if (factor != real(1)) {
      const auto scale = [&](real* of) { kernels_->scale_rows(of, factor, rows, rL_, rL_, of); };
      scale(projected_);
      scale(query_rows_);
    }
    kernels_->values_words({keys, rows, N, nullptr, dd, row, query_rows_, sums_ + of_head(head)});
    return projected_;
  }
  const real* sums(int head) const { return sums_ + of_head(head); }

  /// The gradient by Q, Z^T (D (X K)) with the latter as `add` returns it, to gq (d, rL).
  void differentiate_q(int rows, const real* z, const real* projected, bool more, real* gq) const {
    const int L = kernels_->lanes;
    kernels_->product({{d_, rL_ / L, rows}, {z, d_}, {projected, rL_, L}, {gq, rL_, L}, more});
  }

  /// That by K, X^T (D^T (Z Q)) of a sample's x (keys, d), to gk (d, rL).
  void differentiate_k(int head, int keys, const real* x, bool more, real* gk) const {
    const int L = kernels_->lanes;
    kernels_->product(
        {{d_, rL_ / L, keys}, {x, d_}, {sums_ + of_head(head), rL_, L}, {gk, rL_, L}, more});
  }

 private:
  std::ptrdiff_t size() const { return std::ptrdiff_t(TL_) * rL_; }
  std::ptrdiff_t of_head(int head) const { return head * size(); }

  const Kernels<real>* kernels_ = nullptr;
  int d_ = 0, r_ = 0, rL_ = 0, TL_ = 0;
  bool gradient_ = false;
  real *transposed_ = nullptr, *by_rows_ = nullptr, *sums_ = nullptr;
  real *queries_ = nullptr, *query_rows_ = nullptr, *projected_ = nullptr;
};

}  // namespace mhfast
