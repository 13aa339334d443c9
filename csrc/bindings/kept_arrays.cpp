#include "kept_arrays.hpp"

#include <memory>
#include <mutex>
#include <vector>

#include "../runtime/scratch.hpp"
#include "../runtime/tuning.hpp"

namespace mhfast {
namespace {

using Block = std::unique_ptr<AlignedBuffer>;

class KeptBlocks {
 public:
  /// The smallest block that holds `size` bytes, unless that is far larger; else a new one.
  Block take(std::size_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::size_t best = blocks_.size();
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      const std::size_t of = blocks_[i]->size();
      const bool fits = size <= of && of <= 4 * size;
      if (fits && (best == blocks_.size() || of < blocks_[best]->size())) best = i;
    }
    if (best == blocks_.size()) return std::make_unique<AlignedBuffer>();
    Block found = std::move(blocks_[best]);
    blocks_.erase(blocks_.begin() + std::ptrdiff_t(best));
    bytes_ -= found->size();
    return found;
  }

  /// Keeps a block; those kept longest make room for it.
  void leave(Block block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (block->size() > kKeptArrays) return;
    while (bytes_ + block->size() > kKeptArrays) {
      bytes_ -= blocks_.front()->size();
      blocks_.erase(blocks_.begin());
    }
    bytes_ += block->size();
    blocks_.push_back(std::move(block));
  }

 private:
  std::mutex mutex_;
  std::vector<Block> blocks_;
  std::size_t bytes_ = 0;
};

/// Never destroyed: arrays may be released after everything else.
KeptBlocks& kept_blocks() {
  static KeptBlocks* const blocks = new KeptBlocks;
  return *blocks;
}

}  // namespace

template <class T>
py::array kept_array(const ArrayShape& shape) {
  std::size_t size = sizeof(T);
  for (const py::ssize_t length : shape) size *= std::size_t(length);
  Block block = kept_blocks().take(size);
  T* const at = reinterpret_cast<T*>(block->reserve(std::max<std::size_t>(size, 1)));
  const py::capsule owner(block.get(), [](void* given) {
    kept_blocks().leave(Block(static_cast<AlignedBuffer*>(given)));
  });
  block.release();
  return py::array_t<T>(std::vector<py::ssize_t>(shape.begin(), shape.end()), at, owner);
}

template py::array kept_array<float>(const ArrayShape&);
template py::array kept_array<double>(const ArrayShape&);

}  // namespace mhfast
