// A part of a product, on one thread: what the work of a mixture of experts is shared out in.
#pragma once

#include "matmul.h"

namespace minfer::MINFER_ISA {

struct Part {
  int64_t i, of;
};

// In place of threads: does part `i` of the tasks of a kernel and leaves the rest to others.
inline Threads alone(const Part& part) {
  return {(int)part.of, const_cast<Part*>(&part),
          [](void* pool, int64_t tasks, Threads::Task task, const void* f) {
            const Part& p = *static_cast<const Part*>(pool);
            for (int64_t t = tasks * p.i / p.of; t < tasks * (p.i + 1) / p.of; t++) task(f, t);
          }};
}

// Part i of a product without a norm after it: all rows, some of the outputs. What is done to the
// rows of x first is done again for each part.
inline bool part(const Product& p, bool few, int64_t i, int64_t of) {
  const Part mine = {i, of}, all = {0, 1};
  return few ? matvec(p, alone(all), alone(mine)) : matmul(p, alone(all), alone(mine));
}

}  // namespace minfer::MINFER_ISA
