// SIMD in GCC's and Clang's portable vector extensions: one source for AVX-512, AVX2 and NEON, and one result.
//
// `floats` is what a register holds, and serves wherever lanes have nothing to do with each other. Whatever adds up over
// lanes does so in the 16 lanes of a `wide`, however many registers that takes, and in one fixed order: so results have
// the same bits on every processor, and do not depend on how many rows are computed together.
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
#include <utility>

// With the checks of sanitizers, what is inlined by force would take minutes to compile.
#if defined(__SANITIZE_ADDRESS__)
#define ALWAYS_INLINE inline
#else
#define ALWAYS_INLINE [[gnu::always_inline]] inline
#endif

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
  for (int lane = 0; lane < LANES; ++lane) c[lane] = std::fma(a[lane], b[lane], c[lane]);
  return c;
#endif
}

inline floats larger(floats a, floats b) { return a > b ? a : b; }

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

inline float exp_of_negative(float x) { return exp_of_negative(splat(x))[0]; }

// --- sums over lanes -------------------------------------------------------------------------------------------------

constexpr int WIDE = 16;  // lanes that sums are taken in

struct wide {
  floats parts[WIDE / LANES];  // lanes 0 .. LANES - 1, then the next ones
};

// The wide whose parts are part(0), part(1), ...
template <typename Part>
inline wide each_part(Part part) {
  wide value;
  for (int i = 0; i < WIDE / LANES; ++i) value.parts[i] = part(i);
  return value;
}

inline wide load_wide(const float* from) {
  return each_part([&](int i) { return load(from + i * LANES); });
}

inline void store(float* to, const wide& value) {
  for (int i = 0; i < WIDE / LANES; ++i) store(to + i * LANES, value.parts[i]);
}

inline wide splat_wide(float value) {
  return each_part([&](int) { return splat(value); });
}

inline wide operator+(const wide& a, const wide& b) {
  return each_part([&](int i) { return a.parts[i] + b.parts[i]; });
}

inline wide operator-(const wide& a, const wide& b) {
  return each_part([&](int i) { return a.parts[i] - b.parts[i]; });
}

inline wide operator*(const wide& a, const wide& b) {
  return each_part([&](int i) { return a.parts[i] * b.parts[i]; });
}

inline wide fused(const wide& a, const wide& b, const wide& c) {
  return each_part([&](int i) { return fused(a.parts[i], b.parts[i], c.parts[i]); });
}

inline wide larger(const wide& a, const wide& b) {
  return each_part([&](int i) { return larger(a.parts[i], b.parts[i]); });
}

inline wide magnitude(const wide& value) {
  return each_part([&](int i) { return value.parts[i] < 0.0f ? -value.parts[i] : value.parts[i]; });
}

inline wide exp_of_negative(const wide& x) {
  return each_part([&](int i) { return exp_of_negative(x.parts[i]); });
}

using Lanes = std::make_integer_sequence<int, LANES>;

// Of each lane the one that is `distance` (a power of two) away.
template <int distance, typename Vector, int... lane>
inline Vector partner(Vector value, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(value, value, (lane ^ distance)...);
}

template <int distance>
inline floats plus_partner(floats value, Lanes lanes) {
  return value + partner<distance>(value, lanes);
}

// As plus_partner, with each pair's sum once: those of `a`, then those of `b`.
template <int distance, int... lane>
inline floats plus_partner(floats a, floats b, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(a, b, (lane + (lane & -distance))...) +
         __builtin_shufflevector(a, b, (lane + (lane & -distance) + distance)...);
}

// The sum of a wide's lanes. Halves are added until one lane is left: lane i and i + 8, then i + 4, i + 2, i + 1.
inline floats sum_of_parts(const wide& value) {
  const floats* parts = value.parts;
  if constexpr (LANES == 16) return parts[0];
  if constexpr (LANES == 8) return parts[0] + parts[1];
  if constexpr (LANES == 4) return (parts[0] + parts[2]) + (parts[1] + parts[3]);
}

inline float sum(const wide& value) {
  floats total = sum_of_parts(value);
  if constexpr (LANES > 8) total = plus_partner<8>(total, Lanes());
  if constexpr (LANES > 4) total = plus_partner<4>(total, Lanes());
  total = plus_partner<2>(total, Lanes());
  return plus_partner<1>(total, Lanes())[0];
}

inline int sum(ints value) {
  if constexpr (LANES > 8) value += partner<8>(value, Lanes());
  if constexpr (LANES > 4) value += partner<4>(value, Lanes());
  value += partner<2>(value, Lanes());
  return value[0] + value[1];
}

inline float largest_lane(const wide& value) {
  floats largest = value.parts[0];
  for (int i = 1; i < WIDE / LANES; ++i) largest = larger(value.parts[i], largest);
  if constexpr (LANES > 8) largest = larger(partner<8>(largest, Lanes()), largest);
  if constexpr (LANES > 4) largest = larger(partner<4>(largest, Lanes()), largest);
  largest = larger(partner<2>(largest, Lanes()), largest);
  return std::max(largest[0], largest[1]);
}

// sum() of four wides, with its bits.
inline void sum_each(const wide* values, float* sums) {
  floats ab = plus_partner<LANES / 2>(sum_of_parts(values[0]), sum_of_parts(values[1]), Lanes());
  floats cd = plus_partner<LANES / 2>(sum_of_parts(values[2]), sum_of_parts(values[3]), Lanes());
  floats all = plus_partner<LANES / 4>(ab, cd, Lanes());
  if constexpr (LANES > 8) all = plus_partner<2>(all, Lanes());
  if constexpr (LANES > 4) all = plus_partner<1>(all, Lanes());
  for (int i = 0; i < 4; ++i) sums[i] = all[LANES / 4 * i];
}

// As plus_partner, of `a` in the lanes whose number has `distance` not in it, and of `b` in the others.
template <int distance, int... lane>
inline floats plus_partner_of_each(floats a, floats b, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(a, b, (lane & distance ? LANES + lane : lane)...) +
         __builtin_shufflevector(a, b, (lane & distance ? LANES + lane - distance : lane + distance)...);
}

// sum() of LANES wides, with its bits, in fewer steps than sum_each takes for them. The loops must be unrolled: else GCC
// keeps the sums in memory.
template <int lanes = LANES>  // a step that there is not is not compiled
ALWAYS_INLINE floats sum_lanes_of_each(const wide* values) {
  floats sums[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) sums[i] = sum_of_parts(values[i]);
  auto step = [&]<int distance>() __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int i = 0; i < distance; ++i) sums[i] = plus_partner_of_each<distance>(sums[i], sums[i + distance], Lanes());
  };
  if constexpr (lanes > 8) step.template operator()<8>();
  if constexpr (lanes > 4) step.template operator()<4>();
  step.template operator()<2>();
  step.template operator()<1>();
  return sums[0];
}

// The sum of `size` floats, in the order of dot().
inline float total(const float* values, int size) {
  wide sums = {};
  int i = 0;
  for (; i + WIDE <= size; i += WIDE) sums = sums + load_wide(values + i);
  float result = sum(sums);
  for (; i < size; ++i) result += values[i];
  return result;
}

// Dot product of two runs of `size` floats. What is left of the last 16 is added behind their sum, one by one.
inline float dot(const float* a, const float* b, int size) {
  wide total = {};
  int i = 0;
  for (; i + WIDE <= size; i += WIDE) total = fused(load_wide(a + i), load_wide(b + i), total);
  float result = sum(total);
  for (; i < size; ++i) result = std::fma(a[i], b[i], result);
  return result;
}

// dot() of `a` with four runs that lie `stride` apart, with its bits.
inline void dot_each(const float* a, const float* b, size_t stride, int size, float* dots) {
  wide totals[4] = {};
  int i = 0;
  for (; i + WIDE <= size; i += WIDE) {
    wide shared = load_wide(a + i);
    for (int j = 0; j < 4; ++j) totals[j] = fused(shared, load_wide(b + j * stride + i), totals[j]);
  }
  sum_each(totals, dots);
  for (; i < size; ++i)
    for (int j = 0; j < 4; ++j) dots[j] = std::fma(a[i], b[j * stride + i], dots[j]);
}
