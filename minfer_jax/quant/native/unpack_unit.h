// The weights of a unit in float32, from its bytes and scales: what every reader of whole numbers does.
#pragma once

#include "ops.h"

namespace minfer::MINFER_ISA {

// Calls put(column, 16 weights) for the 32 columns of unit u, in order.
template <class Reader, class Put>
INLINE void unpack_unit(const Reader& reader, int64_t u, Put put) {
  F s[Reader::groups], m[Reader::groups];
  UNROLL for (int g = 0; g < Reader::groups; g++) {
    s[g] = reader.scale_of(u, g);
    if constexpr (Reader::has_low) m[g] = reader.low_of(u, g);
  }
  UNROLL for (int t = 0; t < 8; t += 2) {
    U two[2];
    reader.pair(u, t / 2, two);
    UNROLL for (int i = 0; i < 8; i++) {
      const U four = two[i / 4];
      const int column = 4 * t + i, b = i % 4;
      const U q = b == 3 ? four >> 24 : (four >> (8 * b)) & splat<uint32_t>(0xff);
      const I whole = bits<int32_t>(q);
      F value = (to_float(whole) - splat(reader.zero)) * s[column / Reader::group];
      if constexpr (Reader::has_low) value = value + m[column / Reader::group];
      put(column, value);
    }
  }
}

}  // namespace minfer::MINFER_ISA
