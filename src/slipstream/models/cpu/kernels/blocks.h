// 4-bit weights in groups of 32 inputs whose scales and minimums are integers, in blocks of eight groups:
//
//     weight = scale * group scale * code - minimum * group minimum
//
// Scale and minimum are a block's, half floats; the group's are integers of 8 bits. So the sums of a whole block stay
// integers, exact, and only blocks are added as numbers, one after another. Rows are rounded to 8 bits block by block.
//
// A panel is one stream, as in groups.h: of each block scales, minimums, the groups' scales, their minimums in pairs of
// groups, and the codes. The last block may have fewer groups.
#pragma once

#include "groups.h"

constexpr int BLOCK_GROUPS = 8, BLOCK_GROUP = 32, BLOCK_INPUTS = BLOCK_GROUPS * BLOCK_GROUP;  // groups, inputs of each, of all

// A block of a quantised row: what an integer stands for, the sums of its groups, and its integers, from -127 to 127.
struct RowBlock {
  float scale, unused;
  int16_t sums[BLOCK_GROUPS];
  int8_t integers[];
};

inline int num_blocks(int in) { return (in + BLOCK_INPUTS - 1) / BLOCK_INPUTS; }
inline int groups_in_block(int in, int block) { return std::min(BLOCK_GROUPS, num_groups(in, BLOCK_GROUP) - block * BLOCK_GROUPS); }
inline size_t blocked_row_bytes(int in) { return num_blocks(in) * sizeof(RowBlock) + num_groups(in, BLOCK_GROUP) * BLOCK_GROUP; }

constexpr size_t WHOLE_ROW_BLOCK = sizeof(RowBlock) + BLOCK_INPUTS;

inline void quantise_blocks(const float* row, const int32_t* order, int in, uint8_t* quantised) {
  float room[BLOCK_INPUTS];
  for (int first = 0; first < in; first += BLOCK_INPUTS, quantised += WHOLE_ROW_BLOCK) {
    RowBlock& block = *(RowBlock*)quantised;
    const int count = std::min(BLOCK_INPUTS, in - first), groups = num_groups(count, BLOCK_GROUP);
    const float* inputs = in_order(row, order, first, count, room);
    const float largest = largest_magnitude(inputs, count), inverse = quantum(largest);
    std::memset(block.integers, 0, groups * BLOCK_GROUP);
    for (int k = 0; k < count && inverse > 0.0f; ++k) block.integers[k] = int8_t(rounded(inputs[k] * inverse));
    for (int g = 0; g < BLOCK_GROUPS; ++g) {
      int total = 0;
      for (int k = 0; k < BLOCK_GROUP && g < groups; ++k) total += block.integers[g * BLOCK_GROUP + k];
      block.sums[g] = int16_t(total);
    }
    const bool finite = inverse > 0.0f || largest <= 1e-30f;
    block.scale = finite ? (inverse > 0.0f ? largest / 127.0f : 0.0f) : NAN;
    block.unused = 0.0f;
  }
}

// --- where things lie in a block -------------------------------------------------------------------------------------

constexpr int pairs_of(int groups) { return (groups + 1) / 2; }
constexpr size_t block_scales(int) { return PANEL * 4; }  // behind scales and minimums
constexpr size_t block_minimums(int groups) { return block_scales(groups) + size_t(PANEL) * groups; }
constexpr size_t block_codes(int groups) { return block_minimums(groups) + size_t(PANEL) * 2 * pairs_of(groups); }
constexpr size_t block_bytes(int groups) { return block_codes(groups) + size_t(PANEL) * BLOCK_GROUP / 2 * groups; }

inline size_t blocked_panel_bytes(int in) {
  return (num_blocks(in) - 1) * block_bytes(BLOCK_GROUPS) + block_bytes(groups_in_block(in, num_blocks(in) - 1));
}

// --- products --------------------------------------------------------------------------------------------------------

// LANES unsigned bytes as integers.
inline ints widen_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  return (ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  ints value;
  for (int lane = 0; lane < LANES; ++lane) value[lane] = from[lane];
  return value;
#endif
}

// A pair of signed bytes in every lane; `dot` is the sum of both products with a pair of 16-bit numbers.
struct BytePairs {
#if defined(__AVX512BW__)
  __m512i pairs;
  explicit BytePairs(const uint8_t* from) : pairs(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from))) {}
  ints dot(const int16_t* pair) const { return (ints)_mm512_madd_epi16(pairs, (__m512i)splat_four((const int8_t*)pair)); }
#elif defined(__AVX2__)
  __m256i pairs;
  explicit BytePairs(const uint8_t* from) : pairs(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from))) {}
  ints dot(const int16_t* pair) const { return (ints)_mm256_madd_epi16(pairs, (__m256i)splat_four((const int8_t*)pair)); }
#else
  ints first, second;
  explicit BytePairs(const uint8_t* from) {
    for (int lane = 0; lane < LANES; ++lane) first[lane] = int8_t(from[2 * lane]), second[lane] = int8_t(from[2 * lane + 1]);
  }
  ints dot(const int16_t* pair) const { return first * int32_t(pair[0]) + second * int32_t(pair[1]); }
#endif
};

// A piece is a block, see multiply_pieces.
struct BlockPieces {
  int in, num_pieces;
  static constexpr int part = PART_INPUTS / BLOCK_INPUTS;
  size_t row_bytes, stride;

  explicit BlockPieces(int in)
      : in(in), num_pieces(num_blocks(in)), row_bytes(blocked_row_bytes(in)), stride(blocked_panel_bytes(in)) {}

  // out [R, C * LANES] (stride UNIT) += a block, of whose codes, groups' scales and rows' integers `sums` are the products.
  template <int R, int C>
  void finish(const uint8_t* of_rows, const uint8_t* block, int groups, const ints (*sums)[C], float* out) const {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      const uint8_t* halves = block + c / 2 * stride + c % 2 * LANES * 2;
      const uint8_t* minimums = block + c / 2 * stride + block_minimums(groups) + c % 2 * LANES * 2;
      const floats scale = widen((const float16*)halves), minimum = widen((const float16*)halves + PANEL);
      ints less[R] = {};
      for (int pair = 0; pair < pairs_of(groups); ++pair) {
        const BytePairs of_groups(minimums + size_t(pair) * PANEL * 2);
        for (int r = 0; r < R; ++r)
          less[r] += of_groups.dot(((const RowBlock*)(of_rows + r * row_bytes))->sums + 2 * pair);
      }
      for (int r = 0; r < R; ++r) {
        const floats products = __builtin_convertvector(sums[r][c], floats) * scale;
        const floats result = fused(-__builtin_convertvector(less[r], floats), minimum, products);
        float* to = out + r * UNIT + c * LANES;
        store(to, fused(splat(((const RowBlock*)(of_rows + r * row_bytes))->scale), result, load(to)));
      }
    }
  }

  template <int R, int C>
  void add(const uint8_t* rows, const uint8_t* panel, int begin, int end, bool fetches, float* out) const {
    for (int b = begin; b < end; ++b) {
      const uint8_t *block = panel + b * block_bytes(BLOCK_GROUPS), *of_rows = rows + b * WHOLE_ROW_BLOCK;
      const int groups = groups_in_block(in, b);
      if (fetches) prefetch_panels<C>(block, stride, block_codes(groups));
      ints sums[R][C];
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sums[r][c] = ints{};
      for (int g = 0; g < groups; ++g) {
        const uint8_t* codes = block + block_codes(groups) + size_t(g) * PANEL * BLOCK_GROUP / 2;
        if (fetches) prefetch_panels<C>(codes, stride, PANEL * BLOCK_GROUP / 2);
        Sums of_group[R][C];
        FourBits::sum<R, C>(of_rows + sizeof(RowBlock) + g * BLOCK_GROUP, row_bytes, codes, stride, of_group);
        for (int c = 0; c < C; ++c) {
          const uint8_t* scales = block + c / 2 * stride + block_scales(groups) + size_t(g) * PANEL + c % 2 * LANES;
          const auto factor = Sums::factor(widen_bytes(scales));
          for (int r = 0; r < R; ++r) sums[r][c] += of_group[r][c].times(factor);
        }
      }
      finish<R, C>(of_rows, block, groups, sums, out);
    }
  }
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
    block[block_scales(groups) + size_t(g) * PANEL + column] = coded.scales[g];
    block[block_minimums(groups) + size_t(g / 2) * PANEL * 2 + 2 * column + g % 2] = uint8_t(coded.minimums[g]);
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
    const int group_scale = block[block_scales(groups) + size_t(g) * PANEL + column];
    const int group_minimum = int8_t(block[block_minimums(groups) + size_t(g / 2) * PANEL * 2 + 2 * column + g % 2]);
    const int code = FourBits::get(block + block_codes(groups) + size_t(g) * PANEL * BLOCK_GROUP / 2, k % BLOCK_GROUP, column);
    out[order ? order[k] : k] = (scale * float(group_scale * code) - minimum * float(group_minimum)) * factor;
  }
}
