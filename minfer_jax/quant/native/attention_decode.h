// Attention of one query position: paid in bytes of cache, so only slots that are seen are read.
//
// The slots are cut into spans of a fixed length, which threads take in any order; each leaves a
// partial softmax, and the partials are joined in order: the result does not depend on the threads.
#pragma once

#include "memory.h"
#include "ops.h"
#include "weight.h"

namespace minfer::MINFER_ISA {

constexpr int kSpan = 256;   // slots
constexpr int kHeads = 4;    // query heads that share a pass over the cache
constexpr int kRowsAhead = 32;
constexpr float kNever = -1e30f;

template <int N>
struct Wide {
  static constexpr int value = N;
};

// e**(score - top), and 0 for a slot that is not seen: where none is, the top is kNever itself.
INLINE F softmax_weight(F score, float top) {
  F weight = exp(score - splat(top));
  UNROLL for (int p = 0; p < kParts; p++)
    weight.part[p] = score.part[p] == kNever ? F::Native{} : weight.part[p];
  return weight;
}

// The row that comes `kRowsAhead` after this one.
template <class T>
INLINE void prefetch(const T* row, int64_t h) {
  const char* at = reinterpret_cast<const char*>(row + kRowsAhead * h);
  for (int64_t i = 0; i < least<int64_t>(h, 4 * kLanes) * (int64_t)sizeof(T); i += 64)
    __builtin_prefetch(at + i);
}

// Query heads g0 .. g0 + G of one kv head, over slots s0 .. s1: leaves their largest score, the sum
// of weights, and the weighted sum of values [G][H].
template <class T, int G, int Chunks>
void attend_span(const Attention& a, const T* k, const T* v, const float* q, int32_t qp,
                 const int32_t* held, int64_t s0, int64_t s1, float* tops, float* totals, float* out) {
  const int64_t h = Chunks ? Chunks * kLanes : a.h;
  const int count = (int)(s1 - s0);
  alignas(64) float scores[G][kSpan];
  const int padded = (count + kLanes - 1) / kLanes * kLanes;
  for (int i0 = 0; i0 < count; i0 += kLanes) {
    F dots[G][kLanes];
    alignas(64) int32_t seen[kLanes];
    for (int i = 0; i < kLanes; i++) {
      const int64_t slot = s0 + least(i0 + i, count - 1);
      seen[i] = i0 + i < count && a.sees(qp, held[slot]);
      const T* row = k + slot * h;
      prefetch(row, h);
      F dot[G];
      UNROLL for (int g = 0; g < G; g++) dot[g] = splat(0.0f);
      UNROLL for (int64_t c = 0; c < h; c += kLanes) {
        const F key = widen(row + c);
        UNROLL for (int g = 0; g < G; g++) dot[g] = fma(key, load(q + g * h + c), dot[g]);
      }
      UNROLL for (int g = 0; g < G; g++) dots[g][i] = dot[g];
    }
    UNROLL for (int g = 0; g < G; g++) {
      const F score = sums(dots[g]) * splat(a.scale);
      store(&scores[g][i0], select(load(seen), score, splat(kNever)));
    }
  }
  for (int g = 0; g < G; g++) {
    F largest = splat(kNever);
    for (int i = 0; i < padded; i += kLanes) largest = max(largest, load(&scores[g][i]));
    tops[g] = top(largest);
    F total = splat(0.0f);
    for (int i = 0; i < padded; i += kLanes) {
      const F score = load(&scores[g][i]);
      const F weight = softmax_weight(score, tops[g]);
      store(&scores[g][i], weight);
      total = total + weight;
    }
    totals[g] = sum(total);
  }
  const auto values = [&](auto width, int64_t c) {
    constexpr int wide = decltype(width)::value;
    F acc[G][wide];
    UNROLL for (int g = 0; g < G; g++) {
      UNROLL for (int x = 0; x < wide; x++) acc[g][x] = splat(0.0f);
    }
    for (int i = 0; i < count; i++) {
      const T* row = v + (s0 + i) * h + c;
      prefetch(row, h);
      F weight[G];
      UNROLL for (int g = 0; g < G; g++) weight[g] = splat(scores[g][i]);
      UNROLL for (int x = 0; x < wide; x++) {
        const F value = widen(row + x * kLanes);
        UNROLL for (int g = 0; g < G; g++) acc[g][x] = fma(weight[g], value, acc[g][x]);
      }
    }
    UNROLL for (int g = 0; g < G; g++) {
      UNROLL for (int x = 0; x < wide; x++) store(out + g * h + c + x * kLanes, acc[g][x]);
    }
  };
  int64_t c = 0;
  for (; c + 4 * kLanes <= h; c += 4 * kLanes) values(Wide<4>(), c);
  for (; c < h; c += kLanes) values(Wide<1>(), c);
}

template <class T, int G = kHeads>
void attend_some(int groups, const Attention& a, const T* k, const T* v, const float* q, int32_t qp,
                 const int32_t* held, int64_t s0, int64_t s1, float* tops, float* totals, float* out) {
  if constexpr (G > 1) {
    if (groups < G)
      return attend_some<T, G - 1>(groups, a, k, v, q, qp, held, s0, s1, tops, totals, out);
  }
  const auto span = a.h == 64    ? attend_span<T, G, 4>
                    : a.h == 128 ? attend_span<T, G, 8>
                    : a.h == 256 ? attend_span<T, G, 16>
                                 : attend_span<T, G, 0>;
  span(a, k, v, q, qp, held, s0, s1, tops, totals, out);
}

// First and one past the last slot that holds anything the query may see. Slots fill in order of
// position until a ring wraps; from then on all of them count.
inline void visible(const Attention& a, int32_t oldest, int32_t newest, int64_t& first, int64_t& last) {
  last = least<int64_t>((int64_t)newest + 1, a.slots);
  first = 0;
  if (a.window && newest < a.slots) first = most<int64_t>(0, (int64_t)oldest - a.window + 1);
}

template <class T>
void attend_row(const Attention& a, const Threads& threads) {
  const int64_t groups = a.groups(), h = a.h;
  const int64_t passes = (groups + kHeads - 1) / kHeads;
  for (int64_t b = 0; b < a.b; b++) {
    const int32_t qp = a.q_at[b];
    int64_t first, last;
    visible(a, qp, qp, first, last);
    const int64_t spans = most<int64_t>(0, (last - first + kSpan - 1) / kSpan);
    if (spans == 0) {
      fill(a.out + b * a.n * h, a.n * h, 0.0f);
      continue;
    }
    const int64_t each = kHeads * (h + 2);  // of a partial: tops, sums, values
    Buffer<float> partial(a.kv_heads * passes * spans * each);
    const int32_t* held = a.k_at + b * a.slots;
    threads.run(a.kv_heads * passes * spans, [&](int64_t task) {
      const int64_t span = task % spans, pass = task / spans % passes, head = task / spans / passes;
      const int64_t g0 = pass * kHeads, s0 = first + span * kSpan, s1 = least(last, s0 + kSpan);
      const int64_t cache = (b * a.kv_heads + head) * a.slots * h;
      float* p = &partial[task * each];
      attend_some<T>((int)least<int64_t>(kHeads, groups - g0), a,
                     static_cast<const T*>(a.k) + cache, static_cast<const T*>(a.v) + cache,
                     a.q + (b * a.n + head * groups + g0) * h, qp, held, s0, s1, p, p + kHeads,
                     p + 2 * kHeads);
    });
    for (int64_t n = 0; n < a.n; n++) {
      const int64_t head = n / groups, g = n % groups;
      const float* p = &partial[(head * passes + g / kHeads) * spans * each] + g % kHeads;
      const float* values = p - g % kHeads + 2 * kHeads + g % kHeads * h;
      float largest = kNever, total = 0;
      for (int64_t s = 0; s < spans; s++) largest = most(largest, p[s * each]);
      float* out = a.out + (b * a.n + n) * h;
      fill(out, h, 0.0f);
      for (int64_t s = 0; s < spans; s++) {
        const float share = __builtin_expf(p[s * each] - largest);
        total += share * p[s * each + kHeads];
        for (int64_t c = 0; c < h; c++) out[c] += share * values[s * each + c];
      }
      const float inverse = total > 0 ? 1 / total : 0;
      for (int64_t c = 0; c < h; c++) out[c] *= inverse;
    }
  }
}

}  // namespace minfer::MINFER_ISA
