// A change of low rank that is kept apart from a layer's packed weight, as LoRA learns it (Hu et al. 2021): every row adds
// up (down row), in float32. Both products have one order of additions, so a row's bits do not depend on the other rows.
#pragma once

#include "panels.h"
#include "vectors.h"

// Of one panel of outputs: those numbers of `down row` that it reads. Layers that are stacked have ranks of their own.
struct RankPanel {
  int32_t first, count;
  int64_t offset;  // in `up`
};

// mirrored by structs.py.
struct LowRank {
  int32_t rank, in;
  const float* down;        // [rank, in], of rows as they are, whatever order the packed inputs have
  const float* up;          // of each panel [count, PANEL]
  const RankPanel* panels;  // [padded out / PANEL]
};

// lowered [rank] = down times a row [in].
inline void lower(const LowRank& change, const float* row, float* lowered) {
  const size_t in = change.in;
  int i = 0;
  for (; i + 4 <= change.rank; i += 4) dot_each(row, change.down + i * in, in, change.in, lowered + i);
  for (; i < change.rank; ++i) lowered[i] = dot(row, change.down + i * in, change.in);
}

// out [n, num_panels * PANEL], `stride` apart, of the panels from `panel` on, += up times what n rows were lowered to.
inline void add_raised(const LowRank& change, const float* lowered, int n, int panel, int num_panels, size_t stride, float* out) {
  for (int p = 0; p < num_panels; ++p) {
    const RankPanel& part = change.panels[panel + p];
    for (int r = 0; part.count && r < n; ++r) {
      const float *small = lowered + size_t(r) * change.rank + part.first, *up = change.up + part.offset;
      for (int c = 0; c < PANEL; c += LANES) {
        floats total = {};
        for (int k = 0; k < part.count; ++k) total = fused(splat(small[k]), load(up + k * PANEL + c), total);
        float* at = out + r * stride + p * PANEL + c;
        store(at, load(at) + total);
      }
    }
  }
}
