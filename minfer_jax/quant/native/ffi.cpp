// The kernels as custom calls of XLA (its foreign function interface), on XLA's own threads.
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#include <cstring>

#include "threads.h"
#include "weight.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace minfer {
namespace {

// --- the instruction set -------------------------------------------------------------------------

// From the most to the least able, as far as the library was built with them.
const Kernels* const kAll[] = {
#if defined(MINFER_WITH_avx512)
    kAvx512,
#endif
#if defined(MINFER_WITH_avx2)
    kAvx2,
#endif
#if defined(MINFER_WITH_neon)
    kNeon,
#endif
    kPortable,
};
const Kernels* chosen = nullptr;

bool runs_here(const Kernels* kernels) {
#if defined(__x86_64__)
  __builtin_cpu_init();
#if defined(MINFER_WITH_avx512)
  if (kernels == kAvx512)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
#endif
#if defined(MINFER_WITH_avx2)
  if (kernels == kAvx2)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");  // and with it F16C
#endif
#endif
#if defined(__aarch64__) && defined(__linux__)
  if (kernels != kPortable) return getauxval(AT_HWCAP) & (1 << 20);  // dot products of bytes
#endif
  return true;  // every other machine for which neon is built has them
}

// The kernels of this name, or the best ones where it is empty; null if there are none.
const Kernels* find(const char* name) {
  for (const Kernels* kernels : kAll)
    if (runs_here(kernels) && (!*name || !std::strcmp(name, kernels->name))) return kernels;
  return nullptr;
}

// --- buffers to weights --------------------------------------------------------------------------

ffi::Error invalid(const char* what) { return ffi::Error::InvalidArgument(what); }

// What a weight is, as the attributes of a call say it.
struct Format {
  int64_t k;
  int32_t width0, width1, group, super_block, zero;
  bool fine, low;
};

// The planes of one layer, from operand `at` on, in the order bits, scale, sub, low, sublow (those
// that are there), or dense.
bool read_weight(const ffi::RemainingArgs& args, size_t at, uint32_t layer, int64_t n, const Format& f,
                 Weight& w) {
  w = {};
  w.n = n;
  w.k = f.k;
  w.width[0] = f.width0;
  w.width[1] = f.width1;
  w.group = f.group;
  w.super_block = f.super_block;
  w.zero = f.zero;
  const auto plane = [&](ffi::DataType* type) -> const void* {
    auto found = args.get<ffi::AnyBuffer>(at++);
    if (!found.has_value()) return nullptr;
    const ffi::AnyBuffer& buffer = found.value();
    const auto dims = buffer.dimensions();
    int64_t offset = 0;
    if (dims.size() == 4) {  // a stack
      if (layer >= dims[0]) return nullptr;
      offset = (int64_t)buffer.size_bytes() / dims[0] * layer;
    }
    if (type) *type = buffer.element_type();
    return static_cast<const char*>(buffer.untyped_data()) + offset;
  };
  if (f.width0 == 0) {
    ffi::DataType type = ffi::F32;
    w.dense = plane(&type);
    w.dense_type = type == ffi::F32 ? 'f' : type == ffi::F16 ? 'h' : 'b';
    return w.dense != nullptr;
  }
  w.bits[0] = static_cast<const uint32_t*>(plane(nullptr));
  if (f.width1) w.bits[1] = static_cast<const uint32_t*>(plane(nullptr));
  w.scale = static_cast<const uint16_t*>(plane(nullptr));
  if (f.fine) w.sub = static_cast<const int8_t*>(plane(nullptr));
  if (f.low) w.low = static_cast<const uint16_t*>(plane(nullptr));
  if (f.low && f.fine) w.sublow = static_cast<const int8_t*>(plane(nullptr));
  return w.bits[0] && w.scale && (!f.width1 || w.bits[1]) && (!f.fine || w.sub) &&
         (!f.low || w.low) && (!f.low || !f.fine || w.sublow);
}

constexpr char kNoPlane[] = "a plane of the weight is missing, or the layer is outside its stack";
constexpr char kNoKernel[] = "no kernel for this format of weight";

ffi::Error product(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::U32> layer,
                   ffi::RemainingArgs args, ffi::Result<ffi::Buffer<ffi::F32>> y, int64_t k,
                  int32_t width0, int32_t width1, int32_t group, int32_t super_block, int32_t zero,
                  bool fine, bool low, bool plus, bool post, int32_t prologue, float eps,
                   bool few, bool rounded, bool bfloat16) {
  const auto dims = y->dimensions();
  size_t at = 0;
  const uint32_t row = layer.typed_data()[0];
  const auto vector = [&](int64_t size, bool stacked) -> const float* {
    auto found = args.get<ffi::Buffer<ffi::F32>>(at++);
    if (!found.has_value()) return nullptr;
    int64_t first = 0;
    if (stacked) {  // the operand after it says which row
      auto index = args.get<ffi::Buffer<ffi::U32>>(at++);
      if (!index.has_value()) return nullptr;
      first = size * index.value().typed_data()[0];
    }
    const int64_t values = (int64_t)found.value().element_count();
    return first + size <= values ? found.value().typed_data() + first : nullptr;
  };
  Product p = {};
  p.x = x.typed_data();
  p.rows = dims[0];
  p.prologue = static_cast<Prologue>(prologue);
  p.eps = eps;
  p.rounded = rounded;
  p.bfloat16 = bfloat16;
  p.y = y->typed_data();
  if (plus && !(p.plus = vector(dims[0] * dims[1], false))) return invalid("there is nothing to add");
  if (p.prologue == Prologue::rms_norm && !(p.norm = vector(k, true))) return invalid("the norm is missing");
  if (post && !(p.post = vector(dims[1], true))) return invalid("the norm of the result is missing");
  const Format format = {k, width0, width1, group, super_block, zero, fine, low};
  if (!read_weight(args, at, row, dims[1], format, p.w)) return invalid(kNoPlane);
  const bool done = few ? chosen->matvec(p, on<true>(pool)) : chosen->matmul(p, on<false>(pool));
  return done ? ffi::Error::Success() : invalid(kNoKernel);
}

// Sizes and the layer's cache; false if the layer is outside it.
bool read_cache(const ffi::AnyBuffer& k, const ffi::AnyBuffer& v, uint32_t layer, Attention& a) {
  const auto dims = k.dimensions();  // L B K S H
  if (layer >= dims[0]) return false;
  const int64_t offset = (int64_t)k.size_bytes() / dims[0] * layer;
  a.b = dims[1], a.kv_heads = dims[2], a.slots = dims[3], a.h = dims[4];
  a.k = static_cast<const char*>(k.untyped_data()) + offset;
  a.v = static_cast<const char*>(v.untyped_data()) + offset;
  a.cache = k.element_type() == ffi::F32   ? Cache::f32
            : k.element_type() == ffi::F16 ? Cache::f16
                                           : Cache::bf16;
  return true;
}

constexpr char kNoLayer[] = "the layer is outside the cache";
constexpr char kNoHead[] = "no kernel for a head of this size";

ffi::Error attention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                     ffi::Buffer<ffi::U32> layer, ffi::Buffer<ffi::S32> q_at,
                     ffi::Buffer<ffi::S32> k_at, ffi::Result<ffi::Buffer<ffi::F32>> out,
                     int64_t window, float scale, bool bfloat16) {
  Attention a = {};
  if (!read_cache(k, v, layer.typed_data()[0], a)) return invalid(kNoLayer);
  a.t = q.dimensions()[1], a.n = q.dimensions()[2];
  a.q = q.typed_data();
  a.q_at = q_at.typed_data();
  a.k_at = k_at.typed_data();
  a.window = window;
  a.scale = scale;
  a.bfloat16 = bfloat16;
  a.out = out->typed_data();
  return chosen->attend(a, on<false>(pool)) ? ffi::Error::Success() : invalid(kNoHead);
}

ffi::Error step(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> qkv, ffi::AnyBuffer k, ffi::AnyBuffer v,
                ffi::Buffer<ffi::U32> layer, ffi::Buffer<ffi::S32> q_at, ffi::Buffer<ffi::S32> k_at,
                ffi::Buffer<ffi::S32> slots, ffi::RemainingArgs args,
                ffi::Result<ffi::Buffer<ffi::F32>> out, ffi::Result<ffi::AnyBuffer> new_k,
                ffi::Result<ffi::AnyBuffer> new_v, int64_t window, float scale, bool rotate,
                bool interleaved, bool q_norm, bool k_norm, bool q_factor, float eps) {
  if (new_k->untyped_data() != k.untyped_data() || new_v->untyped_data() != v.untyped_data())
    return invalid("the cache is to be updated in place");
  Step s = {};
  Attention& a = s.attention;
  if (!read_cache(k, v, layer.typed_data()[0], a)) return invalid(kNoLayer);
  a.t = 1, a.n = out->dimensions()[2];
  a.q_at = q_at.typed_data();
  a.k_at = k_at.typed_data();
  a.window = window;
  a.scale = scale;
  a.out = out->typed_data();
  size_t at = 0;
  bool whole = true;
  const auto vector = [&](bool there, int64_t* size = nullptr) -> const float* {
    if (!there) return nullptr;
    auto found = args.get<ffi::Buffer<ffi::F32>>(at++);
    whole = whole && found.has_value();
    if (!found.has_value()) return nullptr;
    if (size) *size = found.value().dimensions().back();
    return found.value().typed_data();
  };
  s.qkv = qkv.typed_data();
  s.cos = vector(rotate, &s.pairs);
  s.sin = vector(rotate);
  s.q_norm = vector(q_norm);
  s.k_norm = vector(k_norm);
  s.q_factor = vector(q_factor);
  if (!whole) return invalid("an operand is missing");
  s.interleaved = interleaved;
  s.eps = eps;
  s.slots = slots.typed_data();
  s.k = const_cast<void*>(a.k);
  s.v = const_cast<void*>(a.v);
  return chosen->step(s, on<true>(pool)) ? ffi::Error::Success() : invalid(kNoHead);
}

XLA_FFI_DEFINE_HANDLER(kProduct, product,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::Buffer<ffi::F32>>()
                           .Arg<ffi::Buffer<ffi::U32>>()
                           .RemainingArgs()
                           .Ret<ffi::Buffer<ffi::F32>>()
                           .Attr<int64_t>("k")
                           .Attr<int32_t>("width0")
                           .Attr<int32_t>("width1")
                           .Attr<int32_t>("group")
                           .Attr<int32_t>("super_block")
                           .Attr<int32_t>("zero")
                           .Attr<bool>("fine")
                           .Attr<bool>("low")
                           .Attr<bool>("plus")
                           .Attr<bool>("post")
                           .Attr<int32_t>("prologue")
                           .Attr<float>("eps")
                           .Attr<bool>("few")
                           .Attr<bool>("rounded")
                           .Attr<bool>("bfloat16"));

XLA_FFI_DEFINE_HANDLER(kAttention, attention,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::Buffer<ffi::F32>>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::Buffer<ffi::U32>>()
                           .Arg<ffi::Buffer<ffi::S32>>()
                           .Arg<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::F32>>()
                           .Attr<int64_t>("window")
                           .Attr<float>("scale")
                           .Attr<bool>("bfloat16"));

XLA_FFI_DEFINE_HANDLER(kStep, step,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::Buffer<ffi::F32>>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::Buffer<ffi::U32>>()
                           .Arg<ffi::Buffer<ffi::S32>>()
                           .Arg<ffi::Buffer<ffi::S32>>()
                           .Arg<ffi::Buffer<ffi::S32>>()
                           .RemainingArgs()
                           .Ret<ffi::Buffer<ffi::F32>>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<int64_t>("window")
                           .Attr<float>("scale")
                           .Attr<bool>("rotate")
                           .Attr<bool>("interleaved")
                           .Attr<bool>("q_norm")
                           .Attr<bool>("k_norm")
                           .Attr<bool>("q_factor")
                           .Attr<float>("eps"));

}  // namespace
}  // namespace minfer

// --- what Python calls ---------------------------------------------------------------------------

extern "C" {

// Whether the library and the machine have the instruction set of this name.
__attribute__((visibility("default"))) bool minfer_has(const char* name) {
  return minfer::find(name) != nullptr;
}

// Takes the instruction set of this name, or the best one where it is empty. Returns its name, or
// null if there is none.
__attribute__((visibility("default"))) const char* minfer_choose(const char* name) {
  const minfer::Kernels* found = minfer::find(name);
  if (found == nullptr) return nullptr;
  minfer::chosen = found;
  return found->name;
}

// Whether the chosen one multiplies many rows in bfloat16.
__attribute__((visibility("default"))) bool minfer_bfloat16() { return minfer::chosen->bfloat16; }

#define MINFER_CALL(name, handler)                                                                  \
  __attribute__((visibility("default"))) XLA_FFI_Error* name(XLA_FFI_CallFrame* frame) {            \
    return minfer::handler(frame);                                                                  \
  }
MINFER_CALL(minfer_product, kProduct)
MINFER_CALL(minfer_attention, kAttention)
MINFER_CALL(minfer_step, kStep)
}
