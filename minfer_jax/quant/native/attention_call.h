// Attention, and its step with what surrounds it, as custom calls of XLA.
#pragma once

#include "chosen.h"
#include "threads.h"

namespace minfer {
namespace {

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
