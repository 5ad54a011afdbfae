// Room for the rows of a pass, and the threads that compute its operations.
//
// All matrices are row-major float32.
#pragma once

#include "attention.h"
#include "best_token.h"
#include "bfloat16.h"
#include "mixture.h"
#include "part_times.h"
#include "team.h"

// Rows that lie a multiple of 4 KiB apart would all fall into the same few places of the nearest cache: keep them an odd
// number of cache lines apart.
inline size_t row_stride(int width) { return ((width + 15) / 16 | 1) * size_t(16); }

// The largest of what `of` finds in the linear layers of a pass, those without weights left out; of experts in the first
// one's.
template <typename Of>
inline int largest(const Model& m, Of of) {
  int most = 0;
  auto look = [&](const Linear& linear) {
    if (linear.panels) most = std::max(most, int(of(linear)));
  };
  look(m.head);
  look(m.inputs.projection);
  for (const Layer* layer = m.layers; layer != m.layers + m.num_layers; ++layer) {
    for (const Linear* each : {&layer->qkv, &layer->output, &layer->gate_up, &layer->down, &layer->input_gate, &layer->input_projection})
      look(*each);
    if (!m.num_experts) continue;
    look(layer->mixture.gate_up[0]);
    look(layer->mixture.down[0]);
  }
  return most;
}

// Whether a pass rounds its rows to 8 bits.
inline bool quantises(const Model& m) {
  return largest(m, [](const Linear& linear) { return quantises(linear); });
}

// The most numbers that a row is lowered to.
inline int largest_rank(const Model& m) {
  return largest(m, [](const Linear& linear) { return linear.change ? linear.change->rank : 0; });
}

// Numbers of a row's queries, keys and values.
inline int qkv_width(const Model& m, const Layer& layer) { return (m.num_heads + 2 * layer.num_kv_heads) * layer.head_dim; }

// The widest rows of a kind among a model's layers.
struct Widths {
  int qkv = 0, attended = 0, inner = 0, of_expert = 0, inputs;

  explicit Widths(const Model& m) : inputs(m.inputs.width) {
    for (const Layer* layer = m.layers; layer != m.layers + m.num_layers; ++layer) {
      qkv = std::max(qkv, qkv_width(m, *layer));
      attended = std::max(attended, m.num_heads * layer->head_dim);
      if (layer->down.panels) inner = std::max(inner, layer->down.in);
      if (m.num_experts) of_expert = std::max(of_expert, layer->mixture.down[0].in);
    }
  }

  int widest() const { return std::max({attended, inner, of_expert, inputs}); }
};

// Room for the rows of a pass between its operations; grows to the largest pass. All of it is had before the threads
// start, none of which may fail.
//
// Of few rows each thread makes what its products read in a copy of its own, all rows: it is done before the others would
// have heard of it. A thread that comes late finds no products left to compute, so it does no harm that it reads what
// others already write.
struct Scratch {
  std::vector<float> normed, cosines, sines;  // [copies, rows, ...]; of `normed` one more, that all share
  std::vector<float> lowered;                             // likewise: by changes of low rank
  std::vector<uint8_t> quantised;                         // likewise
  std::vector<float> states, qkv, attended, gated;
  std::vector<float> beside;             // what an MLP gives beside experts
  std::vector<float> inputs, projected;  // of all layers: [rows, layers * width]
  std::vector<float> visiting;  // rows at the experts: what they read, then what they give
  std::vector<TileLine> rounded;                // of the fast rows
  std::vector<std::vector<TileLine>> arranged;  // of each thread
  std::vector<int> fast_of;                     // [rows]: which of the fast rows it is, or -1
  std::vector<std::pair<int, int>> exact_runs;  // first row and number of neighbouring rows that are not fast
  Sight sight;
  std::vector<AttentionPlan> attention;  // one for each shape of a layer's heads
  Routing routing;
  std::vector<BestToken> best;   // [threads, rows whose logits are wanted], where the tokens alone are
  std::vector<uint8_t> head_rows;  // those rows, as a rounded head multiplies them; [copies, ...]
  std::vector<PartTimes> times;  // of each thread; none: nobody asks
  int copies = 1;
  struct {
    size_t normed, angles, lowered, quantised;
  } of_copy;  // how much each holds

  // `rounds`: whether rows are rounded to 8 bits. `input` is the width of the widest rows that `normed` must hold, where
  // that is more than the hidden states'.
  void reserve(const Model& m, size_t rows, bool rounds, int input = 0, int num_copies = 1) {
    const Widths widths(m);
    const int widest = std::max({m.hidden, widths.widest(), input});
    copies = num_copies;
    make_room(qkv, rows * widths.qkv);
    make_room(attended, rows * row_stride(widths.attended));
    const size_t visits = m.num_experts ? rows * m.num_chosen : rows;
    const size_t of_mlp = rows * row_stride(std::max(widths.inner, widths.inputs));
    make_room(gated, m.num_experts ? std::max(of_mlp, visits * row_stride(widths.of_expert)) : of_mlp);
    make_room(visiting, m.num_experts ? visits * row_stride(m.hidden) : 0);
    make_room(beside, m.num_experts && widths.inner ? rows * m.hidden : 0);
    for (auto* each : {&inputs, &projected}) make_room(*each, rows * m.num_layers * widths.inputs);
    routing.reserve(m, rows);
    of_copy = {rows * row_stride(std::max(m.hidden, input)),
               rows * m.num_rotaries * m.rotary_dim / 2,
               rows * largest_rank(m),
               rounds ? visits * most_quantised_bytes(widest) : 0};
    make_room(states, rows * m.hidden);
    make_room(normed, (copies > 1 ? copies + 1 : 1) * of_copy.normed);
    make_room(cosines, copies * of_copy.angles);
    make_room(sines, copies * of_copy.angles);
    make_room(lowered, copies * of_copy.lowered);
    make_room(quantised, copies * of_copy.quantised);
  }

  // For passes of which the best tokens alone are wanted; behind `reserve`.
  void begin_best(const Model& m, size_t rows, int threads) {
    make_room(best, rows * threads);
    for (BestToken& each : best) each.has_begun = false;
    make_room(head_rows, copies * rows * quantised_bytes(m.rounded_head.linear));
  }

  // Divide the rows by the arithmetic that computes them.
  void divide(const Model& m, const Batch& b, int threads) {
    make_room(fast_of, b.num_rows);
    std::fill_n(fast_of.begin(), b.num_rows, -1);
    for (int i = 0; i < b.num_fast; ++i) fast_of[b.fast_rows[i]] = i;
    exact_runs.clear();
    exact_runs.reserve(b.num_rows);
    for (int row = 0; row < b.num_rows; ++row) {
      if (fast_of[row] >= 0) continue;
      if (row == 0 || fast_of[row - 1] >= 0) exact_runs.push_back({row, 0});
      ++exact_runs.back().second;
    }
    if (!b.num_fast) return;
    const int widest = std::max(m.hidden, Widths(m).widest());
    make_room(rounded, b.num_fast * line_stride(widest));
    if (arranged.size() < size_t(threads)) arranged.resize(threads);
    for (auto& room : arranged) make_room(room, arranged_lines(widest));
  }

  void plan_attention(const Model& m, const Batch& b, int threads) {
    sight = {b.positions, b.run_begin, b.run_length, b.tail_begin,   b.tail_slots,
             b.tail_positions, b.shared_begin, b.shared_length};
    for (AttentionPlan& plan : attention) plan.is_made = false;
    for (const Layer* layer = m.layers; layer != m.layers + m.num_layers; ++layer) {
      AttentionPlan* plan = plan_of(*layer);
      if (!plan) plan = &attention.emplace_back(layer->num_kv_heads, layer->head_dim);
      if (!plan->is_made) plan->make(sight, b.num_rows, m.num_heads, threads);
    }
  }

  AttentionPlan* plan_of(const Layer& layer) {
    for (AttentionPlan& plan : attention)
      if (plan.num_kv_heads == layer.num_kv_heads && plan.dim == layer.head_dim) return &plan;
    return nullptr;
  }

  // The most operations of a layer's attention.
  int attention_operations() const {
    int most = 1;
    for (const AttentionPlan& plan : attention)
      if (plan.is_made) most = std::max(most, plan.num_operations());
    return most;
  }

  size_t num_bytes() const {
    size_t total = bytes_of(quantised) + bytes_of(rounded) + bytes_of(fast_of) + bytes_of(exact_runs) + bytes_of(best) +
                   bytes_of(head_rows) + routing.num_bytes();
    for (const AttentionPlan& plan : attention) total += plan.num_bytes();
    for (const auto& room : arranged) total += bytes_of(room);
    for (auto* rows : {&states, &normed, &qkv, &attended, &gated, &cosines, &sines, &visiting, &lowered, &beside,
                       &inputs, &projected})
      total += bytes_of(*rows);
    return total;
  }
};

// What every pass is made of: operations whose parts the threads share out.
class Worker {
 protected:
  Scratch& s;
  Team& team;
  const int rank;
  int operation = 0;
  float* const given;  // the rows of `normed` that all threads share
  // This thread's copies.
  float *const normed, *const cosines, *const sines, *const lowered;
  uint8_t* const quantised;
  PartTimes* const times;
  int current = 0;  // the layer that `times` is told of

  Worker(Scratch& scratch, Team& team, int rank)
      : s(scratch),
        team(team),
        rank(rank),
        given(s.normed.data() + (s.copies > 1 ? s.copies * s.of_copy.normed : 0)),
        normed(own(s.normed, s.of_copy.normed)),
        cosines(own(s.cosines, s.of_copy.angles)),
        sines(own(s.sines, s.of_copy.angles)),
        lowered(own(s.lowered, s.of_copy.lowered)),
        quantised(own(s.quantised, s.of_copy.quantised)),
        times(s.times.empty() ? nullptr : &s.times[rank]) {
    if (times) times->start();
  }

  // What has passed since the last lap was `part`'s.
  void lap(PassPart part, bool waited = false) {
    if (times) times->add(current, part, waited);
  }

  template <typename Work>
  void share(PassPart part, int num_parts, Work work) {
    team.work(operation, num_parts, work);
    lap(part);
    team.wait(operation++, num_parts);
    lap(part, true);
  }

  // `work(row)` for what the products of the very next operation read: of every row by each thread where it has a copy of its
  // own.
  template <typename Work>
  void own_rows(PassPart part, int num_rows, Work work) {
    if (s.copies == 1) return share(part, num_rows, work);
    for (int row = 0; row < num_rows; ++row) work(row);
    lap(part);
  }

  // `each(unit)` for every unit of the outputs; `behind(first unit, end)` behind each `group` neighbouring ones, which one
  // thread computes.
  template <typename Each, typename Behind>
  void each_group(PassPart part, const Linear& linear, int group, Each each, Behind behind) {
    const int units = num_units(linear.out), groups = (units + group - 1) / group, parts = std::min(groups, 8 * team.size());
    share(part, parts, [&](int number) {
      for (int i = groups * number / parts; i < groups * (number + 1) / parts; ++i) {
        const int first = i * group, end = std::min(first + group, units);
        for (int unit = first; unit < end; ++unit) each(unit);
        behind(first, end);
      }
    });
  }

  template <typename Each>
  void each_unit(PassPart part, const Linear& linear, Each each) {
    each_group(part, linear, 1, each, [](int, int) {});
  }

  // out [n, width] = rows times the layer's weight, each row of a unit handed to `take(row, unit, outputs)`.
  template <typename Take>
  void multiply(PassPart part, const Linear& linear, const float* values, int n, Take take) {
    each_unit(part, linear, [&](int unit) { multiply_run(linear, values, 0, n, unit, take); });
  }

  template <typename Take>
  void multiply_run(const Linear& linear, const float* values, int begin, int n, int unit, Take take) {
    const size_t stride = row_stride(linear.in);
    const bool rounds = quantises(linear);  // else there is no room for such rows
    Rows rows{values + begin * stride, stride, rounds ? quantised + begin * quantised_bytes(linear) : nullptr,
              linear.change ? lowered + size_t(begin) * linear.change->rank : nullptr};
    multiply_unit(linear, rows, n, unit, [&](int first, int count, const float* tile) {
      for (int r = 0; r < count; ++r) take(begin + first + r, unit, tile + r * UNIT);
    });
  }

  // Make one row ready for `next`: where the weights are integers, the row must be quantised first, and lowered where
  // something is added to their products.
  void ready(const Linear& next, const float* values, int row) {
    const float* from = values + row * row_stride(next.in);
    if (quantises(next)) quantise(next, from, quantised + row * quantised_bytes(next));
    if (next.change) lower(*next.change, from, &lowered[size_t(row) * next.change->rank]);
  }

 private:
  template <typename Number>
  Number* own(std::vector<Number>& copies, size_t each) {
    return copies.data() + (s.copies > 1 ? rank * each : 0);
  }
};
