// One position, from what the projections give to what attention gives.
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
  const int64_t h = a.h, heads = a.n + 2 * a.kv_heads;
  Buffer<float> queries(a.b * a.n * h);
  Buffer<float> head(h);
  for (int64_t b = 0; b < a.b; b++) {
    const float* from = s.qkv + b * heads * h;
    for (int64_t n = 0; n < a.n + a.kv_heads; n++) {
      const bool query = n < a.n;
      float* to = query ? &queries[(b * a.n + n) * h] : &head[0];
      const float* norm = query ? s.q_norm : s.k_norm;
      if (norm) rms_norm(from + n * h, norm, h, s.eps, to);
      else copy(from + n * h, h, to);
      if (s.cos) rotate(to, s.cos + b * s.pairs, s.sin + b * s.pairs, s.pairs, s.interleaved);
      if (query && s.q_factor) {
        for (int64_t i = 0; i < h; i++) to[i] *= s.q_factor[b];
      }
      if (query || s.slots[b] >= a.slots) continue;
      const int64_t at = ((b * a.kv_heads + n - a.n) * a.slots + s.slots[b]) * h;
      for (int64_t i = 0; i < h; i += kLanes) {
        narrow(static_cast<T*>(s.k) + at + i, load(to + i));
        narrow(static_cast<T*>(s.v) + at + i, load(from + (n + a.kv_heads) * h + i));
      }
    }
  }
  a.q = &queries[0];
  attend_row<T>(a, threads);
}

inline bool step(const Step& s, const Threads& threads) {
  if (s.attention.h % 32) return false;
  switch (s.attention.cache) {
    case Cache::f32: step_cache<float>(s, threads); break;
    case Cache::f16: step_cache<F16>(s, threads); break;
    case Cache::bf16: step_cache<BF16>(s, threads); break;
  }
  return true;
}

}  // namespace minfer::MINFER_ISA
