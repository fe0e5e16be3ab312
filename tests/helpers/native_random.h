// Random numbers, threads and errors, for native_check.cpp.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "weight.h"

namespace minfer {
namespace {

uint32_t state = 1;

uint32_t word() { return state = state * 1664525u + 1013904223u; }

float uniform() { return (float)(word() >> 8) * 0x1p-23f - 1; }  // [-1, 1)

// Vectors have the size that is asked for, to the byte: a sanitizer sees what is beyond.
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

// The upper halves of floats.
std::vector<uint16_t> bfloats(int64_t n) {
  std::vector<uint16_t> v(n);
  for (uint16_t& x : v) {
    const float f = uniform();
    uint32_t u;
    std::memcpy(&u, &f, 4);
    x = (uint16_t)(u >> 16);
  }
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

// As many threads as are claimed, one after another, the last task first.
void in_turn(void*, int64_t tasks, Threads::Task task, const void* f) {
  for (int64_t i = tasks; i-- > 0;) task(f, i);
}
Threads threads(int count) { return {count, nullptr, in_turn}; }

// The largest difference of the first values from those expected, over the largest of all expected.
double error(const std::vector<float>& found, const std::vector<float>& expected) {
  double off = 0, size = 0;
  for (size_t i = 0; i < found.size(); i++) {
    const double d = std::fabs((double)found[i] - expected[i]);
    if (!(d <= off)) off = d;  // NaN too
  }
  for (float x : expected) size = std::fmax(size, std::fabs((double)x));
  return off == 0 ? 0 : off / size;
}

// The largest error of each kind; a kernel that refused has NaN.
std::map<std::string, double> worst;

void report(const std::string& kind, bool ok, double value) {
  double& most = worst[kind];
  if (!ok) value = NAN;
  if (!(value <= most)) most = value;
}

}  // namespace
}  // namespace minfer
