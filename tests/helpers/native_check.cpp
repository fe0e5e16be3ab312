// Runs the kernels of one instruction set, in shapes that do not come out even, and prints the largest
// error of each kind: beside the portable ones, or what is written out here. MINFER_TABLE is the table
// to be tested. tests/test_native_arm.py builds it for a processor that only an emulator has,
// tests/test_native_memory.py with checks of every access.
#include "native_attention.h"
#include "native_products.h"

int main() {
  using namespace minfer;
  all_products(MINFER_TABLE);
  all_attention(MINFER_TABLE);
  for (const auto& [kind, value] : worst) std::printf("%s: %g\n", kind.c_str(), value);
}
