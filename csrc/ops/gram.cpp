#include "gram.hpp"

#include <algorithm>
#include <memory>

#include "../dispatch/dispatch.hpp"
#include "scratch.hpp"
#include "team.hpp"

namespace mhfast {
namespace {

constexpr int kColumns = 64;                 // of a block of the result
constexpr int kDepth = 96;                   // rows of a product: its panels stay near
constexpr std::size_t kPortion = 1u << 23;   // bytes of the rows held at a time
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
  const std::ptrdiff_t padded = std::ptrdiff_t(blocks) * kColumns;
  const std::int64_t rows_wanted =
      std::clamp<std::int64_t>(std::int64_t(kPortion / sizeof(double)) / padded, 1, kMostRows);
  const std::int64_t items_held =
      std::min(std::max<std::int64_t>(rows_wanted / source.rows_per_item, 1),
               std::max<std::int64_t>(source.items, 1));
  const std::ptrdiff_t panel = items_held * source.rows_per_item * kColumns;
  const std::ptrdiff_t item_size = source.rows_per_item * padded;
  const int team = gram_threads(source, threads);
  thread_local std::unique_ptr<Block>
      kept;  // on the heap: threads have little storage of their own
  if (!kept) kept = std::make_unique<Block>();
  Block& block = *kept;
  // Rows by panels of columns, [block][row][column]; items as they are made, one for each member.
  double *rows = nullptr, *items = nullptr, *sum = nullptr;
  const auto lay_out = [&](Layout layout) {
    rows = layout.take<double>(panel * blocks);
    items = layout.take<double>(item_size * team);
    sum = layout.take<double>(padded * padded);
    return layout.size();
  };
  lay_out(Layout(block.reserve(lay_out(Layout()))));
  std::fill(items, items + item_size * team, 0.0);
  std::fill(sum, sum + padded * padded, 0.0);

  run_team(team, [&](const Member& member) {
    double* const item = items + member.index * item_size;
    for (std::int64_t begin = 0; begin < source.items; begin += items_held) {
      const std::int64_t count = std::min(items_held, source.items - begin);
      for (std::int64_t i = count * member.index / member.count;
           i < count * (member.index + 1) / member.count; ++i) {
        source.fill(begin + i, member.index, item, padded);
        double* to = rows + i * source.rows_per_item * kColumns;
        for (int r = 0; r < source.rows_per_item; ++r, to += kColumns)
          for (int b = 0; b < blocks; ++b)
            std::copy_n(item + r * padded + b * kColumns, kColumns, to + b * panel);
      }
      member.wait();
      const std::int64_t depth = count * source.rows_per_item;
      int number = 0;
      for (int i = 0; i < blocks; ++i)
        for (int j = i; j < blocks; ++j, ++number) {
          if (number % member.count != member.index) continue;
          Product<double> product{};
          product.size.M = std::min(kColumns, width - i * kColumns);
          product.size.N = kColumns / kernels.lanes;
          product.a.k1 = product.b.k1 = kColumns;
          product.b.n = product.c.n = kernels.lanes;
          product.c.at = sum + (i * padded + j) * kColumns;
          product.c.m = padded;
          product.add = true;
          for (std::int64_t k = 0; k < depth; k += kDepth) {
            product.size.K1 = int(std::min<std::int64_t>(kDepth, depth - k));
            product.a.at = rows + i * panel + k * kColumns;
            product.b.at = rows + j * panel + k * kColumns;
            kernels.product(product);
          }
        }
      member.wait();
    }
  });

  for (std::ptrdiff_t i = 0; i < width; ++i)
    for (std::ptrdiff_t j = 0; j < width; ++j)
      out[i * width + j] = sum[std::min(i, j) * padded + std::max(i, j)];
  constexpr std::size_t kKept = std::size_t(1) << 25;
  if (block.size() > kKept) block.release();
}

}  // namespace mhfast
