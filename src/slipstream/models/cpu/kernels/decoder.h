// A whole pass of a decoder: layers of rotary grouped-query attention and an MLP, each added to the residual states.
//
// Families differ in where they have norms and of which kind, in the MLP's activation and gate, and in scales and caps. Each
// is a field of its own that says so; see known_families.py for who has what.
//
// All matrices are row-major float32.
#pragma once

#include "experts.h"
#include "sines.h"

inline void rms_norm(const float* row, const float* weight, int size, float epsilon, float* out) {
  float inverse = 1.0f / std::sqrt(dot(row, row, size) / size + epsilon);
  for (int i = 0; i < size; ++i) out[i] = weight[i] * (row[i] * inverse);
}

inline void centred_norm(const float* row, const Norm& norm, int size, float epsilon, float* out) {
  const float mean = total(row, size) / size;
  for (int i = 0; i < size; ++i) out[i] = row[i] - mean;
  const float inverse = 1.0f / std::sqrt(dot(out, out, size) / size + epsilon);
  for (int i = 0; i < size; ++i) out[i] = out[i] * inverse * norm.weight[i];
  if (norm.bias)
    for (int i = 0; i < size; ++i) out[i] += norm.bias[i];
}

// `out` may be `row`.
inline void normalise(const float* row, const Norm& norm, int size, float epsilon, float* out) {
  if (norm.centred) return centred_norm(row, norm, size, epsilon, out);
  if (norm.weight) return rms_norm(row, norm.weight, size, epsilon, out);
  std::memmove(out, row, sizeof(float) * size);
}

// The embedding of a token in `model`.
inline void embed(const Model& model, int64_t token, float* to) {
  if (model.embedding) {
    widen_row(model.embedding_kind, model.embedding, token, model.hidden, to);
  } else {
    unpack_row(model.table.panels ? model.table : model.head, token, to);
  }
  if (model.embedding_scale != 1.0f)
    for (int i = 0; i < model.hidden; ++i) to[i] *= model.embedding_scale;
}

class Pass : protected Mixer {
 public:
  Pass(const Model& model, const Batch& batch, Scratch& scratch, Team& team, int rank)
      : Mixer(model, scratch, team, rank), b(batch), qkv_width((m.num_heads + 2 * m.num_kv_heads) * m.head_dim) {}

  static int num_operations(const Model& model, const Batch& batch, const Scratch& scratch) {
    return (13 + NUM_OPERATIONS + scratch.attention.num_operations()) * model.num_layers + 8 + batch.num_taps;
  }

  void run() {
    each_row([&](int row) {
      float* state = &s.states[size_t(row) * m.hidden];
      embed(m, b.token_ids[row], state);
      if (b.added)
        for (int i = 0; i < m.hidden; ++i) state[i] += b.added[size_t(row) * m.hidden + i];
      if (m.input_scale != 1.0f)
        for (int i = 0; i < m.hidden; ++i) state[i] *= m.input_scale;
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
  const Batch& b;
  const int qkv_width;

  template <typename Part>
  void each_row(Part part) {
    share(b.num_rows, part);
  }

  // The rotary angles of a row's position.
  void place(int row) {
    const int half = m.rotary_dim / 2, all = m.num_rotaries * half;
    for (int i = 0; i < all; ++i) {
      Turn turn = turned(float(b.positions[row]) * m.inverse_frequencies[i]);
      s.cosines[size_t(row) * all + i] = turn.cosine * m.rotary_scales[i / half];
      s.sines[size_t(row) * all + i] = turn.sine * m.rotary_scales[i / half];
    }
  }

  void tap(int number) {
    for (int i = 0; i < b.num_taps; ++i)
      if (b.tap_layers[i] == number)
        each_row([&](int row) {
          std::memcpy(b.taps[i] + size_t(row) * m.hidden, &s.states[size_t(row) * m.hidden], sizeof(float) * m.hidden);
        });
  }

  // normed = the states as `next` reads them.
  void load_states(const Norm& norm, const Linear& next) {
    each_row([&](int row) {
      float* to = &s.normed[row * row_stride(m.hidden)];
      normalise(&s.states[size_t(row) * m.hidden], norm, m.hidden, m.norm_epsilon, to);
      prepare_row(next, s.normed.data(), row);
    });
  }

  // As `multiply`, for all rows, each in its own arithmetic; prepare_row comes first.
  template <typename Take>
  void multiply_each(const Linear& linear, const float* values, Take take) {
    each_unit(linear, [&](int unit) {
      for (auto [begin, n] : s.exact_runs) multiply_run(linear, values, begin, n, unit, take);
      if (!b.num_fast) return;
      multiply_unit_in_bfloat16(linear, s.rounded.data(), b.num_fast, unit, s.arranged[rank].data(),
                                [&](int first, int count, const float* tile) {
                                  for (int r = 0; r < count; ++r) take(b.fast_rows[first + r], unit, tile + r * UNIT);
                                });
    });
  }

  // What a row must be before it is multiplied: quantised where the weights are integers, rounded where it is fast.
  void prepare_row(const Linear& linear, const float* values, int row) {
    ready(linear, values, row);
    const int fast = s.fast_of[row];
    if (fast >= 0) round_row(values + row * row_stride(linear.in), linear.in, &s.rounded[fast * line_stride(linear.in)]);
  }

  void prepare(const Linear& linear, const float* values) {
    if (quantises(linear.kind) || b.num_fast) each_row([&](int row) { prepare_row(linear, values, row); });
  }

  Entries keys_of(int64_t layer) const { return entries(b.keys[layer], b.key_scales, layer); }
  Entries values_of(int64_t layer) const { return entries(b.values[layer], b.value_scales, layer); }

  Entries entries(void* numbers, float* const *scales, int64_t layer) const {
    return {int32_t(b.entry_type), m.head_dim, b.num_slots, numbers, b.entry_type == ENTRY_INT8 ? scales[layer] : nullptr};
  }

  void layer(const Layer& layer, const Entries& keys, const Entries& values) {
    load_states(layer.attention_norm, layer.qkv);
    attention(layer, keys, values);
    if (m.parallel) {
      mlp(layer);
      add_attention(layer);
    } else {
      add_attention(layer);
      mlp(layer);
    }
    add_mlp(layer);
  }

  // attended = the attention of what `normed` holds.
  void attention(const Layer& layer, const Entries& keys, const Entries& values) {
    multiply_each(layer.qkv, s.normed.data(), [&](int row, int unit, const float* tile) {
      int begin = unit * UNIT;
      std::memcpy(&s.qkv[size_t(row) * qkv_width + begin], tile, sizeof(float) * std::min(UNIT, qkv_width - begin));
    });
    each_row([&](int row) { rotate_and_store(layer, row, keys, values); });
    attend(layer, keys, values);
  }

  void add_attention(const Layer& layer) { add_to_states(layer.output, s.attended.data(), layer.attended_norm); }

  // gated = what the MLP makes of the states before its last linear layer; of experts normed = what they give.
  void mlp(const Layer& layer) {
    if (m.num_experts) {
      load_states(layer.mlp_norm, layer.mixture.router);
      return mix(layer.mixture, b.num_rows);
    }
    load_states(layer.mlp_norm, layer.gate_up);
    multiply_each(layer.gate_up, s.normed.data(), [&](int row, int unit, const float* tile) {
      alignas(64) float gated[UNIT];
      const int width = gate(tile, gated);
      float* to = &s.gated[row * row_stride(m.intermediate) + unit * width];
      std::memcpy(to, gated, sizeof(float) * std::min(width, m.intermediate - unit * width));
    });
  }

  void add_mlp(const Layer& layer) {
    if (m.num_experts) return add_normed(layer.mlp_out_norm);
    add_to_states(layer.down, s.gated.data(), layer.mlp_out_norm);
  }

  void add_to_states(const Linear& linear, const float* values, const Norm& norm) {
    prepare(linear, values);
    multiply_each(linear, values, [&](int row, int unit, const float* tile) {
      const int size = std::min(UNIT, m.hidden - unit * UNIT);
      if (norm.weight) {
        std::memcpy(&s.normed[row * row_stride(m.hidden) + unit * UNIT], tile, sizeof(float) * size);
      } else {
        add(row, unit * UNIT, tile, size);
      }
    });
    if (norm.weight) add_normed(norm);
  }

  // Add what `normed` holds, through a norm if there is one.
  void add_normed(const Norm& norm) {
    each_row([&](int row) {
      float* normed = &s.normed[row * row_stride(m.hidden)];
      normalise(normed, norm, m.hidden, m.norm_epsilon, normed);
      add(row, 0, normed, m.hidden);
    });
  }

  // Add to some neighbouring numbers of a row's state.
  void add(int row, int begin, const float* values, int size) {
    float* to = &s.states[size_t(row) * m.hidden + begin];
    for (int i = 0; i < size; ++i) to[i] += values[i] * m.residual_scale;
  }

  void rotate_and_store(const Layer& layer, int row, const Entries& keys, const Entries& values) {
    float* heads = &s.qkv[size_t(row) * qkv_width];
    float* key = heads + size_t(m.num_heads) * m.head_dim;
    if (m.whole_norms) {
      rms_norm(heads, layer.query_norm, m.num_heads * m.head_dim, m.norm_epsilon, heads);
      rms_norm(key, layer.key_norm, m.num_kv_heads * m.head_dim, m.norm_epsilon, key);
    }
    for (int h = 0; h < m.num_heads + m.num_kv_heads; ++h) {
      float* head = heads + h * m.head_dim;
      const float* norm = h < m.num_heads ? layer.query_norm : layer.key_norm;
      if (norm && !m.whole_norms) rms_norm(head, norm, m.head_dim, m.norm_epsilon, head);
      if (layer.rotary >= 0) rotate(head, row, int(layer.rotary));
    }
    const float* value = key + size_t(m.num_kv_heads) * m.head_dim;
    for (int h = 0; h < m.num_kv_heads; ++h) {
      keys.write(h, b.slots[row], key + h * m.head_dim);
      values.write(h, b.slots[row], value + h * m.head_dim);
    }
  }

  void rotate(float* head, int row, int rotary) {
    const int half = m.rotary_dim / 2;
    const size_t place = (size_t(row) * m.num_rotaries + rotary) * half;
    const float *cosines = &s.cosines[place], *sines = &s.sines[place];
    for (int i = 0; i < half; ++i) {
      float low = head[i], high = head[i + half];
      head[i] = low * cosines[i] - high * sines[i];
      head[i + half] = high * cosines[i] + low * sines[i];
    }
  }

  void attend(const Layer& layer, const Entries& keys, const Entries& values) {
    Attention attention{s.attention, s.sight, keys, values, m.num_heads, m.num_kv_heads, m.attention_scale, m.score_cap,
                        layer.sinks, layer.reach, s.qkv.data(), size_t(qkv_width), s.attended.data(),
                        row_stride(m.num_heads * m.head_dim)};
    const int num_merged = int(s.attention.tiles.size()) * m.num_kv_heads;
    for (int wave = 0; wave < s.attention.num_waves; ++wave) {
      share(s.attention.num_parts(), [&](int part) { attention.attend(part, wave, rank); });
      if (s.attention.split)
        share(num_merged, [&](int part) { attention.merge_parts(part / m.num_kv_heads, part % m.num_kv_heads, wave); });
    }
  }

  // normed = what the output layer reads of the rows whose logits are wanted.
  void select() {
    share(b.num_logit_rows, [&](int i) {
      float* to = &s.normed[i * row_stride(m.hidden)];
      const float* state = &s.states[size_t(b.logit_rows[i]) * m.hidden];
      normalise(state, m.final_norm, m.hidden, m.norm_epsilon, to);
      ready(m.head, s.normed.data(), i);
    });
  }

  void head() {
    select();
    multiply(m.head, s.normed.data(), b.num_logit_rows, [&](int row, int unit, const float* tile) {
      float* to = b.logits + size_t(row) * m.vocab + unit * UNIT;
      alignas(64) float changed[UNIT];
      if (m.logit_divisor != 1.0f || m.logit_cap) {
        for (int i = 0; i < UNIT; i += LANES) {
          const floats divided = load(tile + i) / m.logit_divisor;
          store(changed + i, m.logit_cap ? capped(divided, m.logit_cap) : divided);
        }
        tile = changed;
      }
      std::memcpy(to, tile, sizeof(float) * std::min(UNIT, m.vocab - unit * UNIT));
    });
    for (int i = 0; i < b.num_taps; ++i)
      if (b.tap_layers[i] == m.num_layers)
        each_row([&](int row) {
          normalise(&s.states[size_t(row) * m.hidden], m.final_norm, m.hidden, m.norm_epsilon, b.taps[i] + size_t(row) * m.hidden);
        });
  }
};
