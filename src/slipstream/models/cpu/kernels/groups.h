// Weights of 4 or 8 bits in groups of neighbouring inputs, each group of an output with a scale and a zero:
//
//     weight = scale * (code - zero)
//
// A code of 4 bits may also be the place of a number of 8 bits in a table, which is then multiplied in its stead.
//
// A panel is one stream through memory: of each group first the scales of its PANEL outputs, then their zeros, then the
// codes. Rows are rounded to 8 bits, each group of inputs of each row alone; an input that is far larger than the rest of its
// group is not rounded. The products of a group are added up as integers, exactly; the groups of an output are added one
// after another as numbers. So a row's result has the same bits for any number of rows, and on every processor.
#pragma once

#include "entries.h"
#include "panels.h"

typedef uint8_t bytes __attribute__((vector_size(4 * LANES)));

inline bytes load_bytes(const void* from) {
  bytes value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

constexpr int MAX_GROUP = 128;  // inputs

// --- rows ------------------------------------------------------------------------------------------------------------

// A group of a quantised row. The largest input may stand apart: beside it the others would all be rounded coarsely. Models
// have channels whose numbers are a hundred times as large as the rest (Dettmers et al. 2022, LLM.int8()).
struct RowGroup {
  float scale, minus_sum;  // what an integer stands for; minus the sum of what all inputs stand for
  float apart;             // the input that stands apart, as it is
  int16_t place, sum;      // where that is, or -1; the sum of the integers
  int8_t integers[];       // from -127 to 127, as many as a group has inputs
};

// An input stands apart if it is so many times the mean magnitude of its group. With 5, a third of the groups of SmolLM2's
// rows have one.
constexpr float APART_FROM = 5.0f;

inline int num_groups(int in, int size) { return (in + size - 1) / size; }
inline size_t row_group_bytes(int size) { return sizeof(RowGroup) + size; }
inline size_t grouped_row_bytes(int in, int size) { return num_groups(in, size) * row_group_bytes(size); }

// Where the first of `values` [size] is whose magnitude is `wanted`, which one's is.
inline int place_of(const float* values, int size, float wanted) {
  for (int k = 0; k < size; k += LANES) {
    const floats value = load(values + k);
    const ints found = (ints)((value < 0.0f ? -value : value) == wanted);
    if (sum(found))
      for (int lane = 0; lane < LANES; ++lane)
        if (found[lane]) return k + lane;
  }
  return size - 1;
}

// Integers from -127 to 127: the nearest ones to values [size] times `inverse`, halves away from zero; returns their sum.
inline int round_all(const float* values, int size, float inverse, int8_t* integers) {
  typedef int8_t few __attribute__((vector_size(LANES)));
  ints sums = {};
  for (int k = 0; k < size; k += LANES) {
    const floats value = load(values + k) * inverse;
    const ints nearest = __builtin_convertvector(value + (value < 0.0f ? splat(-0.5f) : splat(0.5f)), ints);
    const few narrow = __builtin_convertvector(nearest, few);
    std::memcpy(integers + k, &narrow, sizeof narrow);
    sums += nearest;
  }
  return sum(sums);
}

// inputs [size], a multiple of WIDE; the one that stands apart becomes 0. With a number that is not finite the scale is NaN,
// and so is the result.
inline void quantise_group(float* inputs, int size, RowGroup& group) {
  wide best = {}, total = {};
  for (int k = 0; k < size; k += WIDE) {
    const wide magnitudes = magnitude(load_wide(inputs + k));
    best = larger(magnitudes, best);
    total = total + magnitudes;
  }
  float largest = largest_lane(best);
  const float mass = sum(total);
  const bool finite = mass < INFINITY;
  group.apart = 0.0f;
  group.place = -1;
  if (finite && largest * float(size) > APART_FROM * mass) {
    const int place = place_of(inputs, size, largest);
    group.apart = inputs[place];
    group.place = int16_t(place);
    inputs[place] = 0.0f;
    best = {};
    for (int k = 0; k < size; k += WIDE) best = larger(magnitude(load_wide(inputs + k)), best);
    largest = largest_lane(best);
  }
  const float inverse = finite ? quantum(largest) : 0.0f;
  group.scale = finite ? (inverse > 0.0f ? largest / 127.0f : 0.0f) : NAN;
  if (inverse > 0.0f) {
    group.sum = int16_t(round_all(inputs, size, inverse, group.integers));
  } else {
    std::memset(group.integers, 0, size);
    group.sum = 0;
  }
  group.minus_sum = -(group.scale * float(group.sum) + group.apart);
}

// What a row [in] is multiplied as; `order`, as in Linear, says where in it each input lies.
inline void quantise_groups(const float* row, const int32_t* order, int in, int size, uint8_t* quantised) {
  alignas(64) float inputs[MAX_GROUP];
  for (int first = 0; first < in; first += size, quantised += row_group_bytes(size)) {
    const int count = std::min(size, in - first);
    if (order) {
      for (int k = 0; k < count; ++k) inputs[k] = row[order[first + k]];
    } else {
      std::memcpy(inputs, row + first, sizeof(float) * count);
    }
    std::fill(inputs + count, inputs + size, 0.0f);
    quantise_group(inputs, size, *(RowGroup*)quantised);
  }
}

// --- sums of products ------------------------------------------------------------------------------------------------

// Four integers of a row in every lane.
inline ints splat_four(const int8_t* from) {
  int32_t four;
  std::memcpy(&four, from, sizeof four);
  return four - ints{};
}

// Sums of products of a row's integers with codes from 0 to 15, four of them in each call and lane, of INPUTS inputs in all:
// where pairs of products are added in 16 bits, 8 times 2 * 15 * 127 still fit. The empty instructions keep compilers
// from adding up in another order, which is as right and needs more registers than there are.
struct Sums {
  static constexpr int INPUTS = 32;
#if defined(__AVX512BW__) && !defined(__AVX512VNNI__)
  __m512i pairs = _mm512_setzero_si512();
  void add(bytes codes, ints row) {
    pairs = _mm512_add_epi16(pairs, _mm512_maddubs_epi16((__m512i)codes, (__m512i)row));
    asm("" : "+v"(pairs));
  }
  ints whole() const { return (ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)); }
#elif defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
  __m256i pairs = _mm256_setzero_si256();
  void add(bytes codes, ints row) {
    pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16((__m256i)codes, (__m256i)row));
    asm("" : "+x"(pairs));
  }
  ints whole() const { return (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
#elif defined(__aarch64__) && !defined(__ARM_FEATURE_DOTPROD)
  int16x8_t pairs = vdupq_n_s16(0);
  void add(bytes codes, ints row) {
    const int8x16_t a = (int8x16_t)codes, b = (int8x16_t)row;
    pairs = vaddq_s16(pairs, vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b)));
  }
  ints whole() const { return (ints)vpaddlq_s16(pairs); }
#else
  ints total = {};
  ints whole() const { return total; }
  void add(bytes codes, ints row) {
#if defined(__AVX512VNNI__)
    total = (ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)codes, (__m512i)row);
#elif defined(__AVXVNNI__)
    total = (ints)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)codes, (__m256i)row);
#elif defined(__aarch64__)
    total = (ints)vdotq_s32((int32x4_t)total, (int8x16_t)codes, (int8x16_t)row);
#else
    int8_t integers[4 * LANES];
    std::memcpy(integers, &row, sizeof integers);
    for (int lane = 0; lane < LANES; ++lane)
      for (int i = 0; i < 4; ++i) total[lane] += int32_t(codes[4 * lane + i]) * integers[4 * lane + i];
#endif
  }
#endif
};

// How dot products take signed codes. VNNI has one side without signs: there a code is 128 more, and the sums of a group
// begin with what that adds.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
inline bytes multiplicand(bytes codes) { return codes ^ 128; }
inline ints begin_signed(const RowGroup& row) { return -128 * row.sum - ints{}; }
#else
inline bytes multiplicand(bytes codes) { return codes; }
inline ints begin_signed(const RowGroup&) { return ints{}; }
#endif

// total[lane] += four products of a multiplicand and a row's integers. Where vpmaddubsw wants one side without signs, they
// are given to the other; two products of 128 and 127 still fit into 16 bits.
ALWAYS_INLINE ints add_signed(ints total, bytes codes, ints row) {
#if defined(__AVX512VNNI__)
  return (ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)codes, (__m512i)row);
#elif defined(__AVXVNNI__)
  return (ints)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)codes, (__m256i)row);
#elif defined(__AVX512BW__)
  const __m512i magnitudes = _mm512_abs_epi8((__m512i)codes), zero = _mm512_setzero_si512();
  const __m512i signed_row = _mm512_mask_sub_epi8((__m512i)row, _mm512_movepi8_mask((__m512i)codes), zero, (__m512i)row);
  return total + (ints)_mm512_madd_epi16(_mm512_maddubs_epi16(magnitudes, signed_row), _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  const __m256i magnitudes = _mm256_abs_epi8((__m256i)codes), signed_row = _mm256_sign_epi8((__m256i)row, (__m256i)codes);
  total += (ints)_mm256_madd_epi16(_mm256_maddubs_epi16(magnitudes, signed_row), _mm256_set1_epi16(1));
  asm("" : "+x"(total));  // as in Sums
  return total;
#elif defined(__ARM_FEATURE_DOTPROD)
  return (ints)vdotq_s32((int32x4_t)total, (int8x16_t)codes, (int8x16_t)row);
#elif defined(__aarch64__)
  const int8x16_t a = (int8x16_t)codes, b = (int8x16_t)row;
  const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
  return (ints)vpadalq_s16((int32x4_t)total, vpaddq_s16(low, high));
#else
  int8_t numbers[4 * LANES], integers[4 * LANES];
  std::memcpy(numbers, &codes, sizeof numbers);
  std::memcpy(integers, &row, sizeof integers);
  for (int lane = 0; lane < LANES; ++lane)
    for (int i = 0; i < 4; ++i) total[lane] += int32_t(numbers[4 * lane + i]) * integers[4 * lane + i];
  return total;
#endif
}

// --- codes -----------------------------------------------------------------------------------------------------------

// How codes lie in a panel. `place` is where in a group an output's code of an input lies, in bytes, and `number` is what it
// stands for. `four` reads those of four inputs from `input` on of LANES outputs, whose codes begin at `codes`: as bytes from
// 0 to 15, or where they are SIGNED as bytes with a sign. `OFFSET` is taken off zeros that are stored, `MIDDLE` is the one
// where none is.
struct AnyCodes {
  const int8_t* table;  // [16] or null
};

// Two codes a byte: of eight inputs the first four are the low halves of an output's four bytes.
struct FourBits : AnyCodes {
  static constexpr int BITS = 4, OFFSET = 0, MIDDLE = 8;
  static constexpr bool SIGNED = false;

  static size_t place(int input, int column) { return size_t(input / 8) * PANEL * 4 + column * 4 + input % 4; }
  static void put(uint8_t* group, int input, int column, uint8_t code) {
    group[place(input, column)] |= uint8_t(input % 8 < 4 ? code : code << 4);
  }
  static int get(const uint8_t* group, int input, int column) {
    return group[place(input, column)] >> (input % 8 < 4 ? 0 : 4) & 15;
  }
  int number(const uint8_t* group, int input, int column) const { return get(group, input, column); }

  ALWAYS_INLINE bytes four(const uint8_t* codes, int input) const {
    const bytes both = load_bytes(codes + size_t(input / 8) * PANEL * 4);
    return input % 8 < 4 ? both & 15 : both >> 4;
  }
};

// LANES times four numbers of a table of 16, at places from 0 to 15.
struct Table {
#if defined(__AVX512BW__)
  __m512i numbers;
  explicit Table(const int8_t* from) : numbers(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)from))) {}
  bytes operator[](bytes places) const { return (bytes)_mm512_shuffle_epi8(numbers, (__m512i)places); }
#elif defined(__AVX2__)
  __m256i numbers;
  explicit Table(const int8_t* from) : numbers(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)from))) {}
  bytes operator[](bytes places) const { return (bytes)_mm256_shuffle_epi8(numbers, (__m256i)places); }
#elif defined(__aarch64__)
  int8x16_t numbers;
  explicit Table(const int8_t* from) : numbers(vld1q_s8(from)) {}
  bytes operator[](bytes places) const { return (bytes)vqtbl1q_s8(numbers, (uint8x16_t)places); }
#else
  const int8_t* numbers;
  explicit Table(const int8_t* from) : numbers(from) {}
  bytes operator[](bytes places) const {
    for (int i = 0; i < 4 * LANES; ++i) places[i] = uint8_t(numbers[places[i]]);
    return places;
  }
#endif
};

// As FourBits, each code the place of its number in the table.
struct TableCodes : AnyCodes {
  static constexpr int BITS = 4, OFFSET = 0, MIDDLE = 0;
  static constexpr bool SIGNED = true;

  static void put(uint8_t* group, int input, int column, uint8_t code) { FourBits::put(group, input, column, code); }
  int number(const uint8_t* group, int input, int column) const { return table[FourBits::get(group, input, column)]; }

  ALWAYS_INLINE bytes four(const uint8_t* codes, int input) const { return Table(table)[FourBits().four(codes, input)]; }
};

// A code a byte, with 128 taken off.
struct EightBits : AnyCodes {
  static constexpr int BITS = 8, OFFSET = 128, MIDDLE = 0;
  static constexpr bool SIGNED = true;

  static size_t place(int input, int column) { return size_t(input / 4) * PANEL * 4 + column * 4 + input % 4; }
  static void put(uint8_t* group, int input, int column, uint8_t code) { group[place(input, column)] = code ^ 128; }
  int number(const uint8_t* group, int input, int column) const { return int8_t(group[place(input, column)]); }

  ALWAYS_INLINE bytes four(const uint8_t* codes, int input) const { return load_bytes(codes + size_t(input / 4) * PANEL * 4); }
};

// What the codes of one input stand for, of LANES outputs.
template <typename Codes>
inline floats one_input(const Codes& kind, const uint8_t* codes, int input) {
  const ints four = (ints)kind.four(codes, input);
  return __builtin_convertvector(Codes::SIGNED ? four << (24 - 8 * (input % 4)) >> 24 : four >> (8 * (input % 4)) & 15, floats);
}

// sums [R][C] of products of a group of `size` inputs, of R rows and C vectors of outputs, two vectors a panel, panels
// `stride` apart.
template <int R, int C, typename Codes>
ALWAYS_INLINE void sum_group(const Codes& kind, const uint8_t* of_rows, size_t row_bytes, const uint8_t* codes,
                                             size_t stride, int size, ints (*sums)[C]) {
  auto read = [&](int input, bytes* weight) {
    for (int c = 0; c < C; ++c) weight[c] = kind.four(codes + c / 2 * stride + c % 2 * 4 * LANES, input);
  };
  auto row_at = [&](int r) -> const RowGroup& { return *(const RowGroup*)(of_rows + r * row_bytes); };
  if constexpr (Codes::SIGNED) {
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) sums[r][c] = begin_signed(row_at(r));
#pragma GCC unroll 4
    for (int k = 0; k < size; k += 4) {
      bytes weight[C];
      read(k, weight);
      for (int c = 0; c < C; ++c) weight[c] = multiplicand(weight[c]);
      for (int r = 0; r < R; ++r) {
        const ints row = splat_four(row_at(r).integers + k);
        for (int c = 0; c < C; ++c) sums[r][c] = add_signed(sums[r][c], weight[c], row);
      }
    }
  } else {
    auto add = [&]<bool FIRST>(int first) __attribute__((always_inline)) {
      Sums some[R][C];
#pragma GCC unroll 8
      for (int k = 0; k < Sums::INPUTS; k += 4) {
        bytes weight[C];
        read(first + k, weight);
        for (int r = 0; r < R; ++r) {
          const ints row = splat_four(row_at(r).integers + first + k);
          for (int c = 0; c < C; ++c) some[r][c].add(weight[c], row);
        }
      }
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sums[r][c] = FIRST ? some[r][c].whole() : sums[r][c] + some[r][c].whole();
    };
    add.template operator()<true>(0);
    for (int first = Sums::INPUTS; first < size; first += Sums::INPUTS) add.template operator()<false>(first);
  }
}

template <typename Codes, bool ZEROS>
size_t group_bytes(int size) {
  return size_t(PANEL) * (size * Codes::BITS / 8 + (ZEROS ? 4 : 2));
}

// --- products --------------------------------------------------------------------------------------------------------

constexpr int GROUPED_TILE = LANES == 16 ? 12 : 6;  // rows whose sums fit the registers, or nearly
constexpr int GROUPED_FEW = 2;                     // rows whose sums do for both panels of a unit
// Whether these ask for what is read next too: with wide registers two streams at a time outrun what the processor asks for
// by itself (12 to 16 GB/s of one thread), with narrow ones their arithmetic does not.
constexpr bool FEW_FETCH = LANES == 16;
constexpr int GROUPED_ROWS = 16;                    // rows that are computed while a part of a panel is near
constexpr int PART_INPUTS = 512;                    // inputs of such a part

// Of each of the panels that C vectors of outputs lie in.
template <int C>
void prefetch_panels(const uint8_t* from, size_t stride, size_t num_bytes) {
  for (int p = 0; p < C / 2; ++p) prefetch(from + p * stride, num_bytes);
}

// tile [n, UNIT] times the factors [UNIT] of its outputs.
inline void apply_factors(const float* factors, int n, float* tile) {
  for (int r = 0; r < n; ++r)
    for (int c = 0; c < UNIT; c += LANES) store(tile + r * UNIT + c, load(tile + r * UNIT + c) * load(factors + c));
}

// Where things lie in panels of groups: `scale` and `minimum` are those of LANES outputs, vector c of a group, and a weight is
// scale * code - minimum.
template <typename Codes, bool ZEROS>
struct GroupLayout {
  static constexpr bool HAS_MINIMUM = ZEROS || Codes::MIDDLE;
  Codes kind;
  int size, count;  // inputs of a group; groups
  size_t step, stride;  // bytes from group to group, and from panel to panel

  GroupLayout(Codes kind, int in, int size)
      : kind(kind), size(size), count(num_groups(in, size)), step(group_bytes<Codes, ZEROS>(size)), stride(count * step) {}

  const uint8_t* codes(const uint8_t* panel, int g) const { return panel + g * step + PANEL * (ZEROS ? 4 : 2); }

  floats scale(const uint8_t* panel, int g, int c) const { return widen(halves(panel, g, c)); }

  floats minimum(const uint8_t* panel, int g, int c, floats scale) const { return scale * zero(panel, g, c); }

  // What codes stand for, with the bits of `unpack_groups`.
  struct Numbers {
    floats scale, zero;
    floats of(floats code) const { return (code - zero) * scale; }
  };
  Numbers numbers(const uint8_t* panel, int g, int c) const { return {scale(panel, g, c), zero(panel, g, c)}; }

  template <int C>
  void fetch(const uint8_t* panel, int g) const {
    prefetch_panels<C>(panel + g * step, stride, step);
  }

 private:
  floats zero(const uint8_t* panel, int g, int c) const {
    return ZEROS ? widen(halves(panel, g, c) + PANEL) : splat(Codes::MIDDLE);
  }

  const float16* halves(const uint8_t* panel, int g, int c) const {
    return (const float16*)(panel + c / 2 * stride + g * step) + c % 2 * LANES;
  }
};

// total [R][C] += a group, of whose codes and rows' integers `sums` are the products.
template <int R, int C, typename Layout>
ALWAYS_INLINE void finish_group(const Layout& layout, const uint8_t* of_rows, size_t row_bytes,
                                                const uint8_t* panel, int g, const ints (*sums)[C], floats (*total)[C]) {
  auto row_at = [&](int r) -> const RowGroup& { return *(const RowGroup*)(of_rows + r * row_bytes); };
  for (int c = 0; c < C; ++c) {
    const floats scale = layout.scale(panel, g, c);
    for (int r = 0; r < R; ++r)
      total[r][c] = fused(scale, __builtin_convertvector(sums[r][c], floats) * row_at(r).scale, total[r][c]);
    if constexpr (Layout::HAS_MINIMUM) {
      const floats minimum = layout.minimum(panel, g, c, scale);
      for (int r = 0; r < R; ++r) total[r][c] = fused(minimum, splat(row_at(r).minus_sum), total[r][c]);
    }
  }
  for (int r = 0; r < R; ++r) {
    const RowGroup& row = row_at(r);
    if (row.place < 0) continue;
    for (int c = 0; c < C; ++c) {
      const uint8_t* codes = layout.codes(panel, g) + c / 2 * layout.stride + c % 2 * 4 * LANES;
      total[r][c] = fused(layout.scale(panel, g, c), one_input(layout.kind, codes, row.place) * row.apart, total[r][c]);
    }
  }
}

// out [R, C * LANES] (stride UNIT) += the groups from `begin` to `end` of R rows and C vectors of outputs, two vectors a
// panel. With `fetches` what is read next is asked for.
template <int R, int C, typename Layout>
void add_groups(const Layout& layout, const uint8_t* rows, size_t row_bytes, const uint8_t* panel, int begin, int end, bool fetches,
                float* out) {
  floats total[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) total[r][c] = load(out + r * UNIT + c * LANES);
  for (int g = begin; g < end; ++g) {
    const uint8_t* of_rows = rows + g * row_group_bytes(layout.size);
    if (fetches) layout.template fetch<C>(panel, g);
    ints sums[R][C];
    sum_group<R, C>(layout.kind, of_rows, row_bytes, layout.codes(panel, g), layout.stride, layout.size, sums);
    finish_group<R, C>(layout, of_rows, row_bytes, panel, g, sums, total);
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(out + r * UNIT + c * LANES, total[r][c]);
}

template <int R, int C, typename Layout, typename... Arguments>
void add_upto(int n, const Layout& layout, Arguments... arguments) {
  if (n == R) return add_groups<R, C>(layout, arguments...);
  if constexpr (R > 1) add_upto<R - 1, C>(n, layout, arguments...);
}

// Multiply n quantised rows by one unit; `take` as in multiply_unit. `factors` [padded out] are multiplied in at the end.
template <typename Layout, typename Take>
void multiply_groups(const Layout& layout, const uint8_t* rows, int n, const uint8_t* panels, const float* factors, int unit,
                     Take take) {
  const uint8_t* panel = panels + 2 * unit * layout.stride;
  const size_t row_bytes = layout.count * row_group_bytes(layout.size);
  const int most = std::max(1, PART_INPUTS / layout.size);  // groups of a part
  alignas(64) float tile[GROUPED_ROWS * UNIT];
  for (int first = 0; first < n; first += GROUPED_ROWS) {
    const int count = std::min(GROUPED_ROWS, n - first);
    const uint8_t* some = rows + first * row_bytes;
    std::memset(tile, 0, sizeof(float) * count * UNIT);
    if (count <= GROUPED_FEW) {
      add_upto<GROUPED_FEW, 4>(count, layout, some, row_bytes, panel, 0, layout.count, FEW_FETCH, tile);
    } else {
      const int tiles = (count + GROUPED_TILE - 1) / GROUPED_TILE, part = tiles == 1 ? layout.count : most;
      for (int p = 0; p < 2; ++p)
        for (int begin = 0; begin < layout.count; begin += part)
          for (int t = 0; t < tiles; ++t) {
            const int row = count * t / tiles, end = std::min(begin + part, layout.count);
            add_upto<GROUPED_TILE, 2>(count * (t + 1) / tiles - row, layout, some + row * row_bytes, row_bytes,
                                      panel + p * layout.stride, begin, end, t == 0, tile + row * UNIT + p * PANEL);
          }
    }
    apply_factors(factors + unit * UNIT, count, tile);
    take(first, count, tile);
  }
}

// --- packing ---------------------------------------------------------------------------------------------------------

// A power of two that brings the largest of an output's scales to where half floats are finest for all of them.
inline float output_factor(float largest) {
  int exponent;
  if (!(largest > 0.0f && largest < INFINITY)) return 1.0f;
  std::frexp(largest, &exponent);
  return std::ldexp(1.0f, std::max(exponent - 15, -126));
}

// One panel of codes [out, in], scales and, with ZEROS, zeros [out, groups].
template <typename Codes, bool ZEROS>
void pack_groups(const uint8_t* codes, const float* scales, const float* zeros, int in, int out, int size, int panel,
                 uint8_t* panels, float* factors) {
  const int groups = num_groups(in, size);
  const size_t step = group_bytes<Codes, ZEROS>(size);
  uint8_t* to = panels + size_t(panel) * groups * step;
  std::memset(to, 0, groups * step);
  for (int column = 0; column < PANEL; ++column) {
    const int row = panel * PANEL + column;
    factors[row] = 1.0f;
    if (row >= out) continue;
    const float* from = scales + size_t(row) * groups;
    float largest = 0.0f;
    for (int g = 0; g < groups; ++g) largest = std::max(largest, std::fabs(from[g]));
    const float factor = factors[row] = output_factor(largest);
    for (int g = 0; g < groups; ++g) {
      float16* halves = (float16*)(to + g * step);
      halves[column] = to_float16(from[g] / factor);
      if (ZEROS) halves[PANEL + column] = to_float16(zeros[size_t(row) * groups + g] - float(Codes::OFFSET));
    }
    for (int k = 0; k < in; ++k)
      Codes::put(to + k / size * step + PANEL * (ZEROS ? 4 : 2), k % size, column, codes[size_t(row) * in + k]);
  }
}

// out [in] = one row of the unpacked weight; `order` as in Linear.
template <typename Codes, bool ZEROS>
void unpack_groups(Codes kind, const uint8_t* panels, float factor, const int32_t* order, int in, int size, int64_t row,
                   float* out) {
  const size_t step = group_bytes<Codes, ZEROS>(size);
  const uint8_t* panel = panels + size_t(row / PANEL) * num_groups(in, size) * step;
  const int column = row % PANEL;
  for (int k = 0; k < in; ++k) {
    const uint8_t* group = panel + k / size * step;
    const float16* halves = (const float16*)group;
    const float zero = ZEROS ? widened(halves[PANEL + column]) : float(Codes::MIDDLE);
    const float code = float(kind.number(group + PANEL * (ZEROS ? 4 : 2), k % size, column));
    out[order ? order[k] : k] = (code - zero) * widened(halves[column]) * factor;
  }
}
