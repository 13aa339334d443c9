// Workspace memory: an arena of one aligned allocation, kept by the calling thread between calls.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace mhfast {

/// Lays arrays out one after another; every array starts on a cache line. The first pass (no base)
/// only measures.
class Arena {
 public:
  explicit Arena(std::byte* base = nullptr) : base_(base) {}

  template <class T>
  T* take(std::size_t count) {
    T* at = base_ ? reinterpret_cast<T*>(base_ + size_) : nullptr;
    size_ += (count * sizeof(T) + kLine - 1) / kLine * kLine;
    return at;
  }
  std::size_t size() const { return size_; }

 private:
  static constexpr std::size_t kLine = 64;
  std::byte* base_;
  std::size_t size_ = 0;
};

/// An aligned block that grows on demand; its contents are lost when it does.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;
  ~AlignedBuffer() { std::free(memory_); }

  /// At least `size` bytes. Throws std::bad_alloc.
  std::byte* reserve(std::size_t size) {
    if (size > size_) {
      release();
      size = (size + 63) / 64 * 64;
      void* memory = nullptr;
      if (posix_memalign(&memory, 64, size) != 0) throw std::bad_alloc();
      memory_ = static_cast<std::byte*>(memory);
      size_ = size;
    }
    return memory_;
  }

  void release() {
    std::free(memory_);
    memory_ = nullptr;
    size_ = 0;
  }
  std::size_t size() const { return size_; }

 private:
  std::byte* memory_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace mhfast
