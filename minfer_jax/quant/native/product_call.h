// The product as a custom call of XLA.
#pragma once

#include "chosen.h"
#include "threads.h"

namespace minfer {
namespace {

// What a weight is, as the attribute `format` of a call says it: `_format` in calls.py, in order.
struct Format {
  int64_t k, width0, width1, group, super_block, zero, fine, low, coded, scale_type, span, high,
      factor;  // the exponent of 2
};

bool read_format(ffi::Span<const int64_t> values, Format& f) {
  if (values.size() * sizeof(int64_t) != sizeof f) return false;
  std::memcpy(&f, values.begin(), sizeof f);
  return true;
}

// The planes of one layer, from operand `at` on, in the order bits, scale, sub, low, sublow, high,
// codebook, grid (those that are there), or dense.
bool read_weight(const ffi::RemainingArgs& args, size_t at, uint32_t layer, int64_t n, const Format& f,
                 Weight& w) {
  w = {};
  w.n = n;
  w.k = f.k;
  w.width[0] = (int)f.width0;
  w.width[1] = (int)f.width1;
  w.group = (int)f.group;
  w.super_block = (int)f.super_block;
  w.zero = (int)f.zero;
  w.scale_type = (char)f.scale_type;
  w.span = (int)f.span;
  w.high_bits = (int)f.high;
  w.factor = __builtin_ldexpf(1, (int)f.factor);
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
  bool all = true;
  const auto take = [&](auto& pointer, bool there) {
    if (!there) return;
    pointer = static_cast<std::remove_reference_t<decltype(pointer)>>(plane(nullptr));
    all = all && pointer != nullptr;
  };
  take(w.bits[0], true);
  take(w.bits[1], f.width1);
  take(w.scale, true);
  take(w.sub, f.fine);
  take(w.low, f.low);
  take(w.sublow, f.low && f.fine);
  take(w.high, f.high);
  take(w.codebook, f.coded);
  take(w.grid, f.span);
  return all;
}

constexpr char kNoPlane[] = "a plane of the weight is missing, or the layer is outside its stack";
constexpr char kNoKernel[] = "no kernel for this format of weight";

ffi::Error product(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::U32> layer,
                   ffi::RemainingArgs args, ffi::Result<ffi::Buffer<ffi::F32>> y,
                   ffi::Span<const int64_t> format, bool plus, bool post, int32_t prologue,
                   float eps, bool few, bool rounded, bool bfloat16) {
  Format f;
  if (!read_format(format, f)) return invalid(kNoKernel);
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
  if (p.prologue == Prologue::rms_norm && !(p.norm = vector(f.k, true))) return invalid("the norm is missing");
  if (post && !(p.post = vector(dims[1], true))) return invalid("the norm of the result is missing");
  if (!read_weight(args, at, row, dims[1], f, p.w)) return invalid(kNoPlane);
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
                           .Attr<ffi::Span<const int64_t>>("format")
                           .Attr<bool>("plus")
                           .Attr<bool>("post")
                           .Attr<int32_t>("prologue")
                           .Attr<float>("eps")
                           .Attr<bool>("few")
                           .Attr<bool>("rounded")
                           .Attr<bool>("bfloat16"));

}  // namespace
}  // namespace minfer
