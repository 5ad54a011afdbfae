// Many rows times 4-bit weights in blocks, by AMX's tiles, with the bits of blocks.h.
//
// A group's scale is an integer, so a code times it is one too: scale and code are multiplied before the tiles instead of
// behind them, and a whole block is one product. Two bytes hold it, 16 * high + low, each half a code times four bits of the
// scale, 225 at most. Their sums are exact, and together they are the sums of blocks.h. Taking the codes apart is worth it
// for many rows.
#pragma once

#include "blocks.h"
#include "tile_products.h"

#if defined(SLIPSTREAM_TILES)

constexpr int TILED_FROM = 32;   // rows, fewer are left to vectors
constexpr int TILED_ROWS = 128;  // that share codes taken apart: what their sums take fits the second cache

// low and high [2 panels, inputs / 4, PANEL, 4] of a block of a unit, whose panels are `stride` apart.
inline void take_apart(const uint8_t* block, size_t stride, int groups, uint8_t* low, uint8_t* high) {
  for (int vector = 0; vector < UNIT / LANES; ++vector) {
    const int column = vector % 2 * LANES;
    const uint8_t* own = block + vector / 2 * stride;
    for (int g = 0; g < groups; ++g) {
      const ints scale = widen_bytes(own + block_scales(groups) + size_t(g) * PANEL + column);
      const bytes low_scale = (bytes)((scale & 15) * 0x01010101), high_scale = (bytes)((scale >> 4) * 0x01010101);
      const uint8_t* codes = own + block_codes(groups) + size_t(g) * PANEL * BLOCK_GROUP / 2 + column * 4;
      for (int k = 0; k < BLOCK_GROUP; k += 4) {
        const bytes both = load_bytes(codes + k / 8 * PANEL * 4), code = k % 8 ? both >> 4 : both & 15;
        const size_t at = size_t(vector / 2 * groups * BLOCK_GROUP + g * BLOCK_GROUP + k) * PANEL + column * 4;
        const bytes low_part = code * low_scale, high_part = code * high_scale;
        std::memcpy(low + at, &low_part, sizeof low_part);
        std::memcpy(high + at, &high_part, sizeof high_part);
      }
    }
  }
}

inline ints load_ints(const int32_t* from) {
  ints value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// As multiply_pieces.
template <typename Take>
void multiply_blocks_by_tiles(const BlockPieces& pieces, const uint8_t* rows, int n, const uint8_t* panels, const float* factors,
                              int unit, Take take) {
  constexpr int VECTORS = UNIT / LANES;
  alignas(64) uint8_t low[UNIT * BLOCK_INPUTS], high[UNIT * BLOCK_INPUTS];
  alignas(64) int32_t low_sums[TILED_ROWS * UNIT];
  alignas(64) float tile[TILED_ROWS * UNIT];
  const uint8_t* panel = panels + 2 * unit * pieces.stride;
  for (int first = 0; first < n; first += TILED_ROWS) {
    const int count = std::min(TILED_ROWS, n - first);
    const uint8_t* some = rows + first * pieces.row_bytes;
    std::memset(tile, 0, sizeof(float) * count * UNIT);
    for (int b = 0; b < pieces.num_pieces; ++b) {
      const int groups = groups_in_block(pieces.in, b);
      if (groups % 2) {  // half a tile would be left: the last block alone
        for (int r = 0; r < count; r += GROUPED_TILE)
          for (int p = 0; p < 2; ++p)
            add_upto<GROUPED_TILE, 2>(std::min(GROUPED_TILE, count - r), pieces, some + r * pieces.row_bytes,
                                      panel + p * pieces.stride, b, b + 1, false, tile + r * UNIT + p * PANEL);
        continue;
      }
      const uint8_t *block = panel + b * block_bytes(BLOCK_GROUPS), *of_rows = some + b * WHOLE_ROW_BLOCK;
      const uint8_t* integers = of_rows + sizeof(RowBlock);
      const size_t depth = size_t(groups) * BLOCK_GROUP;
      take_apart(block, pieces.stride, groups, low, high);
      each_tile<SignedByteProducts>(integers, pieces.row_bytes, depth, count, (const int8_t*)low,
                                    [&](int begin, int number, const int32_t* sums) {
                                      std::memcpy(low_sums + begin * UNIT, sums, sizeof *sums * number * UNIT);
                                    });
      each_tile<SignedByteProducts>(integers, pieces.row_bytes, depth, count, (const int8_t*)high,
                                    [&](int begin, int number, const int32_t* sums) {
                                      for (int r = 0; r < number; ++r) {
                                        const int row = begin + r;
                                        ints total[1][VECTORS];
                                        for (int c = 0; c < VECTORS; ++c)
                                          total[0][c] = load_ints(low_sums + row * UNIT + c * LANES) +
                                                        load_ints(sums + r * UNIT + c * LANES) * 16;
                                        pieces.finish<1, VECTORS>(of_rows + row * pieces.row_bytes, block, groups, total,
                                                                  tile + row * UNIT);
                                      }
                                    });
    }
    for (int r = 0; r < count; ++r)
      for (int c = 0; c < UNIT; c += LANES)
        store(tile + r * UNIT + c, load(tile + r * UNIT + c) * load(factors + unit * UNIT + c));
    take(first, count, tile);
  }
}

#endif
