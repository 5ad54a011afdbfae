// Codes for groups of float weights, each the nearest one: of 8 bits between the largest magnitude and its negative, of 4
// bits with the scale and the zero that are searched for.
//
// That search tries the ends of a group's range at several distances. For each the codes are chosen, and then the scale and
// the zero that are best for these codes, by least squares. The trial with the least squared error wins. All sums are taken
// in one order, so every processor finds the same codes.
#pragma once

#include "blocks.h"

// How far the ends of the range are tried: over 15 steps of a range, or 8 of its larger half.
constexpr int NUM_TRIALS = 13;
constexpr float trial_steps(int trial) { return 14.25f + 0.375f * float(trial); }
constexpr float trial_half_steps(int trial) { return 6.75f + 0.1875f * float(trial); }

// The group's numbers, repeated up to whole wides.
struct GroupNumbers {
  alignas(64) float values[MAX_GROUP];
  int size;

  GroupNumbers(const float* from, int count) : size((count + WIDE - 1) / WIDE * WIDE) {
    for (int i = 0; i < size; ++i) values[i] = from[i % count];
  }
  template <typename Take>
  void each(Take take) const {
    for (int i = 0; i < size; i += WIDE) take(load_wide(values + i));
  }
};

// Codes of numbers that are already in steps: from 0 to 15, to the nearest.
inline wide nearest_codes(const wide& steps) {
  return each_part([&](int i) {
    floats low = steps.parts[i] < 0.0f ? floats{} : steps.parts[i];
    floats code = low > 15.0f ? splat(15.0f) : low;
    return __builtin_convertvector(__builtin_convertvector(code + 0.5f, ints), floats);
  });
}

struct Line {
  float scale, minimum;  // weight = scale * code + minimum
};

// The best line through the numbers for the codes of `inverse` and `shift`; returns how much of the squares it leaves.
inline float fit_line(const GroupNumbers& numbers, float inverse, float shift, bool zeros, Line& line) {
  wide codes = {}, squares = {}, products = {}, values = {};
  const wide offset = splat_wide(zeros ? 0.0f : 8.0f);
  numbers.each([&](const wide& value) {
    const wide code = nearest_codes(fused(value, splat_wide(inverse), splat_wide(shift))) - offset;
    codes = codes + code;
    squares = fused(code, code, squares);
    products = fused(code, value, products);
    values = values + value;
  });
  const wide four[] = {codes, squares, products, values};
  float s[4];
  sum_each(four, s);
  const float n = float(numbers.size);
  if (!zeros) {
    line = {s[1] > 0.0f ? s[2] / s[1] : 0.0f, 0.0f};
    line.minimum = -8.0f * line.scale;
    return -line.scale * s[2];
  }
  const float spread = n * s[1] - s[0] * s[0];
  line.scale = spread > 0.0f ? (n * s[2] - s[0] * s[3]) / spread : 0.0f;
  line.minimum = (s[3] - line.scale * s[0]) / n;
  return -line.scale * s[2] - line.minimum * s[3];
}

// The nearest number that a half float times a power of two of its own is.
inline float as_half(float value) {
  if (!(std::fabs(value) > 0.0f && std::fabs(value) < INFINITY)) return value;
  int exponent;
  const float fraction = std::frexp(value, &exponent);
  return std::ldexp(widened(to_float16(fraction)), exponent);
}

// codes [count], and the scale and zero of a group: weight = scale * (code - zero). Without `zeros` the zero is 8.
inline void fit_group(const float* weight, int count, bool zeros, uint8_t* codes, float& scale, float& zero) {
  const GroupNumbers numbers(weight, count);
  float low = weight[0], high = weight[0], odd = 0.0f;
  for (int k = 0; k < count; ++k) {
    low = std::min(low, weight[k]);
    high = std::max(high, weight[k]);
    odd += weight[k] * 0.0f;
  }
  scale = odd == 0.0f ? 0.0f : NAN;
  zero = zeros ? 0.0f : 8.0f;
  std::memset(codes, uint8_t(zero), count);
  const float largest = std::max(-low, high), range = high - low;
  if (odd != 0.0f || largest < 1e-30f) return;
  if (zeros && range < largest * 1e-6f) {  // all alike
    scale = as_half(largest);
    zero = low > 0.0f ? -1.0f : 1.0f;
    return;
  }
  Line best{};
  float least = INFINITY;
  for (int trial = 0; trial < NUM_TRIALS; ++trial)
    for (int side = 0; side < (zeros ? 1 : 2); ++side) {
      Line line;
      const float inverse = zeros ? trial_steps(trial) / range : (side ? -1.0f : 1.0f) * trial_half_steps(trial) / largest;
      const float shift = zeros ? 7.5f - 0.5f * (low + high) * inverse : 8.0f;
      const float left = fit_line(numbers, inverse, shift, zeros, line);
      if (left < least) least = left, best = line;
    }
  scale = as_half(best.scale);
  if (scale == 0.0f) return;
  if (zeros) zero = widened(to_float16(-best.minimum / scale));
  alignas(64) float chosen[MAX_GROUP];
  for (int i = 0; i < numbers.size; i += WIDE)
    store(chosen + i, nearest_codes(fused(load_wide(numbers.values + i), splat_wide(1.0f / scale), splat_wide(zero))));
  for (int k = 0; k < count; ++k) codes[k] = uint8_t(chosen[k]);
}

// One output: weight [in] -> codes [in], scales and zeros [groups].
inline void fit_output(const float* weight, int in, int size, bool has_zeros, uint8_t* codes, float* scales, float* zeros) {
  for (int g = 0; g < num_groups(in, size); ++g)
    fit_group(weight + g * size, std::min(size, in - g * size), has_zeros, codes + g * size, scales[g], zeros[g]);
}

// codes [count] of 8 bits, whose zero is 128, and the scale of a group.
inline void round_group(const float* weight, int count, uint8_t* codes, float& scale) {
  scale = as_half(largest_magnitude(weight, count) / 127.0f);
  const float inverse = quantum(scale * 127.0f);
  if (inverse == 0.0f) {  // nothing but zeros, or numbers that are not finite or nearly so: then the scale says so
    scale = scale < 1.0f ? 0.0f : NAN;
    std::memset(codes, 128, count);
    return;
  }
  for (int k = 0; k < count; ++k) codes[k] = uint8_t(128 + rounded(weight[k] * inverse));
}

// One output: weight [in] -> codes [in], scales [groups].
inline void round_output(const float* weight, int in, int size, uint8_t* codes, float* scales) {
  for (int g = 0; g < num_groups(in, size); ++g)
    round_group(weight + g * size, std::min(size, in - g * size), codes + g * size, scales[g]);
}

// A block of up to BLOCK_INPUTS numbers of an output.
inline CodedBlock fit_block(const float* weight, int count) {
  CodedBlock block{};
  const int groups = num_groups(count, BLOCK_GROUP);
  float scales[BLOCK_GROUPS] = {}, minimums[BLOCK_GROUPS] = {}, largest_scale = 0.0f, largest_minimum = 0.0f;
  for (int g = 0; g < groups; ++g) {
    float zero;
    fit_group(weight + g * BLOCK_GROUP, std::min(BLOCK_GROUP, count - g * BLOCK_GROUP), true, block.codes + g * BLOCK_GROUP,
              scales[g], zero);
    minimums[g] = scales[g] * zero;
    if (scales[g] != scales[g]) {
      block.scale = NAN;
      return block;
    }
    largest_scale = std::max(largest_scale, scales[g]);
    largest_minimum = std::max(largest_minimum, std::fabs(minimums[g]));
  }
  if (largest_scale == 0.0f) return block;
  block.scale = as_half(largest_scale / 255.0f);
  block.minimum = as_half(largest_minimum / 127.0f);
  for (int g = 0; g < groups; ++g) {
    const int scale = std::min(255, rounded(scales[g] / block.scale));
    const int minimum = largest_minimum > 0.0f ? std::clamp(rounded(minimums[g] / block.minimum), -127, 127) : 0;
    block.scales[g] = uint8_t(scale);
    block.minimums[g] = int8_t(minimum);
    const float step = block.scale * float(scale), least = block.minimum * float(minimum);
    for (int k = g * BLOCK_GROUP; k < std::min(count, (g + 1) * BLOCK_GROUP); ++k)
      block.codes[k] = uint8_t(scale ? std::clamp(rounded((weight[k] + least) / step), 0, 15) : 0);
  }
  return block;
}
