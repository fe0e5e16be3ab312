// Which instruction set's kernels run. For ffi.cpp alone: this keeps the choice.
#pragma once

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#include <cstring>

#include "weight.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace minfer {
namespace {

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

ffi::Error invalid(const char* what) { return ffi::Error::InvalidArgument(what); }

}  // namespace
}  // namespace minfer
