// 16-bit floating point -> float32: of weights, embeddings and cache entries. Every such number is a float32 number too, so
// nothing is rounded, and it makes no difference to any bit where a number is widened.
#pragma once

#include "vectors.h"

// In the order that linear.h's has_codes and has_groups ask for. Python has the numbers in structs.py, cpu/kernel.py and the
// weight formats.
enum WeightKind : int32_t {
  FLOAT32 = 0,
  BFLOAT16 = 1,
  FLOAT16 = 2,
  FOUR_BITS_BLOCKS = 3,  // groups in blocks, see blocks.h
  // In groups, see groups.h: without zeros of their own, and with them.
  FOUR_BITS = 4,
  FOUR_BITS_ZEROS = 5,
  EIGHT_BITS = 6,
  EIGHT_BITS_ZEROS = 7,
  // In groups, of codes that stand for the numbers of a table.
  FOUR_BITS_TABLE = 8,
  FOUR_BITS_TABLE_ZEROS = 9,
};

struct bfloat16 {
  uint16_t bits;
};

struct float16 {
  uint16_t bits;
};

// --- one number ------------------------------------------------------------------------------------------------------

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float widened(float value) { return value; }

inline float widened(bfloat16 value) { return from_bits(uint32_t(value.bits) << 16); }

inline float widened(float16 value) {
  uint32_t sign = uint32_t(value.bits & 0x8000) << 16, exponent = value.bits >> 10 & 31, fraction = value.bits & 1023;
  if (exponent == 0) return std::copysign(float(fraction) * 0x1p-24f, from_bits(sign | 0x3f800000));
  if (exponent == 31) return from_bits(sign | 0x7f800000 | fraction << 13 | (fraction ? 0x400000 : 0));
  return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

// --- LANES numbers ---------------------------------------------------------------------------------------------------

inline floats widen(const float* from) { return load(from); }

inline floats widen(const bfloat16* from) {
#if defined(__AVX512F__)
  return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#elif defined(__AVX2__)
  return (floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
#elif defined(__aarch64__)
  return (floats)vshll_n_u16(vld1_u16((const uint16_t*)from), 16);
#else
  floats value;
  for (int lane = 0; lane < LANES; ++lane) value[lane] = widened(from[lane]);
  return value;
#endif
}

inline floats widen(const float16* from) {
#if defined(__AVX512F__)
  return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
  return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#elif defined(__aarch64__)
  return (floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)from)));
#else
  floats value;
  for (int lane = 0; lane < LANES; ++lane) value[lane] = widened(from[lane]);
  return value;
#endif
}

// --- a row of a panel, and of a table --------------------------------------------------------------------------------

// How the panels of a kind of floating-point weight are read: `Stored` is what they hold, `place` where in a panel's row
// of 2 * LANES numbers a column lies, and `read` makes the columns' two vectors of such a row.
template <typename Number>
struct PlainWeights {
  typedef Number Stored;
  static constexpr int place(int column) { return column; }
  static void read(const Number* row, floats* pair) {
    pair[0] = widen(row);
    pair[1] = widen(row + LANES);
  }
};

using Float32Weights = PlainWeights<float>;
using Float16Weights = PlainWeights<float16>;

// Columns i and LANES + i lie side by side, as the halves of 32 bits: a shift widens one vector, a mask the other.
struct Bfloat16Weights {
  typedef bfloat16 Stored;
  static constexpr int place(int column) { return column % LANES * 2 + column / LANES; }
  static void read(const bfloat16* row, floats* pair) {
    ints both;
    std::memcpy(&both, row, sizeof both);
    pair[0] = (floats)(both << 16);
    pair[1] = (floats)(both & int32_t(0xffff0000));
  }
};

template <typename Number>
inline void widen_row(const Number* from, int size, float* out) {
  for (int i = 0; i < size; ++i) out[i] = widened(from[i]);
}

// Row `row` of a plain row-major table [rows, size] of this kind.
inline void widen_row(int32_t kind, const void* table, int64_t row, int size, float* out) {
  const size_t begin = size_t(row) * size;
  switch (kind) {
    case BFLOAT16: return widen_row((const bfloat16*)table + begin, size, out);
    case FLOAT16: return widen_row((const float16*)table + begin, size, out);
    default: return widen_row((const float*)table + begin, size, out);
  }
}
