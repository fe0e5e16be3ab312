// Runs the kernels of one instruction set beside the portable ones, on the same random weights and
// caches, and prints the largest error of each kind. For processors that only an emulator has:
// tests/test_native_arm.py builds it, with MINFER_TABLE the table to be tested.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "weight.h"

using namespace minfer;

namespace {

uint32_t state = 1;

uint32_t word() { return state = state * 1664525u + 1013904223u; }

float uniform() { return (float)(word() >> 8) * 0x1p-23f - 1; }  // [-1, 1)

std::vector<float> floats(int64_t n) {
  std::vector<float> v(n);
  for (float& x : v) x = uniform();
  return v;
}

// Float16 of either sign, subnormal ones among them.
std::vector<uint16_t> halves(int64_t n) {
  std::vector<uint16_t> v(n);
  for (uint16_t& x : v) x = (word() >> 16) & 0xabff;
  return v;
}

std::vector<int8_t> bytes(int64_t n) {
  std::vector<int8_t> v(n);
  for (int8_t& x : v) x = (int8_t)(word() >> 24);
  return v;
}

std::vector<uint32_t> words(int64_t n) {
  std::vector<uint32_t> v(n);
  for (uint32_t& x : v) x = word() ^ (word() >> 16);
  return v;
}

void alone(void*, int64_t tasks, Threads::Task task, const void* f) {
  for (int64_t i = 0; i < tasks; i++) task(f, i);
}
const Threads kAlone = {1, nullptr, alone};

// The largest difference, over the largest value.
double error(const std::vector<float>& found, const std::vector<float>& expected) {
  double off = 0, size = 0;
  for (size_t i = 0; i < found.size(); i++) {
    const double d = std::fabs((double)found[i] - expected[i]);
    if (!(d <= off)) off = d;  // NaN too
    size = std::fmax(size, std::fabs((double)expected[i]));
  }
  return off / size;
}

// Widths, group, zero, two-level, minimum; columns a scale is shared by, if one-level; type of scale;
// whether there is a codebook; of a grid columns of an index, and bits beyond 8. As in unpack.h.
struct Format {
  int w0, w1, group, zero, fine, low, shared = 0;
  char scale = 'h';
  int coded = 0, span = 0, high = 0;
};

void products(const Kernels* kernels, const Format& f) {
  const int w0 = f.w0, w1 = f.w1, group = f.group;
  const bool fine = f.fine, low = f.low;
  const int64_t n = 37, k = 512, tiles = 3, lanes = 16 * tiles;
  const int super_block = fine ? 256 : f.shared ? f.shared : group;
  const auto b0 = words(lanes * k * w0 / 32), b1 = words(lanes * k * w1 / 32);
  const auto scale = halves(lanes * k / super_block), lows = halves(lanes * k / super_block);
  const auto sub = bytes(lanes * k / group), sublow = bytes(lanes * k / group);
  const auto dense = floats(lanes * k);
  auto small = bytes(lanes * k / group);  // exponents about 1, of a float16 or bfloat16
  for (int8_t& x : small) x = f.scale == 'H' ? 100 + (x & 31) : 126 + (x & 3);
  const auto book = bytes(16);
  const auto grid = words(2048), high = words(lanes * k / 64);
  Weight w = {};
  w.n = n, w.k = k, w.width[0] = w0, w.width[1] = w1, w.group = group;
  w.super_block = super_block, w.zero = f.zero, w.factor = 0.125f;
  w.scale_type = f.scale, w.span = f.span, w.high_bits = f.high;
  w.codebook = f.coded ? reinterpret_cast<const uint8_t*>(book.data()) : nullptr;
  w.grid = f.span ? grid.data() : nullptr, w.high = high.data();
  if (w0) {
    w.bits[0] = b0.data(), w.bits[1] = w1 ? b1.data() : nullptr;
    w.scale = f.scale == 'h' ? (const void*)scale.data() : small.data();
    w.sub = fine ? sub.data() : nullptr, w.low = low ? lows.data() : nullptr;
    w.sublow = fine && low ? sublow.data() : nullptr;
  } else {
    w.dense = dense.data(), w.dense_type = 'f';
  }
  for (int64_t rows : {1, 3, 23}) {
    const auto x = floats(rows * k);
    std::vector<float> found(rows * n), expected(rows * n);
    Product p = {};
    p.w = w, p.rows = rows, p.x = x.data();
    for (bool rounded : {false, true}) {
      p.rounded = false, p.y = expected.data();
      bool ok = kPortable->matvec(p, kAlone);
      p.rounded = rounded, p.y = found.data();
      ok = ok && kernels->matvec(p, kAlone);
      std::printf("%s %g\n", rounded ? "rounded" : "few", ok ? error(found, expected) : NAN);
    }
    p.rounded = false;
    const bool ok = kernels->matmul(p, kAlone);
    std::printf("many %g\n", ok ? error(found, expected) : NAN);
  }
}

void attention(const Kernels* kernels, Cache cache, int64_t t, int64_t h, int64_t h_v, bool more) {
  const int64_t slots = 300, kv_heads = 2, n = 6;
  const int64_t cells = kv_heads * slots * (h > h_v ? h : h_v);
  const auto q = floats(t * n * h), sinks = floats(n);
  auto k32 = floats(cells), v32 = floats(cells);
  auto k16 = halves(cells), v16 = halves(cells);
  auto k8 = bytes(cells), v8 = bytes(cells);
  std::vector<int32_t> q_at(t), k_at(slots);
  for (int64_t i = 0; i < t; i++) q_at[i] = 400 + (int32_t)i;
  for (int64_t s = 0; s < slots; s++) k_at[s] = (int32_t)(s < t + 100 ? s + 300 : s);
  std::vector<float> found(t * n * h_v), expected(t * n * h_v);
  Attention a = {};
  a.b = 1, a.t = t, a.n = n, a.h = h, a.h_v = h_v, a.kv_heads = kv_heads, a.slots = slots;
  a.q = q.data();
  if (cache == Cache::f32) a.k.values = k32.data(), a.v.values = v32.data();
  if (cache == Cache::f16) a.k.values = k16.data(), a.v.values = v16.data();
  if (cache == Cache::q8) {
    a.k = {k8.data(), k16.data()};
    a.v = {v8.data(), v16.data()};
  }
  a.cache = cache, a.q_at = q_at.data(), a.k_at = k_at.data(), a.window = 250, a.scale = 0.5f;
  if (more) a.sinks = sinks.data(), a.softcap = 3;
  a.out = expected.data();
  bool ok = kPortable->attend(a, kAlone);
  a.out = found.data();
  ok = ok && kernels->attend(a, kAlone);
  std::printf("attention %g\n", ok ? error(found, expected) : NAN);
}

}  // namespace

int main() {
  const Format formats[] = {
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
      {0, 0, 32, 0, 0, 0}};
  for (const Format& f : formats) products(MINFER_TABLE, f);
  for (Cache cache : {Cache::f32, Cache::f16, Cache::q8})
    for (int64_t t : {1, 19}) {
      attention(MINFER_TABLE, cache, t, 64, 64, false);
      attention(MINFER_TABLE, cache, t, 96, 32, true);
    }
}
