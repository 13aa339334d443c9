#include "gram.hpp"

#include <algorithm>
#include <memory>

#include "../dispatch/dispatch.hpp"
#include "../runtime/scratch.hpp"
#include "../runtime/team.hpp"
#include "../runtime/tuning.hpp"

namespace mhfast {
namespace {

constexpr std::ptrdiff_t kTile = std::ptrdiff_t(kGramColumns) * kGramColumns;

int panels(int columns) { return (columns + kGramColumns - 1) / kGramColumns; }

double flops(const RowSource& s, const std::vector<CrossMoment>& moments) {
  double of_a_row = 0;
  for (const CrossMoment& m : moments)
    of_a_row += (m.left == m.right ? 1.0 : 2.0) * m.left.width * m.right.width;
  return double(s.items) * (s.flops_per_item + double(s.rows_per_item) * of_a_row);
}

/// The part of a moment that two panels give, a tile of the sum; has one owner throughout.
struct Tile {
  int left, right;  // panels
  int rows, columns;
};

/// Tiles of all moments, one moment after the other; the upper ones of a symmetric moment.
std::vector<Tile> tiles_of(const std::vector<CrossMoment>& moments) {
  std::vector<Tile> tiles;
  for (const CrossMoment& m : moments)
    for (int i = 0; i < panels(m.left.width); ++i)
      for (int j = m.left == m.right ? i : 0; j < panels(m.right.width); ++j)
        tiles.push_back({m.left.begin / kGramColumns + i, m.right.begin / kGramColumns + j,
                         std::min(kGramColumns, m.left.width - i * kGramColumns),
                         std::min(kGramColumns, m.right.width - j * kGramColumns)});
  return tiles;
}

/// How many columns of each panel the moments read, in whole vectors.
std::vector<int> columns_read(const std::vector<CrossMoment>& moments, int blocks, int lanes) {
  std::vector<int> read(blocks);
  for (const CrossMoment& m : moments)
    for (const Columns& columns : {m.left, m.right})
      for (int i = 0; i < panels(columns.width); ++i) {
        int& of_panel = read[columns.begin / kGramColumns + i];
        const int width = std::min(kGramColumns, columns.width - i * kGramColumns);
        of_panel = std::max(of_panel, (width + lanes - 1) / lanes * lanes);
      }
  return read;
}

/// Writes a moment from its tiles, the first of which begins at `sum`; returns the end of the last.
const double* write_moment(const CrossMoment& m, const double* sum) {
  const bool symmetric = m.left == m.right;
  for (int i = 0; i < panels(m.left.width); ++i)
    for (int j = symmetric ? i : 0; j < panels(m.right.width); ++j, sum += kTile)
      for (int r = i * kGramColumns; r < std::min((i + 1) * kGramColumns, m.left.width); ++r)
        for (int c = j * kGramColumns; c < std::min((j + 1) * kGramColumns, m.right.width); ++c) {
          if (symmetric && c < r) continue;
          const double value = sum[(r - i * kGramColumns) * kGramColumns + (c - j * kGramColumns)];
          m.out[std::ptrdiff_t(r) * m.right.width + c] = value;
          if (symmetric) m.out[std::ptrdiff_t(c) * m.right.width + r] = value;
        }
  return sum;
}

/// Items whose rows a product takes at once. Sums are added in these blocks, whatever number of
/// them is held.
std::int64_t items_of_a_block(const RowSource& source) {
  return std::max(1, kGramRows / source.rows_per_item);
}

/// How many items are held at a time: whole blocks.
std::int64_t items_of_a_portion(const RowSource& source, std::ptrdiff_t row_size, int team) {
  const std::size_t bytes = team > 1 ? kGramTeamPortionBytes : kGramPortionBytes;
  const std::int64_t rows =
      std::min<std::int64_t>(bytes / sizeof(double) / row_size, kGramPortionRows);
  const std::int64_t block = items_of_a_block(source);
  const std::int64_t blocks = std::max<std::int64_t>(rows / (block * source.rows_per_item), 1);
  return std::min(blocks * block, std::max<std::int64_t>(source.items, 1));
}

}  // namespace

int gram_threads(const RowSource& source, const std::vector<CrossMoment>& moments, int threads) {
  return useful_threads(threads, source.items, flops(source, moments));
}

void cross_moments(const RowSource& source, const std::vector<CrossMoment>& moments, int threads) {
  const Kernels<double>& kernels = active_kernels<double>();
  const int blocks = panels(source.width);
  const std::ptrdiff_t padded = std::ptrdiff_t(blocks) * kGramColumns;
  const int team = gram_threads(source, moments, threads);
  const std::int64_t items_held = items_of_a_portion(source, padded, team);
  const std::int64_t block_rows = items_of_a_block(source) * source.rows_per_item;
  const std::ptrdiff_t panel = items_held * source.rows_per_item * kGramColumns;
  const std::ptrdiff_t item_size = source.rows_per_item * padded;
  const std::vector<Tile> tiles = tiles_of(moments);
  const std::vector<int> read = columns_read(moments, blocks, kernels.lanes);
  thread_local std::unique_ptr<AlignedBuffer> kept;  // on the heap: thread-local storage is small
  if (!kept) kept = std::make_unique<AlignedBuffer>();
  AlignedBuffer& block = *kept;
  // Rows by panels of columns, [block][row][column]; items as they are made, one for each member.
  double *rows = nullptr, *items = nullptr, *sum = nullptr;
  const auto lay_out = [&](Arena layout) {
    rows = layout.take<double>(panel * blocks);
    items = layout.take<double>(item_size * team);
    sum = layout.take<double>(kTile * tiles.size());
    return layout.size();
  };
  lay_out(Arena(block.reserve(lay_out(Arena()))));
  std::fill(items, items + item_size * team, 0.0);
  std::fill(sum, sum + kTile * tiles.size(), 0.0);

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
            std::copy_n(item + r * padded + b * kGramColumns, read[b], to + b * panel);
      }
      member.wait();
      const std::int64_t depth = count * source.rows_per_item;
      for (std::size_t number = member.index; number < tiles.size(); number += member.count) {
        const Tile& tile = tiles[number];
        Product<double> product{};
        product.size.M = tile.rows;
        product.size.N = (tile.columns + kernels.lanes - 1) / kernels.lanes;
        product.a.k1 = product.b.k1 = kGramColumns;
        product.b.n = product.c.n = kernels.lanes;
        product.c.at = sum + std::ptrdiff_t(number) * kTile;
        product.c.m = kGramColumns;
        product.add = true;
        for (std::int64_t first = 0; first < depth; first += block_rows) {
          const std::int64_t end = std::min(first + block_rows, depth);
          for (std::int64_t k = first; k < end; k += kGramRows) {
            product.size.K1 = int(std::min<std::int64_t>(kGramRows, end - k));
            product.a.at = rows + tile.left * panel + k * kGramColumns;
            product.b.at = rows + tile.right * panel + k * kGramColumns;
            kernels.product(product);
          }
        }
      }
      member.wait();
    }
  });

  const double* from = sum;
  for (const CrossMoment& m : moments) from = write_moment(m, from);
  constexpr std::size_t kKept = std::size_t(1) << 25;
  if (block.size() > kKept) block.release();
}

int gram_threads(const RowSource& source, int threads) {
  const Columns all{0, source.width};
  return gram_threads(source, {{all, all, nullptr}}, threads);
}

void gram_matrix(const RowSource& source, int threads, double* out) {
  const Columns all{0, source.width};
  cross_moments(source, {{all, all, out}}, threads);
}

}  // namespace mhfast
