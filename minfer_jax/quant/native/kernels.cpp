// Compiled once for each instruction set, with MINFER_ISA its name and MINFER_TABLE its table.
#include "attention_step.h"
#include "experts.h"

namespace minfer {

#if defined(MINFER_HAS_BF16)
constexpr bool kBfloat16 = true;
#else
constexpr bool kBfloat16 = false;
#endif
#define STRING_(x) #x
#define STRING(x) STRING_(x)
static const Kernels kTable = {STRING(MINFER_ISA), kBfloat16, MINFER_ISA::matvec,
                               MINFER_ISA::matmul, MINFER_ISA::part, MINFER_ISA::attend,
                               MINFER_ISA::step};
const Kernels* const MINFER_TABLE = &kTable;

}  // namespace minfer
