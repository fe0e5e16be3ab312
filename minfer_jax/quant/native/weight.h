// A packed weight as the kernels see it, and the table of kernels of one instruction set.
#pragma once

#include <cstdint>

// Or each instruction set would emit these, and the linker keep one of them for all.
#define MINFER_INLINE __attribute__((always_inline))

namespace minfer {

// One layer of a stack, in tiles of 16 outputs; the planes and the formula of a weight are those of
// quant/formats/base.py. Absent planes are null.
struct Weight {
  int64_t n, k;  // outputs, columns
  int width[2];  // bits of the integer planes, 0 for none; both 0 for plain floats
  int group, super_block, zero;
  const uint32_t* bits[2];
  const void* scale;
  char scale_type;  // 'h' float16; of 8 bits, 'H' of a float16, 'B' of a bfloat16
  const int8_t* sub;
  const uint16_t* low;
  const int8_t* sublow;
  const uint8_t* codebook;  // [16]
  const uint32_t* grid;     // its table
  int span, high_bits;      // columns of an index of the grid, and its bits beyond 8
  const void* high;
  float factor;  // of scale
  const void* dense;
  char dense_type;  // 'f' float32, 'h' float16, 'b' bfloat16

  MINFER_INLINE int64_t tiles() const { return (n + 15) / 16; }
  MINFER_INLINE int shift() const {  // 2**shift units of 32 columns share `scale`
    return super_block <= 32 ? 0 : __builtin_ctz(super_block / 32);
  }
};

enum class Cache { f32, f16, bf16, q8 };

// Keys or values of one layer, [B, K, S, H]; those of q8 have a float16 scale for 32 neighbours.
struct Plane {
  void *values, *scales;
};

// Queries against the cache of one layer; sizes as in model/attention.py.
struct Attention {
  int64_t b, t, n, h, h_v, kv_heads, slots;
  const float* q;            // [B, T, N, H]
  Plane k, v;                // of H and of Hv values
  Cache cache;
  const int32_t* q_at;       // [B, T]
  const int32_t* k_at;       // [B, S]
  const float* sinks;        // [N], one more score of each head, without a value; or null
  int64_t window;            // 0 for none
  float scale, softcap;      // softcap 0 for none
  bool bfloat16;             // the factors of both products may be rounded
  float* out;                // [B, T, N, Hv]

  MINFER_INLINE int64_t groups() const { return n / kv_heads; }
  MINFER_INLINE bool sees(int32_t qp, int32_t kp) const {
    return kp >= 0 && kp <= qp && (window == 0 || qp - kp < window);
  }
};

// A few positions of each sequence, from what the projections give to what attention gives: norms,
// RoPE, the new keys and values put into the cache, and `attention`, whose q this makes.
struct Step {
  Attention attention;
  const float* qkv;         // [B, T, N H + K H + K Hv]
  const float *cos, *sin;   // [B, T, pairs], null for no rotation
  int64_t pairs;
  bool interleaved;         // pairs are (2 i, 2 i + 1), else (i, i + pairs)
  const float *q_norm, *k_norm;  // [H] or null
  float eps;
  const float* q_factor;    // [B, T], of the queries, or null
  const int32_t* slots;     // [B, T], where the key and value go; `slots` itself is nowhere
};

enum class Prologue { none, rms_norm, silu, gelu };

// y [rows, n] = post(prologue(x) times the weight), plus what is given.
struct Product {
  Weight w;
  int64_t rows;
  const float* x;  // [rows, k]; [rows, 2 k] of a | b where the prologue is act(a) * b
  Prologue prologue;
  const float* norm;  // [k], of rms_norm
  float eps;
  bool rounded;       // a few rows: round x, after the prologue, to 16 bits
  bool bfloat16;      // many rows: round both factors to bfloat16
  const float* plus;  // [rows, n] or null
  const float* post;  // [n]: the product is normed, as by rms_norm, before that; or null
  float* y;
  // Of a mixture of experts: row m of the product is order[m] of y, and of x that over `share`.
  const int32_t* order;  // or null
  int64_t share;

  MINFER_INLINE int64_t row(int64_t m) const { return order ? order[m] : m; }
  MINFER_INLINE int64_t row_of_x(int64_t m) const { return order ? order[m] / share : m; }
};

// The threads at hand. `run` calls f(0) .. f(tasks - 1) on them, in any order: no result may depend
// on which.
struct Threads {
  using Task = void (*)(const void* f, int64_t i);
  int count;
  void* pool;
  void (*start)(void* pool, int64_t tasks, Task task, const void* f);

  template <class Call>
  void run(int64_t tasks, const Call& f) const {
    start(pool, tasks, [](const void* g, int64_t i) { (*static_cast<const Call*>(g))(i); }, &f);
  }
};

// What an instruction set offers. A function returns false for what it cannot do.
struct Kernels {
  const char* name;
  bool bfloat16;  // whether products of many rows can be in bfloat16
  bool (*matvec)(const Product&, const Threads&);  // a few rows
  bool (*matmul)(const Product&, const Threads&);  // many
  bool (*part)(const Product&, bool few, int64_t i, int64_t of);  // of either, on this thread
  bool (*attend)(const Attention&, const Threads&);
  bool (*step)(const Step&, const Threads&);
};

extern const Kernels* const kPortable;
extern const Kernels* const kNeon;  // which of these there are depends on the machine built for
extern const Kernels* const kAvx2;
extern const Kernels* const kAvx512;

}  // namespace minfer
