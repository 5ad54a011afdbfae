// Rows as they are, times weights of 4 or 8 bits: each code is widened to the float32 number that it stands for, and all
// arithmetic is float32, one chain of multiply-adds an output. It takes several times the instructions of groups.h.
#pragma once

#include "blocks.h"

// out [R, C * LANES] (stride UNIT) = rows [R, in] (stride `stride`) times C vectors of outputs, two vectors a panel; `order`
// as in Linear.
template <int R, int C, typename Layout>
void multiply_exactly(const Layout& layout, const float* rows, size_t stride, const int32_t* order, int in, const uint8_t* panel,
                      float* out) {
  floats total[R][C] = {};
  for (int g = 0; g < layout.count; ++g) {
    const int first = g * layout.size, count = std::min(layout.size, in - first);
    typename Layout::Numbers numbers[C];
    for (int c = 0; c < C; ++c) numbers[c] = layout.numbers(panel, g, c);
    for (int k = 0; k < count; ++k) {
      const int place = order ? order[first + k] : first + k;
      floats weight[C];
      for (int c = 0; c < C; ++c) {
        const uint8_t* codes = layout.codes(panel, g) + c / 2 * layout.stride + c % 2 * 4 * LANES;
        weight[c] = numbers[c].of(one_input(layout.kind, codes, k));
      }
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) total[r][c] = fused(splat(rows[r * stride + place]), weight[c], total[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(out + r * UNIT + c * LANES, total[r][c]);
}

template <int R, int C, typename Layout, typename... Arguments>
void multiply_exactly_upto(int n, const Layout& layout, Arguments... arguments) {
  if (n == R) return multiply_exactly<R, C>(layout, arguments...);
  if constexpr (R > 1) multiply_exactly_upto<R - 1, C>(n, layout, arguments...);
}

// n rows times one unit; `factors` [padded out] are multiplied in at the end. `take` as in multiply_unit.
template <typename Layout, typename Take>
void multiply_unit_exactly(const Layout& layout, const float* rows, size_t stride, const int32_t* order, int in, int n,
                           const uint8_t* panels, const float* factors, int unit, Take take) {
  const uint8_t* panel = panels + 2 * unit * layout.stride;
  alignas(64) float tile[GROUPED_FEW * UNIT];
  for (int first = 0; first < n; first += GROUPED_FEW) {
    const int count = std::min(GROUPED_FEW, n - first);
    multiply_exactly_upto<GROUPED_FEW, 4>(count, layout, rows + first * stride, stride, order, in, panel, tile);
    apply_factors(factors + unit * UNIT, count, tile);
    take(first, count, tile);
  }
}
