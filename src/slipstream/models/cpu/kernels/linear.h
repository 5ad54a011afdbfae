// Linear layers over packed weights: a few rows for the price of one.
//
// A weight [out, in] is stored in panels of PANEL outputs, each panel [in][PANEL]: one stream through memory, read once
// for up to MAX_TILE rows. Every output is one chain of multiply-adds: over `in`, or where weights are integers over groups of
// inputs (groups.h). So a row's result has the same bits for any number of rows.
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
  const float* scales;  // [padded out], of integers: what all scales of an output's groups are multiplied with
  const float* bias;    // [padded out] or null
  const int32_t* order;  // [in] or null: the place in a row of each input, of the kinds that have groups
  const LowRank* change;  // or null: what is added to the products of integers, of the same kinds
  const int8_t* table;    // [16], of the kinds that have one: the numbers that codes stand for
  int64_t exact_rows;     // whether rows are multiplied as they are, by weights of whatever kind
};

inline bool has_groups(int32_t kind) { return kind >= FOUR_BITS; }

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
  return size_t(num_panels(out)) * PANEL * in * (kind == FLOAT32 ? 4 : 2);
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

// --- integers, see groups.h ------------------------------------------------------------------------------------------

// Whether weights are integers.
inline bool has_codes(int32_t kind) { return kind >= FOUR_BITS_BLOCKS; }

// Whether rows must be quantised before they are multiplied.
inline bool quantises(const Linear& linear) { return has_codes(linear.kind) && !linear.exact_rows; }

// Bytes of a quantised row.
inline size_t quantised_bytes(const Linear& linear) {
  if (!quantises(linear)) return 0;
  return grouped_row_bytes(linear.in, linear.kind == FOUR_BITS_BLOCKS ? BLOCK_GROUP : linear.group);
}

// The most that any kind needs for a row of this width.
inline size_t most_quantised_bytes(size_t in) {
  constexpr size_t LEAST = 16;  // of all groups
  return (in / LEAST + MAX_GROUP / LEAST) * row_group_bytes(LEAST);
}

// One row [in] as the weights are multiplied with.
inline void quantise(const Linear& linear, const float* row, uint8_t* quantised) {
  quantise_groups(row, linear.order, linear.in, linear.kind == FOUR_BITS_BLOCKS ? BLOCK_GROUP : linear.group, quantised);
}

// --- any kind --------------------------------------------------------------------------------------------------------

// Rows ready to be multiplied: float32 as they are, for integers quantised.
struct Rows {
  const float* values;   // [n, stride]
  size_t stride;
  const uint8_t* quantised;  // [n, quantised_bytes()]
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
  const size_t offset = size_t(panel) * PANEL * linear.in;
  auto floats_of = [&](auto weights) {
    using Weights = decltype(weights);
    multiply_floats<Weights, R, P>(rows.values + first * rows.stride, rows.stride,
                                   (const typename Weights::Stored*)linear.panels + offset, linear.in, out);
  };
  switch (linear.kind) {
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

// Weights that are integers.
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
  if (has_codes(linear.kind)) return multiply_unit_by_codes(linear, rows, n, unit, take);
  multiply_unit_by_vectors(linear, rows, n, unit, take);
}

// out [in] = one row of the unpacked weight, its inputs in the order of rows.
inline void unpack_row(const Linear& linear, int64_t row, float* out) {
  if (has_codes(linear.kind)) {
    const auto* panels = (const uint8_t*)linear.panels;
    if (linear.kind == FOUR_BITS_BLOCKS) return unpack_blocks(panels, linear.scales[row], linear.order, linear.in, row, out);
    return of_groups(linear.kind, [&]<typename Codes, bool ZEROS>() {
      unpack_groups<Codes, ZEROS>(Codes{linear.table}, panels, linear.scales[row], linear.order, linear.in, linear.group, row,
                                  out);
    });
  }
  const int column = row % PANEL;
  const size_t panel = size_t(row / PANEL) * PANEL * linear.in;
  switch (linear.kind) {
    case BFLOAT16: unpack_floats<Bfloat16Weights>((const bfloat16*)linear.panels + panel, linear.in, column, out); break;
    case FLOAT16: unpack_floats<Float16Weights>((const float16*)linear.panels + panel, linear.in, column, out); break;
    default: unpack_floats<Float32Weights>((const float*)linear.panels + panel, linear.in, column, out);
  }
}
