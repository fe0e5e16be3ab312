// Products of every kind of weight, in shapes that do not come out even, for native_check.cpp.
#pragma once

#include "experts_tasks.h"
#include "native_random.h"

namespace minfer {
namespace {

// Widths, group, zero, two-level, minimum; columns a scale is shared by, if one-level; type of scale,
// or of plain floats; whether there is a codebook; of a grid columns of an index, and bits beyond 8.
// As in unpack.h.
struct Format {
  int w0, w1, group, zero, fine, low, shared = 0;
  char scale = 'h';
  int coded = 0, span = 0, high = 0;

  int super_block() const { return fine ? 256 : shared ? shared : group; }
};

const Format kFormats[] = {
    {4, 0, 32, 8, 0, 0},
    {4, 0, 32, 0, 0, 1},
    {4, 1, 32, 16, 0, 0},
    {4, 1, 32, 0, 0, 1},
    {8, 0, 32, 128, 0, 0},
    {2, 0, 16, 0, 1, 1},
    {2, 1, 16, 4, 1, 0},
    {4, 0, 32, 0, 1, 1},
    {4, 1, 32, 0, 1, 1},
    {4, 2, 16, 32, 1, 0},
    {2, 0, 32, 1, 0, 0, 256},
    {2, 0, 32, 1, 0, 0, 64},
    {4, 0, 32, 127, 0, 0, 32, 'h', 1},
    {4, 0, 32, 127, 1, 0, 256, 'h', 1},
    {4, 0, 32, 12, 0, 0, 32, 'B', 1},
    {4, 0, 16, 12, 0, 0, 16, 'H', 1},
    {1, 0, 32, 1, 0, 0, 128, 'h', 1},
    {1, 1, 32, 43, 1, 0, 256, 'h', 1, 8, 0},
    {1, 1, 16, 43, 1, 0, 256, 'h', 1, 8, 1},
    {1, 1, 16, 43, 1, 0, 256, 'h', 1, 8, 2},
    {2, 1, 32, 62, 1, 0, 256, 'h', 1, 4, 0},
    {1, 0, 32, 9, 1, 0, 256, 'h', 1, 8, 3},
    {1, 0, 16, 9, 1, 0, 256, 'h', 1, 8, 3},
    {0, 0, 32, 0, 0, 0, 0, 'f'},
    {0, 0, 32, 0, 0, 0, 0, 'h'},
    {0, 0, 32, 0, 0, 0, 0, 'b'}};

// A random weight with its memory.
struct Planes {
  std::vector<uint32_t> b0, b1, grid;
  std::vector<uint16_t> scale, low, dense16;
  std::vector<int8_t> small, sub, sublow, book, high;
  std::vector<float> dense;
  Weight w = {};

  Planes(const Format& f, int64_t n, int64_t k) {
    const int64_t lanes = (n + 15) / 16 * 16, super_block = f.super_block();
    w.n = n, w.k = k, w.width[0] = f.w0, w.width[1] = f.w1, w.group = f.group;
    w.super_block = (int)super_block, w.zero = f.zero, w.factor = 0.125f;
    w.scale_type = f.scale, w.span = f.span, w.high_bits = f.high;
    if (!f.w0) {
      if (f.scale == 'f') dense = floats(lanes * k);
      else dense16 = f.scale == 'h' ? halves(lanes * k) : bfloats(lanes * k);
      w.dense = f.scale == 'f' ? (const void*)dense.data() : dense16.data();
      w.dense_type = f.scale;
      return;
    }
    b0 = words(lanes * k * f.w0 / 32), b1 = words(lanes * k * f.w1 / 32);
    w.bits[0] = b0.data(), w.bits[1] = f.w1 ? b1.data() : nullptr;
    if (f.scale == 'h') {
      scale = halves(lanes * k / super_block);
      w.scale = scale.data();
    } else {  // exponents about 1, of a float16 or bfloat16
      small = bytes(lanes * k / super_block);
      for (int8_t& x : small) x = (int8_t)(f.scale == 'H' ? 100 + (x & 31) : 126 + (x & 3));
      w.scale = small.data();
    }
    if (f.fine) sub = bytes(lanes * k / f.group), w.sub = sub.data();
    if (f.low) low = halves(lanes * k / super_block), w.low = low.data();
    if (f.fine && f.low) sublow = bytes(lanes * k / f.group), w.sublow = sublow.data();
    if (f.coded) book = bytes(16), w.codebook = reinterpret_cast<const uint8_t*>(book.data());
    if (f.span) grid = words(256 << f.high), w.grid = grid.data();
    if (f.high) high = bytes(lanes * k / 32 * (f.high == 3 ? 2 : 1)), w.high = high.data();
  }
};

std::vector<float> normed(const float* x, const float* weight, int64_t n, double eps) {
  double squares = 0;
  for (int64_t i = 0; i < n; i++) squares += (double)x[i] * x[i];
  std::vector<float> y(n);
  for (int64_t i = 0; i < n; i++) y[i] = (float)(x[i] / std::sqrt(squares / n + eps) * weight[i]);
  return y;
}

// What a prologue makes of a row of x.
std::vector<float> prepared(Prologue prologue, const float* x, const float* norm, int64_t k, double eps) {
  if (prologue == Prologue::rms_norm) return normed(x, norm, k, eps);
  std::vector<float> y(x, x + k);
  for (int64_t i = 0; i < k; i++) {
    const double a = x[i], u = std::sqrt(2 / M_PI) * (a + 0.044715 * a * a * a);
    if (prologue == Prologue::silu) y[i] = (float)(a / (1 + std::exp(-a)) * x[k + i]);
    if (prologue == Prologue::gelu) y[i] = (float)(a * 0.5 * (1 + std::tanh(u)) * x[k + i]);
  }
  return y;
}

constexpr int64_t kMostRows = 40;

// The product of some numbers of rows; the portable product of rows without all else is believed.
void products(const Kernels* kernels, const Format& f, int64_t n, int64_t k, Prologue prologue,
              const std::vector<int64_t>& counts) {
  const Planes planes(f, n, k);
  const int64_t width = prologue == Prologue::silu || prologue == Prologue::gelu ? 2 * k : k;
  const float eps = 1e-5f;
  const auto norm = floats(k), post = floats(n), plus = floats(kMostRows * n);
  const auto all = floats(kMostRows * width);
  std::vector<float> ready;
  for (int64_t m = 0; m < kMostRows; m++) {
    const auto row = prepared(prologue, &all[m * width], norm.data(), k, eps);
    ready.insert(ready.end(), row.begin(), row.end());
  }
  std::vector<float> plain(kMostRows * n);
  Product believed = {};
  believed.w = planes.w, believed.rows = kMostRows, believed.x = ready.data(), believed.y = plain.data();
  const bool known = kPortable->matvec(believed, threads(1));

  for (int64_t rows : counts) {
    const std::vector<float> x(all.begin(), all.begin() + rows * width);
    const std::vector<float> more(plus.begin(), plus.begin() + rows * n);
    for (int end = 0; end < 3; end++) {  // nothing, plus, a norm and plus
      Product p = {};
      p.w = planes.w, p.rows = rows, p.x = x.data(), p.prologue = prologue, p.norm = norm.data();
      p.eps = eps, p.plus = end ? more.data() : nullptr, p.post = end == 2 ? post.data() : nullptr;
      std::vector<float> expected = plain;
      for (int64_t m = 0; m < kMostRows && end == 2; m++) {
        const auto row = normed(&plain[m * n], post.data(), n, eps);
        std::copy(row.begin(), row.end(), &expected[m * n]);
      }
      for (size_t i = 0; i < expected.size() && end; i++) expected[i] += plus[i];
      const bool possible = end < 2 || n % 16 == 0;
      for (const char* kind : {"few", "rounded", "many", "bfloat16"}) {
        const bool few = kind[0] == 'f' || kind[0] == 'r';
        p.rounded = kind[0] == 'r', p.bfloat16 = kind[0] == 'b';
        if (p.bfloat16 && !kernels->bfloat16) continue;
        std::vector<float> found(rows * n, NAN);
        p.y = found.data();
        const Threads some = threads(1 + (int)(word() >> 30) * 2);
        const bool ok = few ? kernels->matvec(p, some) : kernels->matmul(p, some);
        if (possible) report(kind, ok && known, error(found, expected));
        else report(kind, !ok, 0);
      }
    }
  }
}

// A mixture of experts, as experts_call.h has it computed.
void experts(const Kernels* kernels, const Format& f, int64_t n, int64_t k,
             const std::vector<int32_t>& ids, int64_t share, bool gated, int64_t few) {
  const int64_t rows = (int64_t)ids.size(), width = gated ? 2 * k : k;
  const int32_t count = *std::max_element(ids.begin(), ids.end()) + 1;
  const Prologue prologue = gated ? Prologue::silu : Prologue::none;
  std::vector<Planes> stack;
  for (int32_t e = 0; e < count; e++) stack.emplace_back(f, n, k);
  const auto x = floats(rows / share * width);
  std::vector<float> expected(rows * n, 0);
  for (int64_t m = 0; m < rows; m++) {
    if (ids[m] < 0) continue;
    const auto row = prepared(prologue, &x[m / share * width], nullptr, k, 0);
    Product p = {};
    p.w = stack[ids[m]].w, p.rows = 1, p.x = row.data(), p.y = &expected[m * n];
    kPortable->matvec(p, threads(1));
  }
  std::vector<int32_t> order;
  const auto groups = group(ids.data(), rows, count, few, order);
  for (const char* kind : {"float32", "rounded", "bfloat16"}) {
    if (kind[0] == 'b' && !kernels->bfloat16) continue;
    std::vector<float> found(rows * n, 0);
    std::vector<Product> products;
    for (const Group& g : groups) {
      Product p = {};
      p.w = stack[g.expert].w, p.rows = g.rows, p.x = x.data(), p.prologue = prologue;
      p.rounded = kind[0] == 'r', p.bfloat16 = kind[0] == 'b' && !g.few;
      p.y = found.data(), p.order = order.data() + g.first, p.share = share;
      products.push_back(p);
    }
    bool ok = true;
    for (const ExpertTask& t : tasks_of(groups, products, 1 + (int)(word() >> 30)))
      ok = kernels->part(*t.product, t.few, t.i, t.of) && ok;
    report(std::string("experts ") + kind, ok, error(found, expected));
  }
}

void all_products(const Kernels* kernels) {
  const std::vector<int64_t> ns = {1, 15, 16, 17, 33, 65}, ks = {32, 64, 96, 256, 1056, 4352};
  const Prologue prologues[] = {Prologue::none, Prologue::rms_norm, Prologue::silu, Prologue::gelu};
  size_t turn = 0;
  for (const Format& f : kFormats)
    for (int64_t k : ks) {
      if (k % f.super_block()) continue;
      const int64_t rows = 2 + (int64_t)(turn % 16);
      products(kernels, f, ns[turn % ns.size()], k, prologues[turn % 4], {1, rows});
      turn += k == 4352 ? 2 : 1;  // or each format has the same in its turn
    }
  std::vector<int64_t> counts = {kMostRows};
  for (int64_t rows = 1; rows <= 17; rows++) counts.push_back(rows);
  for (int64_t n : ns) products(kernels, kFormats[n % 2], n, 64, prologues[n % 4], counts);

  for (const Format& f : {kFormats[0], kFormats[9], kFormats[22], kFormats[24]})
    for (int64_t n : {15, 144}) {
      const int64_t k = f.super_block() == 256 ? 256 : 96;
      std::vector<int32_t> skewed(460, 2);
      for (int i = 0; i < 460; i += 9) skewed[i] = i % 4 - 2;
      experts(kernels, f, n, k, {0}, 1, false, 16);
      experts(kernels, f, n, k, {-1, -1, -7}, 1, true, 16);
      experts(kernels, f, n, k, {3, 3, 0, 3, -1, 2, 2, 0}, 4, true, 16);
      experts(kernels, f, n, k, {1, 0, 1, 1, 1, 5}, 2, false, 1);
      experts(kernels, f, n, k, skewed, 2, true, 16);
    }
}

}  // namespace
}  // namespace minfer
