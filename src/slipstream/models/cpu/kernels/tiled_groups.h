// Many rows times weights in groups, by AMX's tiles, with the bits of groups.h: a group's products are added up as integers
// there, which are exact in any order.
#pragma once

#include "blocks.h"
#include "tile_products.h"

#if defined(SLIPSTREAM_TILES)

constexpr int TILED_FROM = 16;    // rows, fewer are left to vectors
constexpr int TILED_ROWS = 128;   // that share codes taken apart: what their sums take fits the second cache
constexpr int TILE_INPUTS = 32;   // of a tile, at most twice as many
constexpr int TILE_COLUMNS = UNIT / TILE_ROWS, VECTORS = UNIT / LANES;  // tiles and vectors of outputs

// sums [rows, UNIT] = up to 16 rows of `size` integers, `stride` bytes apart, times codes [TILE_COLUMNS][size / 4][TILE_ROWS][4],
// `depth` inputs at a time.
template <typename Products, int... column>
void multiply_codes(const int8_t* rows, size_t stride, int size, int depth, const uint8_t* codes, int32_t* sums,
                    std::integer_sequence<int, column...>) {
  constexpr int ROWS = sizeof...(column), WEIGHTS = ROWS + 1;
  (clear_tile<column>(), ...);
  for (int k = 0; k < size; k += depth) {
    load_tile<ROWS>(rows + k, stride);
    auto add = [&]<int c>() {
      load_tile<WEIGHTS + c % 2>(codes + (size_t(c) * size + k) * TILE_ROWS, TILE_BYTES);
      Products::template add<c, ROWS, WEIGHTS + c % 2>();
    };
    (add.template operator()<column>(), ...);
  }
  (store_tile<column>(sums + column * TILE_ROWS, UNIT * sizeof *sums), ...);
}

// As multiply_groups.
template <typename Layout, typename Take>
void multiply_groups_by_tiles(const Layout& layout, const uint8_t* rows, int n, const uint8_t* panels, const float* factors,
                              int unit, Take take) {
  using Products = std::conditional_t<decltype(layout.kind)::SIGNED, SignedProducts, SignedByteProducts>;
  alignas(64) uint8_t codes[UNIT * MAX_GROUP];
  alignas(64) int32_t sums[TILE_ROWS * UNIT];
  alignas(64) float tile[TILED_ROWS * UNIT];
  const uint8_t* panel = panels + 2 * unit * layout.stride;
  const size_t row_bytes = layout.count * row_group_bytes(layout.size);
  const int depth = layout.size % TILE_BYTES ? TILE_INPUTS : TILE_BYTES;
  int shaped = 0;
  for (int first = 0; first < n; first += TILED_ROWS) {
    const int count = std::min(TILED_ROWS, n - first);
    std::memset(tile, 0, sizeof(float) * count * UNIT);
    for (int g = 0; g < layout.count; ++g) {
      for (int c = 0; c < VECTORS; ++c) {
        const uint8_t* from = layout.codes(panel, g) + c / 2 * layout.stride + c % 2 * 4 * LANES;
        uint8_t* to = codes + size_t(c * LANES / TILE_ROWS) * layout.size * TILE_ROWS + c * LANES % TILE_ROWS * 4;
        for (int k = 0; k < layout.size; k += 4) {
          const bytes four = layout.kind.four(from, k);
          std::memcpy(to + size_t(k) * TILE_ROWS, &four, sizeof four);
        }
      }
      for (int begin = 0; begin < count; begin += TILE_ROWS) {
        const int number = std::min(TILE_ROWS, count - begin);
        if (number != shaped) {
          TileShapes shapes;
          for (int i = 0; i < TILE_COLUMNS; ++i) shapes.set(i, number);
          shapes.set(TILE_COLUMNS, number, depth);
          for (int i = 1; i <= 2; ++i) shapes.set(TILE_COLUMNS + i, depth / 4);
          shape_tiles(shapes);
          shaped = number;
        }
        const uint8_t* of_rows = rows + (first + begin) * row_bytes + g * row_group_bytes(layout.size);
        multiply_codes<Products>(((const RowGroup*)of_rows)->integers, row_bytes, layout.size, depth, codes, sums,
                                 std::make_integer_sequence<int, TILE_COLUMNS>());
        for (int r = 0; r < number; ++r) {
          ints of_row[1][VECTORS];
          floats total[1][VECTORS];
          float* to = tile + (begin + r) * UNIT;
          for (int c = 0; c < VECTORS; ++c) {
            std::memcpy(&of_row[0][c], sums + r * UNIT + c * LANES, sizeof of_row[0][c]);
            total[0][c] = load(to + c * LANES);
          }
          finish_group<1, VECTORS>(layout, of_rows + r * row_bytes, row_bytes, panel, g, of_row, total);
          for (int c = 0; c < VECTORS; ++c) store(to + c * LANES, total[0][c]);
        }
      }
    }
    apply_factors(factors + unit * UNIT, count, tile);
    take(first, count, tile);
  }
  release_tiles();
}

#endif
