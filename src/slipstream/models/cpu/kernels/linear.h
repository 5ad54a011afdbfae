// Linear layers over packed weights: a few rows for the price of one.
//
// A weight [out, in] is stored in panels of PANEL outputs, each panel [in][PANEL]: one stream through memory, read once
// for up to MAX_TILE rows. Every output is one chain of multiply-adds over `in` (or one exact integer sum), so a row's
// result has the same bits for any number of rows. PANEL follows the SIMD width; only this file knows it.
#pragma once

#include <vector>

#include "low_rank.h"
#include "exact_rows.h"
#include "tiled_groups.h"

constexpr int MAX_TILE = LANES == 16 ? 12 : 5;  // rows whose accumulators fit the registers

// mirrored by structs.py. `out` and `in` are the layer's own; columns beyond `out` in the last panel are zero.
struct Linear {
  int32_t kind, in, out;
  int32_t group;  // inputs of one, of the kinds that have groups
  const void* panels;
  const float* scales;  // [padded out], int8: weight = scale * integer; in groups: a factor of all of an output's scales
  const int32_t* sums;  // [padded out], int8: the sum of a column's integers times 128
  const float* bias;    // [padded out] or null
  const int32_t* order;  // [in] or null: the place in a row of each input, of the kinds that have groups
  const LowRank* change;  // or null: what is added to the products of integers, of the same kinds
  const int8_t* table;    // [16], of the kinds that have one: the numbers that codes stand for
  int64_t exact_rows;     // whether rows are multiplied as they are, by weights of whatever kind
};

// int8 reads four inputs at a time, or a tile's.
constexpr int INPUTS = HAS_TILES ? TILE_BYTES : 4;
inline int padded_depth(int32_t kind, int in) { return kind == INT8 ? (in + INPUTS - 1) / INPUTS * INPUTS : in; }

inline bool has_groups(int32_t kind) { return kind >= FOUR_BITS && kind != FOUR_BITS_BLOCKS; }

// Calls act.template operator()<Codes, ZEROS>() of a kind that has groups.
template <typename Act>
inline auto of_groups(int32_t kind, Act act) {
  switch (kind) {
    case FOUR_BITS: return act.template operator()<FourBits, false>();
    case FOUR_BITS_ZEROS: return act.template operator()<FourBits, true>();
    case EIGHT_BITS: return act.template operator()<EightBits, false>();
    case FOUR_BITS_TABLE: return act.template operator()<TableCodes, false>();
    case FOUR_BITS_TABLE_ZEROS: return act.template operator()<TableCodes, true>();
    default: return act.template operator()<EightBits, true>();
  }
}

inline size_t packed_bytes(int32_t kind, int in, int out, int group = 0) {
  if (has_groups(kind)) {
    const size_t each = of_groups(kind, [&]<typename Codes, bool ZEROS>() { return group_bytes<Codes, ZEROS>(group); });
    return size_t(num_panels(out)) * num_groups(in, group) * each;
  }
  if (kind == FOUR_BITS_BLOCKS) return size_t(num_panels(out)) * blocked_panel_bytes(in);
  size_t each = kind == INT8 ? 1 : kind == FLOAT32 ? 4 : 2;
  return size_t(num_panels(out)) * PANEL * padded_depth(kind, in) * each;
}

// --- float32, and 16 bits that are widened to it ---------------------------------------------------------------------

template <typename Weights>
void pack_floats(const typename Weights::Stored* weight, int in, int out, int panel, typename Weights::Stored* panels) {
  auto* to = panels + size_t(panel) * in * PANEL;
  for (int k = 0; k < in; ++k)
    for (int column = 0; column < PANEL; ++column) {
      int row = panel * PANEL + column;
      to[size_t(k) * PANEL + Weights::place(column)] = row < out ? weight[size_t(row) * in + k] : typename Weights::Stored{};
    }
}

// rows [R, in] (stride `stride`) times P neighbouring panels -> out [R, P * PANEL] (stride UNIT). Whatever the weights are
// stored as, the sums are those of their float32 numbers, in the same order.
template <typename Weights, int R, int P>
void multiply_floats(const float* rows, size_t stride, const typename Weights::Stored* panels, int in, float* out) {
  floats total[R][2 * P] = {};
  for (int k = 0; k < in; ++k) {
    if constexpr (R > MAX_TILE / 2)
      for (int p = 0; p < P; ++p) prefetch(panels + (size_t(p) * in + k) * PANEL, PANEL * sizeof *panels);
    floats weight[2 * P];
    for (int p = 0; p < P; ++p) Weights::read(panels + (size_t(p) * in + k) * PANEL, weight + 2 * p);
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < 2 * P; ++c) total[r][c] = fused(splat(rows[r * stride + k]), weight[c], total[r][c]);
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < 2 * P; ++c) store(out + r * UNIT + c * LANES, total[r][c]);
}

// One output of a row: the same bits.
template <typename Weights>
float multiply_column(const float* row, const typename Weights::Stored* panel, int in, int column) {
  floats total = {};
  for (int k = 0; k < in; ++k) total = fused(splat(row[k]), splat(widened(panel[size_t(k) * PANEL + Weights::place(column)])), total);
  return total[0];
}

template <typename Weights>
void unpack_floats(const typename Weights::Stored* panel, int in, int column, float* out) {
  for (int k = 0; k < in; ++k) out[k] = widened(panel[size_t(k) * PANEL + Weights::place(column)]);
}

// --- int8 ------------------------------------------------------------------------------------------------------------

// Activations of one row: integers from -127 to 127, stored with 128 added, and the scale that undoes it.
inline float quantise_row(const float* row, int in, uint8_t* quantised) {
  float largest = largest_magnitude(row, in);
  float inverse = quantum(largest);
  if (inverse == 0.0f) {  // zeros, or NaN: then the scale says so
    std::memset(quantised, 128, padded_depth(INT8, in));
    return largest > 1e-30f || largest != largest ? NAN : 0.0f;
  }
  for (int k = 0; k < in; ++k) quantised[k] = uint8_t(rounded(row[k] * inverse) + 128);
  for (int k = in; k < padded_depth(INT8, in); ++k) quantised[k] = 128;
  return largest / 127.0f;
}

// Whether weights are integers.
inline bool has_codes(int32_t kind) { return kind == INT8 || has_groups(kind) || kind == FOUR_BITS_BLOCKS; }

// Whether rows must be quantised before they are multiplied.
inline bool quantises(const Linear& linear) { return has_codes(linear.kind) && !linear.exact_rows; }

// Bytes of a quantised row.
inline size_t quantised_bytes(const Linear& linear) {
  if (!quantises(linear)) return 0;
  if (has_groups(linear.kind)) return grouped_row_bytes(linear.in, linear.group);
  if (linear.kind == FOUR_BITS_BLOCKS) return grouped_row_bytes(linear.in, BLOCK_GROUP);
  return linear.kind == INT8 ? padded_depth(INT8, linear.in) : 0;
}

// The most that any kind needs for a row of this width.
inline size_t most_quantised_bytes(size_t in) {
  constexpr size_t LEAST = 16;  // of all groups
  return std::max((in + TILE_BYTES - 1) / TILE_BYTES * TILE_BYTES, (in / LEAST + MAX_GROUP / LEAST) * row_group_bytes(LEAST));
}

// One row [in] as the weights are multiplied with; `scale` is int8's.
inline void quantise(const Linear& linear, const float* row, uint8_t* quantised, float& scale) {
  if (linear.kind == INT8) {
    scale = quantise_row(row, linear.in, quantised);
    return;
  }
  quantise_groups(row, linear.order, linear.in, linear.kind == FOUR_BITS_BLOCKS ? BLOCK_GROUP : linear.group, quantised);
}

// One panel, symmetric, one scale an output; also the column sums that undo the 128 of the activations.
inline void pack_int8(const float* weight, int in, int out, int panel, int8_t* panels, float* scales, int32_t* sums) {
  int depth = padded_depth(INT8, in);
  int8_t* to = panels + size_t(panel) * depth * PANEL;
  std::memset(to, 0, size_t(depth) * PANEL);
  for (int column = 0; column < PANEL; ++column) {
    int row = panel * PANEL + column;
    scales[row] = 0.0f;
    sums[row] = 0;
    if (row >= out) continue;
    const float* from = weight + size_t(row) * in;
    float largest = largest_magnitude(from, in);
    float inverse = quantum(largest);
    scales[row] = inverse > 0.0f ? largest / 127.0f : largest != largest ? NAN : 0.0f;
    for (int k = 0; k < in && inverse > 0.0f; ++k) {
      int value = rounded(from[k] * inverse);
      to[size_t(k / 4) * PANEL * 4 + column * 4 + k % 4] = int8_t(value);
      sums[row] += 128 * value;
    }
  }
}

// The rows' bytes have 128 added; where the instructions want signs on both sides, dot_bytes takes it off.
#if defined(__aarch64__) || (defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__))
constexpr bool TAKES_OFF_128 = true;
#else
constexpr bool TAKES_OFF_128 = false;
#endif

// total[lane] += the four products of each lane's bytes; exact on every machine, so its results are too.
inline ints dot_bytes(ints total, int32_t four_rows, const int8_t* weight) {
#if defined(__AVX512VNNI__)
  return (ints)_mm512_dpbusd_epi32((__m512i)total, _mm512_set1_epi32(four_rows), _mm512_loadu_si512(weight));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  return (ints)_mm256_dpbusd_avx_epi32((__m256i)total, _mm256_set1_epi32(four_rows), _mm256_loadu_si256((const __m256i*)weight));
#elif defined(__AVX512BW__)
  // As with AVX2 below.
  const __m512i bytes = _mm512_loadu_si512(weight), row = _mm512_set1_epi32(int32_t(uint32_t(four_rows) ^ 0x80808080u));
  const __m512i signed_row = _mm512_mask_sub_epi8(row, _mm512_movepi8_mask(bytes), _mm512_setzero_si512(), row);
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(bytes), signed_row);
  return total + (ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  // vpmaddubsw takes one side without signs: give them to the other. No magnitude is above 127, so two products fit.
  const __m256i bytes = _mm256_loadu_si256((const __m256i*)weight);
  const __m256i row = _mm256_set1_epi32(int32_t(uint32_t(four_rows) ^ 0x80808080u));
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(bytes), _mm256_sign_epi8(row, bytes));
  return total + (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__aarch64__)
  const int8x16_t rows = vreinterpretq_s8_u32(vdupq_n_u32(uint32_t(four_rows) ^ 0x80808080u)), bytes = vld1q_s8(weight);
#if defined(__ARM_FEATURE_DOTPROD)
  return (ints)vdotq_s32((int32x4_t)total, bytes, rows);
#else
  // No magnitude is above 127: two products fit into 16 bits.
  int16x8_t low = vmull_s8(vget_low_s8(bytes), vget_low_s8(rows)), high = vmull_high_s8(bytes, rows);
  return (ints)vpadalq_s16((int32x4_t)total, vpaddq_s16(low, high));
#endif
#else
  const uint8_t* rows = reinterpret_cast<const uint8_t*>(&four_rows);
  for (int lane = 0; lane < LANES; ++lane)
    for (int i = 0; i < 4; ++i) total[lane] += int32_t(rows[i]) * weight[lane * 4 + i];
  return total;
#endif
}

// Sums of products as numbers, the 128s removed where they are still there.
template <bool has_128>
inline floats scaled(ints total, const int32_t* sums, const float* scales, float row_scale) {
  ints offset = {};
  if constexpr (has_128) std::memcpy(&offset, sums, sizeof offset);
  return __builtin_convertvector(total - offset, floats) * (load(scales) * row_scale);
}

// As multiply_floats, over quantised rows [R, depth]; `out` holds the integers' float values, 128s removed.
template <int R, int P>
void multiply_int8(const uint8_t* rows, size_t depth, const int8_t* panels, const float* scales, const int32_t* sums,
                   const float* row_scales, float* out) {
  ints total[R][2 * P] = {};
  for (size_t k = 0; k < depth; k += 4) {
    if constexpr (R > MAX_TILE / 2)
      for (int p = 0; p < P; ++p) prefetch(panels + (p * depth + k) * PANEL, PANEL * 4);
    int32_t four[R];
    for (int r = 0; r < R; ++r) std::memcpy(&four[r], rows + r * depth + k, 4);
    for (int c = 0; c < 2 * P; ++c) {
      const int8_t* weight = panels + (c / 2 * depth + k) * PANEL + c % 2 * LANES * 4;
      for (int r = 0; r < R; ++r) total[r][c] = dot_bytes(total[r][c], four[r], weight);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < 2 * P; ++c)
      store(out + r * UNIT + c * LANES,
            scaled<!TAKES_OFF_128>(total[r][c], sums + c * LANES, scales + c * LANES, row_scales[r]));
}

// --- any kind --------------------------------------------------------------------------------------------------------

// Rows ready to be multiplied: float32 as they are, for int8 weights quantised.
struct Rows {
  const float* values;   // [n, stride]
  size_t stride;
  const uint8_t* quantised;  // [n, quantised_bytes()]
  const float* scales;       // [n], int8
  const float* lowered;      // [n, rank], of a layer with a change
};

// out [n, num_panels * PANEL] (stride UNIT), of the panels from `panel` on, += their bias.
inline void add_bias(const Linear& linear, int n, int panel, int num_panels, float* out) {
  if (!linear.bias) return;
  for (int r = 0; r < n; ++r)
    for (int c = 0; c < num_panels * PANEL; c += LANES) {
      float* at = out + r * UNIT + c;
      store(at, load(at) + load(linear.bias + panel * PANEL + c));
    }
}

template <int R, int P>
void multiply_tile(const Linear& linear, const Rows& rows, int first, int panel, float* out) {
  int depth = padded_depth(linear.kind, linear.in);
  size_t offset = size_t(panel) * PANEL * depth;
  auto floats_of = [&](auto weights) {
    using Weights = decltype(weights);
    multiply_floats<Weights, R, P>(rows.values + first * rows.stride, rows.stride,
                                   (const typename Weights::Stored*)linear.panels + offset, linear.in, out);
  };
  switch (linear.kind) {
    case INT8:
      multiply_int8<R, P>(rows.quantised + size_t(first) * depth, depth, (const int8_t*)linear.panels + offset,
                          linear.scales + panel * PANEL, linear.sums + panel * PANEL, rows.scales + first, out);
      break;
    case BFLOAT16: floats_of(Bfloat16Weights{}); break;
    case FLOAT16: floats_of(Float16Weights{}); break;
    default: floats_of(Float32Weights{});
  }
  add_bias(linear, R, panel, P, out);
}

// One output of a row, without bias, of weights of 16 or 32 bits: the same bits.
inline float multiply_output(const Linear& linear, const float* row, int output) {
  auto of = [&](auto weights) {
    using Weights = decltype(weights);
    const auto* panel = (const typename Weights::Stored*)linear.panels + size_t(output / PANEL) * PANEL * linear.in;
    return multiply_column<Weights>(row, panel, linear.in, output % PANEL);
  };
  switch (linear.kind) {
    case BFLOAT16: return of(Bfloat16Weights{});
    case FLOAT16: return of(Float16Weights{});
    default: return of(Float32Weights{});
  }
}

template <int R, int P>
void multiply_upto(int n, const Linear& linear, const Rows& rows, int first, int panel, float* out) {
  if (n == R) return multiply_tile<R, P>(linear, rows, first, panel, out);
  if constexpr (R > 1) multiply_upto<R - 1, P>(n, linear, rows, first, panel, out);
}

// What gets the results of a unit of outputs: tiles [count, UNIT] of the rows from `first` on. It knows the caller's function
// by its address alone, so that products are compiled once and not for each caller.
class Taker {
 public:
  template <typename Take>
    requires(!std::is_same_v<std::remove_cvref_t<Take>, Taker>)
  Taker(Take&& take)
      : object(&take), call([](const void* object, int first, int count, const float* tile) {
          (*(std::remove_reference_t<Take>*)object)(first, count, tile);
        }) {}

  void operator()(int first, int count, const float* tile) const { call(object, first, count, tile); }

 private:
  const void* object;
  void (*call)(const void*, int, int, const float*);
};

inline void multiply_unit_by_vectors(const Linear& linear, const Rows& rows, int n, int unit, Taker take) {
  alignas(64) float tile[MAX_TILE * UNIT];
  for (int first = 0; first < n; first += MAX_TILE) {
    int count = std::min(MAX_TILE, n - first);
    if (count <= MAX_TILE / 2) {
      multiply_upto<MAX_TILE / 2, 2>(count, linear, rows, first, 2 * unit, tile);
    } else {
      multiply_upto<MAX_TILE, 1>(count, linear, rows, first, 2 * unit, tile);
      multiply_upto<MAX_TILE, 1>(count, linear, rows, first, 2 * unit + 1, tile + PANEL);
    }
    take(first, count, tile);
  }
}

#if defined(SLIPSTREAM_TILES)

// int8 alone.
inline void multiply_unit_by_tiles(const Linear& linear, const Rows& rows, int n, int unit, Taker take) {
  alignas(64) float tile[TILE_ROWS * UNIT];
  const size_t depth = padded_depth(INT8, linear.in), begin = size_t(unit) * UNIT;
  const int8_t* panels = (const int8_t*)linear.panels + begin * depth;
  UnitTiles tiles;
  tiles.each<ByteProducts>(rows.quantised, depth, depth, n, panels, [&](int first, int count, const int32_t* sums) {
    for (int r = 0; r < count; ++r)
      for (int c = 0; c < UNIT; c += LANES) {
        ints total;
        std::memcpy(&total, sums + r * UNIT + c, sizeof total);
        // The rows' bytes are as they were quantised, whatever dot_bytes wants.
        store(tile + r * UNIT + c,
              scaled<true>(total, linear.sums + begin + c, linear.scales + begin + c, rows.scales[first + r]));
      }
    add_bias(linear, count, 2 * unit, 2, tile);
    take(first, count, tile);
  });
}

#endif

// Weights in groups, and int8 ones whose rows are as they are.
inline void multiply_unit_by_codes(const Linear& linear, const Rows& rows, int n, int unit, Taker take) {
  const auto* panels = (const uint8_t*)linear.panels;
  auto take_with_bias = [&](int first, int count, float* tile) {
    if (linear.change)
      add_raised(*linear.change, rows.lowered + size_t(first) * linear.change->rank, count, 2 * unit, 2, UNIT, tile);
    add_bias(linear, count, 2 * unit, 2, tile);
    take(first, count, (const float*)tile);
  };
  auto exactly = [&](const auto& layout) {
    multiply_unit_exactly(layout, rows.values, rows.stride, linear.order, linear.in, n, panels, linear.scales, unit, take_with_bias);
  };
  if (linear.kind == INT8) return exactly(Int8Layout(padded_depth(INT8, linear.in)));
  auto multiply = [&](const auto& layout) {
    if (linear.exact_rows) return exactly(layout);
#if defined(SLIPSTREAM_TILES)
    if (n >= TILED_FROM && layout.size % TILE_INPUTS == 0 && tiles_permitted())
      return multiply_groups_by_tiles(layout, rows.quantised, n, panels, linear.scales, unit, take_with_bias);
#endif
    multiply_groups(layout, rows.quantised, n, panels, linear.scales, unit, take_with_bias);
  };
  if (linear.kind == FOUR_BITS_BLOCKS) return multiply(BlockLayout(linear.in));
  of_groups(linear.kind, [&]<typename Codes, bool ZEROS>() {
    multiply(GroupLayout<Codes, ZEROS>(Codes{linear.table}, linear.in, linear.group));
  });
}

// Multiply n rows by one unit of the outputs.
inline void multiply_unit(const Linear& linear, const Rows& rows, int n, int unit, Taker take) {
  if (has_codes(linear.kind) && (linear.kind != INT8 || linear.exact_rows)) return multiply_unit_by_codes(linear, rows, n, unit, take);
#if defined(SLIPSTREAM_TILES)
  if (linear.kind == INT8 && tiles_permitted()) return multiply_unit_by_tiles(linear, rows, n, unit, take);
#endif
  multiply_unit_by_vectors(linear, rows, n, unit, take);
}

// out [in] = one row of the unpacked weight, its inputs in the order of rows.
inline void unpack_row(const Linear& linear, int64_t row, float* out) {
  if (has_groups(linear.kind) || linear.kind == FOUR_BITS_BLOCKS) {
    const auto* panels = (const uint8_t*)linear.panels;
    if (linear.kind == FOUR_BITS_BLOCKS) return unpack_blocks(panels, linear.scales[row], linear.order, linear.in, row, out);
    return of_groups(linear.kind, [&]<typename Codes, bool ZEROS>() {
      unpack_groups<Codes, ZEROS>(Codes{linear.table}, panels, linear.scales[row], linear.order, linear.in, linear.group, row,
                                  out);
    });
  }
  int depth = padded_depth(linear.kind, linear.in), column = row % PANEL;
  size_t panel = size_t(row / PANEL) * PANEL * depth;
  switch (linear.kind) {
    case INT8:
      for (int k = 0; k < linear.in; ++k) {
        size_t at = panel + size_t(k / 4) * PANEL * 4 + column * 4 + k % 4;
        out[k] = ((const int8_t*)linear.panels)[at] * linear.scales[row];
      }
      break;
    case BFLOAT16: unpack_floats<Bfloat16Weights>((const bfloat16*)linear.panels + panel, linear.in, column, out); break;
    case FLOAT16: unpack_floats<Float16Weights>((const float16*)linear.panels + panel, linear.in, column, out); break;
    default: unpack_floats<Float32Weights>((const float*)linear.panels + panel, linear.in, column, out);
  }
}
