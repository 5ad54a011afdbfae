// States of recurrent layers along the walk of a pass; see walk.py.
//
// A column of a matrix, or a channel of a convolution, has nothing to do with the others. So the columns are cut into
// blocks, each of which goes all steps of a sequence while it stays in the nearest cache; and how they are cut changes no
// bit. Sums over the rows of a matrix are four, of every fourth row, each a chain of fused multiply-adds.
#pragma once

#include <memory>
#include <vector>

#include "team.h"
#include "vectors.h"

struct Walk {
  int32_t num_steps, num_sequences, num_buffers, unused;
  const int64_t* first_steps;  // [sequences + 1]
  const int64_t* slots;        // [sequences]
  const int64_t* sources;      // [steps]: the buffer of the state before it; 0 is the state in the sequence's slot
  const int64_t* targets;      // [steps]: that of the state behind it
  const int64_t* copies;       // [steps]: the slot that a copy of it goes to, or -1
};

// state = decay * state + key x update, output = query . state; the update is the value, or with `beta` what the decayed
// state lacks of it for this key, times beta.
struct OuterProducts {
  int32_t heads, key_heads, key_dim, value_dim;
  const float *query, *key;  // [steps, key_heads, key_dim]
  const float* value;        // [steps, heads, value_dim]
  const float* decay;        // [steps, heads, decay_rows, decay_columns]
  const float* beta;         // [steps, heads], or null
  const float* rates;        // [heads, key_dim, value_dim], or null: the decays are exp(rates * decay)
  float* output;             // [steps, heads, value_dim]
  float* states;             // [slots, heads, key_dim, value_dim], the slots so far apart:
  int64_t slot_stride;
  int32_t decay_rows, decay_columns;  // key_dim or 1, value_dim or 1
};

// Each channel by itself. What the steps read are rows of `inputs`, and behind those of all steps the sequences' windows.
struct Convolution {
  int32_t channels, taps;
  const float* inputs;   // [steps, channels]
  const float* weight;   // [channels, taps]
  const float* bias;     // [channels], or null
  float* output;         // [steps, channels]
  float* windows;        // [slots, taps - 1, channels], the slots so far apart:
  int64_t slot_stride;
  const int64_t* read;   // [steps, taps], a step's own input last
  const int64_t *kept_steps, *kept_slots;  // the windows that are written: behind which step, to which slot; copies first
  int64_t num_kept;
};

// One float, or a register of them.
template <typename V>
inline V read(const float* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <typename V>
inline V spread(float value) {
  return value - V{};
}

inline float fused(float a, float b, float c) { return std::fma(a, b, c); }

constexpr int REGISTERS = LANES < 8 ? 4 : 2;
constexpr int COLUMNS = REGISTERS * LANES;  // of a block: one or two cache lines
constexpr int CHANNELS = 64;                // of a part of a convolution

struct alignas(64) StateLine {
  float numbers[16];
};

// Some columns of a state of one head.
struct StateColumns {
  float* first;
  size_t stride;  // between rows

  float* row(int i) const { return first + i * stride; }
};

enum Decays { OF_ROWS, OF_NUMBERS, BY_RATES };

// What one head's state gets in one step. `value` and `output` begin with the columns, and so do decays of numbers.
struct HeadStep {
  int key_dim;
  size_t decay_stride, rate_stride;  // between rows
  const float *query, *key, *value, *decay, *rates, *beta;
  float* output;

  // N neighbours of the columns, from `column` on.
  template <Decays DECAYS, typename V, int N>
  void take(const StateColumns& from, const StateColumns& to, int column) const {
    constexpr int WIDTH = sizeof(V) / sizeof(float);
    auto decay_of = [&](int i, int at) {
      if constexpr (DECAYS == OF_ROWS) return spread<V>(decay[i * decay_stride]);
      const V own = read<V>(decay + i * decay_stride + at);
      if constexpr (DECAYS == BY_RATES) return exp_of_negative(read<V>(rates + i * rate_stride + at) * own);
      return own;
    };
    auto decayed = [&](int i, int n) {
      const int at = column + n * WIDTH;
      return read<V>(from.row(i) + at) * decay_of(i, at);
    };
    V update[N], said[N];
    for (int n = 0; n < N; ++n) update[n] = read<V>(value + column + n * WIDTH);
    if (beta) {
      sum_rows<V, N>(said, [&](int i, V* sums) {
        for (int n = 0; n < N; ++n) sums[n] = fused(decayed(i, n), spread<V>(key[i]), sums[n]);
      });
      for (int n = 0; n < N; ++n) update[n] = (update[n] - said[n]) * spread<V>(*beta);
    }
    sum_rows<V, N>(said, [&](int i, V* sums) {
      for (int n = 0; n < N; ++n) {
        const V state = fused(spread<V>(key[i]), update[n], decayed(i, n));
        std::memcpy(to.row(i) + column + n * WIDTH, &state, sizeof state);
        sums[n] = fused(state, spread<V>(query[i]), sums[n]);
      }
    });
    for (int n = 0; n < N; ++n) std::memcpy(output + column + n * WIDTH, &said[n], sizeof(V));
  }

 private:
  // The sums of what `add` adds for each row.
  template <typename V, int N, typename Add>
  void sum_rows(V* totals, Add add) const {
    V sums[4][N] = {};
    int i = 0;
    for (; i + 4 <= key_dim; i += 4)
      for (int k = 0; k < 4; ++k) add(i + k, sums[k]);
    for (int k = 0; i < key_dim; ++i, ++k) add(i, sums[k]);
    for (int n = 0; n < N; ++n) totals[n] = (sums[0][n] + sums[2][n]) + (sums[1][n] + sums[3][n]);
  }
};

class OuterProductsPass {
 public:
  OuterProductsPass(const Walk& walk, const OuterProducts& products, int threads)
      : w(walk), p(products), blocks_((p.value_dim + COLUMNS - 1) / COLUMNS),
        whole_heads_(size_t(w.num_sequences) * p.heads >= size_t(4) * threads),
        lines_(size_t(std::max(w.num_buffers - 1, 0)) * p.key_dim * COLUMNS / 16 + 1), room_(new StateLine[threads * lines_]) {}

  int num_parts() const { return w.num_sequences * p.heads * (whole_heads_ ? 1 : blocks_); }

  void run(int part, int rank) {
    const int blocks = whole_heads_ ? blocks_ : 1, first = part % (blocks_ / blocks), head = part / (blocks_ / blocks);
    for (int block = first; block < first + blocks; ++block)
      go(head / p.heads, head % p.heads, block * COLUMNS, room_[rank * lines_].numbers);
  }

 private:
  void go(int sequence, int head, int column, float* room) {
    const size_t matrix = size_t(p.key_dim) * p.value_dim, stride = p.value_dim;
    auto in_slot = [&](int64_t slot) { return StateColumns{p.states + slot * p.slot_stride + head * matrix + column, stride}; };
    auto buffer = [&](int64_t number) {
      if (number == 0) return in_slot(w.slots[sequence]);
      return StateColumns{room + (number - 1) * size_t(p.key_dim) * COLUMNS, COLUMNS};
    };
    const int width = std::min(COLUMNS, p.value_dim - column), key_head = head / (p.heads / p.key_heads);
    for (int64_t step = w.first_steps[sequence]; step < w.first_steps[sequence + 1]; ++step) {
      const size_t of_head = step * p.heads + head, of_keys = (step * p.key_heads + key_head) * p.key_dim;
      const size_t of_values = of_head * p.value_dim + column, of_decays = of_head * p.decay_rows * p.decay_columns;
      const HeadStep taken{p.key_dim, size_t(p.decay_rows > 1 ? p.decay_columns : 0), stride, p.query + of_keys, p.key + of_keys,
                           p.value + of_values, p.decay + of_decays + (p.decay_columns > 1 ? column : 0),
                           p.rates ? p.rates + head * matrix + column : nullptr, p.beta ? p.beta + of_head : nullptr,
                           p.output + of_values};
      const StateColumns from = buffer(w.sources[step]), to = buffer(w.targets[step]);
      if (p.rates) take<BY_RATES>(taken, from, to, width);
      else if (p.decay_columns > 1) take<OF_NUMBERS>(taken, from, to, width);
      else take<OF_ROWS>(taken, from, to, width);
      if (w.copies[step] < 0) continue;
      const StateColumns copy = in_slot(w.copies[step]);
      for (int i = 0; i < p.key_dim; ++i) std::memcpy(copy.row(i), to.row(i), sizeof(float) * width);
    }
  }

  template <Decays DECAYS>
  static void take(const HeadStep& step, const StateColumns& from, const StateColumns& to, int width) {
    int done = 0;
    if (width == COLUMNS) step.take<DECAYS, floats, REGISTERS>(from, to, 0), done = COLUMNS;
    for (; done + LANES <= width; done += LANES) step.take<DECAYS, floats, 1>(from, to, done);
    for (; done < width; ++done) step.take<DECAYS, float, 1>(from, to, done);
  }

  const Walk& w;
  const OuterProducts& p;
  const int blocks_;
  const bool whole_heads_;  // whether a part is a head: there are enough of them
  const size_t lines_;      // of each thread
  std::unique_ptr<StateLine[]> room_;
};

class ConvolutionPass {
 public:
  ConvolutionPass(const Walk& walk, const Convolution& convolution, int threads)
      : w(walk), c(convolution), rows_(size_t(w.num_steps) * c.taps), room_(size_t(threads) * c.taps * CHANNELS) {
    const int64_t window = c.taps - 1;
    for (size_t i = 0; i < rows_.size(); ++i) {
      const int64_t row = c.read[i], before = row - w.num_steps;
      rows_[i] = before < 0 ? c.inputs + row * c.channels
                            : c.windows + w.slots[before / window] * c.slot_stride + before % window * c.channels;
    }
  }

  int num_parts() const { return (c.channels + CHANNELS - 1) / CHANNELS; }

  void run(int part, int rank) {
    const int first = part * CHANNELS, width = std::min(CHANNELS, c.channels - first);
    float* weight = &room_[size_t(rank) * c.taps * CHANNELS];  // [taps, channels]
    for (int channel = 0; channel < width; ++channel)
      for (int tap = 0; tap < c.taps; ++tap) weight[tap * CHANNELS + channel] = c.weight[size_t(first + channel) * c.taps + tap];
    for (int step = 0; step < w.num_steps; ++step) {
      int done = 0;
      for (; done + LANES <= width; done += LANES) take<floats>(step, first + done, weight + done);
      for (; done < width; ++done) take<float>(step, first + done, weight + done);
    }
    // In place, each row behind those that move into its place: nothing is read after it was written.
    for (int64_t i = 0; i < c.num_kept; ++i)
      for (int place = 0; place < c.taps - 1; ++place)
        std::memcpy(c.windows + c.kept_slots[i] * c.slot_stride + size_t(place) * c.channels + first,
                    rows_[c.kept_steps[i] * c.taps + place + 1] + first, sizeof(float) * width);
  }

 private:
  template <typename V>
  void take(int step, int channel, const float* weight) {
    V sum = c.bias ? read<V>(c.bias + channel) : V{};
    for (int tap = 0; tap < c.taps; ++tap)
      sum = fused(read<V>(rows_[size_t(step) * c.taps + tap] + channel), read<V>(weight + tap * CHANNELS), sum);
    std::memcpy(c.output + size_t(step) * c.channels + channel, &sum, sizeof sum);
  }

  const Walk& w;
  const Convolution& c;
  std::vector<const float*> rows_;  // [steps, taps]
  std::vector<float> room_;
};
