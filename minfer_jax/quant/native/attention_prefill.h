// Attention of many query positions: paid in arithmetic. Works through spans of slots with a running
// softmax (Milakov & Gimelshein 2018), a tile of query rows at a time: no matrix of scores is larger
// than kTileRows x kChunk.
//
// The queries of all heads that share a kv head are rows of one product: row t * G + g.
#pragma once

#include "attention_decode.h"
#include "matmul.h"

namespace minfer::MINFER_ISA {

constexpr int kTileRows = 8 * kRows;
constexpr int kChunk = 128;  // slots that one step looks at; a multiple of kStep
constexpr int kStep = kPanel > 32 ? kPanel : 32;  // of a shorter one: whole panels, whole words

// Words of a row of h values, whole registers of them: 0 fills the last.
template <class Word>
INLINE int64_t words_of(int64_t h) {
  return (h + kLanes * Word::columns - 1) / (kLanes * Word::columns) * kLanes;
}

// Words c .. c + kLanes of a row of h values, of which `at` gives some from the one asked for on.
template <class Word, class Call>
INLINE U words_at(int64_t c, int64_t h, const Call& at) {
  F x[Word::columns];
  UNROLL for (int i = 0; i < Word::columns; i++) {
    const int64_t from = c * Word::columns + i * kLanes;
    x[i] = from < h ? at(from) : splat(0.0f);
  }
  return Word::row(x);
}

// Keys and values of a chunk of `count` slots from s0 on, as panels for `blocks`.
//
//   keys    [kChunk / kPanel][H / columns][kTiles][16]     a lane a slot, a word some of H
//   values  [Hv / kPanel][kChunk / columns][tiles][16]     a lane one of Hv, a word some slots
template <class Word, class T>
void pack_chunk(const Rows<T>& k, const Rows<T>& v, int64_t s0, int count, uint32_t* keys,
                uint32_t* values) {
  constexpr int columns = Word::columns;
  const int64_t words = words_of<Word>(k.width), h_v = v.width;
  alignas(64) uint32_t row[kLanes];
  for (int s = 0; s < kChunk; s++) {
    uint32_t* out = keys + s / kPanel * words * kPanel + s % kPanel;
    for (int64_t c = 0; c < words; c += kLanes) {
      store(row, words_at<Word>(c, k.width, [&](int64_t from) __attribute__((always_inline)) {
              return s < count ? k.at(s0 + s, from) : splat(0.0f);
            }));
      for (int i = 0; i < kLanes; i++) out[(c + i) * kPanel] = row[i];
    }
  }
  for (int64_t c = 0; c < h_v; c += kLanes) {
    const int64_t panel = c / kPanel, tiles = least<int64_t>(kPanel, h_v - panel * kPanel) / kLanes;
    uint32_t* out = values + panel * kPanel * (kChunk / columns) + c % kPanel;
    for (int s = 0; s < kChunk; s += columns) {
      F x[columns];
      UNROLL for (int i = 0; i < columns; i++)
        x[i] = s + i < count ? v.at(s0 + s + i, c) : splat(0.0f);
      store(out + s / columns * tiles * kLanes, Word::pack(x));
    }
  }
}

enum class Sight { none, some, all };

// What the rows with positions in [lowest, highest] see of some slots. Padding has lowest = -1.
inline Sight sight(const Attention& a, const int32_t* held, int count, int32_t lowest, int32_t highest) {
  int32_t early = INT32_MAX, late = -1;
  bool gaps = count < kChunk;
  for (int i = 0; i < count; i++) {
    if (held[i] < 0) {
      gaps = true;
      continue;
    }
    early = least(early, held[i]);
    late = most(late, held[i]);
  }
  if (late < 0 || early > highest) return Sight::none;
  if (a.window && late <= lowest - a.window) return Sight::none;
  if (gaps || late > lowest || (a.window && highest - early >= a.window)) return Sight::some;
  return Sight::all;
}

INLINE void mask_row(const Attention& a, int32_t qp, const int32_t* held, int count, int width,
                     float* scores) {
  for (int i = 0; i < width; i++)
    scores[i] = i < count && a.sees(qp, held[i < count ? i : 0]) ? scores[i] : kNever;
}

template <class Word>
void attend_tile(const Attention& a, int64_t b, int64_t head, int64_t r0, int rows, int64_t first,
                 int64_t last, const uint32_t* keys, const uint32_t* values) {
  constexpr int columns = Word::columns;
  const int64_t h = a.h, h_v = a.h_v, groups = a.groups(), words = words_of<Word>(h);
  uint32_t* q = scratch<0>((size_t)kTileRows * words);
  float* acc = reinterpret_cast<float*>(scratch<1>((size_t)kTileRows * h_v));
  alignas(64) static thread_local float scores[kTileRows][kChunk];
  alignas(64) static thread_local uint32_t weights[kTileRows][kChunk / columns];
  float tops[kTileRows], totals[kTileRows];
  int32_t at[kTileRows], lowest = INT32_MAX, highest = -1;
  const auto row_of = [&](int r) { return (b * a.t + (r0 + r) / groups) * a.n + head * groups + (r0 + r) % groups; };
  for (int r = 0; r < rows; r++) {
    at[r] = a.q_at[b * a.t + (r0 + r) / groups];
    lowest = least(lowest, at[r]);
    highest = most(highest, at[r]);
    // A sink is as if the row had seen it, with a value of 0.
    tops[r] = a.sinks ? a.sinks[head * groups + (r0 + r) % groups] : kNever;
    totals[r] = a.sinks ? 1 : 0;
    const float* query = a.q + row_of(r) * h;
    for (int64_t c = 0; c < words; c += kLanes)
      store(q + r * words + c,
            words_at<Word>(c, h, [&](int64_t from) __attribute__((always_inline)) {
              return load(query + from) * splat(a.scale);
            }));
  }
  fill(acc, rows * h_v, 0.0f);
  for (int64_t s0 = first; s0 < last && highest >= 0; s0 += kChunk) {
    const int count = (int)least<int64_t>(kChunk, last - s0);
    const int32_t* held = a.k_at + b * a.slots + s0;
    const Sight seen = sight(a, held, count, lowest, highest);
    if (seen == Sight::none) continue;
    const int64_t chunk = (s0 - first) / kChunk;
    int width = count;  // without the slots at the end that no row sees
    while (held[width - 1] < 0 || held[width - 1] > highest) width--;
    width = (width + kStep - 1) / kStep * kStep;
    for (int p = 0; p < width / kPanel; p++)
      blocks<Word, kTiles>(q, words, rows, keys + chunk * words * kChunk + p * words * kPanel, words,
                           &scores[0][p * kPanel], kChunk, false);
    for (int r = 0; r < rows; r++) {
      float* row = scores[r];
      for (int i = 0; i < width && a.softcap != 0; i += kLanes)
        store(row + i, capped(load(row + i), a.softcap));
      if (seen == Sight::some) mask_row(a, at[r], held, count, width, row);
      F largest = load(row);
      for (int i = kLanes; i < width; i += kLanes) largest = max(largest, load(row + i));
      const float new_top = most(top(largest), tops[r]);  // in this order a sink that is NaN stays
      F total = splat(0.0f);
      for (int i = 0; i < width; i += columns * kLanes) {
        F x[columns];
        UNROLL for (int c = 0; c < columns; c++) {
          x[c] = softmax_weight(load(row + i + c * kLanes), new_top);
          total = total + x[c];
        }
        store(&weights[r][i / columns], Word::row(x));
      }
      if (new_top > tops[r]) {
        const float shrink = totals[r] > 0 ? __builtin_expf(tops[r] - new_top) : 0;
        totals[r] *= shrink;
        for (int64_t c = 0; c < h_v; c += kLanes)
          store(acc + r * h_v + c, load(acc + r * h_v + c) * splat(shrink));
        tops[r] = new_top;
      }
      totals[r] += sum(total);
    }
    for (int64_t c = 0; c < h_v; c += kPanel) {
      const int tiles = (int)least<int64_t>(kTiles, (h_v - c) / kLanes);
      blocks_of<Word>(tiles, &weights[0][0], kChunk / columns, rows,
                      values + (chunk * h_v + c) * (kChunk / columns), width / columns, acc + c, h_v,
                      true);
    }
  }
  for (int r = 0; r < rows; r++) {
    const F inverse = splat(totals[r] > 0 ? 1 / totals[r] : 0);
    float* to = a.out + row_of(r) * h_v;
    for (int64_t c = 0; c < h_v; c += kLanes) store(to + c, load(acc + r * h_v + c) * inverse);
  }
}

template <class Word, class T>
void attend_rows(const Attention& a, const Threads& threads) {
  const int64_t rows = a.t * a.groups(), tiles = (rows + kTileRows - 1) / kTileRows;
  const int64_t keys_each = kChunk * words_of<Word>(a.h), values_each = kChunk / Word::columns * a.h_v;
  for (int64_t b = 0; b < a.b; b++) {
    const int32_t* at = a.q_at + b * a.t;
    int32_t oldest = INT32_MAX, newest = -1;
    for (int64_t t = 0; t < a.t; t++) {
      newest = most(newest, at[t]);
      if (at[t] >= 0) oldest = least(oldest, at[t]);
    }
    int64_t first, last;
    visible(a, oldest, newest, first, last);
    const int64_t chunks = most<int64_t>(0, (last - first + kChunk - 1) / kChunk);
    Buffer<uint32_t> packed(chunks * (keys_each + values_each));
    uint32_t *keys = packed.data(), *values = keys + chunks * keys_each;
    for (int64_t head = 0; head < a.kv_heads; head++) {
      const int64_t row0 = (b * a.kv_heads + head) * a.slots;
      const Rows<T> k(a.k, a.h, row0), v(a.v, a.h_v, row0);
      threads.run(chunks, [&](int64_t c) {
        const int64_t s0 = first + c * kChunk;
        pack_chunk<Word, T>(k, v, s0, (int)least<int64_t>(kChunk, last - s0), keys + c * keys_each,
                            values + c * values_each);
      });
      threads.run(tiles, [&](int64_t task) {  // those that see most come first
        const int64_t r0 = (tiles - 1 - task) * kTileRows;
        attend_tile<Word>(a, b, head, r0, (int)least<int64_t>(kTileRows, rows - r0), first, last,
                          keys, values);
      });
    }
  }
}

inline bool attend(const Attention& a, const Threads& threads) {
  return with_cache(a, [&](auto held) {
    using T = decltype(held);
    if (a.t == 1) return attend_each<T>(a, threads);
#if defined(MINFER_HAS_BF16)
    if (a.bfloat16) return attend_rows<Bfloat16, T>(a, threads);
#endif
    attend_rows<Float32, T>(a, threads);
  });
}

}  // namespace minfer::MINFER_ISA
