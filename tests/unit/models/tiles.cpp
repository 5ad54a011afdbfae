// Products of integers and of bfloat16 numbers by AMX's tiles and by vectors: the same bits over odd shapes. Weights and rows
// end where memory does, so that reading on ends the program.
//
// usage: tiles SEED NUM_CASES; prints how many products of tiles there were, and exits 1 at the first that differs.
#include <sys/mman.h>

#include <memory>
#include <random>

#include "bfloat16.h"

namespace {

std::mt19937_64 generator;

int between(int low, int high) { return low + int(generator() % uint64_t(high - low + 1)); }

float number() { return float(between(-1000, 1000)) / float(between(1, 300)); }

template <typename T>
std::unique_ptr<T[]> block(size_t size) {
  return std::unique_ptr<T[]>(new T[size]());
}

// Zeros before a page that nobody may read.
struct Guarded {
  static constexpr size_t PAGE = 4096;
  size_t mapped;
  uint8_t *memory, *begin;

  explicit Guarded(size_t size) : mapped((size + PAGE - 1) / PAGE * PAGE + PAGE) {
    memory = (uint8_t*)mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(memory + mapped - PAGE, PAGE, PROT_NONE);
    begin = memory + mapped - PAGE - size;
  }
  ~Guarded() { munmap(memory, mapped); }
};

bool same(const float* a, const float* b, size_t size);

CodedBlock coded_block() {
  const bool extreme = between(0, 3) == 0;  // the largest products
  CodedBlock coded;
  coded.scale = number() * 0.01f, coded.minimum = number() * 0.01f;
  for (auto& scale : coded.scales) scale = uint8_t(extreme ? 255 : between(0, 255));
  for (auto& minimum : coded.minimums) minimum = int8_t(between(-128, 127));
  for (auto& code : coded.codes) code = uint8_t(extreme ? 15 : between(0, 15));
  return coded;
}

// Rows [n] of numbers, some far larger than the rest, some not finite, as they are multiplied in groups of `size` inputs.
void make_rows(int n, int in, int size, uint8_t* quantised) {
  auto row = block<float>(in);
  const bool extreme = between(0, 3) == 0;
  for (int r = 0; r < n; ++r) {
    for (int k = 0; k < in; ++k) row[k] = extreme ? (r % 2 ? -1.0f : 1.0f) : number();
    for (int i = between(0, 4); i > 0; --i) row[between(0, in - 1)] = number() * 1e4f;
    if (between(0, 20) == 0) row[between(0, in - 1)] = NAN;
    quantise_groups(row.get(), nullptr, in, size, quantised + r * grouped_row_bytes(in, size));
  }
}

template <typename Layout>
bool groups_are_equal(const Layout& layout, const Linear& linear, int n, const uint8_t* quantised) {
  const Rows rows{nullptr, 0, quantised};
  for (int unit = 0; unit < num_units(linear.out); ++unit) {
    auto by_tiles = block<float>(size_t(n) * UNIT), by_vectors = block<float>(size_t(n) * UNIT);
    multiply_unit(linear, rows, n, unit, [&](int first, int count, const float* tile) {
      std::memcpy(&by_tiles[first * UNIT], tile, sizeof(float) * count * UNIT);
    });
    multiply_groups(layout, quantised, n, (const uint8_t*)linear.panels, linear.scales, unit, [&](int first, int count, float* tile) {
      add_bias(linear, count, 2 * unit, 2, tile);
      std::memcpy(&by_vectors[first * UNIT], tile, sizeof(float) * count * UNIT);
    });
    if (!same(by_tiles.get(), by_vectors.get(), size_t(n) * UNIT)) return false;
  }
  return true;
}

bool blocks_case_is_equal(int n, int in, int out) {
  const size_t padded = size_t(num_units(out)) * UNIT;
  auto factors = block<float>(padded), bias = block<float>(padded);
  auto room = block<CodedBlock>(num_blocks(in));
  const Guarded packed(packed_bytes(FOUR_BITS_BLOCKS, in, out)), quantised(n * grouped_row_bytes(in, BLOCK_GROUP));
  for (int i = 0; i < out; ++i) bias[i] = number();
  for (int panel = 0; panel < num_panels(out); ++panel)
    pack_blocks(in, out, panel, packed.begin, factors.get(), room.get(), [](int, int) { return coded_block(); });
  const Linear linear{FOUR_BITS_BLOCKS, in, out, 0, packed.begin, factors.get(), between(0, 1) ? bias.get() : nullptr};
  make_rows(n, in, BLOCK_GROUP, quantised.begin);
  return groups_are_equal(BlockLayout(in), linear, n, quantised.begin);
}

// Codes of each kind that has groups, which are 32, 64, 96 or 128 inputs.
bool groups_case_is_equal(int n, int in, int out) {
  const int32_t kinds[] = {FOUR_BITS, FOUR_BITS_ZEROS, EIGHT_BITS, EIGHT_BITS_ZEROS, FOUR_BITS_TABLE, FOUR_BITS_TABLE_ZEROS};
  const int32_t kind = kinds[between(0, 5)];
  const int size = 32 * between(1, 4), groups = num_groups(in, size);
  const size_t padded = size_t(num_units(out)) * UNIT;
  auto factors = block<float>(padded), scales = block<float>(size_t(out) * groups), zeros = block<float>(size_t(out) * groups);
  auto codes = block<uint8_t>(size_t(out) * in);
  int8_t table[16];
  for (auto& each : table) each = int8_t(between(-128, 127));
  bool are_equal = false;
  of_groups(kind, [&]<typename Codes, bool ZEROS>() {
    const int largest = Codes::BITS == 4 ? 15 : 255;
    for (size_t i = 0; i < size_t(out) * in; ++i) codes[i] = uint8_t(between(0, 3) ? between(0, largest) : largest);
    for (size_t i = 0; i < size_t(out) * groups; ++i) scales[i] = number() * 0.01f, zeros[i] = float(between(0, largest));
    const Guarded packed(packed_bytes(kind, in, out, size)), quantised(n * grouped_row_bytes(in, size));
    for (int panel = 0; panel < num_panels(out); ++panel)
      pack_groups<Codes, ZEROS>(codes.get(), scales.get(), zeros.get(), in, out, size, panel, packed.begin, factors.get());
    const Linear linear{kind, in, out, size, packed.begin, factors.get(), nullptr, nullptr, nullptr, table};
    make_rows(n, in, size, quantised.begin);
    are_equal = groups_are_equal(GroupLayout<Codes, ZEROS>(Codes{table}, in, size), linear, n, quantised.begin);
  });
  return are_equal;
}

// The bits of two NaNs may differ.
bool same(const float* a, const float* b, size_t size) {
  for (size_t i = 0; i < size; ++i)
    if (std::memcmp(a + i, b + i, sizeof(float)) && (a[i] == a[i] || b[i] == b[i])) return false;
  return true;
}

template <typename Number, typename Weights>
bool bfloat16_case_is_equal(int32_t kind, int n, int in, int out) {
  const size_t padded = size_t(num_units(out)) * UNIT, depth = num_lines(in) * LINE_INPUTS;
  auto wide = block<float>(size_t(out) * in), bias = block<float>(padded), rows = block<float>(size_t(n) * in);
  auto weight = block<Number>(size_t(out) * in);
  const Guarded packed(packed_bytes(kind, in, out));
  const Guarded rounded(((n - 1) * line_stride(in) + num_lines(in)) * sizeof(TileLine));
  const Guarded room(arranged_lines(in) * sizeof(TileLine));
  TileLine *lines = (TileLine*)rounded.begin, *arranged = (TileLine*)room.begin;
  for (size_t i = 0; i < size_t(out) * in; ++i) wide[i] = number();
  narrow(wide.get(), out * in, weight.get());
  for (int i = 0; i < out; ++i) bias[i] = number();
  for (int panel = 0; panel < num_panels(out); ++panel) pack_floats<Weights>(weight.get(), in, out, panel, (Number*)packed.begin);
  const Linear linear{kind, in, out, 0, packed.begin, nullptr, between(0, 1) ? bias.get() : nullptr};
  const float odd[] = {0.0f, -0.0f, 1e-38f, 1e-40f, 3e38f, INFINITY, NAN}, scale = between(0, 4) ? 1.0f : 1e-38f;
  for (int r = 0; r < n; ++r) {
    for (int k = 0; k < in; ++k) rows[r * in + k] = number() * scale;
    if (between(0, 5) == 0) rows[r * in + between(0, in - 1)] = odd[between(0, 6)];
    round_row(&rows[r * in], in, lines + r * line_stride(in));
  }
  for (int unit = 0; unit < num_units(out); ++unit) {
    auto by_tiles = block<float>(size_t(n) * UNIT), by_vectors = block<float>(size_t(n) * UNIT);
    auto keep = [](float* to) {
      return [to](int first, int count, const float* tile) { std::memcpy(to + first * UNIT, tile, sizeof(float) * count * UNIT); };
    };
    multiply_unit_in_bfloat16(linear, lines, n, unit, arranged, keep(by_tiles.get()));
    multiply_arranged_by_vectors(linear, lines, n, unit, arranged, keep(by_vectors.get()));
    if (!same(by_tiles.get(), by_vectors.get(), size_t(n) * UNIT)) return false;
    // They share the arrangement: both against plain sums.
    for (int r = 0; r < n; ++r)
      for (int i = unit * UNIT; i < std::min(out, (unit + 1) * UNIT); ++i) {
        double sum = linear.bias ? bias[i] : 0.0, magnitude = std::fabs(sum);
        for (int k = 0; k < in; ++k) {
          const float own = widened(weight[size_t(i) * in + k]);
          const double product = double(widened(to_bfloat16(own))) * widened(to_bfloat16(rows[r * in + k]));
          sum += product, magnitude += std::fabs(product);
        }
        const double found = by_tiles[r * UNIT + i % UNIT];
        // A number that is too small counts as zero, and no weight is above 1000.
        if (magnitude < 1e37 && !(std::fabs(found - sum) <= 1e-6 * magnitude + depth * 1000 * 0x1p-126)) return false;
      }
  }
  return true;
}

}  // namespace

int main(int, char** arguments) {
  generator.seed(std::strtoull(arguments[1], nullptr, 10));
  const int num_cases = std::atoi(arguments[2]);
  const int edges[] = {1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64};  // of tiles of 16 rows
  for (int i = 0; i < num_cases; ++i) {
    int n = i < 16 ? edges[i] : between(1, 64), in = between(1, 200);
    const int out = between(1, 200);
    const char* differs = nullptr;
    if (!bfloat16_case_is_equal<bfloat16, Bfloat16Weights>(BFLOAT16, n, in, out)) differs = "bfloat16";
    if (!bfloat16_case_is_equal<float16, Float16Weights>(FLOAT16, n, in, out)) differs = "float16";
    if (!differs) {
      n = between(1, 3) == 1 ? between(1, 300) : n, in = between(1, 700);
      if (!blocks_case_is_equal(n, in, out)) differs = "4-bit";
      if (!groups_case_is_equal(n, in, out)) differs = "grouped";
    }
    if (!differs) continue;
    std::printf("%d rows of %d inputs and %d %s outputs have other bits by tiles\n", n, in, out, differs);
    return 1;
  }
  std::printf("%ld\n", emulated::num_products.load());
}
