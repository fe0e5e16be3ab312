// How the rows of a mixture of experts become products, and these the tasks of threads.
#pragma once

#include <algorithm>
#include <vector>

#include "weight.h"

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

}  // namespace
}  // namespace minfer
