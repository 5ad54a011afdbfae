// A pass of an EAGLE draft head: its first layer's rows combine a state with the embedding of the token behind it.
//
// The state is the target's, or what the head put out for the token before. EAGLE-1 reduces both to one hidden state.
// EAGLE-3 reduces several states of the target to one, and its attention reads the embedding beside it. Further layers
// are a decoder's.
#pragma once

#include "decoder.h"

// mirrored by structs.py.
struct Eagle {
  Model model;                  // its vocabulary is the target's
  const Model* embedder;        // the model whose embeddings are read; as wide as the head
  Linear fc;                    // EAGLE-1: of the embedding and the state; EAGLE-3: of the target's states
  const float* embedding_norm;  // [hidden], EAGLE-3; null: EAGLE-1
  const int64_t* token_ids;     // [outputs of the head]: the target's ids of its tokens; null: they are the same
  int64_t residual_is_normed;   // EAGLE-3: whether the state's norm comes before the residual
};

// The states that the rows of a pass start from.
struct States {
  const float* given;   // [rows, hidden], or what EAGLE-3's fc reads of the target
  float* made;          // [rows, hidden]
  int64_t from_target;  // whether they are the target's
};

class EaglePass : Pass {
 public:
  EaglePass(const Eagle& eagle, const Batch& batch, const States& states, Scratch& scratch, Team& team, int rank)
      : Pass(eagle.model, batch, scratch, team, rank), e(eagle), from(states) {}

  static bool quantises_rows(const Eagle& eagle) { return quantises(eagle.fc) || quantises(eagle.model); }

  static int widest_input(const Eagle& eagle) { return std::max(eagle.fc.in, eagle.model.layers[0].qkv.in); }

  void run() {
    if (e.embedding_norm) {
      start_with_embedding_beside();
    } else {
      start_with_embedding_inside();
    }
    const Layer& first = m.layers[0];
    attention(first, keys_of(0), values_of(0));
    add_attention(first);
    mlp(first);
    add_mlp(first);
    for (int i = 1; i < m.num_layers; ++i) layer(m.layers[i], keys_of(i), values_of(i));
    each_row(HEAD, [&](int row) { std::memcpy(from.made + size_t(row) * m.hidden, state(row), sizeof(float) * m.hidden); });
    e.token_ids ? scattered_head() : head();
  }

 private:
  const Eagle& e;
  const States& from;

  // A row of what `next` reads.
  float* input(const Linear& next, int row) { return normed + row * row_stride(next.in); }

  void ready(const Linear& next, int row) { Worker::ready(next, normed, row); }

  void reduce() {
    multiply(EMBEDDING, e.fc, normed, b.num_rows, [&](int row, int unit, const float* tile) {
      std::memcpy(state(row) + unit * UNIT, tile, sizeof(float) * std::min(UNIT, m.hidden - unit * UNIT));
    });
  }

  void start_with_embedding_inside() {
    const Linear& qkv = m.layers[0].qkv;
    own_rows(EMBEDDING, b.num_rows, [&](int row) {
      place(row);
      float* to = input(e.fc, row);
      embed(*e.embedder, b.token_ids[row], to);
      std::memcpy(to + m.hidden, from.given + size_t(row) * m.hidden, sizeof(float) * m.hidden);
      ready(e.fc, row);
    });
    reduce();
    own_rows(ROUNDING, b.num_rows, [&](int row) {
      std::memcpy(input(qkv, row), state(row), sizeof(float) * m.hidden);
      ready(qkv, row);
    });
  }

  void start_with_embedding_beside() {
    const Layer& layer = m.layers[0];
    auto norm = [&](const float* row, float* to) { rms_norm(row, layer.attention_norm.weight, m.hidden, m.norm_epsilon, to); };
    own_rows(EMBEDDING, b.num_rows, [&](int row) {
      place(row);
      if (!from.from_target) return;
      std::memcpy(input(e.fc, row), from.given + size_t(row) * e.fc.in, sizeof(float) * e.fc.in);
      ready(e.fc, row);
    });
    if (from.from_target) reduce();
    if (!from.from_target || e.residual_is_normed)
      each_row(NORM, [&](int row) {
        if (!from.from_target) std::memcpy(state(row), from.given + size_t(row) * m.hidden, sizeof(float) * m.hidden);
        if (e.residual_is_normed) norm(state(row), state(row));
      });
    own_rows(ROUNDING, b.num_rows, [&](int row) {
      float *embedding = input(layer.qkv, row), *beside = embedding + m.hidden;
      embed(*e.embedder, b.token_ids[row], embedding);
      rms_norm(embedding, e.embedding_norm, m.hidden, m.norm_epsilon, embedding);
      if (e.residual_is_normed) {
        std::memcpy(beside, state(row), sizeof(float) * m.hidden);
      } else {
        norm(state(row), beside);
      }
      ready(layer.qkv, row);
    });
  }

  // As head(), for an output layer over some of the target's tokens.
  void scattered_head() {
    share(HEAD, b.num_logit_rows, [&](int row) { std::fill_n(b.logits + size_t(row) * m.vocab, m.vocab, -INFINITY); });
    select();
    multiply(HEAD, m.head, normed, b.num_logit_rows, [&](int row, int unit, const float* tile) {
      const int begin = unit * UNIT, end = std::min(begin + UNIT, m.head.out);
      for (int i = begin; i < end; ++i) b.logits[size_t(row) * m.vocab + e.token_ids[i]] = tile[i - begin];
    });
  }
};
