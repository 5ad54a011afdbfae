// 4-bit weights in groups of 32 inputs whose scales and minimums are integers, in blocks of eight groups:
//
//     weight = scale * group scale * code - minimum * group minimum
//
// Scale and minimum are a block's, half floats; the group's are integers of 8 bits. Rows and products are those of groups.h.
//
// A panel is one stream: of each block scales, minimums, the groups' scales, their minimums, and the codes. The last block
// may have fewer groups.
#pragma once

#include "groups.h"

constexpr int BLOCK_GROUPS = 8, BLOCK_GROUP = 32, BLOCK_INPUTS = BLOCK_GROUPS * BLOCK_GROUP;  // groups, inputs of each, of all

inline int num_blocks(int in) { return (in + BLOCK_INPUTS - 1) / BLOCK_INPUTS; }
inline int groups_in_block(int in, int block) { return std::min(BLOCK_GROUPS, num_groups(in, BLOCK_GROUP) - block * BLOCK_GROUPS); }

// --- where things lie in a block -------------------------------------------------------------------------------------

constexpr size_t BLOCK_SCALES = PANEL * 4;  // behind scales and minimums
constexpr size_t block_minimums(int groups) { return BLOCK_SCALES + size_t(PANEL) * groups; }
constexpr size_t block_codes(int groups) { return block_minimums(groups) + size_t(PANEL) * groups; }
constexpr size_t block_bytes(int groups) { return block_codes(groups) + size_t(PANEL) * BLOCK_GROUP / 2 * groups; }

inline size_t blocked_panel_bytes(int in) {
  return (num_blocks(in) - 1) * block_bytes(BLOCK_GROUPS) + block_bytes(groups_in_block(in, num_blocks(in) - 1));
}

// LANES bytes as numbers.
inline floats widen_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  return (floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
  return (floats)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  floats value;
  for (int lane = 0; lane < LANES; ++lane) value[lane] = from[lane];
  return value;
#endif
}

inline floats widen_bytes(const int8_t* from) {
#if defined(__AVX512F__)
  return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
  return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  floats value;
  for (int lane = 0; lane < LANES; ++lane) value[lane] = from[lane];
  return value;
#endif
}

// As GroupLayout.
struct BlockLayout {
  static constexpr bool HAS_MINIMUM = true;
  static constexpr int size = BLOCK_GROUP;
  FourBits kind;
  int in, count;
  size_t stride;

  explicit BlockLayout(int in) : in(in), count(num_groups(in, BLOCK_GROUP)), stride(blocked_panel_bytes(in)) {}

  const uint8_t* codes(const uint8_t* panel, int g) const {
    return block(panel, g) + block_codes(groups(g)) + size_t(g % BLOCK_GROUPS) * PANEL * BLOCK_GROUP / 2;
  }

  floats scale(const uint8_t* panel, int g, int c) const {
    const Numbers found = numbers(panel, g, c);
    return found.scale * found.of_group;
  }

  floats minimum(const uint8_t* panel, int g, int c, floats) const { return numbers(panel, g, c).minimum; }

  struct Numbers {
    floats scale, of_group, minimum;
    floats of(floats code) const { return scale * (of_group * code) - minimum; }
  };
  Numbers numbers(const uint8_t* panel, int g, int c) const {
    const uint8_t* own = block(panel, g) + c / 2 * stride;
    const size_t column = c % 2 * LANES, at = g % BLOCK_GROUPS * PANEL + column;
    return {widen((const float16*)own + column), widen_bytes(own + BLOCK_SCALES + at),
            widen((const float16*)own + PANEL + column) * widen_bytes((const int8_t*)own + block_minimums(groups(g)) + at)};
  }

  template <int C>
  void fetch(const uint8_t* panel, int g) const {
    if (g % BLOCK_GROUPS == 0) prefetch_panels<C>(block(panel, g), stride, block_codes(groups(g)));
    prefetch_panels<C>(codes(panel, g), stride, PANEL * BLOCK_GROUP / 2);
  }

 private:
  static const uint8_t* block(const uint8_t* panel, int g) { return panel + g / BLOCK_GROUPS * block_bytes(BLOCK_GROUPS); }
  int groups(int g) const { return groups_in_block(in, g / BLOCK_GROUPS); }
};

// --- packing ---------------------------------------------------------------------------------------------------------

// One output's block as it is packed.
struct CodedBlock {
  float scale, minimum;
  uint8_t scales[BLOCK_GROUPS];
  int8_t minimums[BLOCK_GROUPS];
  uint8_t codes[BLOCK_INPUTS];
};

// Write a block of an output into its panel; `factor` is the output's.
inline void put_block(const CodedBlock& coded, int groups, int column, float factor, uint8_t* block) {
  ((float16*)block)[column] = to_float16(coded.scale / factor);
  ((float16*)block)[PANEL + column] = to_float16(coded.minimum / factor);
  for (int g = 0; g < groups; ++g) {
    block[BLOCK_SCALES + size_t(g) * PANEL + column] = coded.scales[g];
    block[block_minimums(groups) + size_t(g) * PANEL + column] = uint8_t(coded.minimums[g]);
    for (int k = 0; k < BLOCK_GROUP; ++k)
      FourBits::put(block + block_codes(groups) + size_t(g) * PANEL * BLOCK_GROUP / 2, k, column, coded.codes[g * BLOCK_GROUP + k]);
  }
}

// One panel, whose blocks `coded(output, block)` makes; those of one output are put into `room`.
template <typename Coded>
void pack_blocks(int in, int out, int panel, uint8_t* panels, float* factors, CodedBlock* room, Coded coded) {
  uint8_t* to = panels + size_t(panel) * blocked_panel_bytes(in);
  std::memset(to, 0, blocked_panel_bytes(in));
  for (int column = 0; column < PANEL; ++column) {
    const int row = panel * PANEL + column;
    factors[row] = 1.0f;
    if (row >= out) continue;
    float largest = 0.0f;
    for (int b = 0; b < num_blocks(in); ++b) {
      room[b] = coded(row, b);
      for (float scale : {room[b].scale, room[b].minimum}) largest = std::max(largest, std::fabs(scale));
    }
    factors[row] = output_factor(largest);
    for (int b = 0; b < num_blocks(in); ++b)
      put_block(room[b], groups_in_block(in, b), column, factors[row], to + b * block_bytes(BLOCK_GROUPS));
  }
}

// out [in] = one row of the unpacked weight; `order` as in Linear.
inline void unpack_blocks(const uint8_t* panels, float factor, const int32_t* order, int in, int64_t row, float* out) {
  const uint8_t* panel = panels + size_t(row / PANEL) * blocked_panel_bytes(in);
  const int column = row % PANEL;
  for (int k = 0; k < in; ++k) {
    const int b = k / BLOCK_INPUTS, g = k % BLOCK_INPUTS / BLOCK_GROUP, groups = groups_in_block(in, b);
    const uint8_t* block = panel + b * block_bytes(BLOCK_GROUPS);
    const float scale = widened(((const float16*)block)[column]), minimum = widened(((const float16*)block)[PANEL + column]);
    const int group_scale = block[BLOCK_SCALES + size_t(g) * PANEL + column];
    const int group_minimum = int8_t(block[block_minimums(groups) + size_t(g) * PANEL + column]);
    const int code = FourBits::get(block + block_codes(groups) + size_t(g) * PANEL * BLOCK_GROUP / 2, k % BLOCK_GROUP, column);
    out[order ? order[k] : k] = (scale * float(group_scale * code) - minimum * float(group_minimum)) * factor;
  }
}
