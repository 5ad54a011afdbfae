// The rows of a pass whose logits are wanted. Behind the last layer that stores entries no other row is of use: what it
// becomes there is not read.
#pragma once

#include <vector>

#include "worker.h"

// How many of a pass's layers every row runs. Taps are of all rows.
inline int num_common_layers(const Model& m, const Batch& b) {
  if (b.num_taps) return b.num_layers;
  int count = b.num_layers;
  while (count && !m.layers[b.layers[count - 1]].projected) --count;
  return count;
}

// A pass over those rows, each once and in their order, through the layers behind the common ones.
struct WantedRows {
  std::vector<int64_t> rows, token_ids, positions, slots, run_begin, run_length, shared_begin, shared_length;
  std::vector<int64_t> tail_begin, tail_slots, tail_positions, logit_rows, fast_rows;
  Batch batch;

  WantedRows(const Batch& all, int num_common) : rows(all.logit_rows, all.logit_rows + all.num_logit_rows), batch(all) {
    std::sort(rows.begin(), rows.end());
    rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
    pick(all.token_ids, token_ids, batch.token_ids);
    pick(all.positions, positions, batch.positions);
    pick(all.slots, slots, batch.slots);
    pick(all.run_begin, run_begin, batch.run_begin);
    pick(all.run_length, run_length, batch.run_length);
    pick(all.shared_begin, shared_begin, batch.shared_begin);
    pick(all.shared_length, shared_length, batch.shared_length);
    tail_begin.push_back(0);
    for (int64_t row : rows) {
      const int64_t begin = all.tail_begin[row], end = all.tail_begin[row + 1];
      tail_slots.insert(tail_slots.end(), all.tail_slots + begin, all.tail_slots + end);
      tail_positions.insert(tail_positions.end(), all.tail_positions + begin, all.tail_positions + end);
      tail_begin.push_back(int64_t(tail_slots.size()));
    }
    for (int i = 0; i < all.num_logit_rows; ++i) logit_rows.push_back(place_of(all.logit_rows[i]));
    for (int i = 0; i < all.num_fast; ++i)
      if (std::binary_search(rows.begin(), rows.end(), all.fast_rows[i])) fast_rows.push_back(place_of(all.fast_rows[i]));
    batch.tail_begin = tail_begin.data(), batch.tail_slots = tail_slots.data(), batch.tail_positions = tail_positions.data();
    batch.logit_rows = logit_rows.data(), batch.fast_rows = fast_rows.data();
    batch.num_rows = int(rows.size()), batch.num_fast = int64_t(fast_rows.size());
    batch.layers = all.layers + num_common, batch.num_layers = all.num_layers - num_common;
  }

  // Leave of what the common layers have made of all rows only these.
  void take(const Model& m, Scratch& scratch) const {
    move(scratch.states, m.hidden);
    if (m.inputs.width) move(scratch.inputs, m.num_layers * m.inputs.width);
  }

 private:
  int64_t place_of(int64_t row) const { return std::lower_bound(rows.begin(), rows.end(), row) - rows.begin(); }

  // A column of theirs, unless there is none.
  void pick(const int64_t* all, std::vector<int64_t>& own, const int64_t*& column) const {
    if (!all) return;
    for (int64_t row : rows) own.push_back(all[row]);
    column = own.data();
  }

  void move(std::vector<float>& numbers, int width) const {
    for (size_t i = 0; i < rows.size(); ++i)  // a row lies at its place or behind it
      std::memmove(&numbers[i * width], &numbers[size_t(rows[i]) * width], sizeof(float) * width);
  }
};
