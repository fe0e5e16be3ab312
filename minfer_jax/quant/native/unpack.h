// Reading packed weights: the fields of a unit of 32 columns, and the scales of its groups.
#pragma once

#include "ops.h"
#include "weight.h"

namespace minfer::MINFER_ISA {

// What the kernels are compiled for. A format of another kind is left to XLA.
template <int W0, int W1, int Group, bool Fine, bool Low>
struct Packed {
  static constexpr int width = W0 + W1;
  static constexpr int group = Group;
  static constexpr int groups = 32 / Group;  // of a unit

  const uint32_t *bits0, *bits1;
  const F16 *scale, *low;
  const int8_t *sub, *sublow;
  int per_super;  // units that share `scale`
  float zero;

  // Tile j of a weight.
  Packed(const Weight& w, int64_t j) {
    const int64_t units = w.k / 32, groups_k = w.k / Group, supers = w.k / w.super_block;
    bits0 = w.bits[0] + j * units * W0 * kLanes;
    bits1 = W1 ? w.bits[1] + j * units * W1 * kLanes : nullptr;
    scale = reinterpret_cast<const F16*>(w.scale) + j * supers * kLanes;
    sub = Fine ? w.sub + j * groups_k * kLanes : nullptr;
    low = Low ? reinterpret_cast<const F16*>(w.low) + j * supers * kLanes : nullptr;
    sublow = Fine && Low ? w.sublow + j * groups_k * kLanes : nullptr;
    per_super = w.super_block / 32;
    zero = (float)w.zero;
  }

  // The bytes of columns 4 t .. 4 t + 3 of unit u; t is a constant once loops are unrolled.
  INLINE U bytes(int64_t u, int t) const {
    U x = field<W0>(bits0, u, t);
    if constexpr (W1 > 0) x = x | (field<W1>(bits1, u, t) << W0);
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

  INLINE F level(const F16* base, const int8_t* fine, int64_t u, int g) const {
    if constexpr (!Fine) return widen(base + u * kLanes);
    const F coarse = widen(base + u / per_super * kLanes);
    return coarse * widen(fine + (u * groups + g) * kLanes);
  }

  // What unit u + ahead takes, into the nearest cache: the machine's own guess stops at each page.
  INLINE void prefetch(int64_t u, int ahead) const {
    UNROLL for (int i = 0; i < W0; i++)
      __builtin_prefetch(bits0 + ((u + ahead) * W0 + i) * kLanes);
    UNROLL for (int i = 0; i < W1; i++)
      __builtin_prefetch(bits1 + ((u + ahead) * W1 + i) * kLanes);
    if constexpr (!Fine) {
      __builtin_prefetch(scale + (u + ahead) * kLanes);
      if constexpr (Low) __builtin_prefetch(low + (u + ahead) * kLanes);
    } else {
      __builtin_prefetch(sub + (u + ahead) * groups * kLanes);
      if constexpr (Low) __builtin_prefetch(sublow + (u + ahead) * groups * kLanes);
    }
  }

  // The weights of unit u in float32, column by column.
  template <class Put>
  INLINE void each_column(int64_t u, Put put) const {
    F s[groups], m[groups];
    UNROLL for (int g = 0; g < groups; g++) {
      s[g] = scale_of(u, g);
      if constexpr (Low) m[g] = low_of(u, g);
    }
    UNROLL for (int t = 0; t < 8; t++) {
      const U four = bytes(u, t);
      UNROLL for (int b = 0; b < 4; b++) {
        const U q = (b == 3) ? four >> 24 : (four >> (8 * b)) & splat<uint32_t>(0xff);
        F value = (to_float(::minfer::MINFER_ISA::bits<int32_t>(q)) - splat(zero)) * s[4 * t / Group];
        if constexpr (Low) value = value + m[4 * t / Group];
        put(4 * t + b, value);
      }
    }
  }
};

// Plain floats; any number of columns that is a multiple of 32.
template <class T>
struct Dense {
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
  const bool fine = w.sub != nullptr, low = w.low != nullptr;
  const auto is = [&](int w0, int w1, int group, bool two, bool has_low) {
    return w.width[0] == w0 && w.width[1] == w1 && w.group == group && fine == two && low == has_low;
  };
  if (w.k % 32) return false;
  if (w.dense) {
    if (w.dense_type == 'f') f(Type<Dense<float>>());
    else if (w.dense_type == 'h') f(Type<Dense<F16>>());
    else if (w.dense_type == 'b') f(Type<Dense<BF16>>());
    else return false;
    return true;
  }
#define MINFER_FORMAT(...)                               \
  if (is(__VA_ARGS__)) {                                 \
    f(Type<Packed<__VA_ARGS__>>());        \
    return true;                                         \
  }
  // widths  group two-level minimum
  MINFER_FORMAT(4, 0, 32, false, false)  // Q4_0
  MINFER_FORMAT(4, 0, 32, false, true)   // Q4_1
  MINFER_FORMAT(4, 1, 32, false, false)  // Q5_0
  MINFER_FORMAT(4, 1, 32, false, true)   // Q5_1
  MINFER_FORMAT(8, 0, 32, false, false)  // Q8_0
  MINFER_FORMAT(2, 0, 16, true, true)    // Q2_K
  MINFER_FORMAT(2, 1, 16, true, false)   // Q3_K
  MINFER_FORMAT(4, 0, 32, true, true)    // Q4_K
  MINFER_FORMAT(4, 1, 32, true, true)    // Q5_K
  MINFER_FORMAT(4, 2, 16, true, false)   // Q6_K
#undef MINFER_FORMAT
  return false;
}

}  // namespace minfer::MINFER_ISA
