// The product of a few rows with a packed weight: paid in bytes of weight, so each is read once.
#pragma once

#include "norm.h"
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

// Writes a tile of the result, with what is to be added unless a norm comes before that.
INLINE void put(const Product& p, int64_t m, int64_t j, F value) {
  const float* plus = p.post ? nullptr : p.plus;
  const int64_t at = p.row(m) * p.w.n + j * kLanes;
  if ((j + 1) * kLanes <= p.w.n) {
    if (plus) value = value + load(plus + at);
    return store(p.y + at, value);
  }
  for (int64_t i = 0; i < p.w.n - j * kLanes; i++)
    p.y[at + i] = lane(value, (int)i) + (plus ? plus[at + i] : 0);
}

// Whether the loops over a row come out even.
inline bool possible(const Product& p) { return p.w.k % 32 == 0 && !(p.post && p.w.n % kLanes); }

// What row m of the product is taken of; k is a multiple of 16.
inline void prepare(const Product& p, int64_t m, float* out) {
  const int64_t k = p.w.k, at = p.row_of_x(m) * k;
  if (p.prologue == Prologue::none) copy(p.x + at, k, out);
  if (p.prologue == Prologue::rms_norm) rms_norm(p.x + at, p.norm, k, p.eps, out);
  if (p.prologue == Prologue::silu) gate(p.x + 2 * at, k, out, [](F a) { return silu(a); });
  if (p.prologue == Prologue::gelu) gate(p.x + 2 * at, k, out, [](F a) { return gelu(a); });
}

// The norm of a row of the result, and what is to be added after it; n is a multiple of 16.
inline void finish(const Product& p, int64_t m) {
  const int64_t n = p.w.n;
  rms_norm(p.y + m * n, p.post, n, p.eps, p.y + m * n, p.plus ? p.plus + m * n : nullptr);
}

// --- activations in float32 ----------------------------------------------------------------------

template <class Reader>
void matvec_float(const Product& p, const Threads& preparing, const Threads& threads) {
  const Weight& w = p.w;
  const int64_t rows = p.rows;
  const bool ready = p.prologue == Prologue::none && (rows == 1 || !p.order);
  Buffer<float> prepared(ready ? 0 : rows * w.k);
  if (!ready) preparing.run(rows, [&](int64_t m) { prepare(p, m, &prepared[m * w.k]); });
  const float* x = ready ? p.x + p.row_of_x(0) * w.k : prepared.data();
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
        for (int m = 0; m < count; m++) put(p, m0 + m, j, total[m][0] + total[m][1]);
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
  // As whole numbers, sizes are in the order of the floats, and NaN is above them all.
  int32_t top = 0;
  for (int i = 0; i < 32; i++) {
    int32_t size;
    std::memcpy(&size, x + i, 4);
    top = most(top, size & 0x7fffffff);
  }
  float largest;
  std::memcpy(&largest, &top, 4);
  const bool finite = top < 0x7f800000;
  const float inverse = finite && largest > 1e-30f ? kTop / largest : 0;  // else all round to 0
  r.scale = finite ? largest / kTop : __builtin_nanf("");
  int32_t q[32];
  for (int i = 0; i < 32; i++) {
    const float value = inverse > 0 ? x[i] * inverse : 0;
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

template <class Reader>
void matvec_rounded(const Product& p, const Threads& preparing, const Threads& threads) {
  const Weight& w = p.w;
  const int64_t rows = p.rows;
  const int64_t units = w.k / 32;
  const int zero = w.zero - offset(Reader::width);
  Buffer<Unit> rounded(rows * units);  // [units, rows]
  preparing.run(rows, [&](int64_t m) {
    const bool ready = p.prologue == Prologue::none;
    Buffer<float> prepared(ready ? 0 : w.k);
    if (!ready) prepare(p, m, prepared.data());
    const float* x = ready ? p.x + p.row_of_x(m) * w.k : prepared.data();
    for (int64_t u = 0; u < units; u++)
      rounded[u * rows + m] = round_unit<Reader::groups>(x + u * 32);
  });

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
          UNROLL for (int g = 0; g < 4; g++) reader.pair(u, g, bytes + 2 * g);
          UNROLL for (int g = 0; g < Reader::groups; g++) {
            scale[g] = reader.scale_of(u, g);
            if constexpr (Reader::has_low) low[g] = reader.low_of(u, g);
          }
          const Unit* unit = &rounded[u * rows + m0];
          const F* lows = Reader::has_low ? low : nullptr;
          if (count == 1) {
            alone = add_unit<Reader>(bytes, zero, *unit, scale, lows, alone);
          } else {
            for (int64_t m = 0; m < count; m++)
              totals[m] = add_unit<Reader>(bytes, zero, unit[m], scale, lows, totals[m]);
          }
        }
        if (count == 1) totals[0] = alone;
        for (int64_t m = 0; m < count; m++) put(p, m0 + m, j, totals[m]);
      }
    }
  });
}
#endif

inline bool matvec(const Product& p, const Threads& preparing, const Threads& threads) {
  if (!possible(p)) return false;
  const bool done = with_reader(p.w, [&](auto type) {
    using Reader = typename decltype(type)::type;
#if defined(MINFER_HAS_DOT)
    if constexpr (Reader::whole_numbers)
      if (p.rounded) return matvec_rounded<Reader>(p, preparing, threads);
#endif
    matvec_float<Reader>(p, preparing, threads);
  });
  for (int64_t m = 0; m < p.rows && p.post && done; m++) finish(p, m);
  return done;
}

inline bool matvec(const Product& p, const Threads& threads) { return matvec(p, threads, threads); }

}  // namespace minfer::MINFER_ISA
