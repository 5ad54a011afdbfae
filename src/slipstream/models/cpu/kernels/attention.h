// Attention over cached entries, in their logical order.
//
// A row sees a run of consecutive slots (the committed text, and the chain before it) and then single slots (its
// ancestors in a draft tree and itself). They are numbered through, so that a node's result has the same bits as that
// of the same text without a tree around it. Queries that look at the same run go through it together, a few entries
// at a time while these are in the nearest cache; each still adds up its own, in the same order as alone.
#pragma once

#include <vector>

#include "vectors.h"

struct Visible {
  int64_t begin;        // the first slot of the run
  int length;           // of the run
  const int64_t* tail;  // the single slots
  int num_tail;

  int size() const { return length + num_tail; }
};

// One layer's keys or values of one head: `base` is slot 0's, `stride` floats lie between slots.
struct Entries {
  const float* base;
  size_t stride;
  int dim;

  const float* at(int64_t slot) const { return base + slot * stride; }
};

// One head of one row.
struct Query {
  const float* values;  // [key dim]
  Visible visible;
  float* scores;  // [visible.size() + LANES]: becomes the weights
  float* out;     // [value dim]
};

constexpr int BLOCK = 16;  // entries that all queries go through before the next ones

inline void score(const Query& query, const Entries& keys, int begin, int end, float scale) {
  int i = begin;
  for (; i + 4 <= end; i += 4) {
    dot_each(query.values, keys.at(query.visible.begin + i), keys.stride, keys.dim, query.scores + i);
    for (int j = i; j < i + 4; ++j) query.scores[j] *= scale;
  }
  for (; i < end; ++i) query.scores[i] = dot(query.values, keys.at(query.visible.begin + i), keys.dim) * scale;
}

inline void score_tail(const Query& query, const Entries& keys, float scale) {
  for (int i = 0; i < query.visible.num_tail; ++i)
    query.scores[query.visible.length + i] = dot(query.values, keys.at(query.visible.tail[i]), keys.dim) * scale;
}

// Scores -> weights that sum to the number returned.
inline float exponentiate(const Query& query) {
  float* scores = query.scores;
  const int size = query.visible.size();
  for (int i = size; i % LANES; ++i) scores[i] = -INFINITY;
  floats best = load(scores);
  for (int i = LANES; i < size; i += LANES) best = larger(load(scores + i), best);
  float largest = largest_lane(best);
  floats total = {};
  for (int i = 0; i < size; i += LANES) {
    floats weight = exp_of_negative(load(scores + i) - largest);
    store(scores + i, weight);
    total += weight;
  }
  return sum(total);
}

// out += weights[i] * the value that slot(i) holds, for i from begin to end.
template <typename Slot>
void weigh(const Query& query, const Entries& values, const float* weights, int begin, int end, Slot slot) {
  float* out = query.out;
  int d = 0;
  for (; d + 4 * LANES <= values.dim; d += 4 * LANES) {  // four sums at a time hide each other's latency
    floats sums[4];
    for (int j = 0; j < 4; ++j) sums[j] = load(out + d + j * LANES);
    for (int i = begin; i < end; ++i)
      for (int j = 0; j < 4; ++j) sums[j] = fused(splat(weights[i]), load(values.at(slot(i)) + d + j * LANES), sums[j]);
    for (int j = 0; j < 4; ++j) store(out + d + j * LANES, sums[j]);
  }
  for (; d < values.dim; ++d)
    for (int i = begin; i < end; ++i) out[d] = std::fma(weights[i], values.at(slot(i))[d], out[d]);
}

// All of `queries` look at entries from the same slot on, each as far as its own run goes.
inline void attend(const std::vector<Query>& queries, const Entries& keys, const Entries& values, float scale) {
  int longest = 0;
  for (const Query& query : queries) longest = std::max(longest, query.visible.length);
  for (int begin = 0; begin < longest; begin += BLOCK)
    for (const Query& query : queries) score(query, keys, begin, std::min(begin + BLOCK, query.visible.length), scale);
  for (const Query& query : queries) {
    score_tail(query, keys, scale);
    float inverse = 1.0f / exponentiate(query);
    for (int i = 0; i < query.visible.size(); ++i) query.scores[i] *= inverse;
    std::memset(query.out, 0, sizeof(float) * values.dim);
  }
  for (int begin = 0; begin < longest; begin += BLOCK)
    for (const Query& query : queries)
      weigh(query, values, query.scores, begin, std::min(begin + BLOCK, query.visible.length),
            [&](int i) { return query.visible.begin + i; });
  for (const Query& query : queries)
    weigh(query, values, query.scores + query.visible.length, 0, query.visible.num_tail,
          [&](int i) { return query.visible.tail[i]; });
}
