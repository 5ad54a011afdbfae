// A model and the rows of a pass, as the kernels read them: mirrored by structs.py.
#pragma once

#include "linear.h"

// Rows over their root mean square; `centred`: less their mean, over their standard deviation.
struct Norm {
  const float *weight, *bias;  // [width]; no weight: rows stay as they are; no bias: none is added
  int64_t centred;
};

// Experts in an MLP's place: each row is sent to some, and what they make of it is added up by its shares.
struct Mixture {
  Linear router;          // [experts] numbers a row, never quantised
  const Linear* gate_up;  // [experts], all of one kind and shape, each as a layer's
  const Linear* down;     // [experts], likewise
  const float* scales;    // [experts] or null: what a row's share of an expert is multiplied with
  // Where experts stand beside an MLP, the norms of what router and experts read, and of what MLP and experts give; else both
  // read what the MLP would.
  Norm router_norm, input_norm, mlp_out_norm, output_norm;
};

// What a layer is given of a token besides the states: a row of a table, and what a projection makes of the embedding.
struct Inputs {
  int32_t width, table_kind;  // of each layer's inputs, 0: there are none; a kind of floating-point weight
  float table_scale, projection_scale, scale;
  const void* table;  // [tokens, layers * width], or null: it is packed
  Linear packed_table;
  Linear projection;  // [layers * width]; without panels: the table's rows are the inputs
  const float* norm;  // [width], of each layer's part of the projection
};

struct Layer {
  Norm attention_norm, mlp_norm;          // of what attention and MLP read
  Norm attended_norm, mlp_out_norm;       // of what they add to the states
  const float *query_norm, *key_norm;     // [head_dim], or with whole_norms [all heads' width], or null
  Linear qkv;  // queries, keys and values of all heads, one behind the other; see `projected`
  Linear output;
  Linear gate_up;  // gate and up in alternating panels; up alone where there is no gate
  Linear down;
  Mixture mixture;     // where the model has experts, in place of the two, or beside them
  Linear input_gate, input_projection;  // of the layer's inputs, the gate as wide as they are; without panels: there are none
  Norm input_norm;                      // of what they add to the states
  const float* sinks;  // [heads] or null: a score a head beside those of entries, which carries no value
  int64_t reach;  // positions that a row sees; 0: all; -C: those since the last multiple of C
  int64_t rotary;          // the number of its frequencies; -1: positions do not count
  int32_t num_kv_heads, head_dim, rotary_dim;
  int32_t projected;  // 2: keys and values; 1: keys, which are the values too before norms and rotation; 0: neither, as it
                      // reads the entries of an earlier layer
  int32_t norms_values;  // whether values are divided by their root mean square
  float scale;        // of the states behind the layer
};

// The output layer's weights in groups of 8 bits, and how far that is from them; see best_token.h.
struct RoundedHead {
  Linear linear;
  const float* errors;  // [padded out]: the norm of what rounding added to an output's weights; infinite for padding
  const float* norms;   // [padded out]: of an output's weights, or of the rounded ones where it is larger
};

struct Model {
  int32_t num_layers, hidden, num_heads, vocab;
  int32_t num_rotaries, rotary_dim;  // of the layer that rotates most of its heads
  int32_t activation;   // of the MLP
  int32_t gated;        // whether the MLP has a gate
  int32_t parallel;     // whether the MLP reads the states that attention read
  int32_t whole_norms;  // whether the norms of queries and keys are of all heads at once
  int32_t embedding_kind;
  int32_t num_experts, num_chosen;  // of each layer, and of each row; 0: there are none
  int32_t whole_shares;             // whether a row's shares add up to 1
  float norm_epsilon, attention_scale;
  float score_cap, logit_cap;    // 0: none
  float residual_scale;          // of what attention and MLP add to the states
  float embedding_scale;         // of the embeddings as they are read
  float input_scale;             // of the embeddings as the first layer reads them, besides
  float logit_divisor;
  float gate_limit, gate_slope;  // of CLAMPED_SILU
  const float* inverse_frequencies;  // [num_rotaries, rotary_dim / 2], of which a layer takes its first ones
  const float* rotary_scales;        // [num_rotaries]
  const void* embedding;             // [vocab, hidden] of a kind of floating-point weight, or null: it is packed
  Norm final_norm;
  Linear head;
  RoundedHead rounded_head;  // of an output layer in 16 or 32 bits; without panels where there is none
  Linear table;  // an embedding that is packed beside the head; without panels where there is none
  Inputs inputs;
  const Layer* layers;
};

struct Batch {
  int32_t num_rows, num_logit_rows, num_taps, num_layers;
  const int64_t *token_ids, *positions, *slots;             // [rows]
  const int64_t *run_begin, *run_length, *tail_begin;       // [rows], [rows], [rows + 1]
  const int64_t *tail_slots, *tail_positions;               // [tail_begin[rows]]
  const int64_t* logit_rows;                                // [num_logit_rows]
  void* const *keys;                                        // [layers] of [kv_heads, num_slots, head_dim], some are the same
  void* const *values;
  const int64_t* tap_layers;  // [num_taps]: 0 is the embedding, the last one comes after the final norm; -1: the inputs
  float* const *taps;         // [num_taps] of [rows, hidden], of inputs [rows, layers * width]
  float* logits;              // [num_logit_rows, vocab]
  const int64_t* layers;      // [num_layers]: those that the pass runs, ascending
  int64_t num_slots, entry_type;
  float* const *key_scales;  // [layers] of [kv_heads, num_slots], for int8
  float* const *value_scales;
  int64_t num_fast;          // rows that the arithmetic of bfloat16.h computes, which a model of 16-bit weights may have
  const int64_t* fast_rows;  // [num_fast], ascending
  const int64_t *shared_begin, *shared_length;  // [rows], or null: see Rows in models/rows.py
  const float* added;  // [rows, hidden], or null: what is added to the embeddings
  int64_t* best;       // [num_logit_rows], or null: the tokens with the highest logits are wanted, and no logits; -1 where
                       // that is not known, and the row's logits are written
};
