#include "distinct.hpp"

#include <algorithm>
#include <cstring>

namespace mhfast {
namespace {

constexpr std::uint64_t kFactor = 0x9e3779b97f4a7c15u;  // odd, of random bits: 2^64 / golden ratio

/// The upper half is added to the lower one, as numbers often differ in their highest bits alone.
std::uint64_t mixed(std::uint64_t hash, std::uint64_t bits) {
  hash = (hash ^ bits) * kFactor;
  return hash ^ (hash >> 32);
}

std::uint64_t load(const unsigned char* at, std::size_t bytes = 8) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, at, bytes);
  return bits;
}

std::uint64_t hash_bytes(const unsigned char* at, std::ptrdiff_t width, std::uint64_t hash) {
  std::ptrdiff_t i = 0;
  // Four chains, since each operation of one waits for the one before.
  std::uint64_t a = hash, b = hash + 1, c = hash + 2, d = hash + 3;
  for (; i + 32 <= width; i += 32) {
    a = mixed(a, load(at + i));
    b = mixed(b, load(at + i + 8));
    c = mixed(c, load(at + i + 16));
    d = mixed(d, load(at + i + 24));
  }
  hash = mixed(mixed(mixed(a, b), c), d);
  for (; i + 8 <= width; i += 8) hash = mixed(hash, load(at + i));
  return i < width ? mixed(hash, load(at + i, std::size_t(width - i))) : hash;
}

/// The different rows so far.
class Table {
 public:
  Table(const std::vector<ByteRows>& parts, std::ptrdiff_t most, std::vector<std::int64_t>& first)
      : parts_(parts), first_(first) {
    std::size_t size = 4;
    while (size < 2 * std::size_t(most + 1)) size *= 2;
    slots_.assign(size, Slot{});
    first_.clear();
  }

  /// The number of a row, a new one if it is none of those before.
  std::int32_t number(std::ptrdiff_t row) {
    std::uint64_t hash = 0;
    for (const ByteRows& part : parts_) hash = hash_bytes(place(part, row), part.width, hash);
    const auto tag = std::uint32_t(hash >> 32);
    const std::size_t last = slots_.size() - 1;
    for (std::size_t s = std::size_t(hash) & last;; s = (s + 1) & last) {
      Slot& slot = slots_[s];
      if (slot.number < 0) {
        slot = {tag, std::int32_t(first_.size())};
        first_.push_back(row);
        return slot.number;
      }
      if (slot.tag == tag && is_same(row, first_[std::size_t(slot.number)])) return slot.number;
    }
  }

 private:
  struct Slot {
    std::uint32_t tag = 0;
    std::int32_t number = -1;
  };

  static const unsigned char* place(const ByteRows& part, std::ptrdiff_t row) {
    return part.at + row * part.width;
  }

  bool is_same(std::ptrdiff_t row, std::ptrdiff_t other) const {
    return std::all_of(parts_.begin(), parts_.end(), [&](const ByteRows& part) {
      return std::memcmp(place(part, row), place(part, other), std::size_t(part.width)) == 0;
    });
  }

  const std::vector<ByteRows>& parts_;
  std::vector<std::int64_t>& first_;
  std::vector<Slot> slots_;
};

/// Whether two of about `probe` rows are the same: of some in equal distances, and of those that
/// follow them, since the same ones may lie side by side.
bool has_same_rows(const std::vector<ByteRows>& parts, std::ptrdiff_t count, std::ptrdiff_t probe,
                   std::vector<std::int64_t>& first) {
  Table table(parts, probe, first);
  const std::ptrdiff_t step = std::max<std::ptrdiff_t>(2, count / (probe / 2));
  std::size_t looked_at = 0;
  for (std::ptrdiff_t row = 0; row + 1 < count; row += step)
    for (const std::ptrdiff_t next : {row, row + 1}) {
      table.number(next);
      if (first.size() < ++looked_at) return true;
    }
  return false;
}

}  // namespace

bool number_rows(const std::vector<ByteRows>& parts, std::ptrdiff_t count, std::ptrdiff_t most,
                 std::ptrdiff_t probe, std::int32_t* numbers, std::vector<std::int64_t>& first) {
  if (probe >= 2 && probe < count && !has_same_rows(parts, count, probe, first)) return false;
  Table table(parts, std::min(most, count), first);
  for (std::ptrdiff_t row = 0; row < count; ++row) {
    numbers[row] = table.number(row);
    if (std::ptrdiff_t(first.size()) > most) return false;
  }
  return true;
}

}  // namespace mhfast
