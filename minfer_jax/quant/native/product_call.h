// The product as a custom call of XLA.
#pragma once

#include "chosen.h"
#include "threads.h"

namespace minfer {
namespace {

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

}  // namespace
}  // namespace minfer
