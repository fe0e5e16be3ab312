// The norm of a row, and the gates between two products.
#pragma once

#include "memory.h"
#include "ops.h"

namespace minfer::MINFER_ISA {

// x / sqrt(mean(x^2) + eps) * weight, and what is given in `plus`; k is a multiple of 16.
inline void rms_norm(const float* x, const float* weight, int64_t k, float eps, float* out,
                     const float* plus = nullptr) {
  F squares = splat(0.0f);
  for (int64_t i = 0; i < k; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
  const F scale = splat(1.0f / __builtin_sqrtf(sum(squares) / (float)k + eps));
  for (int64_t i = 0; i < k; i += kLanes) {
    F value = load(x + i) * scale * load(weight + i);
    if (plus) value = value + load(plus + i);
    store(out + i, value);
  }
}

INLINE F silu(F a) { return a / (splat(1.0f) + exp(splat(0.0f) - a)); }

// The form with a hyperbolic tangent (Hendrycks & Gimpel 2016): a * sigmoid(2 u).
INLINE F gelu(F a) {
  const F u = splat(0.7978845608028654f) * fma(splat(0.044715f) * a * a, a, a);
  return a / (splat(1.0f) + exp(splat(-2.0f) * u));
}

// act(x[i]) * x[k + i]
template <class Call>
INLINE void gate(const float* x, int64_t k, float* out, Call act) {
  for (int64_t i = 0; i < k; i += kLanes) store(out + i, act(load(x + i)) * load(x + k + i));
}

}  // namespace minfer::MINFER_ISA
