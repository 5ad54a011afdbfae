// Medusa and Hydra heads: residual blocks over given rows, then an output layer.
#pragma once

#include "decoder.h"

// x + SiLU(linear(x)); where the widths differ, shortcut(x) in place of x.
struct Block {
  Linear linear;
  Linear shortcut;  // `panels` null: x itself
};

// mirrored by structs.py.
struct Heads {
  int32_t num_heads, num_blocks, hidden, vocab;  // blocks are a head's
  const Block* blocks;                           // [num_heads, num_blocks]
  const Linear* outputs;                         // [num_heads], or one for all
  int64_t shared;                                // whether it is one
};

// What some neighbouring heads make of the same rows.
struct HeadRows {
  int32_t n, first, count, unused;  // rows; the first head and how many
  const float* rows;                // [n, inputs of the first head's first block]
  float* logits;                    // [count, n, vocab]
};

class HeadsPass : Worker {
 public:
  HeadsPass(const Heads& heads, const HeadRows& given, Scratch& scratch, Team& team, int rank)
      : Worker(scratch, team, rank), h(heads), g(given) {}

  static int num_operations(const Heads& heads, const HeadRows& given) { return given.count * (3 * heads.num_blocks + 2); }

  static void reserve(const Heads& heads, const HeadRows& given, Scratch& scratch) {
    Model shape{};
    shape.hidden = heads.hidden;
    int widest = 0;
    bool rounds = false;
    for (int i = 0; i < heads.num_heads * heads.num_blocks; ++i) {
      widest = std::max(widest, heads.blocks[i].linear.in);
      rounds = rounds || quantises(heads.blocks[i].linear);
    }
    for (int i = 0; i < (heads.shared ? 1 : heads.num_heads); ++i) {
      rounds = rounds || quantises(heads.outputs[i]);
      if (heads.outputs[i].change) shape.head = heads.outputs[i];  // the target's own, which all share
    }
    scratch.reserve(shape, size_t(given.count) * given.n, rounds, widest);
  }

  void run() {
    for (int i = 0; i < g.count; ++i) {
      const Block* blocks = h.blocks + size_t(g.first + i) * h.num_blocks;
      for (int j = 0; j < h.num_blocks; ++j) block(blocks[j], j ? state(i, 0) : g.rows, state(i, 0));
    }
    if (h.shared) {
      project(h.outputs[0], 0, g.count * g.n);
    } else {
      for (int i = 0; i < g.count; ++i) project(h.outputs[g.first + i], i * g.n, g.n);
    }
  }

 private:
  const Heads& h;
  const HeadRows& g;

  float* state(int head, int row) { return &s.states[(size_t(head) * g.n + row) * h.hidden]; }

  // normed = n rows, ready for `next`.
  void load_rows(const Linear& next, const float* rows, int n) {
    share(HEAD, n, [&](int row) {
      std::memcpy(&normed[row * row_stride(next.in)], rows + size_t(row) * next.in, sizeof(float) * next.in);
      ready(next, normed, row);
    });
  }

  void block(const Block& block, const float* rows, float* out) {
    load_rows(block.linear, rows, g.n);
    multiply(HEAD, block.linear, normed, g.n, [&](int row, int unit, const float* tile) {
      const int begin = unit * UNIT, end = std::min(begin + UNIT, h.hidden);
      const float* input = &normed[row * row_stride(block.linear.in)];
      alignas(64) float gated[UNIT];
      for (int i = 0; i < UNIT; i += LANES) store(gated + i, silu(load(tile + i)));
      for (int i = begin; i < end; ++i)
        out[size_t(row) * h.hidden + i] = gated[i - begin] + (block.shortcut.panels ? 0.0f : input[i]);
    });
    if (!block.shortcut.panels) return;
    multiply(HEAD, block.shortcut, normed, g.n, [&](int row, int unit, const float* tile) {
      const int begin = unit * UNIT, end = std::min(begin + UNIT, h.hidden);
      for (int i = begin; i < end; ++i) out[size_t(row) * h.hidden + i] += tile[i - begin];
    });
  }

  // Logits of n rows of the states, from row `first` on.
  void project(const Linear& output, int first, int n) {
    load_rows(output, state(0, first), n);
    multiply(HEAD, output, normed, n, [&](int row, int unit, const float* tile) {
      float* to = g.logits + size_t(first + row) * h.vocab + unit * UNIT;
      std::memcpy(to, tile, sizeof(float) * std::min(UNIT, h.vocab - unit * UNIT));
    });
  }
};
