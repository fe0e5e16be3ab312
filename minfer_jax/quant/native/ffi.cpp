// The kernels as custom calls of XLA (its foreign function interface), on XLA's own threads.
#include "attention_call.h"
#include "experts_call.h"

// What Python calls.
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
MINFER_CALL(minfer_experts, kExperts)
MINFER_CALL(minfer_attention, kAttention)
MINFER_CALL(minfer_step, kStep)
}
