#include "gram.hpp"

#include <algorithm>

#include "../dispatch/dispatch.hpp"
#include "scratch.hpp"
#include "team.hpp"

namespace mhfast {
namespace {

constexpr int kColumns = 64;                 // of a block of the result
constexpr std::size_t kPortion = 1u << 21;   // bytes of the rows held at a time
constexpr std::int64_t kMostRows = 1 << 16;  // of a portion

double flops(const RowSource& s) {
  return double(s.items) * (s.flops_per_item + double(s.rows_per_item) * s.width * s.width);
}

}  // namespace

int gram_threads(const RowSource& source, int threads) {
  return useful_threads(threads, source.items, flops(source));
}

void gram_matrix(const RowSource& source, int threads, double* out) {
  const Kernels<double>& kernels = active_kernels<double>();
  const int width = source.width, blocks = (width + kColumns - 1) / kColumns;
  const std::ptrdiff_t stride = std::ptrdiff_t(blocks) * kColumns;
  const std::int64_t rows_held =
      std::clamp<std::int64_t>(std::int64_t(kPortion / sizeof(double)) / stride, 1, kMostRows);
  const std::int64_t items_held =
      std::min(std::max<std::int64_t>(rows_held / source.rows_per_item, 1),
               std::max<std::int64_t>(source.items, 1));
  const std::size_t rows_size = std::size_t(items_held) * source.rows_per_item * stride;
  thread_local Block block;
  double *rows = nullptr, *sum = nullptr;
  const auto lay_out = [&](Layout layout) {
    rows = layout.take<double>(rows_size);
    sum = layout.take<double>(std::size_t(stride) * stride);
    return layout.size();
  };
  lay_out(Layout(block.reserve(lay_out(Layout()))));
  std::fill(rows, rows + rows_size, 0.0);
  std::fill(sum, sum + stride * stride, 0.0);

  run_team(gram_threads(source, threads), [&](const Member& member) {
    for (std::int64_t begin = 0; begin < source.items; begin += items_held) {
      const std::int64_t count = std::min(items_held, source.items - begin);
      for (std::int64_t i = count * member.index / member.count;
           i < count * (member.index + 1) / member.count; ++i)
        source.fill(begin + i, member.index, rows + i * source.rows_per_item * stride, stride);
      member.wait();
      int number = 0;
      for (int i = 0; i < blocks; ++i)
        for (int j = i; j < blocks; ++j, ++number) {
          if (number % member.count != member.index) continue;
          Product<double> product{};
          product.size.M = std::min(kColumns, width - i * kColumns);
          product.size.N = kColumns / kernels.lanes;
          product.size.K1 = int(count) * source.rows_per_item;
          product.a.at = rows + i * kColumns;
          product.a.k1 = stride;
          product.b.at = rows + j * kColumns;
          product.b.k1 = stride;
          product.b.n = kernels.lanes;
          product.c.at = sum + i * kColumns * stride + j * kColumns;
          product.c.m = stride;
          product.c.n = kernels.lanes;
          product.add = true;
          kernels.product(product);
        }
      member.wait();
    }
  });

  for (std::ptrdiff_t i = 0; i < width; ++i)
    for (std::ptrdiff_t j = 0; j < width; ++j)
      out[i * width + j] = sum[std::min(i, j) * stride + std::max(i, j)];
  constexpr std::size_t kKept = std::size_t(1) << 25;
  if (block.size() > kKept) block.release();
}

}  // namespace mhfast
