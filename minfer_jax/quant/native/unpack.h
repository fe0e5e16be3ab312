// Reading packed weights: the fields of a unit of 32 columns, and the scales of its groups.
#pragma once

#include "grid.h"
#include "weight.h"

namespace minfer::MINFER_ISA {

// The codebook of a reader, or nothing.
template <bool Coded>
struct Code {
  explicit Code(const uint8_t*) {}
};
template <>
struct Code<true> {
  Codebook book;
  explicit Code(const uint8_t* bytes) : book(bytes) {}
};

// What the kernels are compiled for. A format of another kind is left to XLA.
//
// Scale: the type of `scale`. Fine: whether there are two levels of scales. Low: whether there are
// minimums. Coded: whether the fields stand for the bytes of a codebook.
template <int W0, int W1, int Group, bool Fine, bool Low, class Scale = F16, bool Coded = false>
struct Packed {
  static constexpr bool whole_numbers = true, has_low = Low;
  static constexpr int width = Coded ? 8 : W0 + W1;  // of the bytes
  static constexpr int group = Group;
  static constexpr int groups = 32 / Group;  // of a unit
  static constexpr bool shared = Fine || W0 <= 2;  // whether units may have a `scale` in common

  const uint32_t *bits0, *bits1;
  const Scale* scale;
  const F16* low;
  const int8_t *sub, *sublow;
  Code<Coded> code;
  int shift;  // 2**shift units share `scale`
  float zero;

  // Tile j of a weight.
  Packed(const Weight& w, int64_t j) : code(w.codebook) {
    const int64_t units = w.k / 32, groups_k = w.k / Group, supers = w.k / w.super_block;
    bits0 = w.bits[0] + j * units * W0 * kLanes;
    bits1 = W1 ? w.bits[1] + j * units * W1 * kLanes : nullptr;
    scale = static_cast<const Scale*>(w.scale) + j * supers * kLanes;
    sub = Fine ? w.sub + j * groups_k * kLanes : nullptr;
    low = Low ? reinterpret_cast<const F16*>(w.low) + j * supers * kLanes : nullptr;
    sublow = Fine && Low ? w.sublow + j * groups_k * kLanes : nullptr;
    shift = w.shift();
    zero = (float)w.zero;
  }

  // The bytes of columns 8 g .. 8 g + 7 of unit u, by fours.
  INLINE void pair(int64_t u, int g, U* two) const {
    two[0] = bytes(u, 2 * g);
    two[1] = bytes(u, 2 * g + 1);
  }

  // The bytes of columns 4 t .. 4 t + 3; t is a constant once loops are unrolled.
  INLINE U bytes(int64_t u, int t) const {
    U x = field<W0>(bits0, u, t);
    if constexpr (W1 > 0) x = x | (field<W1>(bits1, u, t) << W0);
    if constexpr (Coded) x = code.book(x);
    return x;
  }

  template <int W>
  static INLINE U field(const uint32_t* plane, int64_t u, int t) {
    const U word = load(plane + (u * W + t % W) * kLanes);
    if constexpr (W == 8) return word;
    return (word >> (W * (t / W))) & splat<uint32_t>(0x01010101u * ((1u << W) - 1));
  }

  INLINE F scale_of(int64_t u, int g) const { return level(scale, sub, u, g); }
  INLINE F low_of(int64_t u, int g) const { return level(low, sublow, u, g); }

  template <class T>
  INLINE F level(const T* base, const int8_t* fine, int64_t u, int g) const {
    if constexpr (!Fine && groups > 1) return widen(base + (u * groups + g) * kLanes);
    const F coarse = widen(base + (shared ? u >> shift : u) * kLanes);
    if constexpr (!Fine) return coarse;
    return coarse * widen(fine + (u * groups + g) * kLanes);
  }

  // What unit u + ahead takes, into the nearest cache: the machine's own guess stops at each page.
  INLINE void prefetch(int64_t u, int ahead) const {
    UNROLL for (int i = 0; i < W0; i++)
      __builtin_prefetch(bits0 + ((u + ahead) * W0 + i) * kLanes);
    UNROLL for (int i = 0; i < W1; i++)
      __builtin_prefetch(bits1 + ((u + ahead) * W1 + i) * kLanes);
    if constexpr (!Fine) {
      __builtin_prefetch(scale + (shared ? (u + ahead) >> shift : u + ahead) * groups * kLanes);
      if constexpr (Low) __builtin_prefetch(low + (u + ahead) * kLanes);
    } else {
      __builtin_prefetch(sub + (u + ahead) * groups * kLanes);
      if constexpr (Low) __builtin_prefetch(sublow + (u + ahead) * groups * kLanes);
    }
  }

  // The weights of unit u in float32, column by column.
  template <class Put>
  INLINE void each_column(int64_t u, Put put) const {
    unpack_unit(*this, u, put);
  }
};

// Plain floats; any number of columns that is a multiple of 32.
template <class T>
struct Dense {
  static constexpr bool whole_numbers = false;
  const T* values;
  Dense(const Weight& w, int64_t j) : values(static_cast<const T*>(w.dense) + j * w.k * kLanes) {}

  INLINE void prefetch(int64_t u, int ahead) const {
    constexpr int per_line = 64 / (kLanes * sizeof(T));
    UNROLL for (int i = 0; i < 32; i += per_line)
      __builtin_prefetch(values + ((u + ahead) * 32 + i) * kLanes);
  }

  template <class Put>
  INLINE void each_column(int64_t u, Put put) const {
    UNROLL for (int i = 0; i < 32; i++) put(i, widen(values + (u * 32 + i) * kLanes));
  }
};

template <class T>
struct Type {
  using type = T;
};

// Calls f(Type<reader of this weight>); false if there is none.
template <class Call>
bool with_reader(const Weight& w, Call&& f) {
  if (w.k % 32) return false;
  if (w.width[0] == 0) {
    if (w.dense_type == 'f') f(Type<Dense<float>>());
    else if (w.dense_type == 'h') f(Type<Dense<F16>>());
    else if (w.dense_type == 'b') f(Type<Dense<BF16>>());
    else return false;
    return true;
  }
  const bool fine = w.sub != nullptr, low = w.low != nullptr, coded = w.codebook != nullptr;
  const auto is = [&](int w0, int w1, int group, bool two, bool has_low) {
    return w.width[0] == w0 && w.width[1] == w1 && w.group == group && fine == two && low == has_low;
  };
#define MINFER_TAKE(...)           \
  {                                \
    f(Type<__VA_ARGS__>());        \
    return true;                   \
  }
#define MINFER_GRID(columns, high, size)                                      \
  if (w.span == columns && w.high_bits == high && w.group == size && fine)    \
    MINFER_TAKE(Grid<columns, high, size>)
#define MINFER_CODED(Scale, letter, ...)                   \
  if (coded && w.scale_type == letter && is(__VA_ARGS__))  \
    MINFER_TAKE(Packed<__VA_ARGS__, Scale, true>)
#define MINFER_FORMAT(...) \
  if (!coded && is(__VA_ARGS__)) MINFER_TAKE(Packed<__VA_ARGS__>)
  if (w.grid != nullptr) {
    // columns, high bits, group
    MINFER_GRID(8, 0, 32)  // IQ2_XXS
    MINFER_GRID(8, 1, 16)  // IQ2_XS
    MINFER_GRID(8, 2, 16)  // IQ2_S
    MINFER_GRID(4, 0, 32)  // IQ3_XXS
    MINFER_GRID(8, 3, 32)  // IQ1_S
    MINFER_GRID(8, 3, 16)  // IQ1_M
    return false;
  }
  // widths  group two-level minimum
  MINFER_CODED(F16, 'h', 4, 0, 32, false, false)       // IQ4_NL
  MINFER_CODED(F16, 'h', 4, 0, 32, true, false)        // IQ4_XS, IQ3_S
  MINFER_CODED(BF16Byte, 'B', 4, 0, 32, false, false)  // MXFP4
  MINFER_CODED(F16Byte, 'H', 4, 0, 16, false, false)   // NVFP4
  MINFER_CODED(F16, 'h', 1, 0, 32, false, false)       // Q1_0
  MINFER_FORMAT(2, 0, 32, false, false)                // TQ1_0, TQ2_0, Q2_0
  MINFER_FORMAT(4, 0, 32, false, false)                // Q4_0
  MINFER_FORMAT(4, 0, 32, false, true)                 // Q4_1
  MINFER_FORMAT(4, 1, 32, false, false)                // Q5_0
  MINFER_FORMAT(4, 1, 32, false, true)                 // Q5_1
  MINFER_FORMAT(8, 0, 32, false, false)                // Q8_0
  MINFER_FORMAT(2, 0, 16, true, true)                  // Q2_K
  MINFER_FORMAT(2, 1, 16, true, false)                 // Q3_K
  MINFER_FORMAT(4, 0, 32, true, true)                  // Q4_K
  MINFER_FORMAT(4, 1, 32, true, true)                  // Q5_K
  MINFER_FORMAT(4, 2, 16, true, false)                 // Q6_K
#undef MINFER_FORMAT
#undef MINFER_CODED
#undef MINFER_GRID
#undef MINFER_TAKE
  return false;
}

}  // namespace minfer::MINFER_ISA
