// What stands for something else: bytes looked up in a codebook, indices in a table.
#pragma once

#include "ops.h"

namespace minfer::MINFER_ISA {

// Sixteen unsigned bytes, looked up by bytes below 16.
class Codebook {
 public:
  explicit INLINE Codebook(const uint8_t* bytes) {
#if defined(__AVX512F__)
    bytes_ = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)bytes));
#elif defined(__AVX2__)
    bytes_ = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)bytes));
#elif defined(__ARM_NEON)
    bytes_ = vld1q_u8(bytes);
#else
    bytes_ = bytes;
#endif
  }

  INLINE U operator()(U x) const {
    U r;
#if defined(__AVX512F__)
    r.part[0] = (U::Native)_mm512_shuffle_epi8(bytes_, (__m512i)x.part[0]);
#elif defined(__AVX2__)
    UNROLL for (int i = 0; i < kParts; i++)
      r.part[i] = (U::Native)_mm256_shuffle_epi8(bytes_, (__m256i)x.part[i]);
#elif defined(__ARM_NEON)
    UNROLL for (int i = 0; i < kParts; i++)
      r.part[i] = (U::Native)vreinterpretq_u32_u8(
          vqtbl1q_u8(bytes_, vreinterpretq_u8_u32((uint32x4_t)x.part[i])));
#else
    uint8_t all[4 * kLanes];
    std::memcpy(all, &x, sizeof all);
    for (int i = 0; i < 4 * kLanes; i++) all[i] = bytes_[all[i]];
    std::memcpy(&r, all, sizeof all);
#endif
    return r;
  }

 private:
#if defined(__AVX512F__)
  __m512i bytes_;
#elif defined(__AVX2__)
  __m256i bytes_;
#elif defined(__ARM_NEON)
  uint8x16_t bytes_;
#else
  const uint8_t* bytes_;
#endif
};

// table[index] of each lane.
INLINE U gather(const uint32_t* table, U index) {
  U r;
#if defined(__AVX512F__)
  r.part[0] = (U::Native)_mm512_i32gather_epi32((__m512i)index.part[0], table, 4);
#elif defined(__AVX2__)  // gathers of the processors that have no more than this are slow
  alignas(32) uint32_t i[kLanes];
  store(i, index);
  UNROLL for (int j = 0; j < kLanes; j += 8)
    r.part[j / 8] = (U::Native)_mm256_set_epi32(
        (int)table[i[j + 7]], (int)table[i[j + 6]], (int)table[i[j + 5]], (int)table[i[j + 4]],
        (int)table[i[j + 3]], (int)table[i[j + 2]], (int)table[i[j + 1]], (int)table[i[j]]);
#else
  UNROLL for (int i = 0; i < kLanes; i++)
    r.part[i / kNative][i % kNative] = table[lane(index, i)];
#endif
  return r;
}

// --- loads that widen to whole numbers -----------------------------------------------------------

INLINE U whole(const uint8_t* p) {
  U r;
#if defined(__AVX512F__)
  r.part[0] = (U::Native)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  UNROLL for (int i = 0; i < kParts; i++)
    r.part[i] = (U::Native)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8 * i)));
#else
  UNROLL for (int i = 0; i < kLanes; i++) r.part[i / kNative][i % kNative] = p[i];
#endif
  return r;
}

INLINE U whole(const uint16_t* p) {
  U r;
#if defined(__AVX512F__)
  r.part[0] = (U::Native)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  UNROLL for (int i = 0; i < kParts; i++)
    r.part[i] = (U::Native)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8 * i)));
#else
  UNROLL for (int i = 0; i < kLanes; i++) r.part[i / kNative][i % kNative] = p[i];
#endif
  return r;
}

// --- scales of 8 bits: those below the sign of a 16-bit float, whose other bits are 0 ------------

struct F16Byte { uint8_t bits; };   // 5 of exponent, 3 of fraction; 0, or not subnormal
struct BF16Byte { uint8_t bits; };  // the exponent

// The exponents of float are 112 higher: added by a product, which leaves 0 as it is.
INLINE F widen(const F16Byte* p) {
  return bits<float>(whole(reinterpret_cast<const uint8_t*>(p)) << 20) * splat(0x1p112f);
}

INLINE F widen(const BF16Byte* p) {
  return bits<float>(whole(reinterpret_cast<const uint8_t*>(p)) << 23);
}

}  // namespace minfer::MINFER_ISA
