// A whole pass of a Llama-shaped decoder: pre-norm, rotary grouped-query attention, gated MLP.
//
// The structs are mirrored by native.py. All matrices are row-major float32.
#pragma once

#include "attention.h"
#include "linear.h"
#include "sines.h"
#include "team.h"

struct Layer {
  const float *attention_norm, *mlp_norm;  // [hidden]
  const float *query_norm, *key_norm;      // [head_dim] or null
  Linear qkv;                              // queries, keys and values of all heads, one behind the other
  Linear output;
  Linear gate_up;  // gate and up in alternating panels
  Linear down;
  int64_t sliding_window;  // 0: none
};

struct Model {
  int32_t num_layers, hidden, num_heads, num_kv_heads, head_dim, rotary_dim, intermediate, vocab;
  float norm_epsilon, attention_scale, rotary_scale;
  int32_t embedding_kind;
  const float* inverse_frequencies;  // [rotary_dim / 2]
  const void* embedding;             // [vocab, hidden] of a kind of floating-point weight, or null: it is the head's weight
  const float* final_norm;           // [hidden], or null: there is none
  Linear head;
  const Layer* layers;
};

struct Batch {
  int32_t num_rows, num_logit_rows, num_taps, num_layers;
  const int64_t *token_ids, *positions, *slots;             // [rows]
  const int64_t *run_begin, *run_length, *tail_begin;       // [rows], [rows], [rows + 1]
  const int64_t *tail_slots, *tail_positions;               // [tail_begin[rows]]
  const int64_t* logit_rows;                                // [num_logit_rows]
  void* const *keys;                                        // [layers] of [kv_heads, num_slots, head_dim]
  void* const *values;
  const int64_t* tap_layers;  // [num_taps]: 0 is the embedding, the last one comes after the final norm
  float* const *taps;         // [num_taps] of [rows, hidden]
  float* logits;              // [num_logit_rows, vocab]
  const int64_t* layers;      // [num_layers]: those that the pass runs, ascending
  int64_t num_slots, entry_type;
  float* const *key_scales;  // [layers] of [kv_heads, num_slots], for int8
  float* const *value_scales;
};

// Rows that lie a multiple of 4 KiB apart would all fall into the same few places of the nearest cache: keep them an odd
// number of cache lines apart.
inline size_t row_stride(int width) { return ((width + 15) / 16 | 1) * size_t(16); }

// Room for the rows of a pass between its operations; grows to the largest pass.
struct Scratch {
  std::vector<float> states, normed, qkv, attended, gated, cosines, sines, row_scales;
  std::vector<uint8_t> quantised;
  Sight sight;
  AttentionPlan attention;

  // `input` is the width of the widest rows that `normed` must hold, where that is more than the hidden states'.
  void reserve(const Model& m, size_t rows, int input = 0) {
    size_t qkv_width = size_t(m.num_heads + 2 * m.num_kv_heads) * m.head_dim;
    size_t widest = std::max({m.hidden, m.intermediate, m.num_heads * m.head_dim, input});
    if (row_scales.size() < rows) {
      states.resize(rows * m.hidden);
      normed.resize(rows * row_stride(std::max(m.hidden, input)));
      qkv.resize(rows * qkv_width);
      attended.resize(rows * row_stride(m.num_heads * m.head_dim));
      gated.resize(rows * row_stride(m.intermediate));
      cosines.resize(rows * m.rotary_dim / 2);
      sines.resize(rows * m.rotary_dim / 2);
      quantised.resize(rows * padded_depth(INT8, widest));
      row_scales.resize(rows);
    }
  }

  void plan_attention(const Model& m, const Batch& b, int threads) {
    sight = {b.positions, b.run_begin, b.run_length, b.tail_begin, b.tail_slots, b.tail_positions};
    attention.make(sight, b.num_rows, m.num_heads, m.num_kv_heads, m.head_dim, threads);
  }
};

inline void rms_norm(const float* row, const float* weight, int size, float epsilon, float* out) {
  float inverse = 1.0f / std::sqrt(dot(row, row, size) / size + epsilon);
  for (int i = 0; i < size; ++i) out[i] = weight[i] * (row[i] * inverse);
}

// The embedding of a token in `model`.
inline void embed(const Model& model, int64_t token, float* to) {
  if (model.embedding) {
    widen_row(model.embedding_kind, model.embedding, token, model.hidden, to);
  } else {
    unpack_row(model.head, token, to);
  }
}

// What every pass is made of: operations whose parts the threads share out.
class Worker {
 protected:
  Scratch& s;
  Team& team;
  const int rank;
  int operation = 0;

  Worker(Scratch& scratch, Team& team, int rank) : s(scratch), team(team), rank(rank) {}

  template <typename Part>
  void share(int num_parts, Part part) {
    team.share(operation++, num_parts, part);
  }

  // out [n, width] = rows times the layer's weight, each tile handed to `take` (see multiply_unit).
  template <typename Take>
  void multiply(const Linear& linear, const float* values, int n, Take take) {
    Rows rows{values, row_stride(linear.in), s.quantised.data(), s.row_scales.data()};
    int units = num_units(linear.out), parts = std::min(units, 8 * team.size());
    share(parts, [&](int part) {
      for (int unit = units * part / parts; unit < units * (part + 1) / parts; ++unit)
        multiply_unit(linear, rows, n, unit, [&](int first, int count, const float* tile) {
          for (int r = 0; r < count; ++r) take(first + r, unit, tile + r * UNIT);
        });
    });
  }

  // Where the weights are int8, the rows must be quantised first.
  void prepare(const Linear& linear, const float* values, int n) {
    if (linear.kind != INT8) return;
    share(n, [&](int row) { quantise(linear, values, row); });
  }

  void quantise(const Linear& linear, const float* values, int row) {
    uint8_t* to = s.quantised.data() + size_t(row) * padded_depth(INT8, linear.in);
    s.row_scales[row] = quantise_row(values + row * row_stride(linear.in), linear.in, to);
  }
};

class Pass : protected Worker {
 public:
  Pass(const Model& model, const Batch& batch, Scratch& scratch, Team& team, int rank)
      : Worker(scratch, team, rank), m(model), b(batch), qkv_width((m.num_heads + 2 * m.num_kv_heads) * m.head_dim) {}

  static int num_operations(const Model& model, const Batch& batch) {
    return 13 * model.num_layers + 8 + batch.num_taps;
  }

  void run() {
    each_row([&](int row) {
      embed(m, b.token_ids[row], &s.states[size_t(row) * m.hidden]);
      place(row);
    });
    tap(0);
    for (int i = 0; i < b.num_layers; ++i) {
      int64_t number = b.layers[i];
      layer(m.layers[number], keys_of(number), values_of(number));
      if (number + 1 < m.num_layers) tap(number + 1);
    }
    head();
  }

 protected:
  const Model& m;
  const Batch& b;
  const int qkv_width;

  template <typename Part>
  void each_row(Part part) {
    share(b.num_rows, part);
  }

  // The rotary angles of a row's position.
  void place(int row) {
    for (int i = 0; i < m.rotary_dim / 2; ++i) {
      Turn turn = turned(float(b.positions[row]) * m.inverse_frequencies[i]);
      s.cosines[size_t(row) * m.rotary_dim / 2 + i] = turn.cosine * m.rotary_scale;
      s.sines[size_t(row) * m.rotary_dim / 2 + i] = turn.sine * m.rotary_scale;
    }
  }

  void tap(int number) {
    for (int i = 0; i < b.num_taps; ++i)
      if (b.tap_layers[i] == number)
        each_row([&](int row) {
          std::memcpy(b.taps[i] + size_t(row) * m.hidden, &s.states[size_t(row) * m.hidden], sizeof(float) * m.hidden);
        });
  }

  void normalise(const float* weight, const Linear& next) {
    each_row([&](int row) {
      float* to = &s.normed[row * row_stride(m.hidden)];
      rms_norm(&s.states[size_t(row) * m.hidden], weight, m.hidden, m.norm_epsilon, to);
      if (next.kind == INT8) quantise(next, s.normed.data(), row);
    });
  }

  Entries keys_of(int64_t layer) const { return entries(b.keys[layer], b.key_scales, layer); }
  Entries values_of(int64_t layer) const { return entries(b.values[layer], b.value_scales, layer); }

  Entries entries(void* numbers, float* const *scales, int64_t layer) const {
    return {int32_t(b.entry_type), m.head_dim, b.num_slots, numbers, b.entry_type == ENTRY_INT8 ? scales[layer] : nullptr};
  }

  void layer(const Layer& layer, const Entries& keys, const Entries& values) {
    normalise(layer.attention_norm, layer.qkv);
    attention(layer, keys, values);
    mlp(layer);
  }

  // states += the attention of what `normed` holds.
  void attention(const Layer& layer, const Entries& keys, const Entries& values) {
    multiply(layer.qkv, s.normed.data(), b.num_rows, [&](int row, int unit, const float* tile) {
      int begin = unit * UNIT;
      std::memcpy(&s.qkv[size_t(row) * qkv_width + begin], tile, sizeof(float) * std::min(UNIT, qkv_width - begin));
    });
    each_row([&](int row) { rotate_and_store(layer, row, keys, values); });
    attend(layer, keys, values);
    prepare(layer.output, s.attended.data(), b.num_rows);
    add_to_states(layer.output, s.attended.data());
  }

  void mlp(const Layer& layer) {
    normalise(layer.mlp_norm, layer.gate_up);
    multiply(layer.gate_up, s.normed.data(), b.num_rows, [&](int row, int unit, const float* tile) {
      float* to = &s.gated[row * row_stride(m.intermediate) + unit * PANEL];
      float gated[PANEL];
      for (int i = 0; i < PANEL; i += LANES) store(gated + i, silu(load(tile + i)) * load(tile + PANEL + i));
      std::memcpy(to, gated, sizeof(float) * std::min(PANEL, m.intermediate - unit * PANEL));
    });
    prepare(layer.down, s.gated.data(), b.num_rows);
    add_to_states(layer.down, s.gated.data());
  }

  void add_to_states(const Linear& linear, const float* values) {
    multiply(linear, values, b.num_rows, [&](int row, int unit, const float* tile) {
      float* to = &s.states[size_t(row) * m.hidden + unit * UNIT];
      for (int i = 0; i < std::min(UNIT, m.hidden - unit * UNIT); ++i) to[i] += tile[i];
    });
  }

  void rotate_and_store(const Layer& layer, int row, const Entries& keys, const Entries& values) {
    float* heads = &s.qkv[size_t(row) * qkv_width];
    for (int h = 0; h < m.num_heads + m.num_kv_heads; ++h) {
      float* head = heads + h * m.head_dim;
      const float* norm = h < m.num_heads ? layer.query_norm : layer.key_norm;
      if (norm) rms_norm(head, norm, m.head_dim, m.norm_epsilon, head);
      rotate(head, row);
    }
    const float* key = heads + size_t(m.num_heads) * m.head_dim;
    const float* value = key + size_t(m.num_kv_heads) * m.head_dim;
    for (int h = 0; h < m.num_kv_heads; ++h) {
      keys.write(h, b.slots[row], key + h * m.head_dim);
      values.write(h, b.slots[row], value + h * m.head_dim);
    }
  }

  void rotate(float* head, int row) {
    int half = m.rotary_dim / 2;
    const float *cosines = &s.cosines[size_t(row) * half], *sines = &s.sines[size_t(row) * half];
    for (int i = 0; i < half; ++i) {
      float low = head[i], high = head[i + half];
      head[i] = low * cosines[i] - high * sines[i];
      head[i + half] = high * cosines[i] + low * sines[i];
    }
  }

  void attend(const Layer& layer, const Entries& keys, const Entries& values) {
    Attention attention{s.attention, s.sight, keys, values, m.num_heads, m.num_kv_heads, m.attention_scale, layer.sliding_window,
                        s.qkv.data(), size_t(qkv_width), s.attended.data(), row_stride(m.num_heads * m.head_dim)};
    share(s.attention.num_parts(), [&](int part) { attention.attend(part, rank); });
    if (!s.attention.split) return;
    share(int(s.attention.tiles.size()) * m.num_kv_heads,
          [&](int part) { attention.merge_parts(part / m.num_kv_heads, part % m.num_kv_heads, rank); });
  }

  // normed = what the output layer reads of the rows whose logits are wanted.
  void select() {
    share(b.num_logit_rows, [&](int i) {
      float* to = &s.normed[i * row_stride(m.hidden)];
      const float* state = &s.states[size_t(b.logit_rows[i]) * m.hidden];
      if (m.final_norm) {
        rms_norm(state, m.final_norm, m.hidden, m.norm_epsilon, to);
      } else {
        std::memcpy(to, state, sizeof(float) * m.hidden);
      }
      if (m.head.kind == INT8) quantise(m.head, s.normed.data(), i);
    });
  }

  void head() {
    select();
    multiply(m.head, s.normed.data(), b.num_logit_rows, [&](int row, int unit, const float* tile) {
      float* to = b.logits + size_t(row) * m.vocab + unit * UNIT;
      std::memcpy(to, tile, sizeof(float) * std::min(UNIT, m.vocab - unit * UNIT));
    });
    for (int i = 0; i < b.num_taps; ++i)
      if (b.tap_layers[i] == m.num_layers)
        each_row([&](int row) {
          rms_norm(&s.states[size_t(row) * m.hidden], m.final_norm, m.hidden, m.norm_epsilon, b.taps[i] + size_t(row) * m.hidden);
        });
  }
};
