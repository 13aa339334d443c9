#include "attended_tokens.hpp"

#include <algorithm>
#include <vector>

#include "../dispatch/dispatch.hpp"
#include "../problem/alike_heads.hpp"
#include "../runtime/float_mode.hpp"

namespace mhfast {
template <class real>
AttendedTokens<real>::AttendedTokens(const Data<real>& data, std::ptrdiff_t runs, bool apart)
    : given_(data), rows_(data.shape, active_kernels<real>().lanes), data_(data) {
  const std::ptrdiff_t of_run = rows_.count * rows_.size;
  const auto lay_out = [&](Arena layout) {
    x_ = layout.take<real>((apart ? runs : 1) * of_run);
    return layout.size();
  };
  lay_out(Arena(block_.reserve(lay_out(Arena()))));
  data_.x = x_;
  data_.run.x = apart ? of_run : 0;
  data_.shape.attended = true;
}

template <class real>
double AttendedTokens<real>::bytes(const Data<real>& data, std::ptrdiff_t runs, bool apart) {
  const AttendedRows rows(data.shape, active_kernels<real>().lanes);
  return rows.bytes(apart ? double(runs) : 1.0, sizeof(real));
}

template <class real>
void AttendedTokens<real>::compute(std::ptrdiff_t run, const Model<const real*>& model, real scale,
                                   int threads) {
  Data<real> data = at_run(given_, run, 1);
  data.shape.H = computed_heads(given_.shape);
  const Shape& s = data.shape;
  real* const to = x_ + run * data_.run.x;
  for (std::ptrdiff_t row = 0; row < rows_.count && rows_.features < rows_.size; ++row)
    std::fill(to + row * rows_.size + rows_.features, to + (row + 1) * rows_.size, real(0));
  for_attention<real>(data, model, scale, 0, s.n, threads, [&](const AttentionBlock<real>& block) {
    const FlushToZero flush;  // of denormal weights, as in steps
    std::vector<real> words(data.has_words() ? std::ptrdiff_t(block.keys) * s.d : 0);
    const int lanes = active_kernels<real>().lanes;
    std::vector<real> rest(s.d % lanes ? std::ptrdiff_t(block.keys + block.rows) * lanes : 0);
    for (int i = 0; i < block.samples; ++i) {
      const real* x = data.key(block.sample + i, 0, 0);
      if (data.has_words()) {
        for (int k = 0; k < block.keys; ++k)
          std::copy_n(data.key(block.sample + i, 0, k), s.d,
                      words.data() + std::ptrdiff_t(k) * s.d);
        x = words.data();
      }
      attend(block, i, x, to, rest.data());
    }
  });
}

/// A X of the rows of one sample of a block, from its keys. Features beyond whole vectors take a
/// vector of their own in `rest`, (keys + rows, L), whose other lanes are zero.
template <class real>
void AttendedTokens<real>::attend(const AttentionBlock<real>& block, int i, const real* x, real* to,
                                  real* rest) const {
  const Kernels<real>& kernels = active_kernels<real>();
  const int d = given_.shape.d, L = kernels.lanes;
  const int whole = d / L * L;
  const std::ptrdiff_t row = given_.shape.is_layer() ? rows_.size : d;
  real* const out = to + (block.sample + i) * rows_.sample_size() + block.first_row * row +
                    block.head * rows_.features_of_head;
  const real* const weights = block.by_keys ? block.by_keys : block.row(i, 0);
  const std::ptrdiff_t of_row = block.by_keys ? 1 : block.of_row;
  const std::ptrdiff_t of_key = block.by_keys ? block.of_key : 1;
  const auto multiply = [&](const real* keys, std::ptrdiff_t key, int vectors, real* rows,
                            std::ptrdiff_t stride) {
    if (of_row == 1)
      kernels.product({{block.rows, vectors, block.keys},
                       {weights, of_key},
                       {keys, key, L},
                       {rows, stride, L},
                       false});
    else
      kernels.product({{1, vectors, block.keys, 1, block.rows},
                       {weights, of_key, 0, of_row},
                       {keys, key, L, 0, 0},
                       {rows, 0, L, stride}});
  };
  if (whole > 0) multiply(x, d, whole / L, out, row);
  if (whole == d) return;
  real* const rows = rest + std::ptrdiff_t(block.keys) * L;
  for (int k = 0; k < block.keys; ++k)
    std::copy_n(x + std::ptrdiff_t(k) * d + whole, d - whole, rest + std::ptrdiff_t(k) * L);
  multiply(rest, L, 1, rows, L);
  for (int r = 0; r < block.rows; ++r)
    std::copy_n(rows + std::ptrdiff_t(r) * L, d - whole, out + r * row + whole);
}

template class AttendedTokens<float>;
template class AttendedTokens<double>;

}  // namespace mhfast
