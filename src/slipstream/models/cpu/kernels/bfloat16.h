// Products of bfloat16 numbers that are added in float32: the arithmetic of `fast_prompts`.
//
// Activations are rounded to bfloat16, and so are weights that are not. Sums are those of AMX's tiles, as Intel's manual has
// them (TDPBF16PS): of 32 inputs at a time the even ones are one chain of multiply-adds from zero, the odd ones another;
// their sum is added to the total. What is too small for a normal float is zero. So a row's result has the same bits for
// any number of rows, as everywhere, but not those of multiply_unit. Processors without such tiles compute the same bits with
// their vectors, and gain no time. The exception are sums near the least normal float, 1e-38: x86 takes them for zero by
// what they are when rounded, ARM by what they are before, and the generic build of another processor keeps them.
#pragma once

#include <type_traits>

#include "entries.h"
#include "linear.h"

// 32 numbers, or 16 pairs of them: a row of a tile.
struct alignas(64) TileLine {
  int32_t pairs[16];
};
constexpr int LINE_INPUTS = 32;

inline int num_lines(int in) { return (in + LINE_INPUTS - 1) / LINE_INPUTS; }

// Rows lie an odd number of lines apart, see row_stride.
inline size_t line_stride(int in) { return num_lines(in) | 1; }

// One row, zeros behind it.
inline void round_row(const float* row, int in, TileLine* to) {
  bfloat16* numbers = (bfloat16*)to;
  narrow(row, in, numbers);
  std::memset(numbers + in, 0, (num_lines(in) * LINE_INPUTS - in) * sizeof *numbers);
}

// The nearest bfloat16 numbers, of two equally near ones the even one, as the upper halves of 32 bits; NaN stays NaN.
inline ints upper_halves(floats value) {
  ints bits = (ints)value;
  ints rounded = bits + 0x7fff + (bits >> 16 & 1);
  return (value == value ? rounded : bits | 0x400000) & int32_t(0xffff0000);
}

// A unit's weights, two inputs of an output side by side: [2 panels][pairs of inputs][PANEL].
inline size_t arranged_lines(int in) { return size_t(num_lines(in)) * UNIT; }

template <typename Weights>
void arrange_unit(const Linear& linear, int unit, TileLine* arranged) {
  auto halves = [](floats value) {
    if constexpr (std::is_same_v<typename Weights::Stored, bfloat16>) return (ints)value;
    else return upper_halves(value);
  };
  const int depth = num_lines(linear.in) * LINE_INPUTS;
  int32_t* to = arranged->pairs;
  for (int panel = 2 * unit; panel < 2 * unit + 2; ++panel) {
    const auto* from = (const typename Weights::Stored*)linear.panels + size_t(panel) * PANEL * linear.in;
    for (int k = 0; k < depth; k += 2, to += PANEL) {
      floats even[2] = {}, odd[2] = {};
      if (k < linear.in) Weights::read(from + size_t(k) * PANEL, even);
      if (k + 1 < linear.in) Weights::read(from + size_t(k + 1) * PANEL, odd);
      for (int i = 0; i < 2; ++i) {
        const ints pairs = (halves(even[i]) >> 16 & 0xffff) | halves(odd[i]);
        std::memcpy(to + i * LANES, &pairs, sizeof pairs);
      }
    }
  }
}

// While it lives this thread takes numbers that are too small to be normal for zero.
class TinyAreZero {
 public:
#if defined(__x86_64__)
  TinyAreZero() : kept(_mm_getcsr()) { set(kept | 0x8040); }

 private:
  void set(unsigned mode) {
    _mm_setcsr(mode);
    asm volatile("" : : : "memory");
  }
  unsigned kept;
#elif defined(__aarch64__)
  TinyAreZero() {
    asm volatile("mrs %0, fpcr" : "=r"(kept));
    set(kept | 1 << 24);
  }

 private:
  void set(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
  uint64_t kept;
#else
  TinyAreZero() {}

 private:
  void set(int) {}
  int kept = 0;
#endif

 public:
  ~TinyAreZero() {
    asm volatile("" : : : "memory");
    set(kept);
  }
};

// tile [R, PANEL] (stride UNIT) = R rows times one arranged panel.
template <int R>
void multiply_panel_by_vectors(const TileLine* const* rows, const TileLine* panel, int lines, float* tile) {
  floats total[R][2] = {};
  const int32_t* at = panel->pairs;
  for (int line = 0; line < lines; ++line) {
    floats even[R][2] = {}, odd[R][2] = {};
    for (int pair = 0; pair < LINE_INPUTS / 2; ++pair, at += PANEL)
      for (int i = 0; i < 2; ++i) {
        ints both;
        std::memcpy(&both, at + i * LANES, sizeof both);
        for (int r = 0; r < R; ++r) {
          const uint32_t two = rows[r][line].pairs[pair];
          even[r][i] = fused(splat(from_bits(two << 16)), (floats)(both << 16), even[r][i]);
          odd[r][i] = fused(splat(from_bits(two & 0xffff0000)), (floats)(both & int32_t(0xffff0000)), odd[r][i]);
        }
      }
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < 2; ++i) total[r][i] = total[r][i] + (even[r][i] + odd[r][i]);
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < 2; ++i) store(tile + r * UNIT + i * LANES, total[r][i]);
}

template <typename Take>
void multiply_arranged_by_vectors(const Linear& linear, const TileLine* rows, int n, int unit, const TileLine* arranged,
                                  Take take) {
  constexpr int R = MAX_TILE / 2;  // rows whose chains fit the registers
  const int lines = num_lines(linear.in);
  alignas(64) float tile[R * UNIT];
  for (int first = 0; first < n; first += R) {
    const int count = std::min(R, n - first);
    const TileLine* each[R];  // of the last tile some rows twice
    for (int r = 0; r < R; ++r) each[r] = rows + (first + std::min(r, count - 1)) * line_stride(linear.in);
    {
      const TinyAreZero mode;
      multiply_panel_by_vectors<R>(each, arranged, lines, tile);
      multiply_panel_by_vectors<R>(each, arranged + arranged_lines(linear.in) / 2, lines, tile + PANEL);
    }
    add_bias(linear, count, 2 * unit, 2, tile);
    take(first, count, tile);
  }
}

#if defined(SLIPSTREAM_TILES)

template <typename Take>
void multiply_arranged_by_tiles(const Linear& linear, const TileLine* rows, int n, int unit, const TileLine* arranged,
                                Take take) {
  const size_t stride = line_stride(linear.in) * sizeof(TileLine), depth = num_lines(linear.in) * sizeof(TileLine);
  UnitTiles tiles;
  tiles.each<Bfloat16Products>((const uint8_t*)rows, stride, depth, n, (const int8_t*)arranged,
                               [&](int first, int count, float* tile) {
                                 add_bias(linear, count, 2 * unit, 2, tile);
                                 take(first, count, tile);
                               });
}

#endif

// Whether this processor has such tiles and the system permits them.
inline bool has_bfloat16_tiles() {
#if defined(SLIPSTREAM_TILES)
  return tiles_permitted();
#else
  return false;
#endif
}

// As multiply_unit, for n rounded rows and weights of 16 bits. `arranged` is room for arranged_lines(linear.in).
inline void multiply_unit_in_bfloat16(const Linear& linear, const TileLine* rows, int n, int unit, TileLine* arranged, Taker take) {
  if (linear.kind == BFLOAT16) {
    arrange_unit<Bfloat16Weights>(linear, unit, arranged);
  } else {
    arrange_unit<Float16Weights>(linear, unit, arranged);
  }
#if defined(SLIPSTREAM_TILES)
  if (tiles_permitted()) return multiply_arranged_by_tiles(linear, rows, n, unit, arranged, take);
#endif
  multiply_arranged_by_vectors(linear, rows, n, unit, arranged, take);
}
