// A whole pass of a decoder: layers of rotary grouped-query attention and an MLP, each added to the residual states.
//
// Families differ in where they have norms and of which kind, in the MLP's activation and gate, in scales and caps, and in
// what else a layer reads. Each is a field of its own that says so; see families/known.py for who has what.
//
// All matrices are row-major float32.
#pragma once

#include <numeric>

#include "experts.h"
#include "sines.h"

inline void rms_norm(const float* row, const float* weight, int size, float epsilon, float* out) {
  float inverse = 1.0f / std::sqrt(dot(row, row, size) / size + epsilon);
  for (int i = 0; i < size; ++i) out[i] = weight[i] * (row[i] * inverse);
}

// In place, without a weight.
inline void bare_norm(float* row, int size, float epsilon) {
  const float inverse = 1.0f / std::sqrt(dot(row, row, size) / size + epsilon);
  for (int i = 0; i < size; ++i) row[i] *= inverse;
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
      : Mixer(model, scratch, team, rank), b(batch) {}

  // See Scratch.
  static int num_copies(const Model& model, const Batch& batch, int threads) {
    constexpr int FEW_ROWS = 1;
    const bool is_plain = !model.num_experts && !model.inputs.width && !batch.num_fast;
    return is_plain && batch.num_rows <= FEW_ROWS && batch.num_logit_rows <= FEW_ROWS ? threads : 1;
  }

  static int num_operations(const Model& model, const Batch& batch, const Scratch& scratch) {
    const int of_layer = 15 + (model.num_experts ? NUM_OPERATIONS : 0) + (model.inputs.width ? 5 : 0);
    return (of_layer + scratch.attention_operations()) * model.num_layers + 10 + batch.num_taps;
  }

  // The layers of the end go on with the states and inputs that the beginning has left.
  enum Part { WHOLE, BEGINNING, END };

  void run(Part part = WHOLE) {
    current = m.num_layers;
    own_rows(EMBEDDING, b.num_rows, [&](int row) { place(row); });
    if (part != END) begin();
    for (int i = 0; i < b.num_layers; ++i) {
      int64_t number = b.layers[i];
      const Layer& each = m.layers[number];
      current = int(number);
      layer(each, keys_of(number), values_of(number));
      if (each.input_gate.panels) add_inputs(each, number);
      if (each.scale != 1.0f) scale_states(each.scale);
      if (number + 1 < m.num_layers) tap(number + 1);
    }
    current = m.num_layers;
    if (part != BEGINNING) head();
  }

 protected:
  const Batch& b;

  float* state(int row) { return &s.states[size_t(row) * m.hidden]; }

  template <typename Each>
  void each_row(PassPart part, Each each) {
    share(part, b.num_rows, each);
  }

  // states = the embeddings, inputs = what layers are given besides.
  void begin() {
    each_row(EMBEDDING, [&](int row) {
      float* state = this->state(row);
      embed(m, b.token_ids[row], state);
      if (b.added)
        for (int i = 0; i < m.hidden; ++i) state[i] += b.added[size_t(row) * m.hidden + i];
      if (m.input_scale != 1.0f)
        for (int i = 0; i < m.hidden; ++i) state[i] *= m.input_scale;
    });
    tap(0);
    if (m.inputs.width) make_inputs();
  }

  // The rotary angles of a row's position. They do not change within a pass.
  void place(int row) {
    const int half = m.rotary_dim / 2, all = m.num_rotaries * half;
    for (int i = 0; i < all; ++i) {
      Turn turn = turned(float(b.positions[row]) * m.inverse_frequencies[i]);
      cosines[size_t(row) * all + i] = turn.cosine * m.rotary_scales[i / half];
      sines[size_t(row) * all + i] = turn.sine * m.rotary_scales[i / half];
    }
  }

  void tap(int number) { tap(number, s.states, m.hidden); }

  void tap(int number, const std::vector<float>& rows, int width) {
    for (int i = 0; i < b.num_taps; ++i)
      if (b.tap_layers[i] == number)
        each_row(HEAD, [&](int row) {
          std::memcpy(b.taps[i] + size_t(row) * width, &rows[size_t(row) * width], sizeof(float) * width);
        });
  }

  // inputs = what every layer is given of each row besides the states, which are the embeddings yet.
  void make_inputs() {
    const Inputs& in = m.inputs;
    const int all = m.num_layers * in.width;
    if (in.projection.panels) {
      load_states({}, in.projection);
      multiply_each(LAYER_INPUTS, in.projection, normed, [&](int row, int unit, const float* tile) {
        std::memcpy(&s.projected[size_t(row) * all + unit * UNIT], tile, sizeof(float) * std::min(UNIT, all - unit * UNIT));
      });
    }
    each_row(LAYER_INPUTS, [&](int row) {
      float *inputs = &s.inputs[size_t(row) * all], *projected = &s.projected[size_t(row) * all];
      if (in.table) {
        widen_row(in.table_kind, in.table, b.token_ids[row], all, inputs);
      } else {
        unpack_row(in.packed_table, b.token_ids[row], inputs);
      }
      for (int i = 0; i < all; ++i) inputs[i] *= in.table_scale;
      if (!in.projection.panels) return;
      for (int i = 0; i < all; ++i) projected[i] *= in.projection_scale;
      for (int i = 0; i < all; i += in.width) rms_norm(projected + i, in.norm, in.width, m.norm_epsilon, projected + i);
      for (int i = 0; i < all; ++i) inputs[i] = (projected[i] + inputs[i]) * in.scale;
    });
    tap(-1, s.inputs, all);
  }

  // Add what a layer makes of its inputs, gated by the states.
  void add_inputs(const Layer& layer, int64_t number) {
    const int width = m.inputs.width;
    load_states({}, layer.input_gate);
    multiply_each(LAYER_INPUTS, layer.input_gate, normed, [&](int row, int unit, const float* tile) {
      alignas(64) float gated[UNIT];
      activate(m.activation, tile, UNIT, gated);
      const int begin = unit * UNIT, size = std::min(UNIT, width - begin);
      const float* inputs = &s.inputs[(size_t(row) * m.num_layers + number) * width + begin];
      float* to = &s.gated[row * row_stride(width) + begin];
      for (int i = 0; i < size; ++i) to[i] = gated[i] * inputs[i];
    });
    add_to_states(LAYER_INPUTS, layer.input_projection, s.gated.data(), layer.input_norm);
  }

  void scale_states(float scale) {
    each_row(NORM, [&](int row) {
      for (int i = 0; i < m.hidden; ++i) state(row)[i] *= scale;
    });
  }

  // normed = the states as `next` reads them.
  void load_states(const Norm& norm, const Linear& next) {
    own_rows(ROUNDING, b.num_rows, [&](int row) {
      normalise(state(row), norm, m.hidden, m.norm_epsilon, normed + row * row_stride(m.hidden));
      lap(NORM);
      prepare_row(next, normed, row);
    });
  }

  // As `multiply`, for all rows, each in its own arithmetic; prepare_row comes first.
  template <typename Take>
  void multiply_each(PassPart part, const Linear& linear, const float* values, Take take) {
    multiply_each(part, linear, values, take, 1, [](int, int) {});
  }

  // `group` and `behind` as in each_group.
  template <typename Take, typename Behind>
  void multiply_each(PassPart part, const Linear& linear, const float* values, Take take, int group, Behind behind) {
    auto each = [&](int unit) {
      for (auto [begin, n] : s.exact_runs) multiply_run(linear, values, begin, n, unit, take);
      if (!b.num_fast) return;
      multiply_unit_in_bfloat16(linear, s.rounded.data(), b.num_fast, unit, s.arranged[rank].data(),
                                [&](int first, int count, const float* tile) {
                                  for (int r = 0; r < count; ++r) take(b.fast_rows[first + r], unit, tile + r * UNIT);
                                });
    };
    each_group(part, linear, group, each, behind);
  }

  // What a row must be before it is multiplied: quantised where the weights are integers, rounded where it is fast.
  void prepare_row(const Linear& linear, const float* values, int row) {
    ready(linear, values, row);
    const int fast = s.fast_of[row];
    if (fast >= 0) round_row(values + row * row_stride(linear.in), linear.in, &s.rounded[fast * line_stride(linear.in)]);
  }

  void prepare(const Linear& linear, const float* values) {
    if (quantises(linear) || linear.change || b.num_fast)
      own_rows(ROUNDING, b.num_rows, [&](int row) { prepare_row(linear, values, row); });
  }

  Entries keys_of(int64_t layer) const { return entries(b.keys[layer], b.key_scales, layer); }
  Entries values_of(int64_t layer) const { return entries(b.values[layer], b.value_scales, layer); }

  Entries entries(void* numbers, float* const *scales, int64_t layer) const {
    return {int32_t(b.entry_type), m.layers[layer].head_dim, b.num_slots, numbers, b.entry_type == ENTRY_INT8 ? scales[layer] : nullptr};
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
    const int dim = layer.head_dim, group = std::lcm(dim, UNIT) / UNIT;  // units that are whole heads
    const size_t width = qkv_width(m, layer);
    auto take = [&](int row, int unit, const float* tile) {
      int begin = unit * UNIT;
      std::memcpy(&s.qkv[row * width + begin], tile, sizeof(float) * std::min(UNIT, layer.qkv.out - begin));
    };
    multiply_each(QKV, layer.qkv, normed, take, group, [&](int first, int end) {
      if (m.whole_norms) return;
      lap(QKV);
      for (int head = first * UNIT / dim; head < std::min(end * UNIT, layer.qkv.out) / dim; ++head)
        for (int row = 0; row < b.num_rows; ++row) rotate_and_store(layer, row, head, keys, values);
      lap(ROTATION);
    });
    if (m.whole_norms) each_row(ROTATION, [&](int row) { rotate_and_store(layer, row, keys, values); });
    attend(layer, keys, values);
  }

  void add_attention(const Layer& layer) { add_to_states(OUTPUT, layer.output, s.attended.data(), layer.attended_norm); }

  // gated = what the MLP makes of the states before its last linear layer; of experts given = what they give.
  void mlp(const Layer& layer) {
    if (!m.num_experts) return gate_states(layer);
    if (layer.down.panels) return mix_beside(layer);
    load_states(layer.mlp_norm, layer.mixture.router);
    route(layer.mixture, b.num_rows);
    visit(layer.mixture, b.num_rows);
  }

  void gate_states(const Layer& layer) {
    const int inner = layer.down.in;
    load_states(layer.mlp_norm, layer.gate_up);
    multiply_each(GATE_UP, layer.gate_up, normed, [&](int row, int unit, const float* tile) {
      alignas(64) float gated[UNIT];
      const int width = gate(tile, gated);
      float* to = &s.gated[row * row_stride(inner) + unit * width];
      std::memcpy(to, gated, sizeof(float) * std::min(width, inner - unit * width));
    });
  }

  // given = the sum of what the MLP and what the experts beside it give, each behind a norm of its own.
  void mix_beside(const Layer& layer) {
    const Mixture& mixture = layer.mixture;
    gate_states(layer);
    prepare(layer.down, s.gated.data());
    multiply_each(DOWN, layer.down, s.gated.data(), [&](int row, int unit, const float* tile) {
      const int begin = unit * UNIT;
      std::memcpy(&s.beside[size_t(row) * m.hidden + begin], tile, sizeof(float) * std::min(UNIT, m.hidden - begin));
    });
    load_states(mixture.router_norm, mixture.router);
    route(mixture, b.num_rows);
    load_states(mixture.input_norm, mixture.router);  // experts take their rows from there
    visit(mixture, b.num_rows);
    each_row(EXPERTS, [&](int row) {
      float *given = this->given + row * row_stride(m.hidden), *beside = &s.beside[size_t(row) * m.hidden];
      normalise(given, mixture.output_norm, m.hidden, m.norm_epsilon, given);
      normalise(beside, mixture.mlp_out_norm, m.hidden, m.norm_epsilon, beside);
      for (int i = 0; i < m.hidden; ++i) given[i] += beside[i];
    });
  }

  void add_mlp(const Layer& layer) {
    if (m.num_experts) return add_normed(layer.mlp_out_norm);
    add_to_states(DOWN, layer.down, s.gated.data(), layer.mlp_out_norm);
  }

  void add_to_states(PassPart part, const Linear& linear, const float* values, const Norm& norm) {
    prepare(linear, values);
    multiply_each(part, linear, values, [&](int row, int unit, const float* tile) {
      const int size = std::min(UNIT, m.hidden - unit * UNIT);
      if (norm.weight) {
        std::memcpy(&given[row * row_stride(m.hidden) + unit * UNIT], tile, sizeof(float) * size);
      } else {
        add(row, unit * UNIT, tile, size);
      }
    });
    if (norm.weight) add_normed(norm);
  }

  // Add what `given` holds, through a norm if there is one.
  void add_normed(const Norm& norm) {
    each_row(NORM, [&](int row) {
      float* added = given + row * row_stride(m.hidden);
      normalise(added, norm, m.hidden, m.norm_epsilon, added);
      add(row, 0, added, m.hidden);
    });
  }

  // Add to some neighbouring numbers of a row's state.
  void add(int row, int begin, const float* values, int size) {
    float* to = state(row) + begin;
    for (int i = 0; i < size; ++i) to[i] += values[i] * m.residual_scale;
  }

  // All heads of a row, behind norms of all heads at once.
  void rotate_and_store(const Layer& layer, int row, const Entries& keys, const Entries& values) {
    const int queries = m.num_heads * layer.head_dim, num_own = layer.projected ? layer.num_kv_heads : 0;
    float* heads = &s.qkv[size_t(row) * qkv_width(m, layer)];
    rms_norm(heads, layer.query_norm, queries, m.norm_epsilon, heads);
    if (num_own) rms_norm(heads + queries, layer.key_norm, num_own * layer.head_dim, m.norm_epsilon, heads + queries);
    for (int head = 0; head < layer.qkv.out / layer.head_dim; ++head) rotate_and_store(layer, row, head, keys, values);
  }

  // One of the heads that a row's products are: queries first, then keys, then values.
  void rotate_and_store(const Layer& layer, int row, int number, const Entries& keys, const Entries& values) {
    const int dim = layer.head_dim, kv_head = number - m.num_heads;
    float* head = &s.qkv[size_t(row) * qkv_width(m, layer) + size_t(number) * dim];
    if (kv_head >= layer.num_kv_heads) return store_value(layer, row, kv_head - layer.num_kv_heads, head, values);
    if (kv_head >= 0 && layer.projected == 1) {
      float* value = head + size_t(layer.num_kv_heads) * dim;
      std::memcpy(value, head, sizeof(float) * dim);
      store_value(layer, row, kv_head, value, values);
    }
    const float* norm = kv_head < 0 ? layer.query_norm : layer.key_norm;
    if (norm && !m.whole_norms) rms_norm(head, norm, dim, m.norm_epsilon, head);
    if (layer.rotary >= 0) rotate(head, layer.rotary_dim, row, int(layer.rotary));
    if (kv_head >= 0) keys.write(kv_head, b.slots[row], head);
  }

  void store_value(const Layer& layer, int row, int kv_head, float* value, const Entries& values) {
    if (layer.norms_values) bare_norm(value, layer.head_dim, m.norm_epsilon);
    values.write(kv_head, b.slots[row], value);
  }

  void rotate(float* head, int width, int row, int rotary) {
    const int half = width / 2;
    const size_t place = (size_t(row) * m.num_rotaries + rotary) * (m.rotary_dim / 2);
    const float *cosines = this->cosines + place, *sines = this->sines + place;
    for (int i = 0; i < half; ++i) {
      float low = head[i], high = head[i + half];
      head[i] = low * cosines[i] - high * sines[i];
      head[i + half] = high * cosines[i] + low * sines[i];
    }
  }

  void attend(const Layer& layer, const Entries& keys, const Entries& values) {
    const Attention attention{*s.plan_of(layer), s.sight, keys, values, m.num_heads, layer.num_kv_heads,
                              m.attention_scale, m.score_cap, layer.sinks, layer.reach, s.qkv.data(),
                              size_t(qkv_width(m, layer)), s.attended.data(), row_stride(m.num_heads * layer.head_dim)};
    attention.run(rank, [&](int count, auto work) { share(ATTENTION, count, work); });
  }

  // Whether the best tokens are looked for among rounded logits first.
  bool rounds_head() const { return b.best && m.rounded_head.linear.panels; }

  size_t head_row_bytes() const { return quantised_bytes(m.rounded_head.linear); }

  // This thread's copy of the rows that the rounded head multiplies.
  uint8_t* head_rows() { return s.head_rows.data() + (s.copies > 1 ? rank * b.num_logit_rows * head_row_bytes() : 0); }

  // normed = what the output layer reads of the rows whose logits are wanted.
  void select() {
    own_rows(ROUNDING, b.num_logit_rows, [&](int i) {
      normalise(state(int(b.logit_rows[i])), m.final_norm, m.hidden, m.norm_epsilon, normed + i * row_stride(m.hidden));
      lap(NORM);
      if (rounds_head()) {
        quantise(m.rounded_head.linear, normed + i * row_stride(m.hidden), head_rows() + i * head_row_bytes());
      } else {
        ready(m.head, normed, i);
      }
    });
  }

  // The logits [UNIT] that products are, in `changed` where they are not the products themselves.
  const float* logits_of(const float* products, float* changed) const {
    if (m.logit_divisor == 1.0f && !m.logit_cap) return products;
    for (int i = 0; i < UNIT; i += LANES) {
      const floats divided = load(products + i) / m.logit_divisor;
      store(changed + i, m.logit_cap ? capped(divided, m.logit_cap) : divided);
    }
    return changed;
  }

  void write_logits(int row, int unit, const float* tile) {
    alignas(64) float changed[UNIT];
    float* to = b.logits + size_t(row) * m.vocab + unit * UNIT;
    std::memcpy(to, logits_of(tile, changed), sizeof(float) * std::min(UNIT, m.vocab - unit * UNIT));
  }

  void find_best() {
    if (!b.num_logit_rows) return;
    BestToken* own = &s.best[size_t(rank) * b.num_logit_rows];
    if (rounds_head()) {
      bound_logits(own);
    } else {
      multiply(HEAD, m.head, normed, b.num_logit_rows, [&](int row, int unit, const float* tile) {
        alignas(64) float changed[UNIT];
        const int first = unit * UNIT, size = std::min(UNIT, m.vocab - first);
        if (!own[row].has_begun) own[row].begin();
        own[row].take(logits_of(tile, changed), first, size);
      });
    }
    share(HEAD, b.num_logit_rows, [&](int row) { b.best[row] = best_of(row); });
    if (std::all_of(b.best, b.best + b.num_logit_rows, [](int64_t token) { return token >= 0; })) return;
    each_unit(HEAD, m.head, [&](int unit) {
      for (int row = 0; row < b.num_logit_rows; ++row)
        if (b.best[row] < 0)
          multiply_run(m.head, normed, row, 1, unit, [&](int, int, const float* tile) { write_logits(row, unit, tile); });
    });
  }

  // What the logits are at least and at most, by the rounded head.
  void bound_logits(BestToken* own) {
    const RoundedHead& head = m.rounded_head;
    const Rows rows{normed, row_stride(m.hidden), head_rows(), nullptr};
    each_unit(HEAD, head.linear, [&](int unit) {
      multiply_unit(head.linear, rows, b.num_logit_rows, unit, [&](int first, int count, const float* tile) {
        for (int r = 0; r < count; ++r) {
          const int row = first + r, token = unit * UNIT;
          if (!own[row].has_begun)
            own[row].begin_rounded(head.linear, normed + row * row_stride(m.hidden), head_rows() + row * head_row_bytes());
          own[row].bound(head, tile + r * UNIT, token, std::min(UNIT, m.vocab - token));
        }
      });
    });
  }

  // Of what all threads have found; -1 where it is not known.
  int64_t best_of(int row) {
    BestToken found;
    found.begin();
    float least = -INFINITY, dropped = -INFINITY;
    auto each = [&](auto act) {
      for (int i = 0; i < team.size(); ++i) {
        const BestToken& theirs = s.best[size_t(i) * b.num_logit_rows + row];
        if (theirs.has_begun) act(theirs);
      }
    };
    each([&](const BestToken& theirs) {
      found.is_known = found.is_known && theirs.is_known;
      least = std::max(least, theirs.value), dropped = std::max(dropped, theirs.dropped);
    });
    if (!found.is_known || (rounds_head() && !(dropped < least && least < INFINITY))) return -1;
    each([&](const BestToken& theirs) {
      if (!rounds_head()) return found.take(theirs.value, theirs.token);
      for (int i = 0; i < theirs.count; ++i)
        if (!(theirs.most[i] < least))
          found.take(multiply_output(m.head, normed + row * row_stride(m.hidden), theirs.candidates[i]), theirs.candidates[i]);
    });
    return found.is_known && found.token != INT_MAX ? found.token : -1;
  }

  void head() {
    select();
    if (b.best) {
      find_best();
    } else {
      multiply(HEAD, m.head, normed, b.num_logit_rows, [&](int row, int unit, const float* tile) { write_logits(row, unit, tile); });
    }
    for (int i = 0; i < b.num_taps; ++i)
      if (b.tap_layers[i] == m.num_layers)
        each_row(HEAD, [&](int row) {
          normalise(state(row), m.final_norm, m.hidden, m.norm_epsilon, b.taps[i] + size_t(row) * m.hidden);
        });
  }
};
