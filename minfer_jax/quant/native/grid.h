// Reading weights whose integers are looked up in groups, by an index for 8 or 4 columns; the layout
// is that of `Grid` in quant/formats/base.py.
#pragma once

#include "lookup.h"
#include "unpack_unit.h"
#include "weight.h"

namespace minfer::MINFER_ISA {

template <int High>
constexpr auto high_type() {
  if constexpr (High == 3) return uint16_t();
  else return uint8_t();
}

// High: bits of an index beyond 8. With 3 there is a flag beside them, else flags have a plane.
template <int Span, int High, int Group>
struct Grid {
  static constexpr bool whole_numbers = true, has_low = false;
  static constexpr int width = 8;
  static constexpr int group = Group, groups = 32 / Group;
  static constexpr int words = 8 / Span;  // of indices, a unit
  using HighType = decltype(high_type<High>());

  const uint32_t *index, *flags, *table;
  const HighType* high;
  const F16* scale;
  const int8_t* sub;
  Codebook codebook;
  int shift;
  float zero, factor;

  Grid(const Weight& w, int64_t j) : codebook(w.codebook) {
    const int64_t units = w.k / 32, at = j * units * kLanes;
    index = w.bits[0] + at * words;
    flags = High == 3 ? nullptr : w.bits[1] + at;
    table = w.grid;
    high = High ? static_cast<const HighType*>(w.high) + at : nullptr;
    scale = static_cast<const F16*>(w.scale) + j * (w.k / w.super_block) * kLanes;
    sub = w.sub + at * groups;
    shift = w.shift();
    zero = (float)w.zero;
    factor = w.factor;
  }

  // The integers of columns 8 g .. 8 g + 7 of unit u, as the nibbles of a word.
  INLINE U eight(int64_t u, int g) const {
    const U byte = splat(0xffu);
    U r;
    if constexpr (Span == 8) {
      U i = (load(index + u * kLanes) >> (8 * g)) & byte;
      if constexpr (High > 0) {
        const U word = whole(high + u * kLanes) >> ((High == 3 ? 4 : High) * g);
        i = i | ((word & splat((1u << High) - 1)) << 8);
        r = gather(table, i);
        if constexpr (High == 3) {
          const U flag = (word >> 3) & splat(1u);
          return r | ((splat(0u) - flag) & splat(0x88888888u));
        }
      } else {
        r = gather(table, i);
      }
    } else {
      const U two = load(index + (u * words + g / 2) * kLanes) >> (16 * (g % 2));
      r = gather(table, two & byte) | (gather(table, (two >> 8) & byte) << 4);
    }
    return r | ((load(flags + u * kLanes) << (3 - g)) & splat(0x88888888u));
  }

  // The bytes of the same columns, by fours.
  INLINE void pair(int64_t u, int g, U* two) const {
    const U nibbles = eight(u, g), mask = splat(0x0f0f0f0fu);
    two[0] = codebook(nibbles & mask);
    two[1] = codebook((nibbles >> 4) & mask);
  }

  INLINE F scale_of(int64_t u, int g) const {
    const F coarse = widen(scale + (u >> shift) * kLanes) * splat(factor);
    return coarse * widen(sub + (u * groups + g) * kLanes);
  }

  INLINE void prefetch(int64_t u, int ahead) const {
    UNROLL for (int i = 0; i < words; i++)
      __builtin_prefetch(index + ((u + ahead) * words + i) * kLanes);
    if constexpr (High != 3) __builtin_prefetch(flags + (u + ahead) * kLanes);
    if constexpr (High > 0) __builtin_prefetch(high + (u + ahead) * kLanes);
    __builtin_prefetch(sub + (u + ahead) * groups * kLanes);
  }

  template <class Put>
  INLINE void each_column(int64_t u, Put put) const {
    unpack_unit(*this, u, put);
  }
};

}  // namespace minfer::MINFER_ISA
