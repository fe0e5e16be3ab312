// Rows of the cache of one layer, as floats, whatever type they are held in.
#pragma once

#include "memory.h"
#include "ops.h"
#include "weight.h"

namespace minfer::MINFER_ISA {

constexpr int kRowsAhead = 32;  // of the row at hand, what is prefetched

template <class T>
struct Rows {
  T* values;
  int64_t width;

  INLINE Rows(const Plane& plane, int64_t width, int64_t first)
      : values(static_cast<T*>(plane.values) + first * width), width(width) {}

  INLINE F at(int64_t row, int64_t c) const { return widen(values + row * width + c); }

  INLINE void prefetch(int64_t row, int64_t c) const {
    ahead(values + (row + kRowsAhead) * width + c, width);
  }

  INLINE void put(int64_t row, const float* x) const {
    for (int64_t c = 0; c < width; c += kLanes) narrow(values + row * width + c, load(x + c));
  }

  static INLINE void ahead(const T* from, int64_t width) {
    const char* at = reinterpret_cast<const char*>(from);
    for (int64_t i = 0; i < least<int64_t>(width, 4 * kLanes) * (int64_t)sizeof(T); i += 64)
      __builtin_prefetch(at + i);
  }
};

// q8_0: bytes, and a float16 scale for 32 of them; rounded as in quant/cache.py.
struct Q8 {};

template <>
struct Rows<Q8> {
  static constexpr int kBlock = 32;
  int8_t* values;
  F16* scales;
  int64_t width;

  INLINE Rows(const Plane& plane, int64_t width, int64_t first)
      : values(static_cast<int8_t*>(plane.values) + first * width),
        scales(static_cast<F16*>(plane.scales) + first * (width / kBlock)),
        width(width) {}

  INLINE F at(int64_t row, int64_t c) const {
    return widen(values + row * width + c) * spread(scales[row * (width / kBlock) + c / kBlock]);
  }

  INLINE void prefetch(int64_t row, int64_t c) const {
    Rows<int8_t>::ahead(values + (row + kRowsAhead) * width + c, width);
  }

  void put(int64_t row, const float* x) const {
    for (int64_t c = 0; c < width; c += kBlock) {
      float largest = 0;  // or NaN, if there is one
      for (int i = 0; i < kBlock; i++) {
        const float size = __builtin_fabsf(x[c + i]);
        largest = size > largest || size != size ? size : largest;
      }
      const float d = largest / 127;
      const float twice = d < 0x1p-126f ? 0 : 2 / d;  // 2 / d may be infinite there
      alignas(64) F16 scale[kLanes];
      narrow(scale, splat(d));
      scales[row * (width / kBlock) + c / kBlock] = scale[0];
      for (int i = 0; i < kBlock; i++) {
        const float y = x[c + i] * twice;
        const int q = y == y ? (int)y : 0;
        values[row * width + c + i] = (int8_t)((q < 0 ? q - 1 : q + 1) / 2);
      }
    }
  }
};

// Calls f with a value of the type that the cache holds; false where the kernels do not take its
// heads.
template <class Call>
bool with_cache(const Attention& a, const Call& f) {
  const int64_t step = a.cache == Cache::q8 ? Rows<Q8>::kBlock : kLanes;
  if (a.h % step || a.h_v % step) return false;
  switch (a.cache) {
    case Cache::f32: f(float()); break;
    case Cache::f16: f(F16()); break;
    case Cache::bf16: f(BF16()); break;
    case Cache::q8: f(Q8()); break;
  }
  return true;
}

}  // namespace minfer::MINFER_ISA
