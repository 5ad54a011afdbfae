// How packed weights lie in memory, whatever their kind: panels of PANEL outputs, two of them a unit.
#pragma once

#include <algorithm>

#include "widen.h"

constexpr int PANEL = 2 * LANES;
constexpr int UNIT = 2 * PANEL;  // outputs are padded to whole units, the parts that threads share out

inline int num_units(int out) { return (out + UNIT - 1) / UNIT; }
inline int num_panels(int out) { return 2 * num_units(out); }

// Ask for what will be read soon. The processor does so by itself, but not across pages, and many rows leave no time to
// wait at each; a few rows of a single stream wait for the memory all the time, and there this only gets in the way.
inline void prefetch(const void* from, size_t num_bytes) {
  constexpr size_t AHEAD = 4096;
  for (size_t line = 0; line < num_bytes; line += 64) __builtin_prefetch((const char*)from + AHEAD + line);
}

// --- rounding to 8 bits ----------------------------------------------------------------------------------------------

// NaN where any value is not a finite number.
inline float largest_magnitude(const float* values, int size) {
  wide best = {}, odd = {};
  int i = 0;
  for (; i + WIDE <= size; i += WIDE) {
    wide value = load_wide(values + i);
    odd = odd + value * splat_wide(0.0f);
    best = larger(magnitude(value), best);
  }
  float largest = largest_lane(best), rest = sum(odd);
  for (; i < size; ++i) {
    rest += values[i] * 0.0f;
    largest = std::max(largest, std::fabs(values[i]));
  }
  return rest == 0.0f ? largest : NAN;
}

// What turns numbers up to `largest` into integers up to 127; 0 where they are NaN or too small to be told from 0.
inline float quantum(float largest) { return largest > 1e-30f ? 127.0f / largest : 0.0f; }

// To the nearest integer, halves away from zero.
inline int rounded(float value) { return int(value + (value < 0.0f ? -0.5f : 0.5f)); }
