#include "gram.hpp"

#include <algorithm>
#include <memory>

#include "../dispatch/dispatch.hpp"
#include "scratch.hpp"
#include "team.hpp"
#include "tuning.hpp"

namespace mhfast {
namespace {

double flops(const RowSource& s) {
  return double(s.items) * (s.flops_per_item + double(s.rows_per_item) * s.width * s.width);
}

}  // namespace

int gram_threads(const RowSource& source, int threads) {
  return useful_threads(threads, source.items, flops(source));
}

void gram_matrix(const RowSource& source, int threads, double* out) {
  const Kernels<double>& kernels = active_kernels<double>();
  const int width = source.width, blocks = (width + kGramColumns - 1) / kGramColumns;
  const std::ptrdiff_t padded = std::ptrdiff_t(blocks) * kGramColumns;
  const std::int64_t rows_wanted = std::clamp<std::int64_t>(
      std::int64_t(kGramPortionBytes / sizeof(double)) / padded, 1, kGramPortionRows);
  const std::int64_t items_held =
      std::min(std::max<std::int64_t>(rows_wanted / source.rows_per_item, 1),
               std::max<std::int64_t>(source.items, 1));
  const std::ptrdiff_t panel = items_held * source.rows_per_item * kGramColumns;
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
        double* to = rows + i * source.rows_per_item * kGramColumns;
        for (int r = 0; r < source.rows_per_item; ++r, to += kGramColumns)
          for (int b = 0; b < blocks; ++b)
            std::copy_n(item + r * padded + b * kGramColumns, kGramColumns, to + b * panel);
      }
      member.wait();
      const std::int64_t depth = count * source.rows_per_item;
      int number = 0;
      for (int i = 0; i < blocks; ++i)
        for (int j = i; j < blocks; ++j, ++number) {
          if (number % member.count != member.index) continue;
          Product<double> product{};
          product.size.M = std::min(kGramColumns, width - i * kGramColumns);
          product.size.N = kGramColumns / kernels.lanes;
          product.a.k1 = product.b.k1 = kGramColumns;
          product.b.n = product.c.n = kernels.lanes;
          product.c.at = sum + (i * padded + j) * kGramColumns;
          product.c.m = padded;
          product.add = true;
          for (std::int64_t k = 0; k < depth; k += kGramRows) {
            product.size.K1 = int(std::min<std::int64_t>(kGramRows, depth - k));
            product.a.at = rows + i * panel + k * kGramColumns;
            product.b.at = rows + j * panel + k * kGramColumns;
            kernels.product(product);
          }
        }
      member.wait();
    }
  });

  for (std::ptrdiff_t i = 0; i < width; ++i)
    for (std::ptrdiff_t j = 0; j < width; ++j)
      out[i * width + j] = sum[std::min(i, j) * padded + std::max(i, j)];
  if (block.size() > kKeptScratch) block.release();
}

}  // namespace mhfast
