// A few positions, from what the projections give to what attention gives.
#pragma once

#include "attention_prefill.h"
#include "norm.h"

namespace minfer::MINFER_ISA {

// Turns the first 2 * pairs values of a head (Su et al. 2021); the rest stay.
inline void rotate(float* x, const float* cos, const float* sin, int64_t pairs, bool interleaved) {
  const int64_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : pairs;
  for (int64_t i = 0; i < pairs; i++) {
    float &a = x[i * step], &b = x[i * step + apart];
    const float turned = a * cos[i] - b * sin[i];
    b = b * cos[i] + a * sin[i];
    a = turned;
  }
}

template <class T>
void step_cache(const Step& s, const Threads& threads) {
  Attention a = s.attention;
  const int64_t h = a.h, rotated = (a.n + a.kv_heads) * h, width = rotated + a.kv_heads * a.h_v;
  const int64_t rows = a.b * a.t;
  Buffer<float> queries(rows * a.n * h);
  threads.run(rows, [&](int64_t row) {
    Buffer<float> head(h);
    const float* from = s.qkv + row * width;
    for (int64_t n = 0; n < a.n + a.kv_heads; n++) {
      const bool query = n < a.n;
      float* to = query ? &queries[(row * a.n + n) * h] : &head[0];
      const float* norm = query ? s.q_norm : s.k_norm;
      if (norm) rms_norm(from + n * h, norm, h, s.eps, to);
      else copy(from + n * h, h, to);
      if (s.cos) rotate(to, s.cos + row * s.pairs, s.sin + row * s.pairs, s.pairs, s.interleaved);
      if (query && s.q_factor) {
        for (int64_t i = 0; i < h; i++) to[i] *= s.q_factor[row];
      }
      if (query || s.slots[row] >= a.slots) continue;
      const int64_t j = n - a.n, row0 = (row / a.t * a.kv_heads + j) * a.slots;
      Rows<T>(a.k, h, row0).put(s.slots[row], to);
      Rows<T>(a.v, a.h_v, row0).put(s.slots[row], from + rotated + j * a.h_v);
    }
  });
  a.q = &queries[0];
  attend_each<T>(a, threads);
}

inline bool step(const Step& s, const Threads& threads) {
  return with_cache(s.attention, [&](auto held) { step_cache<decltype(held)>(s, threads); });
}

}  // namespace minfer::MINFER_ISA
