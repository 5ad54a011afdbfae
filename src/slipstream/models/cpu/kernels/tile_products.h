// Products of rows and a unit's panels by AMX's tiles.
#pragma once

#include "panels.h"
#include "tiles.h"

#if defined(SLIPSTREAM_TILES)

// sums [n, UNIT] = up to 16 rows of `depth` bytes, `stride` bytes apart, times a unit's panels; a tile has `step` bytes of a
// row. Four bytes of all outputs lie together in a panel: 16 outputs of so many bytes are a tile as they are.
template <typename Products, int... column>
void multiply_by_tiles(const uint8_t* rows, size_t stride, size_t depth, size_t step, const int8_t* panels,
                       typename Products::Sum* sums, std::integer_sequence<int, column...>) {
  // The tiles of sums are 0, 1, ...; behind them one of rows and, in turns, two of weights.
  constexpr int ROWS = sizeof...(column), WEIGHTS = ROWS + 1;
  (clear_tile<column>(), ...);
  for (size_t k = 0; k < depth; k += step) {
    load_tile<ROWS>(rows + k, stride);
    auto add = [&]<int c>() {
      constexpr int first = c * TILE_ROWS;  // output
      load_tile<WEIGHTS + c % 2>(panels + (first / PANEL * depth + k) * PANEL + first % PANEL * 4, PANEL * 4);
      Products::template add<c, ROWS, WEIGHTS + c % 2>();
    };
    (add.template operator()<column>(), ...);
  }
  (store_tile<column>(sums + column * TILE_ROWS, UNIT * sizeof *sums), ...);
}

// The tiles of a unit, `step` bytes of a row each. They are shaped as rows need it and given back at the end: shaping them
// takes as long as the products of a group.
class UnitTiles {
 public:
  explicit UnitTiles(int step = TILE_BYTES) : step(step) {}
  UnitTiles(const UnitTiles&) = delete;
  ~UnitTiles() { release_tiles(); }

  // As multiply_by_tiles, for n rows, a tile of rows at a time: `take(first row, number of rows, sums)` gets the results. A
  // tile of 16 rows takes the time of one row.
  template <typename Products, typename Take>
  void each(const uint8_t* rows, size_t stride, size_t depth, int n, const int8_t* panels, Take take) {
    static_assert(PANEL % TILE_ROWS == 0 && COLUMNS + 3 <= 8);
    alignas(64) typename Products::Sum sums[TILE_ROWS * UNIT];
    for (int first = 0; first < n; first += TILE_ROWS) {
      const int count = std::min(TILE_ROWS, n - first);
      if (count != shaped) shape(count);
      multiply_by_tiles<Products>(rows + first * stride, stride, depth, step, panels, sums, std::make_integer_sequence<int, COLUMNS>());
      take(first, count, sums);
    }
  }

 private:
  static constexpr int COLUMNS = UNIT / TILE_ROWS;
  const int step;
  int shaped = 0;  // rows of a tile

  void shape(int count) {
    TileShapes shapes;
    for (int i = 0; i < COLUMNS; ++i) shapes.set(i, count);
    shapes.set(COLUMNS, count, step);
    for (int i = 1; i <= 2; ++i) shapes.set(COLUMNS + i, step / 4);
    shape_tiles(shapes);
    shaped = count;
  }
};

#endif
