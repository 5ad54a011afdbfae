// The CPU kernels over odd shapes: no access outside a buffer and no undefined behaviour (in a build with sanitizers), the
// same bits for a row in any batch, and a digest of all results, which every build must print alike. Buffers are exactly
// as large as the kernels are promised, and cache entries that nobody wrote are NaN, so that reading one shows.
//
// usage: odd_shapes SEED NUM_CASES; prints one line and exits 1 at the first row that differs.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <random>

#include "kernels.cpp"

// How many more blocks of memory can be had; negative: any number.
std::atomic<int> blocks_left{-1};
bool is_scarce = false;  // not while threads are started: a team gets on with fewer

void* operator new(size_t size) {
  if (blocks_left >= 0 && blocks_left-- == 0) throw std::bad_alloc();
  if (void* block = std::malloc(size ? size : 1)) return block;
  throw std::bad_alloc();
}
void* operator new(size_t size, std::align_val_t alignment) {
  if (blocks_left >= 0 && blocks_left-- == 0) throw std::bad_alloc();
  const size_t unit = size_t(alignment);
  if (void* block = std::aligned_alloc(unit, (size + unit - 1) / unit * unit)) return block;
  throw std::bad_alloc();
}
void* operator new(size_t size, const std::nothrow_t&) noexcept { return std::malloc(size); }
void operator delete(void* block) noexcept { std::free(block); }
void operator delete(void* block, size_t) noexcept { std::free(block); }
void operator delete(void* block, std::align_val_t) noexcept { std::free(block); }
void operator delete(void* block, size_t, std::align_val_t) noexcept { std::free(block); }

namespace {

std::mt19937_64 generator;

// The library's distributions are not the same on every machine.
int between(int low, int high) { return low + int(generator() % uint64_t(high - low + 1)); }

// About normal: of mean 0 and variance 1.
float number() {
  int64_t sum = 0;
  for (int i = 0; i < 12; ++i) sum += generator() >> 40;
  return float(double(sum - 6 * (int64_t(1) << 24)) / (1 << 24));
}

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

// FNV-1a over the bits of all results. The sign and the payload of a NaN are the processor's own.
uint64_t digest = 14695981039346656037u;

void take(const float* values, size_t size) {
  for (size_t i = 0; i < size; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, sizeof bits);
    digest = (digest ^ (values[i] != values[i] ? 0x7fc00000u : bits)) * 1099511628211u;
  }
}

bool same_bits(const float* a, const float* b, size_t size) { return std::memcmp(a, b, size * sizeof(float)) == 0; }

[[noreturn]] void differs(const char* what, int number_of_case, const char* than = "in a batch than alone") {
  std::printf("case %d: %s has other bits %s\n", number_of_case, what, than);
  std::exit(1);
}

// Call a kernel where memory is short. Half of the calls get so many of the blocks that they ask for as is drawn, and in a
// second try all. The others get none at first and one more in each try, so that every part of a pass fails once. A failure
// must be told, and leave everything so that the next try computes what it should. A thread of the kernels' own that asks
// for memory ends the program.
template <typename Call>
void in_scarcity(Call call) {
  static std::mt19937_64 own(61);  // the cases' own draws stay as they are
  const bool one_more = own() % 2;
  const int most = own() % 2 ? 8 : 61;  // most calls ask for few, a pass for dozens
  int to_have = one_more ? 0 : int(own() % most);
  if (!is_scarce) to_have = -1;
  for (bool was_short = true; was_short; to_have = one_more ? to_have + 1 : -1) {
    blocks_left = to_have;
    const Status status = call();
    was_short = to_have >= 0 && blocks_left < 0;
    blocks_left = -1;
    if (status != (was_short ? OUT_OF_MEMORY : DONE)) {
      std::printf("status %d where memory was %s\n", int(status), was_short ? "short" : "enough");
      std::exit(1);
    }
  }
}

// As bfloat16 numbers near these, as float16 other finite ones.
Exact<uint16_t> upper_halves(const std::vector<float>& values) {
  Exact<uint16_t> halves(values.size());
  for (size_t i = 0; i < values.size(); ++i) std::memcpy(&halves[i], (const char*)&values[i] + 2, 2);
  return halves;
}

// Of the kinds that have groups: how many of the least ones make one, and whether inputs are read in another order. Of
// those with codes: whether they multiply rows as they are. All weights that read the same rows are alike.
struct Grouping {
  int steps;
  bool ordered, exact;
};

Grouping grouping;

void draw_grouping() { grouping = {between(1, 4), between(0, 1) == 1, between(0, 2) == 0}; }

// The least and the largest numbers that there are among them.
const int8_t TABLE[16] = {-128, -104, -83, -65, -49, -35, -22, -10, 0, 13, 25, 38, 53, 69, 89, 127};

struct Packed {
  const int group;
  Exact<uint8_t> panels;
  Exact<float> scales;
  Exact<float> bias;
  Exact<int32_t> order;
  Linear linear;

  Packed(int kind, const std::vector<float>& weight, int in, int out, bool biased, int threads)
      : group(!has_groups(kind) ? 0 : grouping.steps * (kind < EIGHT_BITS ? Sums::INPUTS : WIDE)),
        panels(slipstream_packed_bytes(kind, in, out, group)),
        scales(has_codes(kind) ? slipstream_padded_out(out) : 0),
        bias(biased ? slipstream_padded_out(out) : 0),
        order(has_codes(kind) && grouping.ordered ? in : 0) {
    Exact<float> exact(weight);
    Exact<uint16_t> upper = upper_halves(weight);
    if (group)
      pack_in_groups(kind, exact, in, out, threads);
    else
      in_scarcity([&] {
        switch (kind) {
          case FOUR_BITS_BLOCKS: return slipstream_fit_blocks(exact.get(), in, out, panels.get(), scales.get(), threads);
          case BFLOAT16:
            return slipstream_pack_bfloat16((const bfloat16*)upper.get(), in, out, (bfloat16*)panels.get(), threads);
          case FLOAT16: return slipstream_pack_float16((const float16*)upper.get(), in, out, (float16*)panels.get(), threads);
          default: return slipstream_pack_float32(exact.get(), in, out, (float*)panels.get(), threads);
        }
      });
    for (int i = 0; biased && i < out; ++i) bias[i] = number();
    for (int i = 0; i < int(order.size); ++i) order[i] = in - 1 - i;
    linear = {kind,       in, out, group, panels.get(), scales.get(), biased ? bias.get() : nullptr,
              order.size ? order.get() : nullptr, nullptr, TABLE, has_codes(kind) && grouping.exact};
  }

  void pack_in_groups(int kind, const Exact<float>& weight, int in, int out, int threads) {
    const int groups = num_groups(in, group);
    const bool zeros = kind == FOUR_BITS_ZEROS || kind == EIGHT_BITS_ZEROS || kind == FOUR_BITS_TABLE_ZEROS;
    Exact<uint8_t> codes(weight.size);
    Exact<float> of_groups(size_t(out) * groups), zeros_of(of_groups.size);
    in_scarcity([&] {
      if (kind == EIGHT_BITS) return slipstream_round_groups(weight.get(), in, out, group, codes.get(), of_groups.get(), threads);
      return slipstream_fit_groups(weight.get(), in, out, group, zeros, codes.get(), of_groups.get(), zeros_of.get(), threads);
    });
    if (kind == EIGHT_BITS_ZEROS)
      for (size_t i = 0; i < codes.size; ++i) codes[i] = uint8_t(int(weight[i] * 4096.0f));  // padding differs by build
    in_scarcity([&] {
      return slipstream_pack_groups(kind, group, codes.get(), of_groups.get(), zeros ? zeros_of.get() : nullptr, in, out,
                                    panels.get(), scales.get(), threads);
    });
  }
};

std::unique_ptr<Packed> random_linear(int kind, int in, int out, bool biased, int threads) {
  std::vector<float> weight = numbers(size_t(in) * out);
  for (float& value : weight) value /= std::sqrt(float(in));
  return std::make_unique<Packed>(kind, weight, in, out, biased, threads);
}

// The same products of the weights that are read back, in float32.
void check_widened(const Packed& packed, const Exact<float>& rows, int n, const Exact<float>& expected, int number_of_case) {
  const int in = packed.linear.in, out = packed.linear.out;
  Exact<int64_t> all(out);
  for (int i = 0; i < out; ++i) all[i] = i;
  std::vector<float> weight(size_t(out) * in);
  slipstream_unpack(&packed.linear, all.get(), out, weight.data());
  Packed wide(FLOAT32, weight, in, out, false, 1);
  wide.linear.bias = packed.linear.bias;
  Exact<float> products(size_t(n) * out);
  slipstream_multiply(&wide.linear, rows.get(), n, products.get(), 2);
  if (!same_bits(products.get(), expected.get(), products.size)) 
    differs("a product with 16-bit weights", number_of_case, "than in float32");
}

void check_products(int number_of_case) {
  const int kind = between(0, 9), in = between(1, kind == FOUR_BITS_BLOCKS ? 600 : 150), out = between(1, 200);
  const int n = between(1, 40), threads = between(1, 3);
  draw_grouping();
  auto packed = random_linear(kind, in, out, between(0, 1), threads);
  Exact<float> rows(numbers(size_t(n) * in)), together(size_t(n) * out);
  for (int i = between(0, n); i > 0; --i) rows[between(0, n * in - 1)] *= 200.0f;  // such inputs stand apart from their group
  const float odd[] = {0.0f, 1e-42f, 3e38f, INFINITY, NAN};
  if (between(0, 1)) rows[between(0, n * in - 1)] = odd[between(0, 4)];
  in_scarcity([&] { return slipstream_multiply(&packed->linear, rows.get(), n, together.get(), threads); });
  take(together.get(), together.size);
  for (int row = 0; row < n; ++row) {
    Exact<float> single(std::vector<float>(rows.get() + size_t(row) * in, rows.get() + size_t(row + 1) * in)), alone(out);
    slipstream_multiply(&packed->linear, single.get(), 1, alone.get(), between(1, 3));
    if (!same_bits(alone.get(), together.get() + size_t(row) * out, out)) differs("a product", number_of_case);
  }
  if (kind == BFLOAT16 || kind == FLOAT16) check_widened(*packed, rows, n, together, number_of_case);
  Exact<int64_t> indices(n);
  for (int i = 0; i < n; ++i) indices[i] = between(0, out - 1);
  Exact<float> unpacked(size_t(n) * in);
  slipstream_unpack(&packed->linear, indices.get(), n, unpacked.get());
  take(unpacked.get(), unpacked.size);
}

// A random small model with everything that the structs point at.
struct Network {
  std::vector<std::unique_ptr<Packed>> weights;
  std::vector<std::unique_ptr<Exact<float>>> vectors;
  std::unique_ptr<Exact<uint16_t>> halves;
  std::unique_ptr<Exact<uint8_t>> panels;  // of the rounded head
  std::unique_ptr<Exact<float>> factors, errors, norms;
  std::vector<std::unique_ptr<Exact<Linear>>> experts;
  std::vector<Layer> layers;
  std::vector<int> sources;  // of each layer's entries
  Model model{};

  const float* vector(int size) {
    vectors.push_back(std::make_unique<Exact<float>>(numbers(size)));
    return vectors.back()->get();
  }

  void embed(int kind) {
    std::vector<float> table = numbers(size_t(model.vocab) * model.hidden);
    model.embedding_kind = has_codes(kind) ? FLOAT32 : kind;
    if (model.embedding_kind == FLOAT32) {
      vectors.push_back(std::make_unique<Exact<float>>(table));
      model.embedding = vectors.back()->get();
    } else {
      halves = std::make_unique<Exact<uint16_t>>(upper_halves(table));
      model.embedding = halves->get();
    }
  }

  Linear linear(int kind, int in, int out, bool biased) {
    weights.push_back(random_linear(kind, in, out, biased, 2));
    return weights.back()->linear;
  }

  // Gate and up in alternating panels, each padded with zeros, as packed_weight.py lays them out.
  Linear gate_up(int kind, int hidden, int intermediate) {
    const int padded = (intermediate + PANEL - 1) / PANEL * PANEL;
    const std::vector<float> drawn = numbers(size_t(2) * intermediate * hidden);
    std::vector<float> weight(size_t(2) * padded * hidden);
    for (int i = 0; i < 2 * intermediate; ++i) {
      const int which = i / intermediate, output = i % intermediate;
      const int row = (2 * (output / PANEL) + which) * PANEL + output % PANEL;
      for (int k = 0; k < hidden; ++k) weight[size_t(row) * hidden + k] = drawn[size_t(i) * hidden + k] / std::sqrt(float(hidden));
    }
    weights.push_back(std::make_unique<Packed>(kind, weight, hidden, 2 * padded, false, 2));
    return weights.back()->linear;
  }

  // Experts of which a row visits some, and their router.
  Mixture mixture(int kind, int inner, bool biased) {
    std::vector<Linear> gate_up, down;
    for (int i = 0; i < model.num_experts; ++i) {
      gate_up.push_back(up(kind, inner, biased));
      down.push_back(linear(kind, inner, model.hidden, biased));
    }
    for (auto* each : {&gate_up, &down}) experts.push_back(std::make_unique<Exact<Linear>>(*each));
    const Linear router = linear(FLOAT32, model.hidden, model.num_experts, biased);
    Mixture mixture{router, experts[experts.size() - 2]->get(), experts.back()->get(), nullptr, {}, {}, {}, {}};
    if (between(0, 1)) mixture.scales = vector(model.num_experts);
    return mixture;
  }

  // Gate and up, or up alone.
  Linear up(int kind, int inner, bool biased) {
    return model.gated ? gate_up(kind, model.hidden, inner) : linear(kind, model.hidden, inner, biased);
  }

  // What layers are given besides the states.
  void give_inputs(int kind) {
    Inputs& inputs = model.inputs;
    inputs.width = between(1, 40);
    const int all = model.num_layers * inputs.width;
    for (float* scale : {&inputs.table_scale, &inputs.projection_scale, &inputs.scale}) *scale = 0.3f * between(1, 9);
    if (between(0, 1)) {
      inputs.table = vector(model.vocab * all);
    } else {
      inputs.packed_table = linear(kind, all, model.vocab, false);
    }
    if (between(0, 2)) inputs.projection = linear(kind, model.hidden, all, false);
    inputs.norm = vector(inputs.width);
  }

  // How a layer's heads lie in its rows; some read what an earlier layer stores.
  void draw_heads(Layer& layer, int number) {
    sources.push_back(number && between(0, 3) == 0 ? sources[between(0, number - 1)] : number);
    layer.projected = sources.back() != number ? 0 : between(0, 3) ? 2 : 1;
    if (!layer.projected) {
      const Layer& source = layers[sources.back()];
      layer.num_kv_heads = source.num_kv_heads, layer.head_dim = source.head_dim;
    } else if (number && between(0, 1)) {
      layer.num_kv_heads = layers[number - 1].num_kv_heads, layer.head_dim = layers[number - 1].head_dim;
    } else {
      do layer.num_kv_heads = between(1, 3);
      while (model.num_heads % layer.num_kv_heads);
      layer.head_dim = 2 * between(1, 40);
    }
    layer.rotary_dim = 2 * between(1, layer.head_dim / 2);
    layer.norms_values = between(0, 2) == 0;
  }

  // Of either kind; with neither weight nor bias none at all.
  Norm norm(bool centred, bool exists = true) {
    if (!exists) return {};
    const float* weight = vector(model.hidden);
    return {weight, centred && between(0, 3) ? vector(model.hidden) : nullptr, centred};
  }

  // The output layer in 8 bits besides.
  void round_head() {
    constexpr int GROUP = 32;
    const int in = model.hidden, out = model.vocab, groups = num_groups(in, GROUP);
    Exact<int64_t> all(out);
    for (int i = 0; i < out; ++i) all[i] = i;
    Exact<float> weight(size_t(out) * in), rounded(weight.size), of_groups(size_t(out) * groups);
    Exact<uint8_t> codes(weight.size);
    slipstream_unpack(&model.head, all.get(), out, weight.get());
    for (int row = 0; row < out; ++row)
      for (int g = 0; g < groups; ++g) {
        const float *begin = &weight[size_t(row) * in + g * GROUP], *end = begin + std::min(GROUP, in - g * GROUP);
        float largest = 1e-9f;
        for (const float* each = begin; each != end; ++each) largest = std::max(largest, std::fabs(*each));
        of_groups[row * groups + g] = largest / 127.0f;
        for (const float* each = begin; each != end; ++each) codes[each - weight.get()] = uint8_t(std::lround(*each * 127.0f / largest) + 128);
      }
    panels = std::make_unique<Exact<uint8_t>>(slipstream_packed_bytes(EIGHT_BITS, in, out, GROUP));
    const size_t padded = slipstream_padded_out(out);
    for (auto* each : {&factors, &errors, &norms}) *each = std::make_unique<Exact<float>>(padded);
    slipstream_pack_groups(EIGHT_BITS, GROUP, codes.get(), of_groups.get(), nullptr, in, out, panels->get(), factors->get(), 2);
    model.rounded_head = {{EIGHT_BITS, in, out, GROUP, panels->get(), factors->get()}, errors->get(), norms->get()};
    slipstream_unpack(&model.rounded_head.linear, all.get(), out, rounded.get());
    std::fill_n(errors->get(), padded, INFINITY);
    for (int row = 0; row < out; ++row) {
      double error = 0.0, exact = 0.0, other = 0.0;
      for (int k = 0; k < in; ++k) {
        const double a = weight[size_t(row) * in + k], b = rounded[size_t(row) * in + k];
        error += (a - b) * (a - b), exact += a * a, other += b * b;
      }
      (*errors)[row] = float(std::sqrt(error) * 1.00001);
      (*norms)[row] = float(std::sqrt(std::max(exact, other)) * 1.00001);
    }
  }

  Network() {
    const int kind = between(0, 9);
    draw_grouping();
    model.num_layers = between(1, 3);
    model.hidden = between(1, 70);
    model.num_heads = between(1, 3) * between(1, 3);
    model.vocab = between(2, 140);
    model.norm_epsilon = 1e-5f;
    model.attention_scale = 0.02f * between(5, 40);
    model.num_rotaries = between(1, 2);
    model.rotary_scales = vector(model.num_rotaries);
    model.activation = between(SILU, GELU_TANH);
    model.gated = between(0, 2) > 0;
    if (model.gated && between(0, 3) == 0) model.activation = CLAMPED_SILU;
    model.gate_limit = 0.5f * between(1, 4);
    model.gate_slope = 1.702f;
    if (between(0, 2) == 0) {
      model.num_experts = between(1, 7);
      model.num_chosen = between(1, model.num_experts);
      model.whole_shares = between(0, 1);
    }
    model.parallel = !model.num_experts && between(0, 3) == 0;
    model.score_cap = between(0, 2) ? 0.0f : 2.0f;
    model.logit_cap = between(0, 2) ? 0.0f : 3.0f;
    for (float* scale : {&model.residual_scale, &model.embedding_scale, &model.input_scale, &model.logit_divisor})
      *scale = between(0, 2) ? 1.0f : 0.3f * between(1, 9);
    if (between(0, 1)) embed(kind);
    const bool centred = between(0, 2) == 0;
    const int norms = between(0, 3);  // behind attention and MLP, before and behind, or before: more often
    model.final_norm = norm(centred);
    model.head = linear(kind, model.hidden, model.vocab, false);
    if (!has_codes(kind) && model.logit_divisor == 1.0f && !model.logit_cap) round_head();
    const bool biased = between(0, 1), normed = between(0, 1);
    model.whole_norms = normed && between(0, 1);
    const int heads = model.num_heads, inner = between(1, 90);
    const bool beside = model.num_experts && between(0, 1);
    if (between(0, 3) == 0) give_inputs(kind);
    for (int i = 0; i < model.num_layers; ++i) {
      Layer layer{};
      draw_heads(layer, i);
      const int dim = layer.head_dim, width = (heads + layer.projected * layer.num_kv_heads) * dim;
      model.rotary_dim = std::max(model.rotary_dim, layer.rotary_dim);
      for (Norm* each : {&layer.attention_norm, &layer.mlp_norm}) *each = norm(centred, norms != 0);
      for (Norm* each : {&layer.attended_norm, &layer.mlp_out_norm}) *each = norm(centred, norms < 2);
      layer.query_norm = normed ? vector((model.whole_norms ? heads : 1) * dim) : nullptr;
      layer.key_norm = normed ? vector((model.whole_norms ? layer.num_kv_heads : 1) * dim) : nullptr;
      layer.rotary = between(-1, model.num_rotaries - 1);
      layer.scale = between(0, 2) ? 1.0f : 0.5f;
      layer.qkv = linear(kind, model.hidden, width, biased);
      layer.output = linear(kind, heads * dim, model.hidden, biased);
      if (model.num_experts) layer.mixture = mixture(kind, inner, biased);
      if (!model.num_experts || beside) {
        const int own = between(0, 1) ? inner : between(1, 90);
        layer.gate_up = up(kind, own, biased);
        layer.down = linear(kind, own, model.hidden, biased);
      }
      if (beside)
        for (Norm* each : {&layer.mixture.router_norm, &layer.mixture.input_norm, &layer.mixture.mlp_out_norm,
                           &layer.mixture.output_norm})
          *each = norm(centred, between(0, 3) > 0);
      if (model.inputs.width) {
        layer.input_gate = linear(kind, model.hidden, model.inputs.width, biased);
        layer.input_projection = linear(kind, model.inputs.width, model.hidden, biased);
        layer.input_norm = norm(centred, between(0, 3) > 0);
      }
      layer.sinks = between(0, 2) ? nullptr : vector(heads);
      layer.reach = between(0, 1) ? between(1, 12) * (between(0, 2) ? 1 : -1) : 0;
      layers.push_back(layer);
    }
    model.inverse_frequencies = vector(model.num_rotaries * model.rotary_dim / 2);
    model.layers = layers.data();
  }
};

// Nobody has written an entry yet: each is NaN, or of int8 numbers has the scale NaN.
struct Cache {
  struct Side {
    std::vector<std::unique_ptr<Exact<uint8_t>>> numbers;
    std::vector<std::unique_ptr<Exact<float>>> scales;
    std::vector<void*> number_addresses;
    std::vector<float*> scale_addresses;
  };

  Side keys, values;
  const int num_slots, type;

  // The first `count` entries, again from slot `to` on.
  void copy(const Model& model, int to, int count) {
    const size_t bytes[] = {4, 2, 2, 1};
    for (Side* side : {&keys, &values})
      for (int layer = 0; layer < model.num_layers; ++layer)
        for (size_t head = 0; head < size_t(model.layers[layer].num_kv_heads); ++head) {
          const size_t size = model.layers[layer].head_dim * bytes[type];
          if (!side->numbers[layer]->size) continue;
          uint8_t* numbers = side->numbers[layer]->get() + head * num_slots * size;
          std::memcpy(numbers + to * size, numbers, count * size);
          float* scales = side->scales[layer]->get() + head * num_slots;
          if (type == ENTRY_INT8) std::copy_n(scales, count, scales + to);
        }
  }

  // A layer that reads another one's entries has its addresses, and nothing of its own.
  Cache(const Network& network, int num_slots, int type) : num_slots(num_slots), type(type) {
    const Model& model = network.model;
    const size_t bytes[] = {4, 2, 2, 1};
    for (int layer = 0; layer < model.num_layers; ++layer) {
      const int source = network.sources[layer];
      const size_t entries = source == layer ? size_t(num_slots) * model.layers[layer].num_kv_heads : 0;
      for (Side* side : {&keys, &values}) {
        side->numbers.push_back(std::make_unique<Exact<uint8_t>>(entries * model.layers[layer].head_dim * bytes[type]));
        std::fill_n(side->numbers.back()->get(), side->numbers.back()->size, 0xff);
        side->number_addresses.push_back(side->numbers[source]->get());
        side->scales.push_back(std::make_unique<Exact<float>>(type == ENTRY_INT8 ? entries : 0));
        std::fill_n(side->scales.back()->get(), side->scales.back()->size, NAN);
        side->scale_addresses.push_back(side->scales[source]->get());
      }
    }
  }
};

struct Row {
  int64_t token, position, slot, run_begin, run_length;
  std::vector<int64_t> tail_slots, tail_positions;
  bool fast = false;
};

// [rows, vocab]
// How often memory was short in the parts of a first pass, told by what its scratch has got.
struct Shortages {
  int in_reserve = 0, in_divide = 0, in_plan = 0;

  void count(const Scratch& scratch, const Batch& batch) {
    const bool divided = scratch.exact_runs.capacity() && !(batch.num_fast && scratch.rounded.empty());
    if (scratch.gated.empty()) ++in_reserve;
    else if (!scratch.fast_of.empty() && !divided) ++in_divide;
    else if (!scratch.attention.empty() && scratch.attention[0].tiles.capacity()) ++in_plan;
  }
};

Shortages shortages;

// The same pass where the logits of some rows are wanted, some twice: then not all rows run the last layers.
void check_wanted(const Model& model, Batch batch, Scratch* scratch, const Exact<float>& expected) {
  Exact<int64_t> wanted(between(0, batch.num_rows));
  for (size_t i = 0; i < wanted.size; ++i) wanted[i] = between(0, batch.num_rows - 1);
  Exact<float> logits(wanted.size * model.vocab);
  batch.num_taps = 0, batch.num_logit_rows = int(wanted.size);
  batch.logit_rows = wanted.get(), batch.logits = logits.get();
  const int threads = between(1, 3);
  in_scarcity([&] { return slipstream_forward(&model, &batch, scratch, threads); });
  for (size_t i = 0; i < wanted.size; ++i)
    if (!same_bits(&logits[i * model.vocab], &expected[wanted[i] * model.vocab], model.vocab))
      differs("a wanted row", 0, "than where all are");
}

int num_found = 0;  // best tokens that rounded logits were enough for

// The same pass where only the best tokens of some rows are wanted, some twice.
void check_best(const Model& model, Batch batch, Scratch* scratch, const Exact<float>& expected) {
  const int vocab = model.vocab;
  Exact<int64_t> wanted(between(0, batch.num_rows + 3)), best(wanted.size);
  for (size_t i = 0; i < wanted.size; ++i) wanted[i] = between(0, batch.num_rows - 1);
  Exact<float> logits(wanted.size * vocab);
  batch.num_taps = 0, batch.num_logit_rows = int(wanted.size);
  batch.logit_rows = wanted.get(), batch.best = best.get(), batch.logits = logits.get();
  const int threads = between(1, 3);
  in_scarcity([&] { return slipstream_forward(&model, &batch, scratch, threads); });
  for (size_t i = 0; i < wanted.size; ++i) {
    const float *begin = &expected[wanted[i] * vocab], *end = begin + vocab;
    const bool is_odd = std::any_of(begin, end, [](float logit) { return logit != logit; });
    if (best[i] < 0) {
      if (!is_odd && !model.rounded_head.linear.panels) differs("a best token", 0, "than in the logits, as it is not known");
      if (!same_bits(&logits[i * vocab], begin, vocab)) differs("a row whose best token is not known", 0);
      continue;
    }
    if (is_odd || best[i] != std::max_element(begin, end) - begin) differs("a best token", 0, "than in the logits");
    num_found += model.rounded_head.linear.panels != nullptr;
  }
}

std::vector<float> forward(const Network& network, Cache& cache, Scratch* scratch, const std::vector<Row>& rows) {
  const Model& model = network.model;
  std::vector<int64_t> token, position, slot, run_begin, run_length, tail_begin{0}, tail_slots, tail_positions, logit_rows, fast_rows;
  for (const Row& row : rows) {
    logit_rows.push_back(token.size());
    if (row.fast) fast_rows.push_back(token.size());
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
                             Exact(tail_begin), Exact(tail_slots), Exact(tail_positions), Exact(logit_rows), Exact(fast_rows)};
  const int64_t taps_of[] = {0, model.num_layers, -1};
  Exact<float> first(rows.size() * model.hidden), last(rows.size() * model.hidden), logits(rows.size() * model.vocab);
  Exact<float> inputs(rows.size() * model.num_layers * model.inputs.width);
  float* taps[] = {first.get(), last.get(), inputs.get()};
  std::vector<int64_t> all_layers;
  for (int layer = 0; layer < model.num_layers; ++layer) all_layers.push_back(layer);
  const int count = int(rows.size());
  Batch batch{count,           count,           model.inputs.width ? 3 : 2,               model.num_layers, arrays[0].get(), arrays[1].get(),
              arrays[2].get(), arrays[3].get(), arrays[4].get(), arrays[5].get(),  arrays[6].get(), arrays[7].get(),
              arrays[8].get(), cache.keys.number_addresses.data(), cache.values.number_addresses.data(), taps_of, taps,
              logits.get(), all_layers.data(), cache.num_slots, cache.type, cache.keys.scale_addresses.data(),
              cache.values.scale_addresses.data(), int64_t(fast_rows.size()), arrays[9].get()};
  const int threads = between(1, 3);
  const bool is_first = scratch->states.empty();
  in_scarcity([&] {
    const Status status = slipstream_forward(&model, &batch, scratch, threads);
    if (is_first && status == OUT_OF_MEMORY) shortages.count(*scratch, batch);
    return status;
  });
  for (const Exact<float>* results : {&first, &last, &inputs, &logits}) take(results->get(), results->size);
  if (between(0, 2) == 0) check_wanted(model, batch, scratch, logits);
  if (between(0, 2) == 0) check_best(model, batch, scratch, logits);
  return {logits.get(), logits.get() + logits.size};
}

Row committed(const std::vector<int64_t>& text, int start, int position, int num_fast) {
  return {text[position], position, start + position, start, position + 1, {}, {}, position < num_fast};
}

// A text row by row, then the same text in chunks beside another one, then its end as one path of a tree. The first rows of
// each text may be fast ones.
// The experts that a row chooses against all others.
void check_choices(int number_of_case) {
  const int size = between(1, 40), count = between(1, size);
  std::vector<float> router(size);
  for (float& value : router) value = between(0, 9) ? 0.25f * between(-8, 8) : between(0, 3) ? -INFINITY : NAN;
  const bool is_sick = std::any_of(router.begin(), router.end(), [](float value) { return value != value; });
  Exact<int32_t> chosen(count);
  choose_experts(router.data(), size, count, chosen.get());
  std::vector<bool> is_chosen(size);
  for (int i = 0; i < count; ++i) {
    if (chosen[i] < 0 || chosen[i] >= size || (i && chosen[i] <= chosen[i - 1])) return differs("the order of experts", number_of_case);
    is_chosen[chosen[i]] = true;
  }
  for (int a = 0; a < size && !is_sick; ++a)
    for (int b = 0; b < size; ++b)
      if (is_chosen[a] && !is_chosen[b] && (router[b] > router[a] || (router[b] == router[a] && b < a)))
        return differs("an expert", number_of_case);
}

void check_passes(int number_of_case) {
  Network network;
  // Now and then more than one partition.
  const int length = between(0, 19) ? between(2, 40) : between(2, 2 * PARTITION + 40), vocab = network.model.vocab;
  std::vector<int64_t> text(length), other(length);
  for (int64_t& token : text) token = between(0, vocab - 1);
  for (int64_t& token : other) token = between(0, vocab - 1);
  const int num_slots = 4 * length + 8;
  Scratch* scratch = slipstream_new_scratch();
  const int type = between(0, 3);
  Cache lone(network, num_slots, type), shared(network, num_slots, type);
  const int split = between(1, length - 1), second = length, kind = network.model.head.kind;
  const bool may_be_fast = !network.model.num_experts && (kind == BFLOAT16 || kind == FLOAT16);
  const int num_fast = may_be_fast ? between(0, split) : 0, num_others_fast = may_be_fast ? between(0, length) : 0;
  // Now and then more queries than attention takes at once.
  const int widest = between(0, 3) ? 14 : 2 * TILE + 9;
  std::vector<std::vector<float>> alone;
  for (int i = 0; i < length; ++i) alone.push_back(forward(network, lone, scratch, {committed(text, 0, i, num_fast)}));

  for (int begin = 0, end; begin < split; begin = end) {
    end = std::min(split, begin + between(1, widest));
    std::vector<Row> rows;
    for (int i = begin; i < end; ++i) rows.push_back(committed(other, second, i, num_others_fast));
    for (int i = begin; i < end; ++i) rows.push_back(committed(text, 0, i, num_fast));
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

// A pass over texts of equal length from `begin` on, each behind the slot where it starts; the last rows' logits are wanted.
struct TextRows {
  std::vector<std::unique_ptr<Exact<int64_t>>> columns;
  Exact<float> logits;
  int64_t layers[3] = {0, 1, 2};
  Batch batch{};

  TextRows(const Model& model, Cache& cache, const std::vector<std::vector<int64_t>>& texts, const std::vector<int>& starts, int begin)
      : logits(texts.size() * model.vocab) {
    std::vector<int64_t> token, position, slot, run_begin, run_length, wanted;
    for (size_t i = 0; i < texts.size(); ++i) {
      for (int at = begin; at < int(texts[i].size()); ++at) {
        token.push_back(texts[i][at]);
        position.push_back(at);
        slot.push_back(starts[i] + at);
        run_begin.push_back(starts[i]);
        run_length.push_back(at + 1);
      }
      wanted.push_back(token.size() - 1);
    }
    auto column = [&](const std::vector<int64_t>& values) {
      columns.push_back(std::make_unique<Exact<int64_t>>(values));
      return columns.back()->get();
    };
    batch.num_rows = int(token.size());
    batch.num_logit_rows = int(wanted.size());
    batch.num_layers = model.num_layers;
    batch.tail_begin = column(std::vector<int64_t>(token.size() + 1));
    batch.token_ids = column(token), batch.positions = column(position), batch.slots = column(slot);
    batch.run_begin = column(run_begin), batch.run_length = column(run_length), batch.logit_rows = column(wanted);
    batch.keys = cache.keys.number_addresses.data(), batch.values = cache.values.number_addresses.data();
    batch.key_scales = cache.keys.scale_addresses.data(), batch.value_scales = cache.values.scale_addresses.data();
    batch.num_slots = cache.num_slots, batch.entry_type = cache.type;
    batch.logits = logits.get();
    batch.layers = layers;
  }
};

// Texts that begin alike: what they share is read from the first one, or from each.
void check_sharing(int number_of_case) {
  if (between(0, 4)) return;
  Network network;
  const Model& model = network.model;
  const int count = between(2, 5), common = between(PARTITION - 3, 2 * PARTITION + 9), length = common + between(1, 6);
  std::vector<int64_t> text(common);
  for (int64_t& token : text) token = between(0, model.vocab - 1);
  std::vector<std::vector<int64_t>> texts(count, text);
  std::vector<int> starts;
  for (auto& each : texts) {
    starts.push_back(int(starts.size()) * length);
    while (int(each.size()) < length) each.push_back(between(0, model.vocab - 1));
  }
  Scratch* scratch = slipstream_new_scratch();
  const int type = between(0, 3), threads = between(1, 3);
  std::vector<float> results[2];
  for (bool shares : {false, true}) {
    Cache cache(network, count * length, type);
    TextRows prompt(model, cache, {text}, {0}, 0), ends(model, cache, texts, starts, common);
    in_scarcity([&] { return slipstream_forward(&model, &prompt.batch, scratch, threads); });
    for (int i = 1; i < count; ++i) cache.copy(model, starts[i], common);
    Exact<int64_t> begin(ends.batch.num_rows), shared(ends.batch.num_rows);
    std::fill_n(begin.get(), begin.size, 0);
    for (int row = 0; row < ends.batch.num_rows; ++row) shared[row] = common - row % 2;
    if (shares) ends.batch.shared_begin = begin.get(), ends.batch.shared_length = shared.get();
    in_scarcity([&] { return slipstream_forward(&model, &ends.batch, scratch, threads); });
    results[shares].assign(ends.logits.get(), ends.logits.get() + ends.logits.size);
  }
  if (!same_bits(results[0].data(), results[1].data(), int(results[0].size()))) differs("what is shared", number_of_case);
  slipstream_free_scratch(scratch);
}

// Random chains behind `count` rows.
struct RandomChains {
  int count, depth;
  Exact<int64_t> lengths, token_ids;
  Exact<Drawing> drawings;
  Exact<double> confidences;
  Exact<uint64_t> keys;
  Chains chains;

  RandomChains(int count, int num_tokens, int most)
      : count(count), depth(std::min(between(1, 5), most)), lengths(count), token_ids(size_t(count) * depth), drawings(count),
        confidences(count), keys(size_t(count) * depth) {
    for (int i = 0; i < count; ++i) {
      lengths[i] = between(1, depth);
      confidences[i] = 1.0;
      Drawing& drawing = drawings[i];
      drawing.min_p = between(0, 1) * 0.01;
      drawing.top_p = between(1, 2) * 0.5;
      drawing.least_confidence = between(0, 1) * 1e-4;
      drawing.temperature = between(1, 2) * 0.5f;
      drawing.top_k = between(0, 1) * 3;
      drawing.noisy = between(0, 2);
    }
    for (int i = 0; i < count * depth; ++i) keys[i] = generator();
    chains = {depth, num_tokens, lengths.get(), drawings.get(), keys.get(), confidences.get(), token_ids.get()};
  }

  // Whether a chain has these tokens where `next(chain, level)` makes the logits of each in turn.
  template <typename Next>
  void check(const char* what, int number_of_case, Next next) {
    for (int chain = 0; chain < count; ++chain) {
      double confidence = 1.0;
      for (int level = 0; level < lengths[chain]; ++level) {
        const size_t place = size_t(chain) * depth + level;
        const std::vector<float> logits = next(chain, level);
        if (choose(logits.data(), chains.num_tokens, drawings[chain], keys[place], confidence) != token_ids[place])
          differs(what, number_of_case);
        if (token_ids[place] < 0) break;  // none of its tokens may be drafted, or the chain has ended
      }
      if (confidence != confidences[chain]) differs(what, number_of_case);
    }
  }
};

// Whole chains of several texts, by a draft model or an EAGLE head, against those of each text level by level.
void check_chains(int number_of_case) {
  Network network;
  Model& model = network.model;
  const int count = between(1, 4), length = between(1, 12), kind = model.head.kind, room = length + 5;
  const bool is_head = between(0, 1), fuses = between(0, 1);
  Eagle eagle{};
  if (is_head) {
    model.num_layers = 1;
    Layer& layer = network.layers[0];
    layer.qkv = network.linear(kind, model.hidden * (fuses ? 2 : 1), layer.qkv.out, between(0, 1));
    layer.attention_norm = {};
    if (fuses) layer.attention_norm = network.norm(false);
    eagle.embedder = &network.model;
    const int fc_in = fuses ? between(1, 150) : 2 * model.hidden;  // drawn first: arguments have no order
    eagle.fc = network.linear(kind, fc_in, model.hidden, between(0, 1));
    eagle.embedding_norm = fuses ? network.vector(model.hidden) : nullptr;
    eagle.residual_is_normed = between(0, 1);
    eagle.model = model;
    if (!fuses) eagle.model.final_norm = {};
  }
  Exact<int64_t> ids(model.vocab);
  for (int i = 0; i < model.vocab; ++i) ids[i] = model.vocab - 1 - i;
  if (is_head && between(0, 1)) {
    eagle.token_ids = ids.get();
    eagle.model.head = network.linear(kind, model.hidden, between(1, model.vocab), false);
  }
  const size_t width = is_head && fuses ? eagle.fc.in : model.hidden;
  std::vector<std::vector<int64_t>> texts(count, std::vector<int64_t>(length));
  std::vector<int> starts;
  for (auto& text : texts) {
    starts.push_back(int(starts.size()) * room);
    for (int64_t& token : text) token = between(0, model.vocab - 1);
  }
  Exact<float> features(numbers(count * length * width)), made(size_t(count) * length * model.hidden);
  Scratch* scratch = slipstream_new_scratch();
  const int type = between(0, 3);
  Cache cache(network, count * room, type), lone(network, count * room, type);
  RandomChains random(count, between(1, model.vocab), 5);
  {
    TextRows rows(model, cache, texts, starts, 0);
    States states{features.get(), made.get(), true};
    if (is_head) slipstream_draft_eagle(&eagle, &rows.batch, &states, &random.chains, scratch, between(1, 3));
    else slipstream_draft(&model, &rows.batch, &random.chains, scratch, between(1, 3));
  }
  std::vector<float> state;
  random.check("a chain", number_of_case, [&](int chain, int level) {
    auto& text = texts[chain];
    if (level) text.push_back(random.token_ids[size_t(chain) * random.depth + level - 1]);
    TextRows rows(model, lone, {text}, {starts[chain]}, level ? int(text.size()) - 1 : 0);
    if (is_head) {
      const int n = rows.batch.num_rows;
      const float* own = features.get() + size_t(chain) * length * width;
      Exact<float> given(level ? state : std::vector<float>(own, own + length * width)), last(size_t(n) * model.hidden);
      States states{given.get(), last.get(), level == 0};
      const int threads = between(1, 3);
      in_scarcity([&] { return slipstream_eagle(&eagle, &rows.batch, &states, scratch, threads); });
      state.assign(last.get() + size_t(n - 1) * model.hidden, last.get() + size_t(n) * model.hidden);
    } else {
      slipstream_forward(&model, &rows.batch, scratch, between(1, 3));
    }
    return std::vector<float>(rows.logits.get(), rows.logits.get() + model.vocab);
  });
  slipstream_free_scratch(scratch);
}

// Medusa's and Hydra's chains against the heads one by one, each row alone.
void check_heads(int number_of_case) {
  Network network;  // the target
  const int hidden = network.model.hidden, vocab = network.model.vocab, kind = network.model.head.kind;
  const int num_heads = between(1, 4), num_blocks = between(1, 3), n = between(1, 5);
  const bool hydra = between(0, 1), shared = between(0, 1);
  std::vector<Block> blocks;
  std::vector<Linear> outputs;
  for (int head = 0; head < num_heads; ++head) {
    for (int i = 0; i < num_blocks; ++i) {
      const int in = hydra && !i ? (head + 2) * hidden : hidden;
      blocks.push_back({network.linear(kind, in, hidden, between(0, 1)), {}});
      if (in != hidden) blocks.back().shortcut = network.linear(kind, in, hidden, true);
    }
    outputs.push_back(network.linear(kind, hidden, vocab, between(0, 1)));
  }
  Heads heads{num_heads, num_blocks, hidden, vocab, blocks.data(), outputs.data(), shared};
  Scratch* scratch = slipstream_new_scratch();
  Exact<float> states(numbers(size_t(n) * hidden));
  RandomChains random(n, between(1, vocab), num_heads);
  std::vector<std::vector<int64_t>> last(n, std::vector<int64_t>(1));
  for (auto& text : last) text[0] = between(0, vocab - 1);
  if (hydra) {
    Cache none(network, 0, ENTRY_FLOAT32);
    TextRows rows(network.model, none, last, std::vector<int>(n), 0);
    slipstream_draft_hydra(&heads, &network.model, &rows.batch, states.get(), &random.chains, scratch, between(1, 3));
  } else {
    Exact<float> logits(size_t(random.depth) * n * vocab);
    HeadRows rows{n, 0, random.depth, 0, states.get(), logits.get()};
    slipstream_draft_medusa(&heads, &rows, &random.chains, scratch, between(1, 3));
  }
  std::vector<float> input;
  random.check("a head's chain", number_of_case, [&](int chain, int level) {
    if (level == 0) input.assign(states.get() + size_t(chain) * hidden, states.get() + size_t(chain + 1) * hidden);
    if (hydra) {
      input.resize(input.size() + hidden);
      const int64_t token = level ? random.token_ids[size_t(chain) * random.depth + level - 1] : last[chain][0];
      embed(network.model, token, &input[input.size() - hidden]);
    }
    Exact<float> given(input), logits(vocab);
    HeadRows row{1, level, 1, 0, given.get(), logits.get()};
    const int threads = between(1, 3);
    in_scarcity([&] { return slipstream_heads(&heads, &row, scratch, threads); });
    return std::vector<float>(logits.get(), logits.get() + vocab);
  });
  slipstream_free_scratch(scratch);
}

// Certain steps, then a tree of uncertain ones, of several sequences; some leave copies.
struct RandomWalk {
  std::vector<int64_t> first_steps{0}, slots, sources, targets, copies, parents, kept_steps, kept_slots;
  int num_slots = 0, num_buffers = 1;

  int num_steps() const { return int(sources.size()); }

  RandomWalk() {
    const int count = between(1, 3);
    for (int i = 0; i < count; ++i) slots.push_back(num_slots++);
    for (int i = 0; i < count; ++i) {
      int64_t last = -1, last_target = 0;
      const int certain = between(0, 4), uncertain = between(certain ? 0 : 1, 6);
      for (int step = 0; step < certain; ++step) last = add(last, 0, 0);
      if (certain) kept_steps.push_back(last), kept_slots.push_back(slots[i]);
      std::vector<std::pair<int64_t, int64_t>> live{{last, 0}};  // (step, buffer)
      for (int step = 0; step < uncertain; ++step) {
        auto& [parent, buffer] = live[between(0, int(live.size()) - 1)];
        if (buffer && between(0, 1)) {
          parent = add(parent, buffer, buffer);
        } else {
          last = add(parent, buffer, ++last_target);
          live.push_back({last, last_target});
        }
      }
      num_buffers = std::max(num_buffers, int(last_target) + 1);
      first_steps.push_back(num_steps());
    }
    for (int step = 0; step < num_steps(); ++step) {
      if (copies[step] < 0) continue;
      kept_steps.insert(kept_steps.begin(), step), kept_slots.insert(kept_slots.begin(), copies[step]);
    }
  }

  // One sequence of certain steps.
  explicit RandomWalk(int certain) : slots{0}, num_slots(1) {
    for (int step = 0; step < certain; ++step) add(step - 1, 0, 0);
    first_steps.push_back(certain), kept_steps.push_back(certain - 1), kept_slots.push_back(0);
  }

  int64_t add(int64_t parent, int64_t source, int64_t target) {
    parents.push_back(parent), sources.push_back(source), targets.push_back(target);
    copies.push_back(slots.size() > 1 && between(0, 4) == 0 ? int64_t(slots.size()) + num_copies_++ : -1);
    num_slots = int(slots.size()) + num_copies_;
    return num_steps() - 1;
  }

  // The steps up to this one.
  std::vector<int64_t> path(int64_t step) const {
    std::vector<int64_t> steps;
    for (; step >= 0; step = parents[step]) steps.insert(steps.begin(), step);
    return steps;
  }

  // [steps, taps]
  std::vector<int64_t> read(int taps) const {
    std::vector<int64_t> rows;
    for (size_t i = 0; i < slots.size(); ++i)
      for (int64_t step = first_steps[i]; step < first_steps[i + 1]; ++step) {
        std::vector<int64_t> seen = path(step), window;
        for (int place = 0; place < taps - 1; ++place) window.push_back(num_steps() + int64_t(i) * (taps - 1) + place);
        seen.insert(seen.begin(), window.begin(), window.end());
        rows.insert(rows.end(), seen.end() - taps, seen.end());
      }
    return rows;
  }

 private:
  int num_copies_ = 0;
};

std::vector<float> of_rows(const std::vector<float>& values, const std::vector<int64_t>& rows, size_t width) {
  std::vector<float> taken;
  for (int64_t row : rows) taken.insert(taken.end(), values.begin() + row * width, values.begin() + (row + 1) * width);
  return taken;
}

// The outputs of a walk over `states`, each with a gap behind it. Decays are within (-1, 1): texts are of any length.
struct WalkInputs {
  int heads, key_heads, key_dim, value_dim, decay_rows, decay_columns, taps;
  bool has_beta, has_rates, has_bias;
  std::vector<float> query, key, value, decay, beta, rates, inputs, weight, bias;

  int channels() const { return heads * value_dim; }
  size_t num_decays() const { return size_t(heads) * decay_rows * decay_columns; }
  size_t matrix() const { return size_t(heads) * key_dim * value_dim; }
  size_t window() const { return size_t(taps - 1) * channels(); }
  size_t stride() const { return matrix() + window() + 3; }

  std::vector<float> run(const RandomWalk& walk, Exact<float>& states) const {
    Exact<int64_t> first(walk.first_steps), slots(walk.slots), sources(walk.sources), targets(walk.targets), copies(walk.copies);
    Exact<int64_t> read(walk.read(taps)), kept_steps(walk.kept_steps), kept_slots(walk.kept_slots);
    const Walk own{walk.num_steps(), int(walk.slots.size()), walk.num_buffers, 0, first.get(), slots.get(), sources.get(),
                   targets.get(), copies.get()};
    Exact<float> q(query), k(key), v(value), d(decay), b(beta), r(rates), i(inputs), w(weight), of(bias);
    Exact<float> read_out(size_t(walk.num_steps()) * channels()), convolved(read_out.size);
    const OuterProducts products{heads, key_heads, key_dim, value_dim, q.get(), k.get(), v.get(), d.get(),
                                 has_beta ? b.get() : nullptr, has_rates ? r.get() : nullptr, read_out.get(), states.get(),
                                 int64_t(stride()), decay_rows, decay_columns};
    const Convolution convolution{channels(), taps, i.get(), w.get(), has_bias ? of.get() : nullptr, convolved.get(),
                                  states.get() + matrix(), int64_t(stride()), read.get(), kept_steps.get(), kept_slots.get(),
                                  int64_t(kept_steps.size)};
    const int threads = between(1, 3);
    in_scarcity([&] { return slipstream_outer_products(&own, &products, threads); });
    in_scarcity([&] { return slipstream_convolve(&own, &convolution, threads); });
    std::vector<float> outputs(read_out.get(), read_out.get() + read_out.size);
    outputs.insert(outputs.end(), convolved.get(), convolved.get() + convolved.size);
    return outputs;
  }
};

// Each sequence up to one of its steps, alone and as a text that is certain.
void check_walks(int number_of_case) {
  const RandomWalk walk;
  const int steps = walk.num_steps(), key_heads = between(1, 3), key_dim = between(1, 40);
  WalkInputs all{key_heads * between(1, 3), key_heads, key_dim, between(1, 70), between(0, 1) ? key_dim : 1, 1, between(1, 5),
                 between(0, 1) == 1, between(0, 3) == 0, between(0, 1) == 1, {}, {}, {}, {}, {}, {}, {}, {}, {}};
  if (all.has_rates) all.decay_rows = 1;
  if (all.has_rates || between(0, 2) == 0) all.decay_columns = all.value_dim;
  const size_t keys = size_t(key_heads) * key_dim, values = all.channels();
  all.query = numbers(steps * keys), all.key = numbers(steps * keys), all.value = numbers(steps * values);
  for (float& each : all.key) each /= key_dim;
  all.decay = numbers(steps * all.num_decays()), all.beta = numbers(size_t(steps) * all.heads);
  for (float& each : all.decay) each /= 8;
  all.rates = numbers(all.matrix());
  for (float& each : all.rates) each = -std::abs(each);
  if (all.has_rates)
    for (float& each : all.decay) each = std::abs(each) * 8;
  all.inputs = numbers(steps * values), all.weight = numbers(values * all.taps), all.bias = numbers(values);
  const std::vector<float> begin = numbers(walk.num_slots * all.stride());
  Exact<float> states(begin);
  const std::vector<float> outputs = all.run(walk, states);
  take(outputs.data(), outputs.size());
  take(states.get(), states.size);
  for (size_t i = 0; i < walk.slots.size(); ++i) {
    const int64_t step = between(int(walk.first_steps[i]), int(walk.first_steps[i + 1]) - 1);
    const std::vector<int64_t> path = walk.path(step);
    WalkInputs lone = all;
    for (auto each : {&WalkInputs::query, &WalkInputs::key}) lone.*each = of_rows(all.*each, path, keys);
    for (auto each : {&WalkInputs::value, &WalkInputs::inputs}) lone.*each = of_rows(all.*each, path, values);
    lone.decay = of_rows(all.decay, path, all.num_decays());
    lone.beta = of_rows(all.beta, path, all.heads);
    Exact<float> own(std::vector<float>(begin.begin() + walk.slots[i] * all.stride(), begin.begin() + (walk.slots[i] + 1) * all.stride()));
    const std::vector<float> alone = lone.run(RandomWalk(int(path.size())), own);
    for (int kind = 0; kind < 2; ++kind)
      if (!same_bits(&alone[((kind + 1) * path.size() - 1) * values], &outputs[(kind * steps + step) * values], values))
        differs("a step of a walk", number_of_case);
    const int64_t slot = walk.copies[step] >= 0 ? walk.copies[step] : walk.slots[i];
    const bool is_final = walk.targets[step] == 0 && (step + 1 == walk.first_steps[i + 1] || walk.targets[step + 1] != 0);
    if ((is_final || walk.copies[step] >= 0) && !same_bits(own.get(), states.get() + slot * all.stride(), all.stride() - 3))
      differs("a state behind a walk", number_of_case);
  }
}

// A layer of latent attention, its weights, and what the rows of one text give it.
struct LatentLayer {
  Latent latent{};
  Exact<float> weight, queries, asked, made;
  Exact<uint16_t> halves;
  float cap = between(0, 1) ? 0.0f : 30.0f;
  int64_t reach = between(0, 1) ? 0 : between(-9, 40);

  explicit LatentLayer(int length)
      : weight(draw_widths()), queries(numbers(size_t(length) * latent.num_heads * (latent.nope + latent.rope))),
        asked(numbers(size_t(length) * latent.num_heads * latent.width())), made(numbers(size_t(length) * latent.width())), halves(upper_halves({weight.get(), weight.get() + weight.size})) {
    const int kinds[] = {FLOAT32, BFLOAT16, FLOAT16};
    latent.weight_kind = kinds[between(0, 2)];
    latent.weight = latent.weight_kind == FLOAT32 ? (const void*)weight.get() : halves.get();
    latent.entry_type = between(0, 3);
    latent.scale = 1.0f / std::sqrt(float(latent.nope + latent.rope));
  }

  size_t query_size() const { return size_t(latent.num_heads) * (latent.nope + latent.rope); }

 private:
  // Now and then more heads or numbers than are taken at once.
  std::vector<float> draw_widths() {
    latent.num_heads = between(0, 5) ? between(1, 5) : TILE + 3;
    latent.rank = WIDE * between(1, 3);
    latent.rope = between(1, 20);
    latent.nope = between(0, 5) ? between(1, 40) : PARTITION + 3;
    latent.value = between(0, 5) ? between(1, 40) : PARTITION + 5;
    return numbers(size_t(latent.num_heads) * (latent.nope + latent.value) * latent.rank);
  }
};

// Entries that nobody has written are NaN, or have the scale NaN.
struct LatentCache {
  const int num_slots;
  Exact<uint8_t> entries;
  Exact<float> scales;

  LatentCache(const Latent& latent, int num_slots)
      : num_slots(num_slots), entries(size_t(num_slots) * latent.width() * (latent.entry_type == ENTRY_INT8 ? 1 : latent.entry_type ? 2 : 4)),
        scales(latent.entry_type == ENTRY_INT8 ? num_slots : 0) {
    std::fill_n(entries.get(), entries.size, 0xff);
    std::fill_n(scales.get(), scales.size, NAN);
  }
};

// The same entries as a layer's own keys, whose first numbers are its values, for rows that have stored them.
Exact<float> attend_by_heads(const LatentLayer& layer, const Latent& latent, LatentCache& cache, LatentScratch* scratch,
                             const std::vector<Row>& rows, int threads) {
  const size_t query = size_t(latent.num_heads) * latent.width();
  Exact<float> queries(rows.size() * query), out(rows.size() * latent.num_heads * latent.rank);
  for (size_t i = 0; i < rows.size(); ++i) std::copy_n(layer.asked.get() + rows[i].token * query, query, queries.get() + i * query);
  LayerAttention own{};
  own.num_rows = int(rows.size()), own.num_heads = latent.num_heads, own.num_kv_heads = 1;
  own.key_dim = own.value_step = latent.width(), own.value_dim = latent.rank;
  own.entry_type = latent.entry_type, own.num_slots = latent.num_slots;
  own.scale = latent.scale, own.cap = layer.cap, own.reach = layer.reach;
  own.queries = queries.get(), own.out = out.get(), own.sight = latent.sight;
  own.keys = own.values = cache.entries.get(), own.key_scales = own.value_scales = cache.scales.get();
  in_scarcity([&] { return slipstream_attend(&own, scratch, threads); });
  take(out.get(), out.size);
  return out;
}

// What the rows, of which `token` says which row of the text each is, give; heads' queries of a row lie side by side or not.
std::vector<float> attend_to_latents(const LatentLayer& layer, LatentCache& cache, LatentScratch* scratch, const std::vector<Row>& rows) {
  Latent latent = layer.latent;
  const size_t n = rows.size(), query = latent.nope + latent.rope, width = latent.width();
  std::vector<int64_t> position, slot, run_begin, run_length, tail_begin{0}, tail_slots, tail_positions;
  Exact<float> queries(n * layer.query_size()), made(n * width), out(n * latent.num_heads * latent.value);
  const bool heads_first = between(0, 1);
  latent.query_row = heads_first ? query : layer.query_size();
  latent.query_head = heads_first ? n * query : query;
  for (size_t i = 0; i < n; ++i) {
    const Row& row = rows[i];
    for (int head = 0; head < latent.num_heads; ++head)
      std::copy_n(layer.queries.get() + row.token * layer.query_size() + head * query, query,
                  queries.get() + i * latent.query_row + head * latent.query_head);
    std::copy_n(layer.made.get() + row.token * width, width, made.get() + i * width);
    position.push_back(row.position);
    slot.push_back(row.slot);
    run_begin.push_back(row.run_begin);
    run_length.push_back(row.run_length);
    tail_slots.insert(tail_slots.end(), row.tail_slots.begin(), row.tail_slots.end());
    tail_positions.insert(tail_positions.end(), row.tail_positions.begin(), row.tail_positions.end());
    tail_begin.push_back(tail_slots.size());
  }
  Exact<int64_t> arrays[] = {Exact(position), Exact(run_begin), Exact(run_length), Exact(tail_begin), Exact(tail_slots),
                             Exact(tail_positions), Exact(slot)};
  latent.num_rows = int(n);
  latent.num_slots = cache.num_slots;
  latent.queries = queries.get(), latent.made = made.get(), latent.out = out.get(), latent.slots = arrays[6].get();
  latent.numbers = cache.entries.get(), latent.scales = cache.scales.get();
  latent.sight = {arrays[0].get(), arrays[1].get(), arrays[2].get(), arrays[3].get(), arrays[4].get(), arrays[5].get(), nullptr, nullptr};
  const int threads = between(1, 3);
  in_scarcity([&] { return slipstream_latent(&latent, scratch, threads); });
  take(out.get(), out.size);
  const Exact<float> heads = attend_by_heads(layer, latent, cache, scratch, rows, threads);
  std::vector<float> both;
  for (size_t i = 0; i < n; ++i) {
    const size_t values = out.size / n, attended = heads.size / n;
    both.insert(both.end(), out.get() + i * values, out.get() + (i + 1) * values);
    both.insert(both.end(), heads.get() + i * attended, heads.get() + (i + 1) * attended);
  }
  return both;
}

// A text row by row, then in chunks beside its own beginning as another text, then its end as a path of a tree.
void check_latents(int number_of_case) {
  static std::mt19937_64 own(83);  // the other cases' draws stay as they are
  std::swap(generator, own);
  const int length = between(0, 9) ? between(2, 60) : between(2, 2 * PARTITION + 40), split = between(1, length - 1);
  const LatentLayer layer(length);
  LatentScratch* scratch = slipstream_new_layer_scratch();
  LatentCache lone(layer.latent, length), shared(layer.latent, 3 * length);
  const size_t width = size_t(layer.latent.num_heads) * (layer.latent.value + layer.latent.rank);
  auto of_text = [&](int start, int position) { return Row{position, position, start + position, start, position + 1, {}, {}}; };
  std::vector<std::vector<float>> alone;
  for (int i = 0; i < length; ++i) alone.push_back(attend_to_latents(layer, lone, scratch, {of_text(0, i)}));
  for (int begin = 0, end; begin < split; begin = end) {
    end = std::min(split, begin + between(1, LATENT_ROWS + 9));
    std::vector<Row> rows;
    for (int start : {length, 0})
      for (int i = begin; i < end; ++i) rows.push_back(of_text(start, i));
    const std::vector<float> out = attend_to_latents(layer, shared, scratch, rows);
    for (int i = 0; i < int(rows.size()); ++i)
      if (!same_bits(&out[i * width], alone[rows[i].token].data(), width)) differs("a chunk's row over latents", number_of_case);
  }
  // A wrong node, of a token of the beginning, beside each right one.
  std::vector<Row> tree;
  std::vector<int64_t> slots, positions;
  for (int position = split; position < std::min(length, split + length / 2); ++position)
    for (bool right : {false, true}) {
      const int64_t slot = 2 * length + int(tree.size());
      Row row{right ? position : 0, position, slot, 0, split, slots, positions};
      row.tail_slots.push_back(slot);
      row.tail_positions.push_back(position);
      if (right) slots = row.tail_slots, positions = row.tail_positions;
      tree.push_back(row);
    }
  const std::vector<float> out = attend_to_latents(layer, shared, scratch, tree);
  for (size_t i = 1; i < tree.size(); i += 2)
    if (!same_bits(&out[i * width], alone[tree[i].token].data(), width)) differs("a node over latents", number_of_case);
  slipstream_free_layer_scratch(scratch);
  std::swap(generator, own);
}

}  // namespace

int main(int, char** arguments) {
  const int num_cases = std::atoi(arguments[2]);
  for (int threads = 1; threads <= 3; ++threads) random_linear(FLOAT32, 1, 1, false, threads);  // starts them
  generator.seed(std::strtoull(arguments[1], nullptr, 10));
  is_scarce = true;
  for (int i = 0; i < num_cases; ++i) {
    check_products(i);
    check_choices(i);
    check_passes(i);
    check_sharing(i);
    check_chains(i);
    check_heads(i);
    check_walks(i);
    check_latents(i);
  }
  if (num_cases >= 50 && !num_found) differs("no best token", num_cases, "as rounded logits were never enough");
  std::printf("memory was short in reserve %d, divide %d, plan %d times\n", shortages.in_reserve, shortages.in_divide,
              shortages.in_plan);
  std::printf("%d cases on %s: equal in any batch, digest %016llx\n", num_cases, slipstream_instructions(),
              (unsigned long long)digest);
  std::fflush(stdout);
  std::_Exit(0);  // the kernels' threads never end
}
