// The CPU kernels over odd shapes, for a build with sanitizers: no access outside a buffer, no undefined behaviour, and
// the same bits for a row in any company. Buffers are exactly as large as the kernels are promised, and cache entries
// that nobody wrote are NaN, so that reading one shows.
//
// usage: odd_shapes SEED NUM_CASES; prints one line and exits 1 at the first row that differs.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>

#include "kernels.cpp"

namespace {

std::mt19937_64 generator;

int between(int low, int high) { return std::uniform_int_distribution<int>(low, high)(generator); }

float number() { return std::normal_distribution<float>()(generator); }

std::vector<float> numbers(size_t size) {
  std::vector<float> values(size);
  for (float& value : values) value = number();
  return values;
}

// A heap block of its own: a vector may have room behind its end, which would hide an access.
template <typename T>
struct Exact {
  std::unique_ptr<T[]> data;
  size_t size;

  explicit Exact(size_t size) : data(new T[size]()), size(size) {}
  explicit Exact(const std::vector<T>& values) : Exact(values.size()) { std::copy(values.begin(), values.end(), data.get()); }
  T* get() const { return data.get(); }
  T& operator[](size_t i) const { return data[i]; }
};

bool same_bits(const float* a, const float* b, size_t size) { return std::memcmp(a, b, size * sizeof(float)) == 0; }

[[noreturn]] void differs(const char* what, int number_of_case) {
  std::printf("case %d: %s has other bits in company than alone\n", number_of_case, what);
  std::exit(1);
}

struct Packed {
  Exact<uint8_t> panels;
  Exact<float> scales;
  Exact<int32_t> sums;
  Exact<float> bias;
  Linear linear;

  Packed(int kind, const std::vector<float>& weight, int in, int out, bool biased, int threads)
      : panels(slipstream_packed_bytes(kind, in, out)),
        scales(kind == INT8 ? slipstream_padded_out(out) : 0),
        sums(kind == INT8 ? slipstream_padded_out(out) : 0),
        bias(biased ? slipstream_padded_out(out) : 0) {
    Exact<float> exact(weight);
    if (kind == INT8)
      slipstream_pack_int8(exact.get(), in, out, (int8_t*)panels.get(), scales.get(), sums.get(), threads);
    else
      slipstream_pack_float32(exact.get(), in, out, (float*)panels.get(), threads);
    for (int i = 0; biased && i < out; ++i) bias[i] = number();
    linear = {kind, in, out, 0, panels.get(), scales.get(), sums.get(), biased ? bias.get() : nullptr};
  }
};

std::unique_ptr<Packed> random_linear(int kind, int in, int out, bool biased, int threads) {
  std::vector<float> weight = numbers(size_t(in) * out);
  for (float& value : weight) value /= std::sqrt(float(in));
  return std::make_unique<Packed>(kind, weight, in, out, biased, threads);
}

void check_products(int number_of_case) {
  const int kind = between(0, 1), in = between(1, 150), out = between(1, 200), n = between(1, 40), threads = between(1, 3);
  auto packed = random_linear(kind, in, out, between(0, 1), threads);
  Exact<float> rows(numbers(size_t(n) * in)), together(size_t(n) * out);
  const float odd[] = {0.0f, 1e-42f, 3e38f, INFINITY, NAN};
  if (between(0, 1)) rows[between(0, n * in - 1)] = odd[between(0, 4)];
  slipstream_multiply(&packed->linear, rows.get(), n, together.get(), threads);
  for (int row = 0; row < n; ++row) {
    Exact<float> single(std::vector<float>(rows.get() + size_t(row) * in, rows.get() + size_t(row + 1) * in)), alone(out);
    slipstream_multiply(&packed->linear, single.get(), 1, alone.get(), between(1, 3));
    if (!same_bits(alone.get(), together.get() + size_t(row) * out, out)) differs("a product", number_of_case);
  }
  Exact<int64_t> indices(n);
  for (int i = 0; i < n; ++i) indices[i] = between(0, out - 1);
  Exact<float> unpacked(size_t(n) * in);
  slipstream_unpack(&packed->linear, indices.get(), n, unpacked.get());
}

// A random small model with everything that the structs point at.
struct Network {
  std::vector<std::unique_ptr<Packed>> weights;
  std::vector<std::unique_ptr<Exact<float>>> vectors;
  std::vector<Layer> layers;
  Model model{};

  const float* vector(int size) {
    vectors.push_back(std::make_unique<Exact<float>>(numbers(size)));
    return vectors.back()->get();
  }

  Linear linear(int kind, int in, int out, bool biased) {
    weights.push_back(random_linear(kind, in, out, biased, 2));
    return weights.back()->linear;
  }

  // Gate and up in alternating panels, each padded with zeros, as native.py lays them out.
  Linear gate_up(int kind, int hidden, int intermediate) {
    const int padded = (intermediate + PANEL - 1) / PANEL * PANEL;
    std::vector<float> weight(size_t(2) * padded * hidden);
    for (int output = 0; output < 2 * padded; ++output)
      if (output / (2 * PANEL) * PANEL + output % PANEL < intermediate)
        for (int k = 0; k < hidden; ++k) weight[size_t(output) * hidden + k] = number() / std::sqrt(float(hidden));
    weights.push_back(std::make_unique<Packed>(kind, weight, hidden, 2 * padded, false, 2));
    return weights.back()->linear;
  }

  Network() {
    const int kind = between(0, 1);
    model.num_layers = between(1, 3);
    model.hidden = between(1, 70);
    model.num_kv_heads = between(1, 3);
    model.num_heads = model.num_kv_heads * between(1, 3);
    model.head_dim = 2 * between(1, 40);
    model.rotary_dim = 2 * between(1, model.head_dim / 2);
    model.intermediate = between(1, 90);
    model.vocab = between(2, 140);
    model.norm_epsilon = 1e-5f;
    model.attention_scale = 1.0f / std::sqrt(float(model.head_dim));
    model.rotary_scale = 1.0f;
    model.inverse_frequencies = vector(model.rotary_dim / 2);
    model.embedding = between(0, 1) ? vector(model.vocab * model.hidden) : nullptr;
    model.final_norm = vector(model.hidden);
    model.head = linear(kind, model.hidden, model.vocab, false);
    const bool biased = between(0, 1), normed = between(0, 1);
    const int heads = model.num_heads, width = (heads + 2 * model.num_kv_heads) * model.head_dim;
    for (int i = 0; i < model.num_layers; ++i) {
      Layer layer{};
      layer.attention_norm = vector(model.hidden);
      layer.mlp_norm = vector(model.hidden);
      layer.query_norm = normed ? vector(model.head_dim) : nullptr;
      layer.key_norm = normed ? vector(model.head_dim) : nullptr;
      layer.qkv = linear(kind, model.hidden, width, biased);
      layer.output = linear(kind, heads * model.head_dim, model.hidden, biased);
      layer.gate_up = gate_up(kind, model.hidden, model.intermediate);
      layer.down = linear(kind, model.intermediate, model.hidden, false);
      layer.sliding_window = between(0, 1) ? between(1, 12) : 0;
      layers.push_back(layer);
    }
    model.layers = layers.data();
  }
};

struct Cache {
  std::vector<std::unique_ptr<Exact<float>>> keys, values;
  std::vector<float*> key_addresses, value_addresses;

  Cache(const Model& model, int num_slots) {
    for (int layer = 0; layer < model.num_layers; ++layer)
      for (auto [store, addresses] : {std::pair{&keys, &key_addresses}, std::pair{&values, &value_addresses}}) {
        store->push_back(std::make_unique<Exact<float>>(size_t(num_slots) * model.num_kv_heads * model.head_dim));
        std::fill_n(store->back()->get(), store->back()->size, NAN);
        addresses->push_back(store->back()->get());
      }
  }
};

struct Row {
  int64_t token, position, slot, run_begin, run_length;
  std::vector<int64_t> tail_slots, tail_positions;
};

// [rows, vocab]
std::vector<float> forward(const Network& network, Cache& cache, Scratch* scratch, const std::vector<Row>& rows) {
  const Model& model = network.model;
  std::vector<int64_t> token, position, slot, run_begin, run_length, tail_begin{0}, tail_slots, tail_positions, logit_rows;
  for (const Row& row : rows) {
    logit_rows.push_back(token.size());
    token.push_back(row.token);
    position.push_back(row.position);
    slot.push_back(row.slot);
    run_begin.push_back(row.run_begin);
    run_length.push_back(row.run_length);
    tail_slots.insert(tail_slots.end(), row.tail_slots.begin(), row.tail_slots.end());
    tail_positions.insert(tail_positions.end(), row.tail_positions.begin(), row.tail_positions.end());
    tail_begin.push_back(tail_slots.size());
  }
  Exact<int64_t> arrays[] = {Exact(token), Exact(position), Exact(slot), Exact(run_begin), Exact(run_length),
                             Exact(tail_begin), Exact(tail_slots), Exact(tail_positions), Exact(logit_rows)};
  const int64_t taps_of[] = {0, model.num_layers};
  Exact<float> first(rows.size() * model.hidden), last(rows.size() * model.hidden), logits(rows.size() * model.vocab);
  float* taps[] = {first.get(), last.get()};
  std::vector<int64_t> all_layers;
  for (int layer = 0; layer < model.num_layers; ++layer) all_layers.push_back(layer);
  const int count = int(rows.size());
  Batch batch{count,           count,           2,               model.num_layers, arrays[0].get(), arrays[1].get(),
              arrays[2].get(), arrays[3].get(), arrays[4].get(), arrays[5].get(),  arrays[6].get(), arrays[7].get(),
              arrays[8].get(), cache.key_addresses.data(), cache.value_addresses.data(), taps_of, taps, logits.get(),
              all_layers.data()};
  slipstream_forward(&model, &batch, scratch, between(1, 3));
  return {logits.get(), logits.get() + logits.size};
}

Row committed(const std::vector<int64_t>& text, int start, int position) {
  return {text[position], position, start + position, start, position + 1, {}, {}};
}

// A text row by row, then the same text in chunks beside another one, then its end as one path of a tree.
void check_passes(int number_of_case) {
  Network network;
  const int length = between(2, 40), vocab = network.model.vocab;
  std::vector<int64_t> text(length), other(length);
  for (int64_t& token : text) token = between(0, vocab - 1);
  for (int64_t& token : other) token = between(0, vocab - 1);
  const int num_slots = 4 * length + 8;
  Scratch* scratch = slipstream_new_scratch();
  Cache lone(network.model, num_slots), shared(network.model, num_slots);
  std::vector<std::vector<float>> alone;
  for (int i = 0; i < length; ++i) alone.push_back(forward(network, lone, scratch, {committed(text, 0, i)}));

  const int split = between(1, length - 1), second = length;
  for (int begin = 0, end; begin < split; begin = end) {
    end = std::min(split, begin + between(1, 14));
    std::vector<Row> rows;
    for (int i = begin; i < end; ++i) rows.push_back(committed(other, second, i));
    for (int i = begin; i < end; ++i) rows.push_back(committed(text, 0, i));
    std::vector<float> logits = forward(network, shared, scratch, rows);
    for (int i = begin; i < end; ++i)
      if (!same_bits(&logits[size_t(end - begin + i - begin) * vocab], alone[i].data(), vocab)) differs("a chunk's row", number_of_case);
  }

  // At each depth some wrong siblings and the right node, in any order; a node sees the right ones above it and itself.
  std::vector<Row> tree;
  std::vector<std::pair<int, int>> right;  // (row, position)
  std::vector<int64_t> slots, positions;
  for (int position = split; position < length && 2 * length + int(tree.size()) + 3 <= num_slots; ++position) {
    const int siblings = between(1, 3), which = between(0, siblings - 1);
    int64_t right_slot = 0;
    for (int sibling = 0; sibling < siblings; ++sibling) {
      const int64_t slot = 2 * length + int(tree.size());
      Row row{sibling == which ? text[position] : between(0, vocab - 1), position, slot, 0, split, slots, positions};
      row.tail_slots.push_back(slot);
      row.tail_positions.push_back(position);
      if (sibling == which) {
        right.push_back({int(tree.size()), position});
        right_slot = slot;
      }
      tree.push_back(row);
    }
    slots.push_back(right_slot);
    positions.push_back(position);
  }
  std::vector<float> logits = forward(network, shared, scratch, tree);
  for (auto [row, position] : right)
    if (!same_bits(&logits[size_t(row) * vocab], alone[position].data(), vocab)) differs("a node of a tree", number_of_case);
  slipstream_free_scratch(scratch);
}

}  // namespace

int main(int, char** arguments) {
  generator.seed(std::strtoull(arguments[1], nullptr, 10));
  const int num_cases = std::atoi(arguments[2]);
  for (int i = 0; i < num_cases; ++i) {
    check_products(i);
    check_passes(i);
  }
  std::printf("%d cases on %s: equal in any company\n", num_cases, slipstream_instructions());
  std::fflush(stdout);
  std::_Exit(0);  // the kernels' threads never end
}
