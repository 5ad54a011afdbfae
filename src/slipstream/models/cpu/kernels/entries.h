// What the cache holds: keys and values, rounded once when they are written and widened whenever they are read: in
// registers, where few queries read an entry, or into a buffer, where many do.
#pragma once

#include "widen.h"

enum EntryType : int32_t { ENTRY_FLOAT32 = 0, ENTRY_BFLOAT16 = 1, ENTRY_FLOAT16 = 2, ENTRY_INT8 = 3 };

#if defined(__aarch64__)
typedef __fp16 half;
#else
typedef _Float16 half;
#endif

// LANES integers, as `widen` of the other types.
inline floats widen(const int8_t* from) {
#if defined(__AVX512F__)
  return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
  return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  floats value;
  for (int lane = 0; lane < LANES; ++lane) value[lane] = float(from[lane]);
  return value;
#endif
}

template <typename Number>
inline wide widen_wide(const Number* from) {
  return each_part([&](int i) { return widen(from + i * LANES); });
}

// The nearest number of the type, of two equally near ones the even one; NaN stays NaN.
inline bfloat16 to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return {uint16_t(bits >> 16 | 0x40)};
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline float16 to_float16(float value) {
#if defined(__F16C__)
  return {uint16_t(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT))};
#else
  half narrow = half(value);
  float16 result;
  std::memcpy(&result, &narrow, sizeof result);
  return result;
#endif
}

inline void narrow(const float* from, int size, float* to) { std::memcpy(to, from, sizeof(float) * size); }

inline void narrow(const float* from, int size, bfloat16* to) {
  for (int i = 0; i < size; ++i) to[i] = to_bfloat16(from[i]);
}

inline void narrow(const float* from, int size, float16* to) {
  for (int i = 0; i < size; ++i) to[i] = to_float16(from[i]);
}

// Integers from -127 to 127, to the nearest, and the scale that undoes it. An entry with a number that is not finite gets
// the scale NaN, so that rows that attend to it are NaN as well.
inline float narrow(const float* from, int size, int8_t* to) {
  float largest = 0.0f, odd = 0.0f;
  for (int i = 0; i < size; ++i) {
    largest = std::max(largest, std::fabs(from[i]));
    odd += from[i] * 0.0f;
  }
  if (odd != 0.0f || largest < 1e-30f) {  // 0 * NaN and 0 * infinity are NaN
    std::fill_n(to, size, int8_t(0));  // GCC warns of memset here: a negative size would be huge
    return odd != 0.0f ? NAN : 0.0f;
  }
  const float inverse = 127.0f / largest;
  constexpr float TO_NEAREST = 12582912.0f;  // 1.5 * 2^23: where neighbouring floats are 1 apart
  for (int i = 0; i < size; ++i) to[i] = int8_t(int(from[i] * inverse + TO_NEAREST - TO_NEAREST));
  return largest / 127.0f;
}

// One layer's keys or values: [kv_heads, slots, dim] numbers and, for int8, [kv_heads, slots] scales. Values that are the
// first numbers of their keys lie as far apart as these: `stride` numbers; 0: `dim`.
struct Entries {
  int32_t type;
  int dim;
  int64_t num_slots;
  void* numbers;
  float* scales;
  int stride = 0;

  size_t step() const { return stride ? stride : dim; }

  template <typename Number>
  Number* at(int head, int64_t slot) const {
    return (Number*)numbers + (head * num_slots + slot) * step();
  }

  float& scale(int head, int64_t slot) const { return scales[head * num_slots + slot]; }

  // Keep the dim numbers at `from`.
  void write(int head, int64_t slot, const float* from) const {
    if (type == ENTRY_FLOAT32) narrow(from, dim, at<float>(head, slot));
    if (type == ENTRY_BFLOAT16) narrow(from, dim, at<bfloat16>(head, slot));
    if (type == ENTRY_FLOAT16) narrow(from, dim, at<float16>(head, slot));
    if (type == ENTRY_INT8) scale(head, slot) = narrow(from, dim, at<int8_t>(head, slot));
  }
};
