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
  return buffer.data();
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

// The words of all rows, of what the product is taken of.
template <class Word>
void pack_rows(const Product& p, const Threads& threads, uint32_t* words) {
  constexpr int columns = Word::columns, some = 16;
  const int64_t k = p.w.k, stride = k / columns;
  threads.run((p.rows + some - 1) / some, [&](int64_t task) {
    float* row = reinterpret_cast<float*>(scratch<0>((size_t)k));
    for (int64_t m = task * some; m < least(p.rows, (task + 1) * some); m++) {
      prepare(p, m, row);
      for (int64_t i = 0; i < k; i += columns * kLanes) {
        F x[columns];
        UNROLL for (int c = 0; c < columns; c++) x[c] = load(row + i + c * kLanes);
        store(words + m * stride + i / columns, Word::row(x));
      }
    }
  });
}

template <class Word, class Reader>
void matmul_as(const Product& p, const uint32_t* x, const Threads& threads) {
  const Weight& w = p.w;
  const int64_t tiles = w.tiles(), panels = (tiles + kTiles - 1) / kTiles;
  const int64_t x_stride = w.k / Word::columns, unit = 32 / Word::columns;
  // Few panels are shared out by rows too: a thread left idle costs more than unpacking twice.
  const int64_t wanted = threads.count == 1 ? 1 : (8 * threads.count + panels - 1) / panels;
  const int64_t parts = most<int64_t>(1, least(wanted, p.rows / (16 * kRows)));
  const int64_t step = ((p.rows + parts - 1) / parts + kRows - 1) / kRows * kRows;
  const float* plus = p.post ? nullptr : p.plus;

  threads.run(panels * parts, [&](int64_t task) {
    const int64_t j0 = task / parts * kTiles, row0 = task % parts * step;
    const int64_t count = least(step, p.rows - row0), n0 = j0 * kLanes;
    if (count <= 0) return;
    const int here = (int)least<int64_t>(kTiles, tiles - j0);
    const int64_t width = least<int64_t>(here * kLanes, w.n - n0);  // less where lanes are beyond N
    const bool whole = width == here * kLanes && !p.order;
    const int64_t deepest = least<int64_t>(kDeep, x_stride), stride = whole ? w.n : kPanel;
    uint32_t* panel = scratch<0>((size_t)deepest * here * kLanes);
    float* out = whole ? p.y + row0 * w.n + n0
                       : reinterpret_cast<float*>(scratch<1>((size_t)count * kPanel));
    for (int64_t m = 0; m < count && plus; m++)
      copy(plus + (row0 + m) * w.n + n0, width, out + m * stride);
    for (int64_t k = 0; k < x_stride; k += kDeep) {
      const int64_t deep = least<int64_t>(kDeep, x_stride - k);
      unpack_panel<Word, Reader>(w, j0, here, k / unit, (k + deep) / unit, panel);
      blocks_of<Word>(here, x + row0 * x_stride + k, x_stride, count, panel, deep, out, stride,
                      plus || k > 0);
    }
    if (whole) return;
    for (int64_t m = 0; m < count; m++) copy(out + m * kPanel, width, p.y + p.row(row0 + m) * w.n + n0);
  });
}

template <class Word>
bool matmul_of(const Product& p, const Threads& packing, const Threads& threads) {
  if (!possible(p)) return false;
  uint32_t* words = scratch<2>((size_t)(p.rows * p.w.k / Word::columns));  // fresh pages cost more
  pack_rows<Word>(p, packing, words);
  const bool done = with_reader(p.w, [&](auto type) {
    matmul_as<Word, typename decltype(type)::type>(p, words, threads);
  });
  if (done && p.post) threads.run(p.rows, [&](int64_t m) { finish(p, m); });
  return done;
}

inline bool matmul(const Product& p, const Threads& packing, const Threads& threads) {
#if defined(MINFER_HAS_BF16)
  if (p.bfloat16) return matmul_of<Bfloat16>(p, packing, threads);
#endif
  return !p.bfloat16 && matmul_of<Float32>(p, packing, threads);
}

inline bool matmul(const Product& p, const Threads& threads) { return matmul(p, threads, threads); }

}  // namespace minfer::MINFER_ISA
