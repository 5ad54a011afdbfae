// Many rows times weights in groups, by AMX's tiles, with the bits of groups.h: a group's products are added up as integers
// there, which are exact in any order.
#pragma once

#include "blocks.h"
#include "tile_products.h"

#if defined(SLIPSTREAM_TILES)

constexpr int TILED_FROM = 16;    // rows, fewer are left to vectors
constexpr int TILED_ROWS = 128;   // that share codes taken apart: what their sums take fits the second cache
constexpr int TILE_INPUTS = 32;   // of a tile, at most twice as many

// As multiply_groups.
template <typename Layout, typename Take>
void multiply_groups_by_tiles(const Layout& layout, const uint8_t* rows, int n, const uint8_t* panels, const float* factors,
                              int unit, Take take) {
  using Products = std::conditional_t<decltype(layout.kind)::SIGNED, SignedProducts, SignedByteProducts>;
  constexpr int VECTORS = UNIT / LANES;
  alignas(64) int8_t codes[UNIT * MAX_GROUP];  // [2 panels, inputs / 4, PANEL, 4], of a group
  alignas(64) float tile[TILED_ROWS * UNIT];
  const uint8_t* panel = panels + 2 * unit * layout.stride;
  const size_t row_bytes = layout.count * row_group_bytes(layout.size);
  UnitTiles tiles(layout.size % TILE_BYTES ? TILE_INPUTS : TILE_BYTES);
  for (int first = 0; first < n; first += TILED_ROWS) {
    const int count = std::min(TILED_ROWS, n - first);
    std::memset(tile, 0, sizeof(float) * count * UNIT);
    for (int g = 0; g < layout.count; ++g) {
      for (int c = 0; c < VECTORS; ++c) {
        const uint8_t* from = layout.codes(panel, g) + c / 2 * layout.stride + c % 2 * 4 * LANES;
        int8_t* to = codes + size_t(c / 2) * layout.size * PANEL + c % 2 * 4 * LANES;
        for (int k = 0; k < layout.size; k += 4) {
          const bytes four = layout.kind.four(from, k);
          std::memcpy(to + size_t(k) * PANEL, &four, sizeof four);
        }
      }
      const uint8_t* of_rows = rows + first * row_bytes + g * row_group_bytes(layout.size);
      tiles.template each<Products>(
          of_rows + sizeof(RowGroup), row_bytes, layout.size, count, codes,
          [&](int begin, int number, const int32_t* sums) {
            for (int r = 0; r < number; ++r) {
              ints of_row[1][VECTORS];
              floats total[1][VECTORS];
              float* to = tile + (begin + r) * UNIT;
              for (int c = 0; c < VECTORS; ++c) {
                std::memcpy(&of_row[0][c], sums + r * UNIT + c * LANES, sizeof of_row[0][c]);
                total[0][c] = load(to + c * LANES);
              }
              finish_group<1, VECTORS>(layout, of_rows + (begin + r) * row_bytes, row_bytes, panel, g, of_row, total);
              for (int c = 0; c < VECTORS; ++c) store(to + c * LANES, total[0][c]);
            }
          });
    }
    apply_factors(factors + unit * UNIT, count, tile);
    take(first, count, tile);
  }
}

#endif
