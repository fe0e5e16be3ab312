// Attention of few query positions: paid in bytes of cache, so only slots that are seen are read. Each
// position is worked on by itself, and gets the same numbers as if it came alone.
//
// The slots are cut into spans of a fixed length, which threads take in any order; each leaves a
// partial softmax, and the partials are joined in order: the result does not depend on the threads.
#pragma once

#include "attention_cache.h"

namespace minfer::MINFER_ISA {

constexpr int kSpan = 256;   // slots
constexpr int kHeads = 4;    // query heads that share a pass over the cache
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

// Near 0 a quotient of polynomials (the [7/6] Padé approximant, off by less than 1e-10 where it is
// taken), or the difference of two near 1 would be all that is left; beyond, from e**2x.
INLINE F tanh(F x) {
  const F s = x * x;
  const F above = x * fma(fma(s + splat(378.0f), s, splat(17325.0f)), s, splat(135135.0f));
  const F below =
      fma(fma(fma(splat(28.0f), s, splat(3150.0f)), s, splat(62370.0f)), s, splat(135135.0f));
  const F small = above / below;
  F r = splat(1.0f) - splat(2.0f) / (exp(x + x) + splat(1.0f));
  UNROLL for (int p = 0; p < kParts; p++) r.part[p] = s.part[p] < 1.0f ? small.part[p] : r.part[p];
  return r;
}

INLINE F capped(F score, float softcap) {
  return splat(softcap) * tanh(score * splat(1 / softcap));
}

// Query heads g0 .. g0 + G of one kv head, over slots s0 .. s1 of its rows, which begin at `row0`:
// leaves their largest score, the sum of weights, and the weighted sum of values [G][Hv]. `Chunks`
// is H and Hv in registers, or 0.
template <class T, int G, int Chunks>
void attend_span(const Attention& a, int64_t row0, const float* q, int32_t qp, const int32_t* held,
                 int64_t s0, int64_t s1, float* tops, float* totals, float* out) {
  const int64_t h = Chunks ? Chunks * kLanes : a.h, h_v = Chunks ? h : a.h_v;
  const Rows<T> keys(a.k, h, row0), values(a.v, h_v, row0);
  const int count = (int)(s1 - s0);
  alignas(64) float scores[G][kSpan];
  const int padded = (count + kLanes - 1) / kLanes * kLanes;
  for (int i0 = 0; i0 < count; i0 += kLanes) {
    F dots[G][kLanes];
    alignas(64) int32_t seen[kLanes];
    for (int i = 0; i < kLanes; i++) {
      const int64_t slot = s0 + least(i0 + i, count - 1);
      seen[i] = i0 + i < count && a.sees(qp, held[slot]);
      keys.prefetch(slot, 0);
      F dot[G];
      UNROLL for (int g = 0; g < G; g++) dot[g] = splat(0.0f);
      UNROLL for (int64_t c = 0; c < h; c += kLanes) {
        const F key = keys.at(slot, c);
        UNROLL for (int g = 0; g < G; g++) dot[g] = fma(key, load(q + g * h + c), dot[g]);
      }
      UNROLL for (int g = 0; g < G; g++) dots[g][i] = dot[g];
    }
    UNROLL for (int g = 0; g < G; g++) {
      F score = sums(dots[g]) * splat(a.scale);
      if (a.softcap != 0) score = capped(score, a.softcap);
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
  const auto weigh = [&](auto width, int64_t c) {
    constexpr int wide = decltype(width)::value;
    F acc[G][wide];
    UNROLL for (int g = 0; g < G; g++) {
      UNROLL for (int x = 0; x < wide; x++) acc[g][x] = splat(0.0f);
    }
    for (int i = 0; i < count; i++) {
      values.prefetch(s0 + i, c);
      F weight[G];
      UNROLL for (int g = 0; g < G; g++) weight[g] = splat(scores[g][i]);
      UNROLL for (int x = 0; x < wide; x++) {
        const F value = values.at(s0 + i, c + x * kLanes);
        UNROLL for (int g = 0; g < G; g++) acc[g][x] = fma(weight[g], value, acc[g][x]);
      }
    }
    UNROLL for (int g = 0; g < G; g++) {
      UNROLL for (int x = 0; x < wide; x++) store(out + g * h_v + c + x * kLanes, acc[g][x]);
    }
  };
  int64_t c = 0;
  for (; c + 4 * kLanes <= h_v; c += 4 * kLanes) weigh(Wide<4>(), c);
  for (; c < h_v; c += kLanes) weigh(Wide<1>(), c);
}

template <class T, int G = kHeads>
void attend_some(int groups, const Attention& a, int64_t row0, const float* q, int32_t qp,
                 const int32_t* held, int64_t s0, int64_t s1, float* tops, float* totals, float* out) {
  if constexpr (G > 1) {
    if (groups < G)
      return attend_some<T, G - 1>(groups, a, row0, q, qp, held, s0, s1, tops, totals, out);
  }
  const int64_t h = a.h == a.h_v ? a.h : 0;
  const auto span = h == 64    ? attend_span<T, G, 4>
                    : h == 128 ? attend_span<T, G, 8>
                    : h == 256 ? attend_span<T, G, 16>
                               : attend_span<T, G, 0>;
  span(a, row0, q, qp, held, s0, s1, tops, totals, out);
}

// First and one past the last slot that holds anything the query may see. Slots fill in order of
// position until a ring wraps; from then on all of them count.
inline void visible(const Attention& a, int32_t oldest, int32_t newest, int64_t& first, int64_t& last) {
  last = least<int64_t>((int64_t)newest + 1, a.slots);
  first = 0;
  if (a.window && newest < a.slots) first = most<int64_t>(0, (int64_t)oldest - a.window + 1);
}

template <class T>
void attend_each(const Attention& a, const Threads& threads) {
  const int64_t groups = a.groups(), h = a.h, h_v = a.h_v, rows = a.b * a.t;
  const int64_t passes = (groups + kHeads - 1) / kHeads;
  const auto spans_of = [&](int64_t row, int64_t& first, int64_t& last) {
    visible(a, a.q_at[row], a.q_at[row], first, last);
    return most<int64_t>(0, (last - first + kSpan - 1) / kSpan);
  };
  int64_t spans = 0, first, last;
  for (int64_t row = 0; row < rows; row++) spans = most(spans, spans_of(row, first, last));
  const int64_t each = kHeads * (h_v + 2);  // of a partial: tops, sums, values
  Buffer<float> partials(rows * a.kv_heads * passes * spans * each);
  const auto partial = [&](int64_t row, int64_t head, int64_t pass) {
    return partials.data() + ((row * a.kv_heads + head) * passes + pass) * spans * each;
  };
  // What rows have in common is read by one after the other.
  threads.run(a.kv_heads * passes * spans * rows, [&](int64_t task) {
    const int64_t row = task % rows, span = task / rows % spans, pass = task / rows / spans % passes;
    const int64_t head = task / rows / spans / passes, b = row / a.t, g0 = pass * kHeads;
    int64_t first, last;
    if (span >= spans_of(row, first, last)) return;
    const int64_t s0 = first + span * kSpan, s1 = least(last, s0 + kSpan);
    float* p = partial(row, head, pass) + span * each;
    attend_some<T>((int)least<int64_t>(kHeads, groups - g0), a, (b * a.kv_heads + head) * a.slots,
                   a.q + (row * a.n + head * groups + g0) * h, a.q_at[row], a.k_at + b * a.slots, s0,
                   s1, p, p + kHeads, p + 2 * kHeads);
  });
  threads.run(rows, [&](int64_t row) {
    int64_t first, last;
    const int64_t spans = spans_of(row, first, last);
    if (spans == 0) return fill(a.out + row * a.n * h_v, a.n * h_v, 0.0f);
    for (int64_t n = 0; n < a.n; n++) {
      const int64_t head = n / groups, g = n % groups;
      const float* p = partial(row, head, g / kHeads) + g % kHeads;
      const float* values = p - g % kHeads + 2 * kHeads + g % kHeads * h_v;
      float largest = a.sinks ? a.sinks[n] : kNever;
      for (int64_t s = 0; s < spans; s++) largest = most(largest, p[s * each]);
      float total = a.sinks ? __builtin_expf(a.sinks[n] - largest) : 0;
      float* out = a.out + (row * a.n + n) * h_v;
      fill(out, h_v, 0.0f);
      for (int64_t s = 0; s < spans; s++) {
        const float share = __builtin_expf(p[s * each] - largest);
        total += share * p[s * each + kHeads];
        for (int64_t c = 0; c < h_v; c++) out[c] += share * values[s * each + c];
      }
      const float inverse = total == 0 ? 0 : 1 / total;
      for (int64_t c = 0; c < h_v; c++) out[c] *= inverse;
    }
  });
}

}  // namespace minfer::MINFER_ISA
