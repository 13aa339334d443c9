// Attention weights of one run, by a single call.
#pragma once

#include <functional>

#include "../problem/data.hpp"

namespace mhfast {

/// Attention weights of one head for some query rows of one sample, or for all rows of several.
template <class real>
struct AttentionBlock {
  std::ptrdiff_t sample;
  int samples, head, first_row, rows;
  int keys;                          // beyond these all weights are zero
  const real* at;                    // rows of `keys` weights
  std::ptrdiff_t of_row, of_sample;  // numbers from row to row, and from sample to sample
  const real* by_keys;               // of one sample: the same, a row for each key; or null
  std::ptrdiff_t of_key;             // from key to key there

  const real* row(std::ptrdiff_t i, int t) const { return at + i * of_sample + t * of_row; }
};

/// Calls `body` with all blocks of samples `first` to `last`: on one thread sample by sample, or
/// block of samples by block, its query rows in order, with all heads of the same rows in a row;
/// several threads call it at the same time. What a block holds is small, for any number of tokens.
template <class real>
void for_attention(const Data<real>& data, const Model<const real*>& model, real scale,
                   std::ptrdiff_t first, std::ptrdiff_t last, int threads,
                   const std::function<void(const AttentionBlock<real>&)>& body);

/// Query rows of the blocks that all samples of the data have, but for the last one of a sample.
template <class real>
int rows_of_blocks(const Data<real>& data);

/// Attention weights of samples `first` to `last` into out (last - first, H, q, T). Denormal
/// weights are kept.
template <class real>
void attention(const Data<real>& data, const Model<const real*>& model, real scale,
               std::ptrdiff_t first, std::ptrdiff_t last, int threads, real* out);

}  // namespace mhfast
