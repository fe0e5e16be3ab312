// The product of a mixture of experts as a custom call of XLA: each row with the weight of its own
// expert. The rows of an expert are one product; all products' parts are one list of tasks.
#pragma once

#include "experts_tasks.h"
#include "product_call.h"

namespace minfer {
namespace {

ffi::Error experts(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> ids,
                   ffi::Buffer<ffi::U32> layer, ffi::RemainingArgs args,
                   ffi::Result<ffi::Buffer<ffi::F32>> y, ffi::Span<const int64_t> format,
                   int32_t prologue, int64_t few, bool rounded, bool bfloat16) {
  const int64_t rows = y->dimensions()[0], n = y->dimensions()[1], first = layer.typed_data()[0];
  const int32_t* expert = ids.typed_data();
  auto plane = args.get<ffi::AnyBuffer>(0);
  if (!plane.has_value() || plane.value().dimensions().size() != 4) return invalid(kNoPlane);
  const int64_t stack = plane.value().dimensions()[0];
  int32_t count = 0;  // one more than the largest id
  for (int64_t p = 0; p < rows; p++) {
    if (expert[p] >= 0 && first + expert[p] >= stack) return invalid("an expert is outside the stack");
    if (expert[p] < 0) std::fill_n(y->typed_data() + p * n, n, 0.0f);
    count = std::max(count, expert[p] + 1);
  }
  std::vector<int32_t> order;
  const std::vector<Group> groups = group(expert, rows, count, few, order);

  Format f;
  if (!read_format(format, f)) return invalid(kNoKernel);
  std::vector<Product> products;
  bool all_few = true;
  for (const Group& g : groups) {
    Product p = {};
    if (!read_weight(args, 0, (uint32_t)(first + g.expert), n, f, p.w)) return invalid(kNoPlane);
    p.rows = g.rows;
    p.x = x.typed_data();
    p.prologue = static_cast<Prologue>(prologue);
    p.rounded = rounded;
    p.bfloat16 = bfloat16 && !g.few;
    p.y = y->typed_data();
    p.order = order.data() + g.first;
    p.share = rows / x.dimensions()[0];
    products.push_back(p);
    all_few = all_few && g.few;
  }
  const Threads threads = all_few ? on<true>(pool) : on<false>(pool);
  const std::vector<ExpertTask> tasks = tasks_of(groups, products, threads.count);
  std::atomic<bool> done{true};
  threads.run((int64_t)tasks.size(), [&](int64_t i) {
    const ExpertTask& t = tasks[i];
    if (!chosen->part(*t.product, t.few, t.i, t.of)) done = false;
  });
  return done ? ffi::Error::Success() : invalid(kNoKernel);
}

XLA_FFI_DEFINE_HANDLER(kExperts, experts,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::Buffer<ffi::F32>>()
                           .Arg<ffi::Buffer<ffi::S32>>()
                           .Arg<ffi::Buffer<ffi::U32>>()
                           .RemainingArgs()
                           .Ret<ffi::Buffer<ffi::F32>>()
                           .Attr<ffi::Span<const int64_t>>("format")
                           .Attr<int32_t>("prologue")
                           .Attr<int64_t>("few")
                           .Attr<bool>("rounded")
                           .Attr<bool>("bfloat16"));

}  // namespace
}  // namespace minfer
