// Draft chains: a draft's passes level after level, with the choice of each token between them.
#pragma once

#include <vector>

#include "decoder.h"

// Mirrored by native.py. One chain for each row of the first pass whose logits are wanted.
struct Chains {
  int32_t depth, num_tokens;  // the longest chain; tokens from this id on are never drafted
  const int64_t* lengths;     // [chains], from 1 to depth
  const float* temperatures;  // [chains]; 0: always the most probable token
  const uint64_t* keys;       // [chains, depth]: of the target's noise at each position, see sampling/noise.py
  int64_t* token_ids;         // [chains, depth]; -1, and the chain ends, where the logits are not finite
};

// The target's noise of a token, as sampling/noise.py has it: splitmix64's output number `token` from `key` on, an odd
// 53-bit integer, is a uniform number; its Gumbel noise is -log(-log(uniform)).
inline uint64_t uniform_bits(uint64_t key, int token) {
  uint64_t word = key + (uint64_t(token) + 1) * 0x9E3779B97F4A7C15u;
  word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9u;
  word = (word ^ word >> 27) * 0x94D049BB133111EBu;
  return (word ^ word >> 31) >> 11 | 1;
}

inline double gumbel_of(uint64_t bits) { return -std::log(-std::log(double(bits) * 0x1p-53)); }

// NaN where one of the numbers is.
inline float largest_of(const float* values, int size) {
  wide best = splat_wide(-INFINITY), rest = {};
  float largest = -INFINITY, left = 0.0f;
  int i = 0;
  for (; i + WIDE <= size; i += WIDE) {
    wide next = load_wide(values + i);
    best = larger(next, best);
    rest = each_part([&](int part) { return next.parts[part] == next.parts[part] ? rest.parts[part] : next.parts[part]; });
  }
  for (; i < size; ++i) {
    largest = std::max(largest, values[i]);
    if (values[i] != values[i]) left = values[i];
  }
  return sum(rest) + left == 0.0f ? std::max(largest, largest_lane(best)) : NAN;
}

// The most probable token with the target's noise added, or without it at temperature 0; -1 unless the logits are finite
// or minus infinity, and one is finite. Ties go to the lowest id.
//
// The logarithms are computed for few tokens: first for those within LEAD of the most probable one; any other needs
// noise beyond one threshold to win.
inline int64_t choose(const float* logits, int size, float temperature, uint64_t key) {
  constexpr float LEAD = 5.0f;
  const float top = largest_of(logits, size);
  if (!std::isfinite(top)) return -1;
  if (temperature == 0.0f) return std::find(logits, logits + size, top) - logits;
  const double scale = 1.0 / temperature;
  double best = -INFINITY;
  int64_t chosen = -1;
  auto consider = [&](int token, uint64_t bits) {
    double score = logits[token] * scale + gumbel_of(bits);
    if (score > best || (score == best && token < chosen)) best = score, chosen = token;
  };
  const float leading = top - LEAD * temperature;
  for (int i = 0; i < size; ++i)
    if (logits[i] >= leading) consider(i, uniform_bits(key, i));
  // A uniform number u > exp(-exp(-x)) means noise above x; the margin covers the threshold's rounding.
  const uint64_t threshold = std::exp(-std::exp(leading * scale - best)) * (1 - 1e-9) * 0x1p53;
  constexpr int AT_ONCE = 64;
  uint64_t bits[AT_ONCE];
  for (int begin = 0; begin < size; begin += AT_ONCE) {
    uint64_t largest = 0;
    for (int i = 0; i < AT_ONCE; ++i) bits[i] = uniform_bits(key, begin + i), largest = std::max(largest, bits[i]);
    if (largest < threshold) continue;
    for (int i = 0; i < std::min(AT_ONCE, size - begin); ++i)
      if (bits[i] >= threshold && logits[begin + i] < leading && logits[begin + i] > -INFINITY) consider(begin + i, bits[i]);
  }
  return chosen;
}

inline int64_t choose(const Chains& chains, int chain, int level, const float* logits) {
  const size_t place = size_t(chain) * chains.depth + level;
  return chains.token_ids[place] = choose(logits, chains.num_tokens, chains.temperatures[chain], chains.keys[place]);
}

// Draft all chains. `first` is the pass behind which they begin; `run(batch, above)` computes a pass, where `above` holds
// for each row the row of the last pass that it continues, and is empty in the first pass.
template <typename Run>
void draft(const Batch& first, int vocab, const Chains& chains, Run run) {
  Batch batch = first;
  std::vector<int> open(first.num_logit_rows);
  for (int i = 0; i < first.num_logit_rows; ++i) open[i] = i;
  std::vector<int64_t> above;
  // What Batch has of a row, for the rows of a level: each sees all entries before it.
  std::vector<int64_t> token_ids, positions, slots, run_begin, run_length, tail_begin, logit_rows;
  run(batch, above);
  for (int level = 0;; ++level) {
    std::vector<int> going;
    above.clear();
    for (auto* column : {&token_ids, &positions, &slots, &run_begin, &run_length}) column->clear();
    std::vector<int64_t> last_rows(batch.logit_rows, batch.logit_rows + batch.num_logit_rows);
    for (size_t i = 0; i < open.size(); ++i) {
      const int chain = open[i];
      const int64_t token = choose(chains, chain, level, batch.logits + i * vocab);
      if (token < 0 || level + 1 == chains.lengths[chain]) continue;
      const int64_t row = first.logit_rows[chain];
      going.push_back(chain);
      above.push_back(last_rows[i]);
      token_ids.push_back(token);
      positions.push_back(first.positions[row] + level + 1);
      slots.push_back(first.slots[row] + level + 1);
      run_begin.push_back(first.run_begin[row]);
      run_length.push_back(first.run_length[row] + level + 1);
    }
    if (going.empty()) return;
    open = going;
    batch.num_rows = batch.num_logit_rows = int(going.size());
    batch.num_taps = 0;
    tail_begin.assign(going.size() + 1, 0);
    logit_rows.resize(going.size());
    for (size_t i = 0; i < going.size(); ++i) logit_rows[i] = i;
    batch.token_ids = token_ids.data(), batch.positions = positions.data(), batch.slots = slots.data();
    batch.run_begin = run_begin.data(), batch.run_length = run_length.data(), batch.tail_begin = tail_begin.data();
    batch.logit_rows = logit_rows.data();
    run(batch, above);
  }
}
