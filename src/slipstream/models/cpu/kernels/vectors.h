// SIMD in GCC's and Clang's portable vector extensions: one source for AVX-512, AVX2 and NEON.
//
// Everything here computes each lane, and sums the lanes, in one fixed order. Nothing depends on how many rows are
// computed together: that is what makes the decoder's rows bit-identical whatever stands beside them.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

inline floats load(const float* from) {
  floats value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void store(float* to, floats value) { std::memcpy(to, &value, sizeof value); }

// Every lane `value`. Compilers fold the subtraction, which changes nothing, to one broadcast; a loop over the lanes they
// build on the stack, which made whole layers five times slower.
inline floats splat(float value) { return value - floats{}; }

// a * b + c, rounded once. Said outright and not left to the compiler, which would choose by what stands around it.
inline floats fused(floats a, floats b, floats c) {
#if defined(__AVX512F__)
  return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// Halves are added until one lane is left.
inline float sum(floats value) {
#if defined(__AVX512F__)
  value += __builtin_shufflevector(value, value, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  value += __builtin_shufflevector(value, value, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  value += __builtin_shufflevector(value, value, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  value += __builtin_shufflevector(value, value, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  return value[0];
#else
  float total = 0.0f;
  for (int lane = 0; lane < LANES; ++lane) total += value[lane];
  return total;
#endif
}

// sum() of four vectors, with its bits.
inline void sum_each(const floats* values, float* sums) {
#if defined(__AVX512F__)
  auto halves = [](floats a, floats b) {  // lanes 0-7: a's halves added, 8-15: b's
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  };
  floats ab = halves(values[0], values[1]), cd = halves(values[2], values[3]);
  floats all = __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  all += __builtin_shufflevector(all, all, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  all += __builtin_shufflevector(all, all, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  for (int i = 0; i < 4; ++i) sums[i] = all[4 * i];
#else
  for (int i = 0; i < 4; ++i) sums[i] = sum(values[i]);
#endif
}

inline floats larger(floats a, floats b) { return a > b ? a : b; }

inline float largest_lane(floats value) {
  float largest = value[0];
  for (int lane = 1; lane < LANES; ++lane) largest = std::max(largest, value[lane]);
  return largest;
}

// Dot product of two runs of `size` floats.
inline float dot(const float* a, const float* b, int size) {
  floats total = {};
  int i = 0;
  for (; i + LANES <= size; i += LANES) total = fused(load(a + i), load(b + i), total);
  float result = sum(total);
  for (; i < size; ++i) result = std::fma(a[i], b[i], result);
  return result;
}

// dot() of `a` with four runs that lie `stride` apart, with its bits.
inline void dot_each(const float* a, const float* b, size_t stride, int size, float* dots) {
  floats totals[4] = {};
  int i = 0;
  for (; i + LANES <= size; i += LANES) {
    floats shared = load(a + i);
    for (int j = 0; j < 4; ++j) totals[j] = fused(shared, load(b + j * stride + i), totals[j]);
  }
  sum_each(totals, dots);
  for (; i < size; ++i)
    for (int j = 0; j < 4; ++j) dots[j] = std::fma(a[i], b[j * stride + i], dots[j]);
}

// exp(x) for x <= 0, to about 1e-7 relative; 0 below -87. Cephes' polynomial on the fraction of x / ln 2.
inline floats exp_of_negative(floats x) {
  floats clamped = x < splat(-87.0f) ? splat(-87.0f) : x;
  floats scaled = clamped * 1.44269504088896341f;
  ints whole = __builtin_convertvector(scaled - 0.5f, ints);  // truncation towards zero rounds these to nearest
  floats n = __builtin_convertvector(whole, floats);
  floats r = fused(n, splat(2.12194440e-4f), fused(n, splat(-0.693359375f), clamped));
  floats p = splat(1.9875691500e-4f);
  p = fused(p, r, splat(1.3981999507e-3f));
  p = fused(p, r, splat(8.3334519073e-3f));
  p = fused(p, r, splat(4.1665795894e-2f));
  p = fused(p, r, splat(1.6666665459e-1f));
  p = fused(p, r, splat(5.0000001201e-1f));
  p = fused(p * r, r, r + 1.0f);
  ints bits = (whole + 127) << 23;
  floats power;
  std::memcpy(&power, &bits, sizeof power);
  return x < splat(-87.0f) ? floats{} : p * power;
}

// x * sigmoid(x)
inline floats silu(floats x) {
  floats small = exp_of_negative(x < 0.0f ? x : -x);
  return x * (x < 0.0f ? small : splat(1.0f)) / (small + 1.0f);
}
