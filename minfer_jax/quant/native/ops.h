// What the vector extension cannot say: conversions, sums across lanes, dot products of bytes and
// of bfloat16 pairs. One definition an instruction set, and a portable one.
#pragma once

#include "simd.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace minfer::MINFER_ISA {

struct F16 { uint16_t bits; };   // IEEE half
struct BF16 { uint16_t bits; };  // the upper half of a float

// --- loads that widen to float -------------------------------------------------------------------

INLINE F widen(const float* p) { return load(p); }

INLINE F widen(const BF16* p) {
  F r;
#if defined(__AVX512F__)
  const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  r.part[0] = (F::Native)_mm512_slli_epi32(x, 16);
#else
  U u;
  UNROLL for (int i = 0; i < kLanes; i++) u.part[i / kNative][i % kNative] = p[i].bits;
  r = bits<float>(u << 16);
#endif
  return r;
}

INLINE F widen(const F16* p) {
  F r;
#if defined(__AVX512F__)
  r.part[0] = (F::Native)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  UNROLL for (int i = 0; i < kParts; i++)
    r.part[i] = (F::Native)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8 * i)));
#elif defined(__ARM_NEON)
  UNROLL for (int i = 0; i < kParts; i++)
    r.part[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)(p + 4 * i))));
#else
  // Exponent and fraction move into place. Subnormals are made from whole numbers: as floats they
  // would be subnormal too, which XLA's threads take for zero.
  U u;
  UNROLL for (int i = 0; i < kLanes; i++) u.part[i / kNative][i % kNative] = p[i].bits;
  const U magnitude = u & splat(0x7fffu);
  F value = bits<float>((magnitude << 13) + splat(112u << 23));
  const F small = to_float(bits<int32_t>(magnitude)) * splat(0x1p-24f);
  const F special = bits<float>((magnitude << 13) | splat(0x7f800000u));  // infinity, NaN
  UNROLL for (int i = 0; i < kParts; i++) {
    value.part[i] = magnitude.part[i] < 0x400u ? small.part[i] : value.part[i];
    value.part[i] = magnitude.part[i] >= 0x7c00u ? special.part[i] : value.part[i];
  }
  r = bits<float>(bits<uint32_t>(value) | ((u & splat(0x8000u)) << 16));
#endif
  return r;
}

INLINE F widen(const int8_t* p) {
#if defined(__AVX512F__)
  I r;
  r.part[0] = (I::Native)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
  return to_float(r);
#elif defined(__AVX2__)
  I r;
  UNROLL for (int i = 0; i < kParts; i++)
    r.part[i] = (I::Native)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8 * i)));
  return to_float(r);
#else
  I r;
  UNROLL for (int i = 0; i < kLanes; i++) r.part[i / kNative][i % kNative] = p[i];
  return to_float(r);
#endif
}

// The same number in every lane.
INLINE F spread(F16 x) {
  F r;
#if defined(__AVX512F__)
  r.part[0] = (F::Native)_mm512_cvtph_ps(_mm256_set1_epi16((int16_t)x.bits));
#elif defined(__F16C__)
  const F::Native one = (F::Native)_mm256_cvtph_ps(_mm_set1_epi16((int16_t)x.bits));
  UNROLL for (int i = 0; i < kParts; i++) r.part[i] = one;
#elif defined(__ARM_NEON)
  const F::Native one = (F::Native)vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(x.bits)));
  UNROLL for (int i = 0; i < kParts; i++) r.part[i] = one;
#else
  F16 copies[kLanes];
  UNROLL for (int i = 0; i < kLanes; i++) copies[i] = x;
  r = splat(lane(widen(copies), 0));
#endif
  return r;
}

// --- stores that narrow, to the nearest, ties to even --------------------------------------------

INLINE void narrow(float* p, F a) { store(p, a); }

INLINE void narrow(BF16* p, F a) {
  UNROLL for (int i = 0; i < kLanes; i++) {
    const float x = lane(a, i);
    uint32_t u;
    std::memcpy(&u, &x, 4);
    p[i].bits = x != x ? 0x7fc0 : (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
}

INLINE void narrow(F16* p, F a) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)a.part[0], _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  UNROLL for (int i = 0; i < kParts; i++)
    _mm_storeu_si128((__m128i*)(p + 8 * i),
                     _mm256_cvtps_ph((__m256)a.part[i], _MM_FROUND_TO_NEAREST_INT));
#elif defined(__ARM_NEON)
  UNROLL for (int i = 0; i < kParts; i++)
    vst1_u16((uint16_t*)(p + 4 * i), vreinterpret_u16_f16(vcvt_f16_f32(a.part[i])));
#else
  for (int i = 0; i < kLanes; i++) {
    const float x = lane(a, i);
    uint32_t u;
    std::memcpy(&u, &x, 4);
    const uint32_t sign = (u >> 16) & 0x8000, size = u & 0x7fffffff;
    if (size >= 0x7f800000) {  // infinity, NaN
      p[i].bits = sign | (size > 0x7f800000 ? 0x7e00 : 0x7c00);
    } else if (size >= 0x477ff000) {  // rounds beyond the largest
      p[i].bits = sign | 0x7c00;
    } else if (size < 0x38800000) {  // subnormal: adding 0.5 leaves the fraction in place, rounded
      float f;
      std::memcpy(&f, &size, 4);
      f += 0.5f;
      std::memcpy(&u, &f, 4);
      p[i].bits = sign | (u - 0x3f000000);
    } else {
      p[i].bits = sign | ((size - 0x38000000 + 0xfff + ((size >> 13) & 1)) >> 13);
    }
  }
#endif
}

// --- across lanes --------------------------------------------------------------------------------

INLINE float sum(F a) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)a.part[0]);
#else
  typename F::Native s = a.part[0];
  UNROLL for (int i = 1; i < kParts; i++) s = s + a.part[i];
  float r = 0;
  UNROLL for (int i = 0; i < kNative; i++) r += s[i];
  return r;
#endif
}

// The sums of 16 vectors, a lane each: halves the vectors, then the blocks of four lanes.
INLINE F sums(const F* a) {
#if defined(__AVX512F__)
  __m512 two[8], four[4], half[2];
  const auto fold4 = [](__m512 x, __m512 y) __attribute__((always_inline)) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
  };
  UNROLL for (int i = 0; i < 8; i++) {
    const __m512 x = (__m512)a[2 * i].part[0], y = (__m512)a[2 * i + 1].part[0];
    two[i] = _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
  }
  UNROLL for (int i = 0; i < 4; i++) {
    const __m512d x = (__m512d)two[2 * i], y = (__m512d)two[2 * i + 1];
    four[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(x, y), (__m512)_mm512_unpackhi_pd(x, y));
  }
  half[0] = fold4(four[0], four[1]);
  half[1] = fold4(four[2], four[3]);
  F r;
  r.part[0] = (F::Native)fold4(half[0], half[1]);
  return r;
#else
  alignas(64) float r[kLanes];
  UNROLL for (int i = 0; i < kLanes; i++) r[i] = sum(a[i]);
  return load(r);
#endif
}

INLINE float top(F a) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)a.part[0]);
#else
  float r = a.part[0][0];
  UNROLL for (int i = 0; i < kLanes; i++) {
    const float x = lane(a, i);
    r = x > r ? x : r;
  }
  return r;
#endif
}

// e**x: 2**n from the exponent's bits, the rest by a polynomial of degree 6
// (Taylor about 0 on |r| <= ln2 / 2: an error of 2e-8). Beyond -87.5 and 88 it stays as it is there.
INLINE F exp(F x) {
  x = min(splat(88.0f), max(splat(-87.5f), x));  // in this order NaN stays
  const F shifter = splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to an integer
  const F n = fma(x, splat(1.44269504088896341f), shifter) - shifter;
  F r = fma(n, splat(-0.693145751953125f), x);  // ln 2 in two parts
  r = fma(n, splat(-1.42860682030941723212e-6f), r);
  F p = splat(1.0f / 720);
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  const I exponent = (to_int(n) + splat(127)) << 23;
  return p * bits<float>(exponent);
}

// --- dot products of bytes -----------------------------------------------------------------------
//
// Activations are rounded to 16 bits (one scale for 32 of them). Four of them stand beside the
// bytes of four columns as two words, whose products with the bytes are summed apart:
//
//   VNNI, NEON   a = the upper bytes, b = the lower bytes, each signed: value = 256 a + b
//   AVX2         a = columns 0 and 2, b = columns 1 and 3, 16 bits each: value = a + b

#if defined(__AVX512VNNI__) || defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
#define MINFER_HAS_DOT 1
#endif

constexpr int kTop = 127 * 256;  // of a rounded activation, in size

struct Quad {
  uint32_t a, b;
};

INLINE Quad quad(const int32_t* q) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
  const auto pair = [](int32_t low, int32_t high) {
    return (uint32_t)(low & 0xffff) | ((uint32_t)high << 16);
  };
  return {pair(q[0], q[2]), pair(q[1], q[3])};
#else
  Quad r = {0, 0};
  for (int i = 0; i < 4; i++) {
    const int32_t low = (int8_t)(q[i] & 0xff), high = (q[i] - low) >> 8;
    r.a |= (uint32_t)(high & 0xff) << (8 * i);
    r.b |= (uint32_t)(low & 0xff) << (8 * i);
  }
  return r;
#endif
}

#if defined(MINFER_HAS_DOT)
// Adds to sum_a and sum_b the products of the four bytes of each lane, unsigned below 2**width.
template <int width>
INLINE void dot(I& sum_a, I& sum_b, U bytes, uint32_t a, uint32_t b) {
#if defined(__AVX512VNNI__)
  const __m512i w = (__m512i)bytes.part[0];
  sum_a.part[0] = (I::Native)_mm512_dpbusd_epi32((__m512i)sum_a.part[0], w, _mm512_set1_epi32((int)a));
  sum_b.part[0] = (I::Native)_mm512_dpbusd_epi32((__m512i)sum_b.part[0], w, _mm512_set1_epi32((int)b));
#elif defined(__AVX2__)
  const __m256i mask = _mm256_set1_epi32(0x00ff00ff);
  UNROLL for (int i = 0; i < kParts; i++) {
    const __m256i w = (__m256i)bytes.part[i];
    const __m256i even = _mm256_and_si256(w, mask);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(w, 8), mask);
    sum_a.part[i] += (I::Native)_mm256_madd_epi16(even, _mm256_set1_epi32((int)a));
    sum_b.part[i] += (I::Native)_mm256_madd_epi16(odd, _mm256_set1_epi32((int)b));
  }
#else  // signed bytes only: 8-bit weights are moved by 128, which `offset` below takes back
  UNROLL for (int i = 0; i < kParts; i++) {
    uint32x4_t w = (uint32x4_t)bytes.part[i];
    if (width == 8) w = veorq_u32(w, vdupq_n_u32(0x80808080u));
    const int8x16_t s = vreinterpretq_s8_u32(w);
    sum_a.part[i] = vdotq_s32(sum_a.part[i], s, vreinterpretq_s8_u32(vdupq_n_u32(a)));
    sum_b.part[i] = vdotq_s32(sum_b.part[i], s, vreinterpretq_s8_u32(vdupq_n_u32(b)));
  }
#endif
}

// What `dot` left out of each weight of so many bits.
constexpr int offset(int width) {
#if defined(__ARM_FEATURE_DOTPROD)
  return width == 8 ? 128 : 0;
#else
  return 0 * width;
#endif
}

// The sum that the two of `dot` stand for.
INLINE I joined(I sum_a, I sum_b) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
  return sum_a + sum_b;
#else
  return (sum_a << 8) + sum_b;
#endif
}
#endif

// --- multiply-accumulate of a tile: one 32-bit word of x against a word of each of 16 outputs ----
//
// A word is a float, or a pair of bfloat16 of two neighbouring columns.

struct Float32 {
  static constexpr int columns = 1;  // of a word
  static INLINE F mac(F sum, uint32_t x, U w) {
    float f;
    std::memcpy(&f, &x, 4);
    return fma(splat(f), bits<float>(w), sum);
  }
  // The word of each lane, from its columns.
  static INLINE U pack(const F* columns) { return bits<uint32_t>(columns[0]); }
  // Sixteen words of one row, from 16 * columns neighbouring values.
  static INLINE U row(const F* values) { return bits<uint32_t>(values[0]); }
};

#if defined(__AVX512BF16__)
#define MINFER_HAS_BF16 1
struct Bfloat16 {
  static constexpr int columns = 2;
  static INLINE F mac(F sum, uint32_t x, U w) {
    F r;
    r.part[0] = (F::Native)_mm512_dpbf16_ps((__m512)sum.part[0],
                                            (__m512bh)_mm512_set1_epi32((int)x),
                                            (__m512bh)w.part[0]);
    return r;
  }
  // Lane i of the result: columns[0] below, columns[1] above.
  static INLINE U pack(const F* columns) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                           8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512bh both =
        _mm512_cvtne2ps_pbh((__m512)columns[1].part[0], (__m512)columns[0].part[0]);
    U r;
    r.part[0] = (U::Native)_mm512_permutexvar_epi16(order, (__m512i)both);
    return r;
  }
  static INLINE U row(const F* values) {
    U r;
    r.part[0] = (U::Native)_mm512_cvtne2ps_pbh((__m512)values[1].part[0], (__m512)values[0].part[0]);
    return r;
  }
};
#endif

}  // namespace minfer::MINFER_ISA
