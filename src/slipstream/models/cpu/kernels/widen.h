// 16-bit floating point -> float32. Every such number is a float32 number too, so nothing is rounded.
#pragma once

#include "vectors.h"

enum WeightKind : int32_t { FLOAT32 = 0, INT8 = 1, BFLOAT16 = 2, FLOAT16 = 3 };

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float widened_bfloat16(uint16_t bits) { return from_bits(uint32_t(bits) << 16); }

inline float widened_float16(uint16_t bits) {
  uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent == 0) return std::copysign(float(fraction) * 0x1p-24f, from_bits(sign | 0x3f800000));
  if (exponent == 31) return from_bits(sign | 0x7f800000 | fraction << 13 | (fraction ? 0x400000 : 0));
  return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

// How the panels of a kind of floating-point weight are read: `Stored` is what they hold, `place` where in a panel's row
// of 2 * LANES numbers a column lies, and `read` makes the columns' two vectors of such a row.

struct Float32Weights {
  typedef float Stored;
  static constexpr int place(int column) { return column; }
  static float widened(float value) { return value; }
  static void read(const float* row, floats* pair) {
    pair[0] = load(row);
    pair[1] = load(row + LANES);
  }
};

// Columns i and LANES + i lie side by side, as the halves of 32 bits: a shift widens one vector, a mask the other.
struct Bfloat16Weights {
  typedef uint16_t Stored;
  static constexpr int place(int column) { return column % LANES * 2 + column / LANES; }
  static float widened(uint16_t bits) { return widened_bfloat16(bits); }
  static void read(const uint16_t* row, floats* pair) {
    ints both;
    std::memcpy(&both, row, sizeof both);
    pair[0] = (floats)(both << 16);
    pair[1] = (floats)(both & int32_t(0xffff0000));
  }
};

struct Float16Weights {
  typedef uint16_t Stored;
  static constexpr int place(int column) { return column; }
  static float widened(uint16_t bits) { return widened_float16(bits); }
  static void read(const uint16_t* row, floats* pair) {
    for (int half = 0; half < 2; ++half, row += LANES) {
#if defined(__AVX512F__)
      pair[half] = (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)row));
#elif defined(__F16C__)
      pair[half] = (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)row));
#elif defined(__aarch64__)
      pair[half] = (floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(row)));
#else
      for (int lane = 0; lane < LANES; ++lane) pair[half][lane] = widened_float16(row[lane]);
#endif
    }
  }
};

// Row `row` of a plain row-major table [rows, size] of this kind.
inline void widen_row(int32_t kind, const void* table, int64_t row, int size, float* out) {
  size_t begin = size_t(row) * size;
  if (kind == BFLOAT16) {
    const uint16_t* from = (const uint16_t*)table + begin;
    for (int i = 0; i < size; ++i) out[i] = widened_bfloat16(from[i]);
  } else if (kind == FLOAT16) {
    const uint16_t* from = (const uint16_t*)table + begin;
    for (int i = 0; i < size; ++i) out[i] = widened_float16(from[i]);
  } else {
    std::memcpy(out, (const float*)table + begin, sizeof(float) * size);
  }
}
