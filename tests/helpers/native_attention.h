// Attention over caches of every type, in sizes that do not come out even, for native_check.cpp.
#pragma once

#include "native_random.h"

namespace minfer {
namespace {

// A random cache with its memory.
struct Held {
  Cache cache;
  int64_t width;
  std::vector<float> f32;
  std::vector<uint16_t> f16;  // scales of q8, or all of bfloat16
  std::vector<int8_t> q8;

  Held(Cache cache, int64_t rows, int64_t width) : cache(cache), width(width) {
    if (cache == Cache::f32) f32 = floats(rows * width);
    if (cache == Cache::f16) f16 = halves(rows * width);
    if (cache == Cache::bf16) f16 = bfloats(rows * width);
    if (cache == Cache::q8) q8 = bytes(rows * width), f16 = halves(rows * width / 32);
  }

  Plane plane() {
    if (cache == Cache::f32) return {f32.data(), nullptr};
    if (cache == Cache::q8) return {q8.data(), f16.data()};
    return {f16.data(), nullptr};
  }

  double at(int64_t row, int64_t c) const {
    const int64_t i = row * width + c;
    if (cache == Cache::f32) return f32[i];
    if (cache == Cache::f16) return half(f16[i]);
    if (cache == Cache::q8) return q8[i] * half(f16[i / 32]);
    const uint32_t u = (uint32_t)f16[i] << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
  }

  std::vector<float> all() const {
    std::vector<float> v;
    for (size_t i = 0; i < (f32.empty() ? q8.empty() ? f16.size() : q8.size() : f32.size()); i++)
      v.push_back((float)at(0, (int64_t)i));
    return v;
  }

  static double half(uint16_t x) {
    const int exponent = x >> 10 & 31, fraction = x & 1023;
    const double size = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
    return x >> 15 ? -size : size;
  }
};

// What each slot holds once the positions up to `newest` were written in turn, -1 for none.
std::vector<int32_t> ring(int64_t slots, int32_t newest) {
  std::vector<int32_t> held(slots, -1);
  for (int32_t p = (int32_t)std::fmax(0, newest - slots + 1); p <= newest; p++) held[p % slots] = p;
  return held;
}

std::vector<float> attended(const Attention& a, const Held& k, const Held& v) {
  std::vector<float> out(a.b * a.t * a.n * a.h_v, 0);
  for (int64_t i = 0; i < a.b * a.t * a.n; i++) {
    const int64_t b = i / a.n / a.t, n = i % a.n, row0 = (b * a.kv_heads + n / a.groups()) * a.slots;
    double total = 0, top = a.sinks ? a.sinks[n] : -INFINITY;
    std::vector<double> score(a.slots, -INFINITY), sum(a.h_v, 0);
    for (int64_t s = 0; s < a.slots; s++) {
      if (!a.sees(a.q_at[i / a.n], a.k_at[b * a.slots + s])) continue;
      score[s] = 0;
      for (int64_t c = 0; c < a.h; c++) score[s] += a.scale * a.q[i * a.h + c] * k.at(row0 + s, c);
      if (a.softcap != 0) score[s] = a.softcap * std::tanh(score[s] / a.softcap);
      top = std::fmax(top, score[s]);
    }
    if (a.sinks) total = std::exp(a.sinks[n] - top);
    for (int64_t s = 0; s < a.slots; s++) {
      if (score[s] == -INFINITY) continue;
      const double weight = std::exp(score[s] - top);
      total += weight;
      for (int64_t c = 0; c < a.h_v; c++) sum[c] += weight * v.at(row0 + s, c);
    }
    for (int64_t c = 0; c < a.h_v; c++) out[i * a.h_v + c] = (float)(total > 0 ? sum[c] / total : 0);
  }
  return out;
}

struct Shape {
  int64_t slots, t, n, kv_heads, h, h_v, window;
};

// Two sequences, each at a position of its own; `newest` is -1 for one of padding alone.
void attention(const Kernels* kernels, Cache cache, const Shape& shape, int32_t newest0,
               int32_t newest1, bool more) {
  const int64_t b = 2, t = shape.t;
  Held k(cache, b * shape.kv_heads * shape.slots, shape.h);
  Held v(cache, b * shape.kv_heads * shape.slots, shape.h_v);
  const auto q = floats(b * t * shape.n * shape.h), sinks = floats(shape.n);
  std::vector<int32_t> q_at, k_at;
  for (int32_t newest : {newest0, newest1}) {
    const auto held = ring(shape.slots, newest);
    k_at.insert(k_at.end(), held.begin(), held.end());
    for (int64_t i = 0; i < t; i++) {  // every other beyond the newest is padding
      const int64_t at = newest - (t - 1 - i);
      q_at.push_back(at < 0 || (t > 2 && i % 5 == 3) ? -1 : (int32_t)at);
    }
  }
  std::vector<float> found(b * t * shape.n * shape.h_v, NAN);
  Attention a = {};
  a.b = b, a.t = t, a.n = shape.n, a.h = shape.h, a.h_v = shape.h_v, a.kv_heads = shape.kv_heads;
  a.slots = shape.slots, a.q = q.data(), a.k = k.plane(), a.v = v.plane(), a.cache = cache;
  a.q_at = q_at.data(), a.k_at = k_at.data(), a.window = shape.window, a.scale = 0.5f;
  a.sinks = more ? sinks.data() : nullptr, a.softcap = more ? 3 : 0, a.out = found.data();
  const bool possible = cache != Cache::q8 || (a.h % 32 == 0 && a.h_v % 32 == 0);
  const auto expected = attended(a, k, v);
  for (bool bfloat16 : {false, true}) {
    a.bfloat16 = bfloat16;
    const bool ok = kernels->attend(a, threads(3));
    if (!possible) report("attention", !ok, 0);
    else report(bfloat16 && kernels->bfloat16 && t > 1 ? "attention bfloat16" : "attention", ok,
                error(found, expected));
  }
}

// The same for one position with what comes before, beside the portable kernels.
void step(const Kernels* kernels, Cache cache, const Shape& shape, int32_t newest0, int32_t newest1,
          bool more) {
  const int64_t b = 2, h = shape.h, pairs = more ? h / 2 - 1 : h / 2;
  const int64_t width = (shape.n + shape.kv_heads) * h + shape.kv_heads * shape.h_v;
  const auto qkv = floats(b * width), cos = floats(b * pairs), sin = floats(b * pairs);
  const auto norm = floats(h), factor = floats(b), sinks = floats(shape.n);
  const Held old_k(cache, b * shape.kv_heads * shape.slots, h);
  const Held old_v(cache, b * shape.kv_heads * shape.slots, shape.h_v);
  std::vector<int32_t> q_at = {newest0, newest1}, k_at, slots;
  for (int32_t newest : q_at) {
    const auto held = ring(shape.slots, newest);
    k_at.insert(k_at.end(), held.begin(), held.end());
    slots.push_back((int32_t)(newest < 0 ? shape.slots : newest % shape.slots));
  }
  std::vector<float> out[2], keys[2], values[2];
  bool ok = true;
  for (int i : {0, 1}) {
    Held k = old_k, v = old_v;
    out[i].assign(b * shape.n * shape.h_v, NAN);
    Step s = {};
    Attention& a = s.attention;
    a.b = b, a.t = 1, a.n = shape.n, a.h = h, a.h_v = shape.h_v, a.kv_heads = shape.kv_heads;
    a.slots = shape.slots, a.k = k.plane(), a.v = v.plane(), a.cache = cache;
    a.q_at = q_at.data(), a.k_at = k_at.data(), a.window = shape.window, a.scale = 0.5f;
    a.sinks = more ? sinks.data() : nullptr, a.out = out[i].data();
    s.qkv = qkv.data(), s.cos = more || h % 32 ? cos.data() : nullptr, s.sin = sin.data();
    s.pairs = pairs, s.interleaved = more, s.eps = 1e-6f, s.slots = slots.data();
    s.q_norm = more ? norm.data() : nullptr, s.k_norm = more ? norm.data() : nullptr;
    s.q_factor = more ? factor.data() : nullptr;
    ok = (i ? kernels : kPortable)->step(s, threads(2)) && ok;
    keys[i] = k.all(), values[i] = v.all();
  }
  if (cache == Cache::q8 && (h % 32 || shape.h_v % 32)) return report("step", !ok, 0);
  report("step", ok, error(out[1], out[0]));
  report("step's cache", ok, std::fmax(error(keys[1], keys[0]), error(values[1], values[0])));
}

void all_attention(const Kernels* kernels) {
  // slots, T, N, K, H, Hv, window
  const Shape shapes[] = {{1, 1, 1, 1, 16, 16, 0},      {31, 1, 5, 1, 80, 80, 0},
                          {257, 1, 12, 2, 64, 64, 0},   {300, 1, 6, 2, 96, 32, 40},
                          {31, 1, 2, 2, 128, 128, 7},   {257, 1, 4, 1, 256, 256, 250},
                          {600, 1, 3, 1, 48, 16, 0},    {1, 2, 1, 1, 16, 16, 0},
                          {31, 17, 4, 2, 48, 48, 0},    {257, 19, 6, 2, 96, 32, 0},
                          {300, 50, 3, 1, 80, 80, 33},  {257, 5, 2, 1, 256, 256, 0},
                          {257, 33, 7, 1, 64, 128, 90}, {31, 3, 1, 1, 128, 64, 5}};
  for (const Shape& shape : shapes)
    for (Cache cache : {Cache::f32, Cache::f16, Cache::bf16, Cache::q8}) {
      const int32_t s = (int32_t)shape.slots;
      const int32_t full = shape.window ? 3 * s + 2 : s - 1;  // a ring has wrapped
      attention(kernels, cache, shape, full, s / 2, true);
      attention(kernels, cache, shape, -1, full, false);
      attention(kernels, cache, shape, -1, -1, shape.t % 2);
      if (shape.t > 1) continue;
      step(kernels, cache, shape, full, s / 3, true);
      step(kernels, cache, shape, -1, full, false);
    }
}

}  // namespace
}  // namespace minfer
