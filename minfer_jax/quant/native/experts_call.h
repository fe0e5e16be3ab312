// The product of a mixture of experts as a custom call of XLA: each row with the weight of its own
// expert. The rows of an expert are one product; all products' parts are one list of tasks.
#pragma once

#include <vector>

#include "product_call.h"

namespace minfer {
namespace {

constexpr int64_t kRowsAtOnce = 192;  // of an expert with many: those of one go into a nearby cache
constexpr int64_t kUnpacking = 8;     // rows that cost as much as reading a weight

// Some rows of y, all of one expert; `order` holds their numbers, one product's after another's.
struct Group {
  int32_t expert;
  bool few;
  int64_t first, rows;  // in `order`
};

// The groups, by expert and then by row. Ids are negative or below `experts`.
std::vector<Group> group(const int32_t* ids, int64_t rows, int32_t experts, int64_t few,
                         std::vector<int32_t>& order) {
  std::vector<int64_t> next(experts + 1, 0);
  for (int64_t p = 0; p < rows; p++)
    if (ids[p] >= 0) next[ids[p] + 1]++;
  std::vector<Group> groups;
  for (int32_t e = 0; e < experts; e++) {
    const int64_t count = next[e + 1], first = next[e];
    next[e + 1] += first;
    const int64_t blocks = (count + kRowsAtOnce - 1) / kRowsAtOnce;  // alike: all few, or none
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t from = count * b / blocks, to = count * (b + 1) / blocks;
      groups.push_back({e, count <= few, first + from, to - from});
    }
  }
  order.resize(next[experts]);
  for (int64_t p = 0; p < rows; p++)
    if (ids[p] >= 0) order[next[ids[p]]++] = (int32_t)p;
  return groups;
}

struct ExpertTask {
  const Product* product;
  bool few;
  int64_t i, of;  // of the parts of the product
};

// Products cut into parts that cost about the same, some for each thread: who comes late, or draws
// a part that takes long, then holds up nobody much.
std::vector<ExpertTask> tasks_of(const std::vector<Group>& groups, const std::vector<Product>& products,
                                 int threads) {
  const auto cost = [](const Group& g) { return std::max(g.rows, kUnpacking); };
  int64_t total = 0;
  for (const Group& g : groups) total += cost(g);
  std::vector<ExpertTask> tasks;
  for (size_t g = 0; g < groups.size(); g++) {
    const int64_t most = (products[g].w.tiles() + 3) / 4;
    const int64_t of = std::min(most, (cost(groups[g]) * 4 * threads + total - 1) / total);
    for (int64_t i = 0; i < of; i++) tasks.push_back({&products[g], groups[g].few, i, of});
  }
  return tasks;
}

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
