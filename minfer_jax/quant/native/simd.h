// Sixteen lanes of 32 bits, whatever the width of the machine's registers.
//
// Written with the vector extension of GCC and Clang, so that one source serves every instruction
// set: kernels.cpp is compiled once for each, with MINFER_ISA naming its namespace. What the
// extension cannot say (conversions, dot products) is in ops.h.
#pragma once

#include <cstdint>
#include <cstring>

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

namespace minfer::MINFER_ISA {

constexpr int kLanes = 16;
#if defined(__AVX512F__)
constexpr int kNative = 16;  // lanes of one register
#elif defined(__AVX2__)
constexpr int kNative = 8;
#else
constexpr int kNative = 4;
#endif
constexpr int kParts = kLanes / kNative;

template <class T>
struct Vec {
  typedef T Native __attribute__((vector_size(4 * kNative)));
  typedef T Unaligned __attribute__((vector_size(4 * kNative), aligned(4), may_alias));
  Native part[kParts];
};
using F = Vec<float>;
using I = Vec<int32_t>;
using U = Vec<uint32_t>;

template <class T>
INLINE Vec<T> load(const T* p) {
  Vec<T> r;
  UNROLL for (int i = 0; i < kParts; i++)
    r.part[i] = *reinterpret_cast<const typename Vec<T>::Unaligned*>(p + i * kNative);
  return r;
}

template <class T>
INLINE void store(T* p, Vec<T> a) {
  UNROLL for (int i = 0; i < kParts; i++)
    *reinterpret_cast<typename Vec<T>::Unaligned*>(p + i * kNative) = a.part[i];
}

template <class T>
INLINE Vec<T> splat(T x) {
  Vec<T> r;
  UNROLL for (int i = 0; i < kParts; i++) r.part[i] = x - typename Vec<T>::Native{};
  return r;
}

#define MINFER_OPERATOR(op)                                                \
  template <class T>                                                       \
  INLINE Vec<T> operator op(Vec<T> a, Vec<T> b) {                          \
    UNROLL for (int i = 0; i < kParts; i++) a.part[i] = a.part[i] op b.part[i]; \
    return a;                                                              \
  }
MINFER_OPERATOR(+)
MINFER_OPERATOR(-)
MINFER_OPERATOR(*)
MINFER_OPERATOR(/)
MINFER_OPERATOR(&)
MINFER_OPERATOR(|)
#undef MINFER_OPERATOR

template <class T>
INLINE Vec<T> operator<<(Vec<T> a, int n) {
  UNROLL for (int i = 0; i < kParts; i++) a.part[i] = a.part[i] << n;
  return a;
}

template <class T>
INLINE Vec<T> operator>>(Vec<T> a, int n) {
  UNROLL for (int i = 0; i < kParts; i++) a.part[i] = a.part[i] >> n;
  return a;
}

// a * b + c; the compiler contracts it where the machine has the instruction.
INLINE F fma(F a, F b, F c) { return a * b + c; }

INLINE F max(F a, F b) {
  UNROLL for (int i = 0; i < kParts; i++) a.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
  return a;
}

INLINE F min(F a, F b) {
  UNROLL for (int i = 0; i < kParts; i++) a.part[i] = a.part[i] < b.part[i] ? a.part[i] : b.part[i];
  return a;
}

// Lanes of x where those of mask are not 0, else of y.
INLINE F select(I mask, F x, F y) {
  UNROLL for (int i = 0; i < kParts; i++) x.part[i] = mask.part[i] ? x.part[i] : y.part[i];
  return x;
}

INLINE F to_float(I a) {
  F r;
  UNROLL for (int i = 0; i < kParts; i++) r.part[i] = __builtin_convertvector(a.part[i], F::Native);
  return r;
}

INLINE I to_int(F a) {  // truncates
  I r;
  UNROLL for (int i = 0; i < kParts; i++) r.part[i] = __builtin_convertvector(a.part[i], I::Native);
  return r;
}

template <class To, class From>
INLINE Vec<To> bits(Vec<From> a) {
  Vec<To> r;
  std::memcpy(&r, &a, sizeof r);
  return r;
}

template <class T>
INLINE T lane(Vec<T> a, int i) {
  return a.part[i / kNative][i % kNative];
}

}  // namespace minfer::MINFER_ISA
