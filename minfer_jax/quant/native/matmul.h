// The product of many rows with a packed weight: paid in arithmetic. A panel of outputs is
// unpacked once, into a buffer that stays in cache, and serves all rows.
#pragma once

#include "matvec.h"

namespace minfer::MINFER_ISA {

// Sums of a block of rows by tiles that stay in registers.
#if defined(__AVX512F__)
constexpr int kRows = 6, kTiles = 4;  // 24 of 32 registers
#elif defined(__AVX2__)
constexpr int kRows = 6, kTiles = 1;  // 12 of 16
#elif defined(__ARM_NEON)
constexpr int kRows = 6, kTiles = 1;  // 24 of 32
#else
constexpr int kRows = 2, kTiles = 1;  // 8 of 16
#endif
constexpr int kPanel = kTiles * kLanes;  // outputs of a panel
constexpr int kDeep = 1024;              // words of x that a panel covers at a time

// Scratch of this thread: grows to what was asked for once, and is kept.
template <int slot>
uint32_t* scratch(size_t words) {
  static thread_local Buffer<uint32_t> buffer(0);
  buffer.grow((int64_t)words);
  return &buffer[0];
}

// y[r][c] (+)= sum over k of x[r][k] panel[k][c]: rows x tiles, `deep` words of x.
template <class Word, int Rows, int Tiles>
INLINE void block(const uint32_t* x, int64_t x_stride, const uint32_t* panel, int64_t deep, float* y,
                  int64_t y_stride, bool add) {
  F sums[Rows][Tiles];
  UNROLL for (int r = 0; r < Rows; r++) {
    UNROLL for (int c = 0; c < Tiles; c++)
      sums[r][c] = add ? load(y + r * y_stride + c * kLanes) : splat(0.0f);
  }
  for (int64_t k = 0; k < deep; k++) {
    U w[Tiles];
    UNROLL for (int c = 0; c < Tiles; c++) w[c] = load(panel + (k * Tiles + c) * kLanes);
    UNROLL for (int r = 0; r < Rows; r++) {
      const uint32_t word = x[r * x_stride + k];
      UNROLL for (int c = 0; c < Tiles; c++) sums[r][c] = Word::mac(sums[r][c], word, w[c]);
    }
  }
  UNROLL for (int r = 0; r < Rows; r++) {
    UNROLL for (int c = 0; c < Tiles; c++) store(y + r * y_stride + c * kLanes, sums[r][c]);
  }
}

// The same for any number of rows.
template <class Word, int Tiles>
void blocks(const uint32_t* x, int64_t x_stride, int64_t rows, const uint32_t* panel, int64_t deep,
            float* y, int64_t y_stride, bool add) {
  int64_t m = 0;
  for (; m + kRows <= rows; m += kRows)
    block<Word, kRows, Tiles>(x + m * x_stride, x_stride, panel, deep, y + m * y_stride, y_stride, add);
  for (; m + 2 <= rows; m += 2)
    block<Word, 2, Tiles>(x + m * x_stride, x_stride, panel, deep, y + m * y_stride, y_stride, add);
  for (; m < rows; m++)
    block<Word, 1, Tiles>(x + m * x_stride, x_stride, panel, deep, y + m * y_stride, y_stride, add);
}

// Chooses the number of tiles, 1 to kTiles.
template <class Word, int Tiles = kTiles>
void blocks_of(int tiles, const uint32_t* x, int64_t x_stride, int64_t rows, const uint32_t* panel,
               int64_t deep, float* y, int64_t y_stride, bool add) {
  if constexpr (Tiles > 1) {
    if (tiles < Tiles)
      return blocks_of<Word, Tiles - 1>(tiles, x, x_stride, rows, panel, deep, y, y_stride, add);
  }
  blocks<Word, Tiles>(x, x_stride, rows, panel, deep, y, y_stride, add);
}

// Units first .. last of some tiles, as words [k][tile][16].
template <class Word, class Reader>
void unpack_panel(const Weight& w, int64_t j0, int tiles, int64_t first, int64_t last, uint32_t* panel) {
  for (int c = 0; c < tiles; c++) {
    const Reader reader(w, j0 + c);
    for (int64_t u = first; u < last; u++) {
      uint32_t* out = panel + ((u - first) * (32 / Word::columns) * tiles + c) * kLanes;
      F held[Word::columns];
      reader.each_column(u, [&](int i, F value) __attribute__((always_inline)) {
        held[i % Word::columns] = value;
        if (i % Word::columns == Word::columns - 1)
          store(out + (i / Word::columns) * tiles * kLanes, Word::pack(held));
      });
    }
  }
}

template <class Word, class Reader>
void matmul_as(const Weight& w, const uint32_t* x, int64_t rows, float* y, const Threads& threads) {
  const int64_t tiles = w.tiles(), panels = (tiles + kTiles - 1) / kTiles;
  const int64_t x_stride = w.k / Word::columns, unit = 32 / Word::columns;
  // Few panels are shared out by rows too: a thread left idle costs more than unpacking twice.
  const int64_t wanted = threads.count == 1 ? 1 : (8 * threads.count + panels - 1) / panels;
  const int64_t parts = most<int64_t>(1, least(wanted, rows / (16 * kRows)));
  const int64_t step = ((rows + parts - 1) / parts + kRows - 1) / kRows * kRows;

  threads.run(panels * parts, [&](int64_t task) {
    const int64_t j0 = task / parts * kTiles, row0 = task % parts * step;
    const int64_t count = least(step, rows - row0);
    if (count <= 0) return;
    const int here = (int)least<int64_t>(kTiles, tiles - j0);
    const bool whole = (j0 + here) * kLanes <= w.n;  // else there are lanes beyond N
    const int64_t deepest = least<int64_t>(kDeep, x_stride), stride = whole ? w.n : kPanel;
    uint32_t* panel = scratch<0>((size_t)(deepest + kPanel) * here * kLanes);
    float* out = whole ? y + row0 * w.n + j0 * kLanes
                       : reinterpret_cast<float*>(scratch<1>((size_t)count * kPanel));
    for (int64_t k = 0; k < x_stride; k += kDeep) {
      const int64_t deep = least<int64_t>(kDeep, x_stride - k);
      unpack_panel<Word, Reader>(w, j0, here, k / unit, (k + deep) / unit, panel);
      blocks_of<Word>(here, x + row0 * x_stride + k, x_stride, count, panel, deep, out, stride, k > 0);
    }
    if (whole) return;
    for (int64_t m = 0; m < count; m++)
      copy(out + m * kPanel, w.n - j0 * kLanes, y + (row0 + m) * w.n + j0 * kLanes);
  });
}

inline bool matmul(const Weight& w, const void* x, int64_t rows, bool bf16, float* y, const Threads& threads) {
  const auto* words = static_cast<const uint32_t*>(x);
#if !defined(MINFER_HAS_BF16)
  if (bf16) return false;
#endif
  return with_reader(w, [&](auto type) {
    using Reader = typename decltype(type)::type;
#if defined(MINFER_HAS_BF16)
    if (bf16) return matmul_as<Bfloat16, Reader>(w, words, rows, y, threads);
#endif
    matmul_as<Float32, Reader>(w, words, rows, y, threads);
  });
}

}  // namespace minfer::MINFER_ISA
