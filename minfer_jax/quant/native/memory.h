// Small helpers with internal names: what the standard headers would emit once for the whole
// library, compiled for whichever instruction set comes first.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "simd.h"

namespace minfer::MINFER_ISA {

template <class T>
INLINE T least(T a, T b) {
  return a < b ? a : b;
}

template <class T>
INLINE T most(T a, T b) {
  return a > b ? a : b;
}

template <class T>
INLINE void fill(T* to, int64_t n, T value) {
  for (int64_t i = 0; i < n; i++) to[i] = value;
}

template <class T>
INLINE void copy(const T* from, int64_t n, T* to) {
  for (int64_t i = 0; i < n; i++) to[i] = from[i];
}

// Memory for n values, aligned to a cache line, not initialised.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t n) { grow(n); }
  Buffer(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  // Makes room for n values; what was held is lost if it must move.
  void grow(int64_t n) {
    if (n <= size_) return;
    std::free(data_);
    size_ = n;
    data_ = static_cast<T*>(std::aligned_alloc(64, (n * sizeof(T) + 127) / 64 * 64));
    if (data_ == nullptr) std::abort();
  }

  T* data() { return data_; }  // null where there was never room for anything
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }

 private:
  T* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace minfer::MINFER_ISA
