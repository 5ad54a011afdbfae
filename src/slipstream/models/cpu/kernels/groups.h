// Weights of 4 or 8 bits in groups of neighbouring inputs, each group of an output with a scale and a zero:
//
//     weight = scale * (code - zero)
//
// A code of 4 bits may also be the place of a number of 8 bits in a table, which is then multiplied in its stead.
//
// A panel is one stream through memory: of each group first the scales of its PANEL outputs, then their zeros, then the
// codes. Rows are rounded to 8 bits, each group of inputs of each row alone. The products of a group are added up as
// integers, exactly; the groups of an output are added one after another as numbers. So a row's result has the same bits
// for any number of rows, and on every processor.
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

// A group of a quantised row: what an integer stands for, minus the sum of what they all stand for, and the integers,
// `size` of them, from -127 to 127.
struct RowGroup {
  float scale, minus_sum;
  int8_t integers[];
};

inline int num_groups(int in, int size) { return (in + size - 1) / size; }
inline size_t row_group_bytes(int size) { return sizeof(RowGroup) + size; }
inline size_t grouped_row_bytes(int in, int size) { return num_groups(in, size) * row_group_bytes(size); }

// Inputs first .. first + count - 1 of a row; where `order` says where each one lies in it, they are put into `room`.
inline const float* in_order(const float* row, const int32_t* order, int first, int count, float* room) {
  if (!order) return row + first;
  for (int k = 0; k < count; ++k) room[k] = row[order[first + k]];
  return room;
}

// What a row [in] is multiplied as; `order` as in Linear. A group with a number that is not finite has the scale NaN, and
// so has the result.
inline void quantise_groups(const float* row, const int32_t* order, int in, int size, uint8_t* quantised) {
  float room[MAX_GROUP];
  for (int first = 0; first < in; first += size, quantised += row_group_bytes(size)) {
    RowGroup& group = *(RowGroup*)quantised;
    const int count = std::min(size, in - first);
    const float* inputs = in_order(row, order, first, count, room);
    const float largest = largest_magnitude(inputs, count), inverse = quantum(largest);
    std::memset(group.integers, 0, size);
    int total = 0;
    if (inverse > 0.0f) {
      for (int k = 0; k < count; ++k) group.integers[k] = int8_t(rounded(inputs[k] * inverse));
      for (int k = 0; k < count; ++k) total += group.integers[k];
    }
    const bool finite = inverse > 0.0f || largest <= 1e-30f;  // neither NaN nor infinite
    group.scale = finite ? (inverse > 0.0f ? largest / 127.0f : 0.0f) : NAN;
    group.minus_sum = -(group.scale * float(total));
  }
}

// --- sums of products ------------------------------------------------------------------------------------------------

// Four integers of a row in every lane.
inline ints splat_four(const int8_t* from) {
  int32_t four;
  std::memcpy(&four, from, sizeof four);
  return four - ints{};
}

// Sums of products of a row's integers with codes from 0 to 15, four of them in each call and lane. `add` may be called 8
// times: where pairs of products are added in 16 bits, 8 times 2 * 15 * 127 still fit. The empty instructions keep compilers
// from adding up in another order, which is as right and needs more registers than there are.
struct Sums {
#if defined(__AVX512BW__) && !defined(__AVX512VNNI__)
  __m512i pairs = _mm512_setzero_si512();
  void add(bytes codes, ints row) {
    pairs = _mm512_add_epi16(pairs, _mm512_maddubs_epi16((__m512i)codes, (__m512i)row));
    asm("" : "+v"(pairs));
  }
  ints whole() const { return (ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)); }
  ints times(ints twice) const { return (ints)_mm512_madd_epi16(pairs, (__m512i)twice); }
  static ints factor(ints value) { return value | value << 16; }
#elif defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
  __m256i pairs = _mm256_setzero_si256();
  void add(bytes codes, ints row) {
    pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16((__m256i)codes, (__m256i)row));
    asm("" : "+x"(pairs));
  }
  ints whole() const { return (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
  ints times(ints twice) const { return (ints)_mm256_madd_epi16(pairs, (__m256i)twice); }
  static ints factor(ints value) { return value | value << 16; }
#elif defined(__aarch64__) && !defined(__ARM_FEATURE_DOTPROD)
  int16x8_t pairs = vdupq_n_s16(0);
  void add(bytes codes, ints row) {
    const int8x16_t a = (int8x16_t)codes, b = (int8x16_t)row;
    pairs = vaddq_s16(pairs, vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b)));
  }
  ints whole() const { return (ints)vpaddlq_s16(pairs); }
  ints times(ints value) const { return whole() * value; }
  static ints factor(ints value) { return value; }
#else
  ints total = {};
  ints whole() const { return total; }
  ints times(ints value) const { return total * value; }
  static ints factor(ints value) { return value; }
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

// total[lane] += four products of signed codes and a row's integers. Where an instruction takes one side without signs,
// they are given to the other; two products of 128 and 127 still fit into 16 bits.
inline ints add_signed(ints total, bytes codes, ints row) {
#if defined(__AVX512BW__)
  const __m512i magnitudes = _mm512_abs_epi8((__m512i)codes), zero = _mm512_setzero_si512();
  const __m512i signed_row = _mm512_mask_sub_epi8((__m512i)row, _mm512_movepi8_mask((__m512i)codes), zero, (__m512i)row);
#if defined(__AVX512VNNI__)
  return (ints)_mm512_dpbusd_epi32((__m512i)total, magnitudes, signed_row);
#else
  return total + (ints)_mm512_madd_epi16(_mm512_maddubs_epi16(magnitudes, signed_row), _mm512_set1_epi16(1));
#endif
#elif defined(__AVX2__)
  const __m256i magnitudes = _mm256_abs_epi8((__m256i)codes), signed_row = _mm256_sign_epi8((__m256i)row, (__m256i)codes);
#if defined(__AVXVNNI__)
  return (ints)_mm256_dpbusd_avx_epi32((__m256i)total, magnitudes, signed_row);
#else
  return total + (ints)_mm256_madd_epi16(_mm256_maddubs_epi16(magnitudes, signed_row), _mm256_set1_epi16(1));
#endif
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

// How codes lie in a panel: `RUN` inputs are added up together; `place` is where in a group an output's code of an input
// lies, in bytes; `number` is what that code stands for; `add` adds RUN inputs of R rows times C vectors of outputs, two
// vectors a panel, panels `stride` apart. `OFFSET` is taken off zeros that are stored, `MIDDLE` is the one where none is.
struct AnyCodes {
  const int8_t* table;  // [16] or null
};

// Two codes a byte: of eight inputs the first four are the low halves of an output's four bytes.
struct FourBits : AnyCodes {
  static constexpr int BITS = 4, RUN = 32, OFFSET = 0, MIDDLE = 8;

  static size_t place(int input, int column) { return size_t(input / 8) * PANEL * 4 + column * 4 + input % 4; }
  static void put(uint8_t* group, int input, int column, uint8_t code) {
    group[place(input, column)] |= uint8_t(input % 8 < 4 ? code : code << 4);
  }
  static int get(const uint8_t* group, int input, int column) {
    return group[place(input, column)] >> (input % 8 < 4 ? 0 : 4) & 15;
  }
  int number(const uint8_t* group, int input, int column) const { return get(group, input, column); }

  // sums [R][C] of RUN inputs.
  template <int R, int C>
  static void sum(const uint8_t* rows, size_t row_bytes, const uint8_t* codes, size_t stride, Sums (*sums)[C]) {
#pragma GCC unroll 4
    for (int k = 0; k < RUN; k += 8) {
      bytes both[C];
      for (int c = 0; c < C; ++c) both[c] = load_bytes(codes + c / 2 * stride + k / 8 * PANEL * 4 + c % 2 * 4 * LANES);
#pragma GCC unroll 2
      for (int part = 0; part < 2; ++part) {
        bytes weight[C];
        for (int c = 0; c < C; ++c) weight[c] = part ? both[c] >> 4 : both[c] & 15;
        for (int r = 0; r < R; ++r) {
          const ints row = splat_four((const int8_t*)rows + r * row_bytes + k + 4 * part);
          for (int c = 0; c < C; ++c) sums[r][c].add(weight[c], row);
        }
      }
    }
  }

  template <int R, int C, bool FIRST>
  void add(const uint8_t* rows, size_t row_bytes, const uint8_t* codes, size_t stride, ints (*total)[C]) const {
    Sums sums[R][C];
    sum<R, C>(rows, row_bytes, codes, stride, sums);
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) total[r][c] = FIRST ? sums[r][c].whole() : total[r][c] + sums[r][c].whole();
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
  static constexpr int BITS = 4, RUN = 16, OFFSET = 0, MIDDLE = 0;

  static void put(uint8_t* group, int input, int column, uint8_t code) { FourBits::put(group, input, column, code); }
  int number(const uint8_t* group, int input, int column) const { return table[FourBits::get(group, input, column)]; }

  template <int R, int C, bool FIRST>
  void add(const uint8_t* rows, size_t row_bytes, const uint8_t* codes, size_t stride, ints (*total)[C]) const {
    const Table numbers(table);
    for (int k = 0; k < RUN; k += 8) {
      bytes both[C];
      for (int c = 0; c < C; ++c) both[c] = load_bytes(codes + c / 2 * stride + k / 8 * PANEL * 4 + c % 2 * 4 * LANES);
#pragma GCC unroll 2
      for (int part = 0; part < 2; ++part)
        for (int c = 0; c < C; ++c) {
          const bytes weight = numbers[part ? both[c] >> 4 : both[c] & 15];
          for (int r = 0; r < R; ++r)
            total[r][c] = add_signed(FIRST && k + part == 0 ? ints{} : total[r][c], weight,
                                     splat_four((const int8_t*)rows + r * row_bytes + k + 4 * part));
        }
    }
  }
};

// A code a byte, with 128 taken off.
struct EightBits : AnyCodes {
  static constexpr int BITS = 8, RUN = 16, OFFSET = 128, MIDDLE = 0;

  static size_t place(int input, int column) { return size_t(input / 4) * PANEL * 4 + column * 4 + input % 4; }
  static void put(uint8_t* group, int input, int column, uint8_t code) { group[place(input, column)] = code ^ 128; }
  int number(const uint8_t* group, int input, int column) const { return int8_t(group[place(input, column)]); }

  template <int R, int C, bool FIRST>
  void add(const uint8_t* rows, size_t row_bytes, const uint8_t* codes, size_t stride, ints (*total)[C]) const {
    for (int k = 0; k < RUN; k += 4)
      for (int c = 0; c < C; ++c) {
        const bytes weight = load_bytes(codes + c / 2 * stride + k * PANEL + c % 2 * 4 * LANES);
        for (int r = 0; r < R; ++r)
          total[r][c] = add_signed(FIRST && k == 0 ? ints{} : total[r][c], weight, splat_four((const int8_t*)rows + r * row_bytes + k));
      }
  }
};

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

template <int R, int C, typename Pieces, typename... Arguments>
void add_upto(int n, const Pieces& pieces, Arguments... arguments) {
  if (n == R) return pieces.template add<R, C>(arguments...);
  if constexpr (R > 1) add_upto<R - 1, C>(n, pieces, arguments...);
}

// Multiply n quantised rows by one unit; `take` as in multiply_unit. `factors` [padded out] are multiplied in at the end.
//
// `pieces` says how many pieces of neighbouring inputs there are, how many of them make a part, where rows and panels lie,
// and with `add<R, C>(rows, panel, begin, end, fetches, out)` adds the pieces from `begin` to `end` of R rows to C vectors
// of outputs [R, C * LANES] (stride UNIT), two vectors a panel. With `fetches` it asks for what is read next.
template <typename Pieces, typename Take>
void multiply_pieces(const Pieces& pieces, const uint8_t* rows, int n, const uint8_t* panels, const float* factors, int unit,
                     Take take) {
  const uint8_t* panel = panels + 2 * unit * pieces.stride;
  alignas(64) float tile[GROUPED_ROWS * UNIT];
  for (int first = 0; first < n; first += GROUPED_ROWS) {
    const int count = std::min(GROUPED_ROWS, n - first);
    const uint8_t* some = rows + first * pieces.row_bytes;
    std::memset(tile, 0, sizeof(float) * count * UNIT);
    if (count <= GROUPED_FEW) {
      add_upto<GROUPED_FEW, 4>(count, pieces, some, panel, 0, pieces.num_pieces, FEW_FETCH, tile);
    } else {
      const int tiles = (count + GROUPED_TILE - 1) / GROUPED_TILE, part = tiles == 1 ? pieces.num_pieces : pieces.part;
      for (int p = 0; p < 2; ++p)
        for (int begin = 0; begin < pieces.num_pieces; begin += part)
          for (int t = 0; t < tiles; ++t) {
            const int row = count * t / tiles, end = std::min(begin + part, pieces.num_pieces);
            add_upto<GROUPED_TILE, 2>(count * (t + 1) / tiles - row, pieces, some + row * pieces.row_bytes,
                                      panel + p * pieces.stride, begin, end, t == 0, tile + row * UNIT + p * PANEL);
          }
    }
    for (int r = 0; r < count; ++r)
      for (int c = 0; c < UNIT; c += LANES)
        store(tile + r * UNIT + c, load(tile + r * UNIT + c) * load(factors + unit * UNIT + c));
    take(first, count, tile);
  }
}

// Codes in groups as `multiply_pieces` reads them. A piece is a group.
template <typename Codes, bool ZEROS>
struct GroupPieces {
  Codes kind;
  int size, num_pieces, part;
  size_t row_bytes, step, stride;

  GroupPieces(Codes kind, int in, int size)
      : kind(kind),
        size(size),
        num_pieces(num_groups(in, size)),
        part(std::max(1, PART_INPUTS / size)),
        row_bytes(grouped_row_bytes(in, size)),
        step(group_bytes<Codes, ZEROS>(size)),
        stride(num_pieces * step) {}

  template <int R, int C>
  void add(const uint8_t* rows, const uint8_t* panel, int begin, int end, bool fetches, float* out) const {
    floats total[R][C];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) total[r][c] = load(out + r * UNIT + c * LANES);
    for (int g = begin; g < end; ++g) {
      const uint8_t *group = panel + g * step, *codes = group + PANEL * (ZEROS ? 4 : 2);
      const uint8_t* of_rows = rows + g * row_group_bytes(size);
      if (fetches) prefetch_panels<C>(group, stride, step);
      ints sums[R][C];
      kind.template add<R, C, true>(of_rows + sizeof(RowGroup), row_bytes, codes, stride, sums);
      for (int k = Codes::RUN; k < size; k += Codes::RUN)
        kind.template add<R, C, false>(of_rows + sizeof(RowGroup) + k, row_bytes, codes + size_t(k) * Codes::BITS / 8 * PANEL,
                                       stride, sums);
      for (int c = 0; c < C; ++c) {
        const float16* scales = (const float16*)(group + c / 2 * stride) + c % 2 * LANES;
        const floats scale = widen(scales), zero = ZEROS ? widen(scales + PANEL) : splat(Codes::MIDDLE);
        for (int r = 0; r < R; ++r) {
          const RowGroup& row = *(const RowGroup*)(of_rows + r * row_bytes);
          const floats of_codes = __builtin_convertvector(sums[r][c], floats);
          const floats products = fused(of_codes, splat(row.scale), zero * splat(row.minus_sum));
          total[r][c] = fused(scale, products, total[r][c]);
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) store(out + r * UNIT + c * LANES, total[r][c]);
  }
};

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
