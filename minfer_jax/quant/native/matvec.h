// The product of a few rows with a packed weight: paid in bytes of weight, so each is read once.
#pragma once

#include "memory.h"
#include "unpack.h"

namespace minfer::MINFER_ISA {

constexpr int kAhead = 16;  // units: 4 KB for 4 bits; less waits for memory, more outruns a share

// Tiles that a thread takes at a time. Two shares for each even out who comes late; shares are
// otherwise as long as can be, since each begins with a wait for memory.
inline int64_t tiles_at_once(int64_t tiles, int threads) {
  return most<int64_t>(1, least<int64_t>(128, (tiles + 2 * threads - 1) / (2 * threads)));
}

// Runs f(first tile, last tile) over all tiles.
template <class Call>
void over_tiles(const Weight& w, const Threads& threads, Call f) {
  const int64_t tiles = w.tiles(), step = tiles_at_once(tiles, threads.count);
  threads.run((tiles + step - 1) / step,
               [&](int64_t i) { f(i * step, least(tiles, (i + 1) * step)); });
}

INLINE void put(const Weight& w, float* y, int64_t m, int64_t j, F value) {
  float* row = y + m * w.n + j * kLanes;
  if ((j + 1) * kLanes <= w.n) return store(row, value);
  for (int64_t i = 0; i < w.n - j * kLanes; i++) row[i] = lane(value, (int)i);
}

// --- activations in float32 ----------------------------------------------------------------------

template <class Reader>
void matvec_float(const Weight& w, const float* x, int64_t rows, float* y, const Threads& threads) {
  over_tiles(w, threads, [&](int64_t first, int64_t last) {
    for (int64_t j = first; j < last; j++) {
      const Reader reader(w, j);
      for (int64_t m0 = 0; m0 < rows; m0 += 4) {
        const int count = (int)least<int64_t>(4, rows - m0);
        F total[4][2] = {};
        for (int64_t u = 0; u < w.k / 32; u++) {
          reader.prefetch(u, kAhead);
          reader.each_column(u, [&](int i, F value) __attribute__((always_inline)) {
            for (int m = 0; m < count; m++) {
              const F xi = splat(x[(m0 + m) * w.k + u * 32 + i]);
              total[m][i % 2] = fma(xi, value, total[m][i % 2]);
            }
          });
        }
        for (int m = 0; m < count; m++) put(w, y, m0 + m, j, total[m][0] + total[m][1]);
      }
    }
  });
}

// --- activations in 16 bits ----------------------------------------------------------------------

#if defined(MINFER_HAS_DOT)

// 32 activations, each scale * (a whole number of 16 bits).
struct alignas(64) Unit {
  uint32_t a[8], b[8];  // see `dot`
  float scale;
  float sum[2];      // of the rounded activations, by group of 16; all of them in sum[0] for 32
  int32_t whole[2];  // the same, over scale
};

template <int Groups>
inline Unit round_unit(const float* x) {
  Unit r;
  float largest = 0;
  for (int i = 0; i < 32; i++) largest = most(largest, __builtin_fabsf(x[i]));
  const float inverse = largest > 0 ? kTop / largest : 0;
  r.scale = largest / kTop;
  int32_t q[32];
  for (int i = 0; i < 32; i++) {
    const float value = x[i] * inverse;
    q[i] = (int32_t)(value + (value < 0 ? -0.5f : 0.5f));
  }
  for (int t = 0; t < 8; t++) {
    const Quad four = quad(q + 4 * t);
    r.a[t] = four.a;
    r.b[t] = four.b;
  }
  for (int g = 0; g < Groups; g++) {
    r.whole[g] = 0;
    for (int i = 0; i < 32 / Groups; i++) r.whole[g] += q[g * (32 / Groups) + i];
    r.sum[g] = r.whole[g] * r.scale;
  }
  return r;
}

// Adds a unit of one row to total.
template <class Reader>
INLINE F add_unit(const U* bytes, int zero, const Unit& x, const F* scale, const F* low, F total) {
  constexpr int steps = 8 / Reader::groups;
  UNROLL for (int g = 0; g < Reader::groups; g++) {
    I a = splat(0), b = splat(0);
    UNROLL for (int t = g * steps; t < (g + 1) * steps; t++)
      dot<Reader::width>(a, b, bytes[t], x.a[t], x.b[t]);
    const I whole = joined(a, b) - splat(zero * x.whole[g]);
    total = fma(to_float(whole), scale[g] * splat(x.scale), total);
    if (low != nullptr) total = fma(low[g], splat(x.sum[g]), total);
  }
  return total;
}

template <int W0, int W1, int Group, bool Fine, bool Low>
void matvec_rounded(const Weight& w, const float* x, int64_t rows, float* y, const Threads& threads, Packed<W0, W1, Group, Fine, Low>*) {
  using Reader = Packed<W0, W1, Group, Fine, Low>;
  const int64_t units = w.k / 32;
  const int zero = w.zero - offset(Reader::width);
  Buffer<Unit> rounded(rows * units);  // [units, rows]
  for (int64_t m = 0; m < rows; m++)
    for (int64_t u = 0; u < units; u++)
      rounded[u * rows + m] = round_unit<Reader::groups>(x + m * w.k + u * 32);

  over_tiles(w, threads, [&](int64_t first, int64_t last) {
    F totals[16];
    for (int64_t j = first; j < last; j++) {
      const Reader reader(w, j);
      for (int64_t m0 = 0; m0 < rows; m0 += 16) {
        const int64_t count = least<int64_t>(16, rows - m0);
        for (int64_t m = 0; m < count; m++) totals[m] = splat(0.0f);
        F alone = splat(0.0f);
        for (int64_t u = 0; u < units; u++) {
          reader.prefetch(u, kAhead);
          U bytes[8];
          F scale[Reader::groups], low[Reader::groups];
          UNROLL for (int t = 0; t < 8; t++) bytes[t] = reader.bytes(u, t);
          UNROLL for (int g = 0; g < Reader::groups; g++) {
            scale[g] = reader.scale_of(u, g);
            if constexpr (Low) low[g] = reader.low_of(u, g);
          }
          const Unit* unit = &rounded[u * rows + m0];
          const F* lows = Low ? low : nullptr;
          if (count == 1) {
            alone = add_unit<Reader>(bytes, zero, *unit, scale, lows, alone);
          } else {
            for (int64_t m = 0; m < count; m++)
              totals[m] = add_unit<Reader>(bytes, zero, unit[m], scale, lows, totals[m]);
          }
        }
        if (count == 1) totals[0] = alone;
        for (int64_t m = 0; m < count; m++) put(w, y, m0 + m, j, totals[m]);
      }
    }
  });
}

template <class T>
void matvec_rounded(const Weight& w, const float* x, int64_t rows, float* y, const Threads& threads, Dense<T>*) {
  matvec_float<Dense<T>>(w, x, rows, y, threads);
}
#endif

inline bool matvec(const Weight& w, const float* x, int64_t rows, bool rounded, float* y,
                   const Threads& threads) {
  return with_reader(w, [&](auto type) {
    using Reader = typename decltype(type)::type;
#if defined(MINFER_HAS_DOT)
    if (rounded)
      return matvec_rounded(w, x, rows, y, threads, static_cast<Reader*>(nullptr));
#endif
    (void)rounded;
    matvec_float<Reader>(w, x, rows, y, threads);
  });
}

}  // namespace minfer::MINFER_ISA
