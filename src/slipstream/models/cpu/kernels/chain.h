// Draft chains: a draft's passes level after level, with the choice of each token between them.
#pragma once

#include <vector>

#include "decoder.h"
#include "draw.h"

// mirrored by structs.py. One chain for each row of the first pass whose logits are wanted.
struct Chains {
  int32_t depth, num_tokens;  // the longest chain; tokens from this id on are never drafted
  const int64_t* lengths;     // [chains], from 1 to depth
  const Drawing* drawings;    // [chains]
  const uint64_t* keys;       // [chains, depth]: of the target's noise at each position, see sampling/noise.py
  double* confidences;        // [chains], 1 at first
  int64_t* token_ids;         // [chains, depth]; the chain ends with NOT_FINITE or ENDED
};

inline int64_t choose(const Chains& chains, int chain, int level, const float* logits) {
  const size_t place = size_t(chain) * chains.depth + level;
  return chains.token_ids[place] =
             choose(logits, chains.num_tokens, chains.drawings[chain], chains.keys[place], chains.confidences[chain]);
}

// Logits of some chains, in rows of `width`.
struct Levels {
  const float* logits;
  const int64_t* firsts;     // [chains]: the row of a chain's first level; the others follow it
  int64_t width;
  const int64_t* token_ids;  // [width]: the target's ids of what the logits are of, or null: they are numbered alike
};

// Draw a chain's token from a row of the logits; `spread` is room for [num_tokens], of use where tokens are numbered otherwise.
inline int64_t draw_row(const Chains& chains, int chain, int level, const Levels& levels, int64_t row, std::vector<float>& spread) {
  const float* logits = levels.logits + size_t(row) * levels.width;
  if (levels.token_ids) {
    spread.assign(chains.num_tokens, -INFINITY);
    for (int64_t i = 0; i < levels.width; ++i) spread[levels.token_ids[i]] = logits[i];
    logits = spread.data();
  }
  return choose(chains, chain, level, logits);
}

// Draw chains whose logits are known, whatever is drawn.
inline void draw_levels(const Chains& chains, int num_chains, const Levels& levels) {
  std::vector<float> spread;
  for (int chain = 0; chain < num_chains; ++chain)
    for (int level = 0; level < chains.lengths[chain]; ++level)
      if (draw_row(chains, chain, level, levels, levels.firsts[chain] + level, spread) < 0) break;
}

// Draw one level of the chains `growing` [n], from row i of the logits for the i-th of them.
inline void draw_level(const Chains& chains, int level, const int64_t* growing, int n, const Levels& levels) {
  std::vector<float> spread;
  for (int i = 0; i < n; ++i) draw_row(chains, int(growing[i]), level, levels, i, spread);
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
    batch.num_fast = 0;
    tail_begin.assign(going.size() + 1, 0);
    logit_rows.resize(going.size());
    for (size_t i = 0; i < going.size(); ++i) logit_rows[i] = i;
    batch.token_ids = token_ids.data(), batch.positions = positions.data(), batch.slots = slots.data();
    batch.run_begin = run_begin.data(), batch.run_length = run_length.data(), batch.tail_begin = tail_begin.data();
    batch.logit_rows = logit_rows.data();
    batch.shared_begin = batch.shared_length = nullptr;  // of the first pass's rows
    batch.added = nullptr;                               // to these rows' embeddings
    run(batch, above);
  }
}
