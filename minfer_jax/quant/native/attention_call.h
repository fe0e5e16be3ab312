// Attention, and its step with what surrounds it, as custom calls of XLA.
#pragma once

#include <utility>

#include "chosen.h"
#include "threads.h"

namespace minfer {
namespace {

// The operands that only some calls have, in order.
class Extras {
 public:
  explicit Extras(ffi::RemainingArgs args) : args_(args) {}

  const float* vector(bool there, int64_t* size = nullptr) {
    return there ? next<ffi::Buffer<ffi::F32>>(size) : nullptr;
  }

  // Those of one layer of `layers`.
  void* scales(int64_t layers, uint32_t layer) {
    auto* all = next<ffi::Buffer<ffi::F16>>();
    return all == nullptr ? nullptr : all + count_ / layers * layer;
  }

  bool missing() const { return missing_; }

 private:
  template <class Kind>
  auto next(int64_t* size = nullptr) -> decltype(std::declval<Kind>().typed_data()) {
    auto found = args_.get<Kind>(at_++);
    missing_ = missing_ || !found.has_value();
    if (!found.has_value()) return nullptr;
    count_ = found.value().element_count();
    if (size) *size = found.value().dimensions().back();
    return found.value().typed_data();
  }

  ffi::RemainingArgs args_;
  size_t at_ = 0;
  int64_t count_ = 0;
  bool missing_ = false;
};

// Sizes and the layer's cache; false if the layer is outside it.
bool read_cache(const ffi::AnyBuffer& k, const ffi::AnyBuffer& v, uint32_t layer, Extras& extras,
                Attention& a) {
  const auto dims = k.dimensions();  // L B K S H
  if (layer >= dims[0]) return false;
  a.b = dims[1], a.kv_heads = dims[2], a.slots = dims[3], a.h = dims[4], a.h_v = v.dimensions()[4];
  a.cache = k.element_type() == ffi::F32   ? Cache::f32
            : k.element_type() == ffi::F16 ? Cache::f16
            : k.element_type() == ffi::S8  ? Cache::q8
                                           : Cache::bf16;
  for (auto [from, to] : {std::pair(&k, &a.k), std::pair(&v, &a.v)}) {
    const int64_t offset = (int64_t)from->size_bytes() / dims[0] * layer;
    to->values = static_cast<char*>(from->untyped_data()) + offset;
    to->scales = a.cache == Cache::q8 ? extras.scales(dims[0], layer) : nullptr;
  }
  return true;
}

// The rest of what both calls have; the output is [B, T, N, Hv].
void read_scoring(ffi::Buffer<ffi::S32> q_at, ffi::Buffer<ffi::S32> k_at, Extras& extras,
                  ffi::Result<ffi::Buffer<ffi::F32>> out, int64_t window, float scale, float softcap,
                  bool sinks, Attention& a) {
  a.t = out->dimensions()[1], a.n = out->dimensions()[2];
  a.q_at = q_at.typed_data();
  a.k_at = k_at.typed_data();
  a.sinks = extras.vector(sinks);
  a.window = window;
  a.scale = scale;
  a.softcap = softcap;
  a.out = out->typed_data();
}

constexpr char kNoLayer[] = "the layer is outside the cache";
constexpr char kNoHead[] = "no kernel for a head of this size";
constexpr char kMissing[] = "an operand is missing";

ffi::Error attention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                     ffi::Buffer<ffi::U32> layer, ffi::Buffer<ffi::S32> q_at,
                     ffi::Buffer<ffi::S32> k_at, ffi::RemainingArgs args,
                     ffi::Result<ffi::Buffer<ffi::F32>> out, int64_t window, float scale,
                     float softcap, bool sinks, bool bfloat16) {
  Attention a = {};
  Extras extras(args);
  if (!read_cache(k, v, layer.typed_data()[0], extras, a)) return invalid(kNoLayer);
  read_scoring(q_at, k_at, extras, out, window, scale, softcap, sinks, a);
  a.q = q.typed_data();
  a.bfloat16 = bfloat16;
  if (extras.missing()) return invalid(kMissing);
  return chosen->attend(a, on<false>(pool)) ? ffi::Error::Success() : invalid(kNoHead);
}

ffi::Error step(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> qkv, ffi::AnyBuffer k, ffi::AnyBuffer v,
                ffi::Buffer<ffi::U32> layer, ffi::Buffer<ffi::S32> q_at, ffi::Buffer<ffi::S32> k_at,
                ffi::Buffer<ffi::S32> slots, ffi::RemainingArgs args,
                ffi::Result<ffi::Buffer<ffi::F32>> out, ffi::Result<ffi::AnyBuffer> new_k,
                ffi::Result<ffi::AnyBuffer> new_v, ffi::RemainingRets new_scales, int64_t window,
                float scale, float softcap, bool sinks, bool rotate, bool interleaved, bool q_norm,
                bool k_norm, bool q_factor, float eps) {
  bool same = new_k->untyped_data() == k.untyped_data() && new_v->untyped_data() == v.untyped_data();
  for (size_t i = 0; i < new_scales.size(); i++) {
    auto scales = args.get<ffi::AnyBuffer>(i);
    auto result = new_scales.get<ffi::AnyBuffer>(i);
    same = same && scales.has_value() && result.has_value() &&
           result.value()->untyped_data() == scales.value().untyped_data();
  }
  if (!same) return invalid("the cache is to be updated in place");
  Step s = {};
  Extras extras(args);
  Attention& a = s.attention;
  if (!read_cache(k, v, layer.typed_data()[0], extras, a)) return invalid(kNoLayer);
  read_scoring(q_at, k_at, extras, out, window, scale, softcap, sinks, a);
  s.qkv = qkv.typed_data();
  s.cos = extras.vector(rotate, &s.pairs);
  s.sin = extras.vector(rotate);
  s.q_norm = extras.vector(q_norm);
  s.k_norm = extras.vector(k_norm);
  s.q_factor = extras.vector(q_factor);
  if (extras.missing()) return invalid(kMissing);
  s.interleaved = interleaved;
  s.eps = eps;
  s.slots = slots.typed_data();
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
                           .RemainingArgs()
                           .Ret<ffi::Buffer<ffi::F32>>()
                           .Attr<int64_t>("window")
                           .Attr<float>("scale")
                           .Attr<float>("softcap")
                           .Attr<bool>("sinks")
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
                           .RemainingRets()
                           .Attr<int64_t>("window")
                           .Attr<float>("scale")
                           .Attr<float>("softcap")
                           .Attr<bool>("sinks")
                           .Attr<bool>("rotate")
                           .Attr<bool>("interleaved")
                           .Attr<bool>("q_norm")
                           .Attr<bool>("k_norm")
                           .Attr<bool>("q_factor")
                           .Attr<float>("eps"));

}  // namespace
}  // namespace minfer
