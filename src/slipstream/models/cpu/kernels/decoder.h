// A whole pass of a Llama-shaped decoder: pre-norm, rotary grouped-query attention, gated MLP.
//
// The structs are mirrored by native.py. All matrices are row-major float32.
#pragma once

#include "attention.h"
#include "linear.h"
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
  int32_t unused;
  const float* inverse_frequencies;  // [rotary_dim / 2]
  const float* embedding;            // [vocab, hidden], or null: it is the head's weight
  const float* final_norm;           // [hidden]
  Linear head;
  const Layer* layers;
};

struct Batch {
  int32_t num_rows, num_logit_rows, num_taps, num_layers;
  const int64_t *token_ids, *positions, *slots;             // [rows]
  const int64_t *run_begin, *run_length, *tail_begin;       // [rows], [rows], [rows + 1]
  const int64_t *tail_slots, *tail_positions;               // [tail_begin[rows]]
  const int64_t* logit_rows;                                // [num_logit_rows]
  float* const *keys;                                       // [layers] of [slots, kv_heads, head_dim]
  float* const *values;
  const int64_t* tap_layers;  // [num_taps]: 0 is the embedding, the last one comes after the final norm
  float* const *taps;         // [num_taps] of [rows, hidden]
  float* logits;              // [num_logit_rows, vocab]
  const int64_t* layers;      // [num_layers]: those that the pass runs, ascending
};

constexpr int ROW_BLOCK = 4;  // rows that one thread attends for together

// Rows that lie a multiple of 4 KiB apart would all fall into the same few places of the nearest cache: keep them an odd
// number of cache lines apart.
inline size_t row_stride(int width) { return ((width + 15) / 16 | 1) * size_t(16); }

// Room for the rows of a pass between its operations; grows to the largest pass.
struct Scratch {
  std::vector<float> states, normed, qkv, attended, gated, cosines, sines, row_scales;
  std::vector<uint8_t> quantised;
  std::vector<std::vector<float>> scores;  // one a thread
  std::vector<std::vector<Query>> queries;

  void reserve(const Model& m, size_t rows, int threads) {
    size_t qkv_width = size_t(m.num_heads + 2 * m.num_kv_heads) * m.head_dim;
    size_t widest = std::max({m.hidden, m.intermediate, m.num_heads * m.head_dim});
    if (row_scales.size() < rows) {
      states.resize(rows * m.hidden);
      normed.resize(rows * row_stride(m.hidden));
      qkv.resize(rows * qkv_width);
      attended.resize(rows * row_stride(m.num_heads * m.head_dim));
      gated.resize(rows * row_stride(m.intermediate));
      cosines.resize(rows * m.rotary_dim / 2);
      sines.resize(rows * m.rotary_dim / 2);
      quantised.resize(rows * padded_depth(INT8, widest));
      row_scales.resize(rows);
    }
    if (scores.size() < size_t(threads)) {
      scores.resize(threads);
      queries.resize(threads);
    }
  }
};

inline void rms_norm(const float* row, const float* weight, int size, float epsilon, float* out) {
  float inverse = 1.0f / std::sqrt(dot(row, row, size) / size + epsilon);
  for (int i = 0; i < size; ++i) out[i] = weight[i] * (row[i] * inverse);
}

class Pass {
 public:
  Pass(const Model& model, const Batch& batch, Scratch& scratch, Team& team, int rank)
      : m(model), b(batch), s(scratch), team(team), rank(rank), qkv_width((m.num_heads + 2 * m.num_kv_heads) * m.head_dim) {}

  static int num_operations(const Model& model, const Batch& batch) {
    return 12 * model.num_layers + 8 + batch.num_taps;
  }

  void run() {
    each_row([&](int row) { embed(row); });
    tap(0);
    for (int i = 0; i < b.num_layers; ++i) {
      int64_t number = b.layers[i];
      layer(m.layers[number], b.keys[number], b.values[number]);
      if (number + 1 < m.num_layers) tap(number + 1);
    }
    head();
  }

 private:
  const Model& m;
  const Batch& b;
  Scratch& s;
  Team& team;
  const int rank;
  const int qkv_width;
  int operation = 0;

  template <typename Part>
  void share(int num_parts, Part part) {
    team.share(operation++, num_parts, part);
  }

  template <typename Part>
  void each_row(Part part) {
    share(b.num_rows, part);
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

  void embed(int row) {
    float* to = &s.states[size_t(row) * m.hidden];
    int64_t token = b.token_ids[row];
    if (m.embedding) {
      std::memcpy(to, m.embedding + token * m.hidden, sizeof(float) * m.hidden);
    } else {
      unpack_row(m.head, token, to);
    }
    for (int i = 0; i < m.rotary_dim / 2; ++i) {
      float angle = float(b.positions[row]) * m.inverse_frequencies[i];
      s.cosines[size_t(row) * m.rotary_dim / 2 + i] = std::cos(angle) * m.rotary_scale;
      s.sines[size_t(row) * m.rotary_dim / 2 + i] = std::sin(angle) * m.rotary_scale;
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

  void layer(const Layer& layer, float* keys, float* values) {
    normalise(layer.attention_norm, layer.qkv);
    multiply(layer.qkv, s.normed.data(), b.num_rows, [&](int row, int unit, const float* tile) {
      int begin = unit * UNIT;
      std::memcpy(&s.qkv[size_t(row) * qkv_width + begin], tile, sizeof(float) * std::min(UNIT, qkv_width - begin));
    });
    each_row([&](int row) { rotate_and_store(layer, row, keys, values); });
    int blocks = (b.num_rows + ROW_BLOCK - 1) / ROW_BLOCK;
    share(blocks * m.num_kv_heads, [&](int part) { attend_block(layer, part, keys, values); });
    prepare(layer.output, s.attended.data(), b.num_rows);
    add_to_states(layer.output, s.attended.data());
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

  void rotate_and_store(const Layer& layer, int row, float* keys, float* values) {
    float* heads = &s.qkv[size_t(row) * qkv_width];
    for (int h = 0; h < m.num_heads + m.num_kv_heads; ++h) {
      float* head = heads + h * m.head_dim;
      const float* norm = h < m.num_heads ? layer.query_norm : layer.key_norm;
      if (norm) rms_norm(head, norm, m.head_dim, m.norm_epsilon, head);
      rotate(head, row);
    }
    size_t width = size_t(m.num_kv_heads) * m.head_dim;
    const float* key = heads + size_t(m.num_heads) * m.head_dim;
    std::memcpy(keys + b.slots[row] * width, key, sizeof(float) * width);
    std::memcpy(values + b.slots[row] * width, key + width, sizeof(float) * width);
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

  // What a row sees in this layer.
  Visible visible_to(const Layer& layer, int row) const {
    int64_t begin = b.run_begin[row], length = b.run_length[row], tail = b.tail_begin[row];
    if (layer.sliding_window) {
      // The run holds positions 0 .. length - 1, the tail those that it says.
      int64_t first = b.positions[row] - layer.sliding_window + 1, hidden = std::clamp<int64_t>(first, 0, length);
      begin += hidden;
      length -= hidden;
      while (tail < b.tail_begin[row + 1] && b.tail_positions[tail] < first) ++tail;
    }
    return {begin, int(length), b.tail_slots + tail, int(b.tail_begin[row + 1] - tail)};
  }

  // Rows that see entries from the same slot on, a few at a time, with all heads that share a key head.
  void attend_block(const Layer& layer, int part, const float* keys, const float* values) {
    const int heads = m.num_heads / m.num_kv_heads, kv_head = part % m.num_kv_heads;
    const size_t width = size_t(m.num_kv_heads) * m.head_dim, offset = size_t(kv_head) * m.head_dim;
    const int first = part / m.num_kv_heads * ROW_BLOCK, end = std::min(first + ROW_BLOCK, b.num_rows);
    Entries key_entries{keys + offset, width, m.head_dim}, value_entries{values + offset, width, m.head_dim};
    auto& queries = s.queries[rank];
    for (int row = first; row < end;) {
      queries.clear();
      size_t room = 0;
      const int64_t begin = visible_to(layer, row).begin;
      for (; row < end; ++row) {
        Visible visible = visible_to(layer, row);
        if (visible.begin != begin) break;
        for (int h = kv_head * heads; h < (kv_head + 1) * heads; ++h) {
          const float* query = &s.qkv[size_t(row) * qkv_width + size_t(h) * m.head_dim];
          queries.push_back({query, visible, nullptr, &s.attended[row * row_stride(m.num_heads * m.head_dim) + h * m.head_dim]});
          room += visible.size() + LANES;
        }
      }
      auto& scores = s.scores[rank];
      if (scores.size() < room) scores.resize(2 * room);
      float* next = scores.data();
      for (Query& query : queries) {
        query.scores = next;
        next += query.visible.size() + LANES;
      }
      attend(queries, key_entries, value_entries, m.attention_scale);
    }
  }

  void head() {
    share(b.num_logit_rows, [&](int i) {
      float* to = &s.normed[i * row_stride(m.hidden)];
      rms_norm(&s.states[size_t(b.logit_rows[i]) * m.hidden], m.final_norm, m.hidden, m.norm_epsilon, to);
      if (m.head.kind == INT8) quantise(m.head, s.normed.data(), i);
    });
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
